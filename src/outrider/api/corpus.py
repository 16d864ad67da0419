"""A corpus of text files, as tokens: what the suffix drafter reads before the first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.files import open_regular

# Bytes of text for a token at the most; what is beyond is not even read.
_BYTES_PER_TOKEN = 16

Texts = tuple[tuple[int, ...], ...]


def read_corpus(path: str, encode: Callable[[str], Sequence[int]], *, num_tokens: int) -> Texts:
    """The first `num_tokens` tokens of a text file, or of a folder's files in the order of their
    names, one text a file. Files that are no text in UTF-8 are left out. Nothing if `path` is
    empty. Raises ConfigError if there is no text to be found."""
    if not path:
        return ()
    texts: list[tuple[int, ...]] = []
    left = num_tokens
    for file in _files(Path(path)):
        text = _read(file, left * _BYTES_PER_TOKEN)
        tokens = tuple(encode(text)[:left]) if text else ()
        if tokens:
            texts.append(tokens)
            left -= len(tokens)
        if not left:
            break
    if not texts:
        raise ConfigError(
            f"suffix_corpus: {path} has no text.",
            hint="--suffix-corpus takes a text file or a folder of text files",
        )
    return tuple(texts)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _read(file: Path, num_bytes: int) -> str:
    """Its beginning; nothing if that is no text."""
    try:
        with open_regular(file) as stream:
            data = stream.read(num_bytes)
    except OSError:
        return ""
    if b"\0" in data:
        return ""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut in two at the end.
        return data[: error.start].decode("utf-8") if error.start >= len(data) - 3 else ""
