"""Texts as tokens: tokenised once into a file that is mapped, cut into windows, read in any order.

Documents follow each other with an end-of-text token between, and a window is the next T tokens
wherever they begin. Attention is not stopped at such an end: a model learns what the token means.
The batch of a step is a function of (seed, step): every epoch reads all windows once, in an order
of its own.

Shapes:  B = windows of a batch, T = tokens of a window.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, VocabularyError
from outrider.core.files import FileKind, read_text, replacing, writing
from outrider.core.spec import DecoderConfig
from outrider_lab.train.data import (
    Document,
    FileRecord,
    Heard,
    TextFile,
    digest_of,
    read_documents,
    record_of,
    unheard,
)
from outrider_lab.train.loop import Batch

_TOKENS, _HELD_OUT, _RECORD = "tokens.bin", "held-out.bin", "tokens.json"
# Documents that are tokenised together, by several threads.
_TOGETHER = 64
# A wide guess, to know before reading which share of documents will be enough.
_BYTES_PER_TOKEN = 3.3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """`max_tokens` 0 reads all; otherwise documents are drawn until about so many. `held_out` is
    the share of documents that nobody learns from."""

    max_tokens: int = 0
    held_out: float = 0.02
    field: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """What the mapped files hold, and the files that something of it is from."""

    digest: str
    vocab_size: int
    num_tokens: int
    num_held_out: int
    num_documents: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class TokenFiles:
    folder: Path
    record: TokenRecord

    @property
    def tokens(self) -> NDArray[np.integer[Any]]:
        """The text to learn from, mapped."""
        return self._map(_TOKENS, self.record.num_tokens)

    @property
    def held_out(self) -> NDArray[np.integer[Any]]:
        return self._map(_HELD_OUT, self.record.num_held_out)

    def _map(self, name: str, num_tokens: int) -> NDArray[np.integer[Any]]:
        kind = _kind(self.record.vocab_size)
        if not num_tokens:
            return np.empty(0, dtype=kind)
        return np.memmap(self.folder / name, dtype=kind, mode="r", shape=(num_tokens,))


def tokenised(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    vocab_size: int,
    folder: Path,
    wish: TokenOptions,
    heard: Heard = unheard,
) -> TokenFiles:
    """The tokens of `files` in `folder`, made anew unless they are there already.

    Raises ConfigError if there is no text, VocabularyError for ids that the model has not, and
    MachineError if `folder` cannot be written.
    """
    drawn = draw(files, wish)
    records = tuple(record_of(file) for file in drawn.files)
    digest = digest_of(records, tokenizer.fingerprint(), vocab_size, *asdict(wish).values())
    record = _read_record(folder / _RECORD)
    if record is not None and record.digest == digest:
        return TokenFiles(folder, record)
    fresh = TokenRecord(
        digest=digest,
        vocab_size=vocab_size,
        num_tokens=0,
        num_held_out=0,
        num_documents=0,
        files=records,
    )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        done = _write(drawn, tokenizer, fresh, folder, wish, heard)
        with replacing(folder / _RECORD, alone=True) as draft:
            draft.write_text(json.dumps(asdict(done)), encoding="utf-8")
    return TokenFiles(folder, done)


@dataclass(frozen=True, slots=True)
class Windows:
    """`Batches` over a text of token ids. Raises ConfigError for a text shorter than a window."""

    ids: NDArray[np.integer[Any]]
    digest: str
    batch_size: int
    window: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.ids) < self.window:
            raise ConfigError(
                f"the text has {len(self.ids)} tokens, less than one window of {self.window}.",
                hint="name more text, or lower --window",
            )

    @property
    def num_windows(self) -> int:
        return len(self.ids) // self.window

    @property
    def facts(self) -> Mapping[str, object]:
        return {"text": self.digest, "batch": self.batch_size, "window": self.window}

    def batch(self, step: int, device: torch.device) -> Batch:
        first = step * self.batch_size
        numbers = tuple(self._number(place) for place in range(first, first + self.batch_size))
        ids_BT = torch.stack([self.read(number) for number in numbers]).to(device)
        return Batch(ids_BT, numbers, step)

    def at(self, place: int) -> Tensor:
        """The window that comes at `place` of the order in which steps read: ids_T."""
        return self.read(self._number(place))

    def _number(self, place: int) -> int:
        epoch, inside = divmod(place, self.num_windows)
        return int(_order(self.seed, epoch, self.num_windows)[inside])

    def read(self, number: int) -> Tensor:
        """Window `number`: ids_T, int64."""
        part = self.ids[number * self.window : (number + 1) * self.window]
        return tensor_of(part, np.dtype(np.int64))


def tensor_of(values: NDArray[Any], kind: np.dtype[Any]) -> Tensor:
    """A tensor of its own memory, on the host."""
    tensor: Tensor = torch.from_numpy(values.astype(kind))  # pyright: ignore[reportUnknownMemberType]
    return tensor


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_windows: int) -> NDArray[np.int64]:
    """In which order an epoch reads all windows."""
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    return generator.permutation(num_windows)


def _write(
    drawn: Drawn,
    tokenizer: Tokenizer,
    fresh: TokenRecord,
    folder: Path,
    wish: TokenOptions,
    heard: Heard,
) -> TokenRecord:
    sizes = {record.path: record.num_bytes for record in fresh.files}
    num_bytes, num_read = max(sum(sizes.values()), 1), 0
    kind = _kind(fresh.vocab_size)
    counts = {_TOKENS: 0, _HELD_OUT: 0}
    num_documents, used = 0, set[str]()
    with (folder / _TOKENS).open("wb") as tokens, (folder / _HELD_OUT).open("wb") as held_out:
        streams: dict[str, IO[bytes]] = {_TOKENS: tokens, _HELD_OUT: held_out}
        documents = drawn.documents(wish)
        while together := list(islice(documents, _TOGETHER)):
            texts = tokenizer.encode_batch([one.text for one in together], add_special=False)
            for document, ids in zip(together, texts, strict=True):
                name = _HELD_OUT if document.lot < wish.held_out else _TOKENS
                closed = np.asarray([*ids, *tokenizer.stop_ids[:1]], dtype=np.int64)
                _check_ids(closed, fresh.vocab_size)
                streams[name].write(closed.astype(kind).tobytes())
                counts[name] += len(closed)
                num_read += 0 if (path := str(document.path)) in used else sizes[path]
                used.add(path)
                num_documents += 1
            heard("reading the texts", num_read / num_bytes)
    if not counts[_TOKENS]:
        raise ConfigError(
            "the files have no text to learn from.", hint="name files that are not empty"
        )
    return replace(
        fresh,
        num_tokens=counts[_TOKENS],
        num_held_out=counts[_HELD_OUT],
        num_documents=num_documents,
        files=tuple(record for record in fresh.files if record.path in used),
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """Files to read, and the share of their lines that is wanted of those that have many."""

    files: tuple[TextFile, ...]
    kept: float

    def documents(self, wish: TokenOptions) -> Iterator[Document]:
        # Lots below `held_out` are the held-out ones, so the same share is taken of either side.
        for file in self.files:
            kept = self.kept if file.has_lines else 1.0
            for document in read_documents(file, wish.field):
                if kept == 1 or (document.lot / max(wish.held_out, 1e-9)) % 1.0 < kept:
                    yield document


def draw(files: Sequence[TextFile], wish: TokenOptions) -> Drawn:
    """All files, or about as many as the wish needs, drawn by their names and sizes: what is not
    drawn is not read. Of JSON lines all files are read, and lines are drawn by their content."""
    if not wish.max_tokens:
        return Drawn(tuple(files), 1.0)
    num_bytes = sum(file.path.stat().st_size for file in files)
    kept = min(1.0, wish.max_tokens * _BYTES_PER_TOKEN / max(1, num_bytes))
    found = tuple(file for file in files if file.has_lines or file.lot < kept)
    return Drawn(found or (min(files, key=lambda file: file.lot),), kept)


def _check_ids(ids: NDArray[np.int64], vocab_size: int) -> None:
    if len(ids) and int(ids.max()) >= vocab_size:
        raise VocabularyError(
            f"the tokenizer writes id {int(ids.max())}, and the model knows {vocab_size} ids.",
            hint="tokenizer and model belong to different vocabularies: outrider draft check",
        )


def _kind(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _read_record(path: Path) -> TokenRecord | None:
    """None if there is none, or one that another version wrote."""
    try:
        values = cast("dict[str, Any]", json.loads(read_text(path, FileKind.RESULTS)))
        values["files"] = tuple(FileRecord(**one) for one in values["files"])
        return TokenRecord(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def frequent_ids(tokens: NDArray[np.integer[Any]], target: DecoderConfig, num_ids: int) -> Tensor:
    """The `num_ids` ids that `tokens` has most often, stop ids among them, in rising order."""
    return _rising(_counts(tokens, target), num_ids)


def covering_ids(tokens: NDArray[np.integer[Any]], target: DecoderConfig, share: float) -> Tensor:
    """The fewest ids that make up `share` of `tokens`, stop ids among them, in rising order."""
    counts = _counts(tokens, target)
    covered = np.cumsum(np.sort(counts)[::-1]) / counts.sum()
    return _rising(counts, int(np.searchsorted(covered, share)) + 1)


def rare_id(tokens: NDArray[np.integer[Any]], target: DecoderConfig) -> int:
    """The highest of the ids that `tokens` has least often."""
    counts = _counts(tokens, target)
    return int(np.flatnonzero(counts == counts.min())[-1])


def digest_of_ids(ids_W: Tensor) -> int:
    """A number that tells one list of ids from another."""
    return int((ids_W.cpu() * torch.arange(1, len(ids_W) + 1)).sum())


def _counts(tokens: NDArray[np.integer[Any]], target: DecoderConfig) -> NDArray[np.int64]:
    counts = np.bincount(tokens, minlength=target.vocab_size)
    counts[list(target.stop_ids)] = counts.max() + 1
    return counts


def _rising(counts: NDArray[np.int64], num_ids: int) -> Tensor:
    likeliest = np.argsort(-counts, kind="stable")[:num_ids]
    return torch.tensor(np.sort(likeliest).astype(np.int64))
