"""Header of a GGUF model: metadata and the table of tensors of one mapped file or of several.

A file has a magic, a version, two counts, keys with typed values, entries of tensors, and their
bytes, which begin at a multiple of the alignment. Nothing in the file is trusted: every count and
length is compared with the bytes that are left, sizes are multiplied as Python's integers, and
tensors may neither leave the file nor overlap. Lists of texts are located by their lengths and
decoded only when they are read.
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import CheckpointError, out_of_memory, reason_of
from outrider.core.files import file_identity, open_regular
from outrider.models.gguf.blocks import SUPPORTED, TYPES, TensorType

MAGIC = b"GGUF"
# Limit for everything before the tensors; the largest vocabularies take some 10 MB.
MAX_HEADER_BYTES = 128 << 20
# Limits for elements of all lists of texts together, for keys and lists in lists, and for tensors:
# they take several times their size in memory.
MAX_TEXTS, MAX_KEYS, MAX_TENSORS = 1 << 22, 1 << 14, 1 << 17
MAX_NAME_BYTES, MAX_DIMENSIONS, MAX_DEPTH = 1024, 4, 4
MAX_ALIGNMENT = 1 << 20
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_AGAIN = "compare its size and hash with the original and download it again"
_DOWNLOAD = "download the file itself: `outrider pull ORG/NAME-GGUF:Q4_K_M`"
_OLD = "download the model as GGUF, or convert it with llama.cpp's convert_llama_ggml_to_gguf.py"
# Other files that may have a GGUF file's name: their first bytes in lower case, and what to do.
_FIRST_BYTES = 64
_OTHERS: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    (
        (b"version https://git-lfs",),
        "a pointer of Git LFS, which stands for the file in a repository",
        f"run `git lfs pull` in the repository, or {_DOWNLOAD}",
    ),
    (
        (b"<!doctype", b"<html", b"<?xml", b"<head"),
        "a web page",
        f"{_DOWNLOAD}; a link to it has /resolve/ where that of its page has /blob/",
    ),
    ((b'{"error', b"invalid user", b"not found", b"entry not"), "a server's answer", _DOWNLOAD),
    ((b"pk\x03\x04",), "a ZIP archive, such as a PyTorch checkpoint", _DOWNLOAD),
    # Magic numbers of ggml, ggmf, ggjt and ggla as they lie in a file.
    ((b"lmgg", b"fmgg", b"tjgg", b"algg"), "a GGML file, from before GGUF (August 2023)", _OLD),
)
# A file of several, as llama.cpp's gguf-split names them.
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1000
# Bytes of texts that are scanned at once.
_WINDOW = 4 << 20
_LENGTH = struct.Struct("<Q")


class Texts:
    """A list of texts, stored as bytes and decoded by `read`."""

    def __init__(self, raw: bytes, ends: array[int], where: str) -> None:
        self._raw, self._ends, self._where = raw, ends, where

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        return len(self._raw) - 8 * len(self._ends)

    def read(self) -> list[str]:
        """Raises CheckpointError for a text that is not UTF-8."""
        raw, start, found = self._raw, 8, list[str]()
        try:
            for end in self._ends:
                found.append(raw[start:end].decode())
                start = end + 8
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._where} has a text, number {len(found)}, that is not UTF-8: {error}.",
                hint=_AGAIN,
            ) from None
        return found


Numbers = NDArray[np.generic]
Value = str | int | float | bool | Texts | Numbers | list["Value"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: its sizes, outermost first, and the file `path` with its offset there in bytes."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    offset: int
    path: Path

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values // self.kind.block * self.kind.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """Everything in a file before its tensors. Headers are compared by identity."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    entries: Mapping[str, Entry]


def file_key(path: Path) -> str:
    """The path of a file and its identity: another one once the file is replaced or written to."""
    return f"{path} {file_identity(path)}"


def map_file(path: Path) -> mmap.mmap:
    """Map a file into memory, read-only. Raises CheckpointError if it cannot be read."""
    try:
        with open_regular(path) as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        # An empty file cannot be mapped, which is a ValueError.
        raise out_of_memory(error, f"mapping {path}") or CheckpointError(
            f"{path}: cannot be read: {reason_of(error)}.", hint=_AGAIN
        ) from None


def not_gguf(path: Path, first: bytes) -> CheckpointError:
    """The error for a file whose first bytes, `first`, are not those of GGUF."""
    for starts, what, hint in _OTHERS:
        if first.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(starts):
            return CheckpointError(f"{path} is no GGUF file: it is {what}.", hint=hint)
    if b'{"' in first[8:10]:
        return CheckpointError(
            f"{path} is no GGUF file: it is a safetensors file.",
            hint="name the folder that has it, with config.json and tokenizer.json",
        )
    if not first.strip(b"\0"):
        return CheckpointError(
            f"{path} is no GGUF file: it begins with zeros, as a download that was broken off.",
            hint=_AGAIN,
        )
    return CheckpointError(f"{path} is no GGUF file: it begins with {first[:16]!r}.", hint=_AGAIN)


def read_header(path: Path) -> Header:
    """Read a header. Raises CheckpointError for a damaged, incomplete or unsupported file."""
    with map_file(path) as memory:
        return _Cursor(path, memory).header()


@dataclass
class _Cursor:
    """Reads forward through the header; `at` is its current byte."""

    path: Path
    memory: mmap.mmap
    at: int = 0
    num_texts: int = 0
    num_lists: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.memory)

    def header(self) -> Header:
        version = self._version()
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        # A key takes 13 bytes at the least, a tensor 32.
        self._bounded("keys", num_keys, min(MAX_KEYS, self._left // 13))
        self._bounded("tensors", num_tensors, min(MAX_TENSORS, self._left // 32))
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name("a key")
            if key in metadata:
                raise self._wrong(f"the key {key!r} is there twice")
            metadata[key] = self._value(self._number("<I"), key)
        entries = self._entries(num_tensors, metadata)
        return Header(self.path, version, metadata, entries)

    def _version(self) -> int:
        if self.memory[:4] != MAGIC:
            raise not_gguf(self.path, self.memory[:_FIRST_BYTES])
        self.at = 4
        version = self._number("<I")
        if version in (2, 3):
            return version
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path} is a GGUF file for big-endian machines, which is not supported.",
                hint="download the little-endian file, which all others are",
            )
        raise CheckpointError(
            f"{self.path} is a GGUF file of version {version}; versions 2 and 3 are supported.",
            hint="convert the model again with a recent llama.cpp",
        )

    def _entries(self, num: int, metadata: Mapping[str, Value]) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for _ in range(num):
            entry = self._entry()
            if entry.name in found:
                raise self._wrong(f"the tensor {entry.name!r} is there twice")
            found[entry.name] = entry
        alignment = self._alignment(metadata)
        start = self.at + -self.at % alignment
        placed = {
            name: replace(entry, offset=start + entry.offset) for name, entry in found.items()
        }
        self._check_offsets(placed.values(), start, alignment)
        return placed

    def _entry(self) -> Entry:
        name = self._name("a tensor's name")
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._wrong(f"{name} has {num_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        sizes = tuple(self._number("<Q") for _ in range(num_dimensions))
        type_id, offset = self._number("<I"), self._number("<Q")
        kind = TYPES.get(type_id)
        if kind is None or not kind.supported:
            said = f"number {type_id}" if kind is None else kind.name
            raise CheckpointError(
                f"{self.path}: {name} has the type {said}, which is not supported.",
                hint=f"choose a file of one of: {', '.join(SUPPORTED)}",
            )
        if 0 in sizes or prod(sizes) > self.size * 8:
            # No type takes less than a bit a number.
            raise self._wrong(f"{name} has the sizes {list(sizes)}, more than the file can hold")
        if sizes[0] % kind.block:
            raise self._wrong(f"a row of {name}, {sizes[0]}, is no whole number of {kind.name}s")
        return Entry(name, sizes[::-1], kind, offset, self.path)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        found = metadata.get("general.alignment", 32)
        power = isinstance(found, int) and 0 < found <= MAX_ALIGNMENT and not found & (found - 1)
        if not isinstance(found, int) or not power:
            raise self._wrong(f"general.alignment is {found!r:.40}, no power of two")
        return found

    def _check_offsets(self, entries: Iterable[Entry], start: int, alignment: int) -> None:
        end, last = start, ""
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if (entry.offset - start) % alignment:
                raise self._wrong(f"{entry.name} does not begin at a multiple of {alignment}")
            if entry.offset < end:
                raise self._wrong(f"the tensors {last} and {entry.name} overlap")
            end, last = entry.offset + entry.num_bytes, entry.name
            if end > self.size:
                raise self._wrong(
                    f"{last} ends at byte {end}, and the file has {self.size}: it is cut off"
                )

    def _value(self, kind: int, key: str, depth: int = 0) -> Value:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise self._wrong(f"{key} has a value of the unknown type {kind}")
        found = self._numbers(_SCALARS[kind], 1, key)[0].item()
        if kind != _BOOL:
            return found
        if found not in (0, 1):
            raise self._wrong(f"{key} is neither true nor false but {found}")
        return bool(found)

    def _array(self, key: str, depth: int) -> Value:
        kind, num = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            return self._texts(key, num)
        if kind == _ARRAY:
            if depth == MAX_DEPTH:
                raise self._wrong(f"{key} nests lists deeper than {MAX_DEPTH}")
            self.num_lists += num
            self._bounded(f"lists in {key}", self.num_lists, min(MAX_KEYS, self._left // 12))
            return [self._array(key, depth + 1) for _ in range(num)]
        if kind not in _SCALARS:
            raise self._wrong(f"{key} has a list of the unknown type {kind}")
        found = self._numbers(_SCALARS[kind], num, key)
        return found.astype(np.bool_) if kind == _BOOL else found

    def _texts(self, key: str, num: int) -> Texts:
        self.num_texts += num
        self._bounded("texts", self.num_texts, MAX_TEXTS)
        self._bounded(f"texts in {key}", num, self._left // 8)
        ends: array[int] = array("Q")
        start = at = self.at
        while len(ends) < num:
            if at + 8 > self._end:
                raise self._cut(key)
            # Reading from bytes is faster than from the mapping.
            window = self.memory[at : min(at + _WINDOW, self._end)]
            at += _walk(window, at - start, num - len(ends), ends)
        if at > self._end:
            raise self._cut(key)
        self.at = at
        return Texts(self.memory[start:at], ends, f"{self.path}: {key}")

    def _name(self, what: str) -> str:
        size = self._number("<Q")
        if not 0 < size <= MAX_NAME_BYTES:
            raise self._wrong(f"{what} has {size} bytes, not 1 to {MAX_NAME_BYTES}")
        return self._decoded(size, what)

    def _text(self, key: str) -> str:
        return self._decoded(self._number("<Q"), key)

    def _decoded(self, size: int, what: str) -> str:
        if size > self._left:
            raise self._cut(what)
        raw = self.memory[self.at : self.at + size]
        self.at += size
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._wrong(f"{what} is not UTF-8 ({error})") from None

    def _number(self, form: str) -> int:
        """Read one unsigned integer."""
        size = struct.calcsize(form)
        if size > self._left:
            raise self._cut("the header")
        (found,) = struct.unpack_from(form, self.memory, self.at)
        self.at += size
        return found

    def _numbers(self, form: str, num: int, what: str) -> Numbers:
        kind = np.dtype(form)
        if num * kind.itemsize > self._left:
            raise self._cut(what)
        raw = self.memory[self.at : self.at + num * kind.itemsize]
        self.at += len(raw)
        return np.frombuffer(raw, kind)

    @property
    def _end(self) -> int:
        return min(self.size, MAX_HEADER_BYTES)

    @property
    def _left(self) -> int:
        return self._end - self.at

    def _bounded(self, what: str, num: int, most: int) -> None:
        if num > most:
            raise self._wrong(f"it claims {num} {what}, and {most} are possible")

    def _cut(self, what: str) -> CheckpointError:
        if self.size > MAX_HEADER_BYTES:
            return self._wrong(f"the header has more than {MAX_HEADER_BYTES} bytes, with {what}")
        return self._wrong(f"the file ends within {what}, after {self.size} bytes: it is cut off")

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or incomplete: {what}.", hint=_AGAIN)


def _walk(window: bytes, base: int, most: int, ends: array[int]) -> int:
    """Append to `ends` the ends, counted from `base`, of at most `most` texts that begin in
    `window`. Return the end of the last one, which may be beyond the window."""
    at, unpack, append = 0, _LENGTH.unpack_from, ends.append
    with suppress(struct.error, OverflowError):
        for _ in range(most):
            at += 8 + unpack(window, at)[0]
            append(base + at)
    return at


def is_gguf(path: Path) -> bool:
    """True if a file has GGUF's first bytes; other programs name such files by their hash."""
    with suppress(OSError), open_regular(path) as stream:
        return stream.read(len(MAGIC)) == MAGIC
    return False


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder without safetensors. Raises CheckpointError for several."""
    if any(folder.glob("*.safetensors")):
        return None
    # Files named mmproj hold the part for pictures of a text model, which is no model by itself.
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = sorted({parts_of(file)[0] for file in files})
    if len(firsts) > 1:
        raise CheckpointError(
            f"{folder} has {len(firsts)} models as GGUF files, such as {firsts[0].name}.",
            hint=f"name the file, as in {firsts[0]}",
        )
    return firsts[0] if firsts else None


def header_of(path: Path) -> Header:
    """The header of a model of one or several files. Raises CheckpointError for a bad file."""
    files = parts_of(path)
    return _header(files, tuple(map(file_identity, files)))


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of the model that begins with `path`. Raises CheckpointError if one is missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path}: a model of {count} files is not supported.")
    files = tuple(
        path.with_name(f"{found['name']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    )
    if path not in files:
        raise CheckpointError(f"{path} is no file of a model of {count} files, by its name.")
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing, one of {count} files of a model.",
                hint="download the missing file into the same folder",
            )
    return files


@lru_cache(maxsize=8)
def _header(files: tuple[Path, ...], identity: tuple[object, ...]) -> Header:
    """Read the headers of a model's files as one, again if `identity` (a cache key) changes."""
    del identity
    headers = [read_header(file) for file in files]
    first = headers[0]
    claimed = first.metadata.get("split.count", 1)
    if claimed != len(files) and claimed not in (0, 1):
        raise CheckpointError(
            f"{files[0]} is one of {claimed} files of a model, and its name does not say so.",
            hint=f"give them back their names, such as NAME-00001-of-{claimed:0>5}.gguf",
        )
    entries = dict(first.entries)
    for number, header in enumerate(headers[1:], 1):
        if header.metadata.get("split.no") != number or entries.keys() & header.entries.keys():
            raise CheckpointError(
                f"{header.path} is not part {number + 1} of the model of {files[0]}.",
                hint="download the files of one model into one folder",
            )
        entries |= header.entries
    total = first.metadata.get("split.tensors.count", len(entries))
    if len(files) > 1 and total != len(entries):
        raise CheckpointError(
            f"{files[0]} and the other files of the model have {len(entries)} tensors of {total}.",
            hint="download all files of the model again",
        )
    return replace(first, entries=entries)
