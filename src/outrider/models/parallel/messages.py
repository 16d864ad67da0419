"""Messages from rank 0 to the other ranks: each call on KV cache or model as a list of integers.

The first number names the call. Lists are preceded by their length, so a message can be read
without knowing anything else. Parents of tree nodes are as in `StepRow`, -1 for the root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

from outrider.core.protocols import CausalLM, DraftNeeds, StepRow


class RankCall(IntEnum):
    OPEN = 0
    FORK = 1
    RESERVE = 2
    COMMIT = 3
    CLOSE = 4
    STEP = 5


def open_message(seq_id: int, tokens: Sequence[int]) -> list[int]:
    return [RankCall.OPEN, seq_id, *_listed(tokens)]


def fork_message(source: int, new: int, length: int) -> list[int]:
    return [RankCall.FORK, source, new, length]


def reserve_message(counts: Mapping[int, int]) -> list[int]:
    return [RankCall.RESERVE, *(number for item in counts.items() for number in item)]


def commit_message(paths: Mapping[int, Sequence[int]]) -> list[int]:
    message: list[int] = [RankCall.COMMIT]
    for seq_id, path in paths.items():
        message += [seq_id, *_listed(path)]
    return message


def close_message(seq_id: int) -> list[int]:
    return [RankCall.CLOSE, seq_id]


def step_message(rows: Sequence[StepRow], needs: DraftNeeds) -> list[int]:
    message = [RankCall.STEP, *_listed(needs.hidden_layers)]
    for row in rows:
        message += [row.seq_id, row.logits_from, *_listed(row.tokens), *row.parents]
    return message


def apply(message: Sequence[int], model: CausalLM) -> None:
    """Make the call that `message` describes."""
    reader = _Reader(message)
    match RankCall(reader.one()):
        case RankCall.OPEN:
            model.state.open(reader.one(), reader.listed())
        case RankCall.FORK:
            model.state.fork(reader.one(), reader.one(), reader.one())
        case RankCall.RESERVE:
            model.state.reserve({reader.one(): reader.one() for _ in reader.items()})
        case RankCall.COMMIT:
            model.state.commit({reader.one(): reader.listed() for _ in reader.items()})
        case RankCall.CLOSE:
            model.state.close(reader.one())
        case RankCall.STEP:
            needs = DraftNeeds(tuple(reader.listed()))
            model.step([_row(reader) for _ in reader.items()], needs)


def _row(reader: _Reader) -> StepRow:
    seq_id, logits_from = reader.one(), reader.one()
    tokens = tuple(reader.listed())
    return StepRow(seq_id, tokens, tuple(reader.run(len(tokens))), logits_from)


def _listed(numbers: Sequence[int]) -> list[int]:
    return [len(numbers), *numbers]


class _Reader:
    """A message from front to back."""

    def __init__(self, message: Sequence[int]) -> None:
        self._message = message
        self._at = 0

    def one(self) -> int:
        self._at += 1
        return self._message[self._at - 1]

    def run(self, count: int) -> list[int]:
        self._at += count
        return list(self._message[self._at - count : self._at])

    def listed(self) -> list[int]:
        return self.run(self.one())

    def items(self) -> Iterator[None]:
        """One turn for everything that follows; each turn has to read its own."""
        while self._at < len(self._message):
            yield None
