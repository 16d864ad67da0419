"""Texts to learn from: files, folders and JSON lines, each with its hash and, where told, licence.

A document is a file, or a line of JSON. Which documents are held out, and which are kept where only
a share is wanted, is a function of their content: the same texts are split the same way wherever
they lie and in whatever order they come.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import cast

from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_bytes, read_text

# The word that means all of this where texts are named.
PYTHON = "python"
_PSF = "PSF-2.0 (CPython standard library)"
_PERMISSIVE = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC")
_SKIPPED = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages"}
# Generated tables rather than source.
_MAX_BYTES = 400_000


def python_sources() -> list[TextFile]:
    """Python source that is on this machine anyway, sorted by path: the standard library, and
    installed packages whose own metadata say that their licence is permissive. No test files: they
    repeat themselves."""
    found = dict([*_standard_library(), *_packages()])
    return [TextFile(Path(path), found[path]) for path in sorted(found)]


def _standard_library() -> Iterator[tuple[str, str]]:
    """Paths with their licence."""
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = [name for name in inside if name not in _SKIPPED]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118 - thousands of them
            if name.endswith(".py") and _fits(path):
                yield path, _PSF


def _packages() -> Iterator[tuple[str, str]]:
    """The same, from the list of files that every installed package keeps."""
    for package in distributions():
        licence = permissive_licence(package)
        if licence is None:
            continue
        # Either of these reads the package's metadata anew.
        told, root = f"{licence} ({package.name})", str(package.locate_file(""))
        for line in (package.read_text("RECORD") or "").splitlines():
            name = line.split(",")[0]
            if name.endswith(".py") and not _SKIPPED & set(name.split("/")):
                path = os.path.join(root, name)  # noqa: PTH118 - thousands of them
                if _fits(path):
                    yield path, told


def permissive_licence(package: Distribution) -> str | None:
    """The licence that a package's metadata state, if it is one of the permissive ones."""
    fields: list[str] = []
    for key in ("License-Expression", "License"):
        fields += package.metadata.get_all(key) or []
    classifiers: list[str] = package.metadata.get_all("Classifier") or []
    fields += [line.split("::")[-1].strip() for line in classifiers if "License ::" in line]
    # A whole licence text says too many words to tell by one of them.
    short = [text for text in fields if 0 < len(text) < 100]
    if any("GPL" in text for text in short):
        return None
    return next((text for text in short if any(word in text for word in _PERMISSIVE)), None)


def _fits(path: str) -> bool:
    try:
        return os.stat(path).st_size <= _MAX_BYTES  # noqa: PTH116 - thousands of them
    except OSError:
        return False


# Told what is being done, and how much of it is done, of 1.
Heard = Callable[[str, float], None]
# Of a folder, these are read; a file that is named is read whatever its name.
SUFFIXES = (".py", ".txt", ".md", ".rst", ".json", ".jsonl", ".c", ".h", ".cpp", ".rs", ".js")
_JSON_LINES = (".jsonl", ".ndjson")
_WHERE = "name a text file, a folder, a .jsonl file, or the word python"
# GSM8K writes its calculator's work into answers.
_CALCULATION = re.compile(r"<<[^<>]*>>")
_FINAL = re.compile(r"\n#### ")


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file to read, the licence of its texts if somebody told, and whether the user named it."""

    path: Path
    licence: str = ""
    named: bool = False

    @property
    def has_lines(self) -> bool:
        """Whether every line is a document."""
        return self.path.suffix in _JSON_LINES

    @property
    def lot(self) -> float:
        """A number below 1, drawn by name and size alone."""
        return _lot(f"{self.path.name} {self.path.stat().st_size}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was read, for the model card."""

    path: str
    sha256: str
    num_bytes: int
    licence: str


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    path: Path

    @property
    def lot(self) -> float:
        """A number below 1, drawn by the content alone."""
        return _lot(self.text)


def unheard(doing: str, share: float) -> None:
    """Where nobody listens."""
    del doing, share


def find_files(words: Sequence[str]) -> list[TextFile]:
    """The files that `words` mean: paths, or `python` for the Python source of this machine.

    Raises ConfigError for a word that names nothing, or if there is no file at all.
    """
    found: dict[Path, TextFile] = {}
    for word in words:
        for file in _files_of(word):
            found.setdefault(file.path.absolute(), file)
    if not found:
        raise ConfigError("there is no text to learn from.", hint=_WHERE)
    return list(found.values())


def read_documents(file: TextFile, field: str = "") -> Iterator[Document]:
    """The documents of one file; `field` is the key of JSON lines that holds the text.

    A file of a folder that is no UTF-8 text has none. Raises ConfigError for a named file that
    cannot be read, or a line without text.
    """
    try:
        text = read_text(file.path, FileKind.TEXT)
    except (OSError, UnicodeDecodeError) as error:
        if not file.named:
            return
        raise ConfigError(f"{file.path} cannot be read: {error}.", hint=_WHERE) from None
    if not file.has_lines:
        if text.strip():
            yield Document(text, file.path)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            text = _text_of(line, field, f"{file.path}, line {number}")
            yield Document(text, file.path)


def record_of(file: TextFile) -> FileRecord:
    """Raises ConfigError if the file cannot be read."""
    try:
        content = read_bytes(file.path, FileKind.TEXT)
    except OSError as error:
        raise ConfigError(f"{file.path} cannot be read: {error.strerror}.", hint=_WHERE) from None
    digest = hashlib.sha256(content).hexdigest()
    return FileRecord(str(file.path), digest, len(content), file.licence)


def digest_of(records: Iterable[FileRecord], *facts: object) -> str:
    """Equal exactly when contents and `facts` are, whatever the order of files."""
    parts = [*sorted(record.sha256 for record in records), *map(str, facts)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _lot(text: str) -> float:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _files_of(word: str) -> list[TextFile]:
    if word == PYTHON:
        return python_sources()
    path = Path(word).expanduser()
    if path.is_file():
        return [TextFile(path, named=True)]
    if not path.is_dir():
        raise ConfigError(f"there is no file or folder {word!r}.", hint=_WHERE)
    inside = sorted(item for item in path.rglob("*") if item.suffix in SUFFIXES)
    found = [TextFile(item) for item in inside if item.is_file()]
    if not found:
        raise ConfigError(
            f"{word} has no file that ends in one of {', '.join(SUFFIXES)}.",
            hint="files of other names are read when they are named themselves",
        )
    return found


def _text_of(line: str, field: str, where: str) -> str:
    try:
        loaded: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not JSON: {error}.",
            hint="a .jsonl file has a value of JSON on every line; plain text is named .txt",
        ) from None
    if isinstance(loaded, str):
        return loaded
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{where} is neither an object nor a text.",
            hint='lines look like {"text": "..."}',
        )
    row = cast("dict[str, object]", loaded)
    text = row.get(field) if field else _usual_text(row)
    if not isinstance(text, str):
        keys = ", ".join(list(row)[:8])
        raise ConfigError(
            f"{where} has no text{f' under {field!r}' if field else ''}: its keys are {keys}.",
            hint="name the key of a text with --field",
        )
    return text


def _usual_text(row: Mapping[str, object]) -> str | None:
    """What common data sets write: one text, a prompt and its completion, or question and answer.
    The latter two as the embedded pair was trained on them."""
    for key in ("text", "content"):
        if isinstance(value := row.get(key), str):
            return value
    question, answer = row.get("question"), row.get("answer")
    if isinstance(question, str) and isinstance(answer, str):
        plain = _FINAL.sub("\nThe answer is ", _CALCULATION.sub("", answer))
        return f"Question: {question}\nAnswer: {plain}"
    prompt = row.get("prompt")
    completion = next((row[key] for key in ("completion", "response") if key in row), "")
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    return None
