"""How much is measured: batches, depths and texts, by the size of the target and the memory left.

A pass of a small target takes a millisecond, so every usual point is tried. That of a large one
takes fifty, and keys and values of its texts count: fewer texts at once, fewer depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.calibrate.timing import BATCHES, KS
from outrider.core.spec import ModelSpec

# Weights from which on a target is a large one, in bytes.
_LARGE = 100_000_000
# K up to which drafts are counted and planned; what they cost beyond goes on along their line.
DEEPEST, DEEPEST_OF_LARGE = 16, 8
_LEAST_KS = (3, 7)
# K of one text alone: up to whole tiles of 8 and 12 rows, and one row more than 16.
_KS_ALONE = (1, 2, 3, 5, 7, 11, 16)
# Texts at once on which drafts of a large target are counted.
_AT_ONCE = 1
# Tokens of a prompt that a large target reads: a row takes it milliseconds, for every drafter, and
# each engine keeps them.
_PROMPT_OF_LARGE = 40
# Keys and values that one engine holds: tokens at the least and bytes at the most.
_LEAST_ROOM, _MOST_ROOM_BYTES = 512, 96_000_000
# Of the memory that is left once the target is loaded, what keys and values may take.
_ROOM_SHARE = 0.5
_PAGE = 64
_CHUNK, _CHUNK_OF_LARGE = 256, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """`room` is how many tokens an engine holds, `chunk` how many of a prompt it reads at once, and
    `longest` how many of a prompt it reads at all, None for no limit. Rounds are timed with
    `batches` of texts, and up to `batch_size` texts are written at once. With `is_large` rounds are
    timed while what is kept of them is counted, since there is no time for both. With `alone` only
    rounds of one text are timed, of about the length that texts will have."""

    batches: Sequence[int]
    ks: Sequence[int]
    deepest: int
    least_ks: tuple[int, ...]
    room: int
    chunk: int
    batch_size: int
    is_large: bool = False
    alone: bool = False
    longest: int | None = None

    def engine_bytes(self, spec: ModelSpec) -> int:
        """Of another engine beside one with the same weights: keys and values, buffers, logits and
        the distributions made of them."""
        rows = self.batch_size * (self.deepest + 1)
        wide = 6 * spec.hidden_size + 3 * spec.ffn_size
        buffers = 4 * (self.chunk + rows) * wide
        return self.room * spec.kv_bytes_per_token + buffers + 8 * rows * spec.vocab_size


def extent_of(
    spec: ModelSpec,
    *,
    batch: int,
    num_engines: int,
    left_bytes: int | None,
    alone: bool = False,
) -> Extent:
    """Of engines that will write `batch` texts at once; `left_bytes` is the memory for all of them
    beside the weights, None for no limit."""
    large = spec.weight_bytes >= _LARGE
    others = (_AT_ONCE,) if large else BATCHES
    batches = list(dict.fromkeys((batch, *others)))
    batch_size = max(batches)
    most = _MOST_ROOM_BYTES
    if left_bytes is not None:
        most = min(most, int(_ROOM_SHARE * max(left_bytes, 0)) // max(num_engines, 1))
    room = max(most // spec.kv_bytes_per_token, _LEAST_ROOM, batch * _LEAST_ROOM // 2)
    return Extent(
        batches=(1,) if alone else batches,
        ks=_KS_ALONE if alone else KS,
        deepest=DEEPEST_OF_LARGE if large else DEEPEST,
        least_ks=_LEAST_KS,
        room=-(-room // _PAGE) * _PAGE,
        chunk=_CHUNK_OF_LARGE if large else _CHUNK,
        batch_size=batch_size,
        is_large=large,
        alone=alone,
        longest=_PROMPT_OF_LARGE if large else None,
    )
