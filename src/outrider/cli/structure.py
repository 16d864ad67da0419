"""Structured output by flags: `--schema`, `--json-object`, `--regex`, `--choice` and `--grammar`.
The value of --schema and --grammar is a file, or the schema or grammar itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text

if TYPE_CHECKING:
    from outrider.api.structure import StructureOptions
    from outrider.cli.options import StructureOption


def structure_of(flags: StructureOption) -> StructureOptions:
    """Return the structure of the flags, checked later. Raises ConfigError for bad files."""
    found: StructureOptions = {}
    if flags.schema is not None:
        found["schema"] = _text_of(flags.schema, "--schema", signs="{")
    if flags.json_object:
        found["json"] = True
    if flags.regex is not None:
        found["regex"] = flags.regex
    if flags.choice:
        found["choices"] = flags.choice
    if flags.grammar is not None:
        found["grammar"] = _text_of(flags.grammar, "--grammar", signs=":")
    return found


def _text_of(given: str, flag: str, *, signs: str) -> str:
    """Return the file's content, or `given` itself if it has `signs`. Raises ConfigError."""
    path = Path(given)
    try:
        is_file = path.exists()
    except OSError:  # too long for a file's name
        is_file = False
    if not is_file and signs in given:
        return given
    try:
        return read_text(path, FileKind.GRAMMAR)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{flag} {given}: cannot be read: {reason}.",
            hint=f"give a file, or write what it would hold: {flag} '{_EXAMPLES[flag]}'",
        ) from None


_EXAMPLES = {"--schema": '{"type": "object"}', "--grammar": 'start: "yes" | "no"'}
