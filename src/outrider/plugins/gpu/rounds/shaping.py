"""Bias and penalties within a captured verification: logits of listed ids change in place.

The host lists the ids that a request touches, each once: those with a bias, and those that its
prompt or text contains. Ids on the path to a drafted node are listed once more for that node, with
their counts there. Both lists are computed from the model's own logits, and the second is written
last, so that the lists may overlap. Unused entries repeat a used one.

Shapes:  B = rows, W = logits rows of each, S = ids of a text, D = ids of a path, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.logits import suffixes_of
from outrider.engine.round import LiveSequence

Field: TypeAlias = tuple[tuple[int, ...], torch.dtype]
# Shorter lists are not worth a graph of their own.
_LEAST_IDS = 256


@dataclass(frozen=True, slots=True)
class _Lists:
    """Ids, each once, with bias, count in the text, and 1 if prompt or text contain it."""

    ids_S: NDArray[np.int32]
    entries_3S: NDArray[np.float32]

    @classmethod
    def of(cls, seq: LiveSequence) -> _Lists:
        """Return the lists of one request; without any, a single id that nothing changes."""
        lists = None if seq.shaper is None else seq.shaper.sparse(seq.tokens)
        if lists is None:
            return cls(np.zeros(1, np.int32), np.zeros((3, 1), np.float32))
        seen, counts = np.array(lists.seen_ids, np.int32), np.array(lists.counts, np.float32)
        biased = np.array(lists.bias_ids, np.int32)
        others = np.setdiff1d(biased, seen)
        entries = np.zeros((3, len(seen) + len(others)), np.float32)
        entries[1, : len(seen)], entries[2, : len(seen)] = counts, 1
        ids = np.concatenate([seen, others])
        if len(biased):
            where = {int(token): index for index, token in enumerate(ids)}
            entries[0, [where[token] for token in biased.tolist()]] = lists.biases
        return cls(ids, entries)

    def on_path(self, path: Sequence[int]) -> _Lists:
        """Return the lists of a path's own ids, with the counts that the path adds; for an empty
        path, the first entry of these lists."""
        tokens = list(dict.fromkeys(path))
        if not tokens:
            return _Lists(self.ids_S[:1], self.entries_3S[:, :1])
        entries = np.zeros((3, len(tokens)), np.float32)
        for index, token in enumerate(tokens):
            known = np.flatnonzero(self.ids_S == token)
            entries[:, index] = self.entries_3S[:, known[0]] if len(known) else 0
            entries[1, index] += path.count(token)
        entries[2] = 1
        return _Lists(np.array(tokens, np.int32), entries)

    def write(self, fields: Mapping[str, NDArray[Any]], name: str, at: tuple[int, int]) -> None:
        ids, entries = fields[f"{name} ids"][at], fields[f"{name} entries"][(slice(None), *at)]
        size = len(self.ids_S)
        ids[:size], entries[:, :size] = self.ids_S, self.entries_3S
        ids[size:], entries[:, size:] = self.ids_S[0], self.entries_3S[:, :1]


def num_listed(batch: Sequence[LiveSequence]) -> int:
    """Return the ids that graphs list of each text: a power of two, 0 for none."""
    shapers = ((seq.shaper, seq.tokens) for seq in batch)
    lists = [shaper.sparse(tokens) for shaper, tokens in shapers if shaper is not None]
    most = max((len(one.seen_ids) + len(one.bias_ids) for one in lists if one), default=0)
    return max(_LEAST_IDS, 1 << (most - 1).bit_length()) if most else 0


def shaping_fields(rows: int, width: int, num_ids: int) -> dict[str, Field]:
    """Return the fields that the host writes; a path has at most one id per node."""
    text, path = (rows, 1, num_ids), (rows, width, max(width - 1, 1))
    fields: dict[str, Field] = {"penalties": ((3, rows, 1, 1), torch.float32)}
    for name, shape in (("text", text), ("path", path)):
        fields |= {
            f"{name} ids": (shape, torch.int64),
            f"{name} entries": ((3, *shape), torch.float32),
        }
    return fields


def write_shaping(fields: Mapping[str, NDArray[Any]], row: int, seq: LiveSequence) -> None:
    """Write the lists of one row."""
    params, lists = seq.params, _Lists.of(seq)
    paths: Sequence[Sequence[int]] = [()]
    penalties = (1.0, 0.0, 0.0)
    if seq.shaper is not None:
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        paths = suffixes_of(seq.draft.tokens, seq.draft.parents)
    fields["penalties"][:, row, 0, 0] = penalties
    lists.write(fields, "text", (row, 0))
    for node in range(fields["path ids"].shape[1]):
        path = paths[node] if node < len(paths) else ()
        lists.on_path(path).write(fields, "path", (row, node))


def shape_logits(logits_BWV: Tensor, fields: Mapping[str, Tensor]) -> None:
    """Apply bias and penalties as `LogitsProcessor` does, row by row, in place."""
    text_ids_BWS = fields["text ids"].expand(-1, logits_BWV.shape[1], -1)
    path_ids_BWD = fields["path ids"]
    text_BWS = _shaped(logits_BWV.gather(-1, text_ids_BWS), fields, "text")
    path_BWD = _shaped(logits_BWV.gather(-1, path_ids_BWD), fields, "path")
    logits_BWV.scatter_(-1, text_ids_BWS, text_BWS)
    logits_BWV.scatter_(-1, path_ids_BWD, path_BWD)


def _shaped(some: Tensor, fields: Mapping[str, Tensor], name: str) -> Tensor:
    repetition, frequency, presence = fields["penalties"].unbind(0)
    bias, count, seen = fields[f"{name} entries"].unbind(0)
    some = some + bias
    pushed = torch.where(some > 0, some / repetition, some * repetition)
    some = torch.where((seen > 0) & (repetition != 1), pushed, some)
    return some - frequency * count - presence * (count > 0)
