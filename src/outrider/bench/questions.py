"""A file of questions in the format of Spec-Bench, as prompts by domain.

Each line has a `category` and `turns`, of which the first is the prompt (Xia et al., "Unlocking
Efficiency in Large Language Model Inference", 2024). Its articles belong to their publishers, so
the file is read where a user has put it and is not part of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.bench.records import RecordError, parse
from outrider.core.errors import ConfigError
from outrider.core.files import Kind, read_text

# Categories that are a domain of ours; all others are conversation.
_DOMAINS: Mapping[str, str] = {
    "translation": "translation",
    "summarization": "summarization",
    "math_reasoning": "maths",
    "math": "maths",
    "rag": "retrieval",
    "coding": "code",
}
_FORMAT = '{"category": "translation", "turns": ["..."]}'


def questions_of(path: Path) -> dict[str, list[str]]:
    """First turns by domain, in the order of the file.

    Raises ConfigError, with the number of the line, for a file of something else.
    """
    try:
        lines = read_text(path, Kind.PROMPTS).splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            domain, text = _question(path, number, line)
            found.setdefault(domain, []).append(text)
    if not found:
        raise ConfigError(f"{path} holds no question.", hint=f"a line is {_FORMAT}")
    return found


def _question(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row: Mapping[str, Any] = parse(line)
    except RecordError as error:
        raise _unreadable(path, number, str(error)) from None
    turns, category = row.get("turns"), row.get("category")
    if not isinstance(category, str):
        raise _unreadable(path, number, "no category")
    match turns:
        case [str() as first, *_] if first:
            return _DOMAINS.get(category, "conversation"), first
        case _:
            raise _unreadable(path, number, "no turns")


def _unreadable(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {what}.", hint=f"a line is {_FORMAT}")
