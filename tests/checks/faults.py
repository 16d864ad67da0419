"""Faults planted where lanes do their work, and what they may cost: one request, or its drafts.

Also drafting ahead where it does not pay, and waiting for what other processes do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.api.request import RequestHandle
from outrider.cache.paged_kv import PagedKV
from outrider.engine.round import LiveSequence
from outrider.models.llama import LlamaModel
from outrider.plugins.lanes.ahead.table import FanOutLimiter
from outrider.plugins.lanes.process.client import ProcessDrafter
from outrider.verify.exact import BlockRule

PROMPTS = ("def f(x):", "for i in", "import os, sys", "x = [1, 2, 3]\n" * 12, "while True:")
CULPRIT = 2
# The culprit is greedy: its text is then the same without drafts.
PARAMS = tuple(
    SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=100 + i, ignore_eos=True)
    for i in range(len(PROMPTS))
)


class FaultError(Exception):
    """What is planted."""


@dataclass(slots=True)
class Fault:
    """Raises a `kind` in calls of `place` that the culprit takes part in, before or after their
    work: always, or `once`, and then where others take part as well. `seq_id` is set when it is
    known."""

    place: str
    before: bool
    once: bool
    kind: type[BaseException] = FaultError
    seq_id: int = -1
    num_raised: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wrap(self, call: Callable[..., Any], who: Callable[..., Sequence[int]]) -> Any:
        def called(*args: Any, **named: Any) -> Any:
            fails = self._fails(who(*args))
            if fails and self.before:
                raise self.kind(self.place)
            result = call(*args, **named)
            if fails:
                raise self.kind(self.place)
            return result

        return called

    def _fails(self, seq_ids: Sequence[int]) -> bool:
        with self.lock:
            if self.seq_id not in seq_ids or (self.once and len(seq_ids) < 2):
                return False
            if self.once and self.num_raised:
                return False
            self.num_raised += 1
            return True


@contextmanager
def planted(llm: LLM, fault: Fault) -> Generator[None]:
    """`fault` is in the code that `llm` runs."""
    target = llm._pair.target  # pyright: ignore[reportPrivateUsage]
    drafter = type(llm._engine.drafter)  # pyright: ignore[reportPrivateUsage]

    def in_pass(model: LlamaModel, rows: Any, *_: Any, of_target: bool) -> Sequence[int]:
        mine = (model.spec == target.spec) == of_target
        return [row.seq_id for row in rows] if mine else []

    def in_rows(_: object, rows: Any) -> Sequence[int]:
        return [row.seq_id for row in rows]

    def in_rule(_: object, rows: Any) -> Sequence[int]:
        seeds = [params.seed for params in PARAMS]
        return [fault.seq_id - CULPRIT + seeds.index(row.rng.seed) for row in rows]

    def in_commit(store: PagedKV, paths: Any) -> Sequence[int]:
        mine = store is target.state
        return [seq_id for seq_id, path in paths.items() if len(path)] if mine else []

    def at_commit_of(store: PagedKV, seq: object, path: Any) -> Sequence[int]:
        """The sequences before it in the same commit are then committed already."""
        if store is not target.state or not len(path):
            return []
        own = store._sequences.get(fault.seq_id)  # pyright: ignore[reportPrivateUsage]
        return [fault.seq_id, -1] if own is seq else []

    places: dict[str, tuple[type[object], str, Callable[..., Sequence[int]]]] = {
        "pass": (LlamaModel, "step", partial(in_pass, of_target=True)),
        "draft pass": (LlamaModel, "step", partial(in_pass, of_target=False)),
        "propose": (drafter, "propose", in_rows),
        "propose_after": (drafter, "propose_after", in_rows),
        "rule": (BlockRule, "__call__", in_rule),
        "commit": (PagedKV, "commit", in_commit),
        "commit of one": (PagedKV, "_commit", at_commit_of),
    }
    owner, name, who = places[fault.place]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fault.wrap(getattr(owner, name), who))
        yield


def sequence(ticket: RequestHandle) -> LiveSequence:
    return ticket.reader.seq


def run(llm: LLM, fault: Fault | None = None) -> list[LiveSequence]:
    """All requests at once, to their end; every page of both models must be free again."""
    pair = llm._pair  # pyright: ignore[reportPrivateUsage]
    models = [model for model in (pair.target, pair.draft) if model is not None]
    free = [model.state.num_free_tokens for model in models]
    tickets = [llm.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    if fault is None:
        finish(llm)
    else:
        fault.seq_id = sequence(tickets[CULPRIT]).seq_id
        with planted(llm, fault):
            finish(llm)
    assert [model.state.num_free_tokens for model in models] == free
    for model in models:
        assert isinstance(model.state, PagedKV)
        model.state.check()
    return [sequence(ticket) for ticket in tickets]


def finish(llm: LLM) -> None:
    """Until nothing is left to do, and what is still drafted ahead of nothing has ended."""
    executor = llm._engine.executor  # pyright: ignore[reportPrivateUsage]
    for _ in range(2000):
        if not llm.has_work and not executor.busy:
            return
        llm.advance()
    raise AssertionError("the engine does not come to an end")


def written(seqs: Sequence[LiveSequence]) -> list[list[int]]:
    return [seq.tokens[seq.prompt_length :] for seq in seqs]


def keep_drafting_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on although here it takes longer than verifying. With a `hybrid_threshold` of 0 the
    schedule asks for it in any case."""

    def learn_nothing(pace: FanOutLimiter, seconds: float, window: float, saved: float) -> None:
        del pace, seconds, window, saved

    monkeypatch.setattr(FanOutLimiter, "observe", learn_nothing)


def until(condition: Callable[[], bool], seconds: float = 240.0) -> float:
    """Seconds until it held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether the process ended; one that nobody waited for yet counts as well."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "Z"
    except OSError:
        return True


def pid_of(drafter: ProcessDrafter) -> int:
    pid = drafter.stats().pid
    assert pid is not None
    return pid


def serving(drafter: ProcessDrafter) -> bool:
    return drafter.stats().pid is not None
