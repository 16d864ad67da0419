"""What the flags of a structure ask for: `--schema`, `--json-object`, `--regex`, `--choice` and
`--grammar`. A schema or a grammar is a file, or is written out where the file's name would be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text

if TYPE_CHECKING:
    from outrider.api.structure import StructureOptions
    from outrider.cli.options import StructureOption


def structure_of(flags: StructureOption) -> StructureOptions:
    """Raises ConfigError for a file that cannot be read; what is in it is judged later."""
    asked: StructureOptions = {}
    if flags.schema is not None:
        asked["schema"] = _text_of(flags.schema, "--schema", signs="{")
    if flags.json_object:
        asked["json"] = True
    if flags.regex is not None:
        asked["regex"] = flags.regex
    if flags.choice:
        asked["choices"] = flags.choice
    if flags.grammar is not None:
        asked["grammar"] = _text_of(flags.grammar, "--grammar", signs=":")
    return asked


def _text_of(given: str, flag: str, *, signs: str) -> str:
    """The text itself, where it has a sign that it is no file's name."""
    path = Path(given)
    try:
        is_file = path.exists()
    except OSError:  # a name that is too long for one
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
