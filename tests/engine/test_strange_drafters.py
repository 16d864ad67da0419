"""Whatever object a drafter gives back, its request goes on as plain decoding and says why.

The same holds under `python -O`, so no assertion may be what refuses it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checks.engine import PROMPT, greedy
from checks.state import VOCAB
from doubles.drafters import NO_NEEDS, REPEATS_LAST
from doubles.rig import Rig
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow

TESTS = Path(__file__).parents[1]
Rows = Sequence[DraftRow]


class Panic(BaseException):
    """As a library in another language raises it."""


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class NoLength:
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("nothing to iterate over")


class LyingList(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("nothing to iterate over")


class Heir(Draft):
    __slots__ = ()


def raises(error: BaseException) -> Callable[[Rows], Any]:
    def propose(rows: Rows) -> Any:
        del rows
        raise error

    return propose


def draft(tokens: Any, parents: Any, probs: Any = None, hit: Any = None, by: Any = "") -> Any:
    """A Draft that was never checked, as copying or unpacking would make it."""
    made = object.__new__(Draft)
    told = {"tokens": tokens, "parents": parents, "probs_NV": probs, "hit": hit, "by": by}
    for name, value in told.items():
        object.__setattr__(made, name, value)
    return made


def each(make: Callable[[], Any]) -> Callable[[Rows], Any]:
    return lambda rows: [make() for _ in rows]


def distribution(*shape: int, value: float = 1 / VOCAB, **kinds: Any) -> torch.Tensor:
    return torch.full(shape, value, **kinds)


NAN_AT_2 = distribution(1, VOCAB)
NAN_AT_2[0, 2] = torch.nan

WHOLE: dict[str, Callable[[Rows], Any]] = {
    "None": lambda rows: None,
    "text": lambda rows: "no drafts" * len(rows),
    "float": lambda rows: 1.5,
    "generator": lambda rows: (Draft.chain([0]) for _ in rows),
    "dict": lambda rows: {row.seq_id: Draft.chain([0]) for row in rows},
    "too few": lambda rows: [Draft.chain([0])] * (len(rows) - 1),
    "too many": lambda rows: [Draft.chain([0])] * (len(rows) + 1),
    "no length": lambda rows: NoLength(),
    "lying list": lambda rows: LyingList([Draft.chain([0]) for _ in rows]),
    "error": raises(RuntimeError("broken")),
    "error without words": raises(WordlessError()),
    "panic": raises(Panic("out of range")),
    "exit": raises(SystemExit(3)),
    "generator's exit": raises(GeneratorExit()),
    "assertion": raises(AssertionError()),
}
DRAFTS: dict[str, Callable[[], Any]] = {
    "draft None": lambda: None,
    "draft of text": lambda: "abc",
    "draft of a float": lambda: 0.5,
    "draft without length": NoLength,
    "heir of Draft": lambda: Heir((0,), (-1,)),
    "tokens None": lambda: draft(None, ()),
    "tokens of text": lambda: draft("ab", (-1, 0)),
    "tokens in a list": lambda: Draft([0, 1], [-1, 0]),  # pyright: ignore[reportArgumentType]
    "tokens generated": lambda: draft((t for t in (0, 1)), (-1, 0)),
    "float ids": lambda: Draft((0.0, 1.0), (-1, 0)),  # pyright: ignore[reportArgumentType]
    "NaN for an id": lambda: draft((float("nan"),), (-1,)),
    "bool ids": lambda: Draft((True, False), (-1, 0)),
    "numpy ids": lambda: Draft.chain(list(np.array([0, 1]))),
    "tensor ids": lambda: Draft.chain(list(torch.tensor([0, 1]))),  # pyright: ignore[reportArgumentType]
    "text ids": lambda: draft(("a",), (-1,)),
    "huge id": lambda: Draft.chain([2**70]),
    "id at the end": lambda: Draft.chain([VOCAB]),
    "negative id": lambda: Draft.chain([-1]),
    "lengths differ": lambda: draft((0, 1), (-1,)),
    "made with lengths that differ": lambda: Draft((0, 1), (-1,)),
    "its own parent": lambda: draft((0,), (0,)),
    "a cycle": lambda: draft((0, 1), (1, 0)),
    "made with a cycle": lambda: Draft((0, 1), (1, 0)),
    "parent of nobody": lambda: draft((0, 1), (-1, 7)),
    "parent below the root": lambda: draft((0, 1), (-1, -5)),
    "float parents": lambda: Draft((0, 1), (-1.0, 0.0)),  # pyright: ignore[reportArgumentType]
    "too deep": lambda: Draft.chain([0] * 9),
    "too many nodes": lambda: Draft((0,) * 9, (-1,) * 9),
    "distributions of text": lambda: draft((0,), (-1,), "distribution"),
    "distributions in a list": lambda: draft((0,), (-1,), [[1.0] * VOCAB]),
    "distributions of numpy": lambda: draft((0,), (-1,), np.ones((1, VOCAB))),
    "distributions of ints": lambda: Draft.chain([0], torch.ones(1, VOCAB, dtype=torch.int64)),
    "a distribution too few": lambda: draft((0, 1), (-1, 0), distribution(1, VOCAB)),
    "a distribution too many": lambda: draft((0,), (-1,), distribution(2, VOCAB)),
    "distributions over others": lambda: Draft.chain([0], distribution(1, VOCAB + 1)),
    "a flat distribution": lambda: Draft.chain([0], distribution(1)),
    "a distribution of no shape": lambda: draft((0,), (-1,), torch.tensor(1.0)),
    "distributions that want gradients": lambda: Draft.chain(
        [0], distribution(1, VOCAB, requires_grad=True)
    ),
    "distributions nowhere": lambda: Draft.chain([0], distribution(1, VOCAB, device="meta")),
    "sparse distributions": lambda: Draft.chain([0], distribution(1, VOCAB).to_sparse()),
    "hit of text": lambda: draft((0,), (-1,), None, "yes"),
    "by nobody": lambda: draft((0,), (-1,), None, None, NoLength()),
}
SAMPLED: dict[str, Callable[[], Any]] = {
    "NaN distributions": lambda: Draft.chain([0], distribution(1, VOCAB, value=torch.nan)),
    "a NaN in a distribution": lambda: Draft.chain([0], NAN_AT_2),
    "an infinite distribution": lambda: Draft.chain([0], distribution(1, VOCAB, value=torch.inf)),
}
ANSWERS = WHOLE | {name: each(make) for name, make in DRAFTS.items()}


@dataclass(slots=True)
class Strange:
    """Answers honestly `num_honest` times for each row, and then with `answer`."""

    answer: Callable[[Rows], Any]
    num_honest: int = 1
    num_asked: dict[int, int] = field(default_factory=dict[int, int])
    name: str = "double"
    needs: DraftNeeds = NO_NEEDS

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def propose(self, rows: Rows) -> Any:
        for row in rows:
            self.num_asked[row.seq_id] = self.num_asked.get(row.seq_id, 0) + 1
        honest = all(self.num_asked[row.seq_id] <= self.num_honest for row in rows)
        return REPEATS_LAST.propose(rows) if honest else self.answer(rows)

    def close(self, seq_id: int) -> None: ...


def plain(params: SamplingParams) -> list[list[int]]:
    return Rig(ToyHybrid(vocab_size=VOCAB), k=0).outputs([PROMPT, (0, 1)], params)


def check(answer: Callable[[Rows], Any], params: SamplingParams, num_honest: int) -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), Strange(answer, num_honest), k=2, honest=False)
    texts = rig.outputs([PROMPT, (0, 1)], params)
    if not num_honest or params.greedy:
        assert texts == plain(params)
    for seq in rig.sequences:
        assert seq.error is None
        assert "'double'" in seq.no_drafts
        assert len(seq.no_drafts) < 500


# Every answer, greedy and sampled, alone and behind an honest one; not each with each. Other
# combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("num_honest", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_strange_answer_ends_drafting_and_not_the_request(
    name: str, temperature: float, num_honest: int
) -> None:
    check(ANSWERS[name], SamplingParams(temperature=temperature, max_tokens=8), num_honest)


@pytest.mark.parametrize("name", SAMPLED)
def test_distributions_that_are_not_numbers_end_the_drafts_of_sampled_requests(name: str) -> None:
    check(each(SAMPLED[name]), SamplingParams(temperature=1.0, max_tokens=8), 0)


@pytest.mark.parametrize("place", ["open", "close"])
@pytest.mark.parametrize("error", [Panic("no"), WordlessError(), SystemExit(3)], ids=repr)
def test_beginnings_and_ends_that_raise_cost_drafts_at_most(
    place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Strange, place, broken)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), Strange(REPEATS_LAST.propose), k=2, honest=False)
    assert rig.outputs([PROMPT, (0, 1)], greedy(8)) == plain(greedy(8))
    assert [bool(seq.no_drafts) for seq in rig.sequences] == [place == "open"] * 2


def test_an_interrupt_out_of_a_drafter_is_no_fault_of_it() -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), Strange(raises(KeyboardInterrupt()), 0), k=2)
    with pytest.raises(KeyboardInterrupt):
        rig.outputs([PROMPT], greedy(8))


@pytest.mark.deep
@pytest.mark.wide
def test_all_answers_are_refused_without_assertions_too() -> None:
    """In a process whose assertions are off, its own included: it counts."""
    done = subprocess.run(
        [sys.executable, "-O", str(Path(__file__))],
        cwd=TESTS,
        env={"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(len(ANSWERS) + len(SAMPLED))]


def _run_unasserted() -> None:
    if __debug__:
        raise SystemExit("run with -O")
    params = SamplingParams(temperature=1.0, max_tokens=6)
    wanted, num_refused = plain(params), 0
    for name, answer in (ANSWERS | {k: each(v) for k, v in SAMPLED.items()}).items():
        rig = Rig(ToyHybrid(vocab_size=VOCAB), Strange(answer, 0), k=2, honest=False)
        if rig.outputs([PROMPT, (0, 1)], params) != wanted:
            raise SystemExit(f"{name}: another text")
        if not all("'double'" in seq.no_drafts and not seq.error for seq in rig.sequences):
            raise SystemExit(f"{name}: drafts go on")
        num_refused += 1
    sys.stdout.write(str(num_refused))


if __name__ == "__main__":
    _run_unasserted()
