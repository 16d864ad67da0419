"""Engines to be measured: plain decoding and each drafter, with a K that changes while they run.

Each has models of its own, as users' engines do, or all of them share the weights of one target. A
drafter that cannot be loaded is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, thread_time

from outrider.api.llm import LLM
from outrider.api.request import RequestHandle
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget, RoundTrace
from outrider.core.errors import ContractError
from outrider.core.protocols import Drafter
from outrider.models.loading import resolve
from outrider_lab.bench.studies.drafters_lineup import OFF, Contestant, Drafts, Lineup, line_up


class Dial:
    """A controller whose K is set from outside, whatever becomes of drafts: every round takes the
    next one of a list. K is the mean of a round's sequences: of four, 5.25 gives three 5 tokens and
    one 6, so that a pass can have any number of rows. The first rounds draft nothing."""

    def __init__(self) -> None:
        self._ks: Sequence[float] = (0,)
        self._turn = 0

    def set(self, ks: Sequence[float]) -> None:
        """From the next round on, `ks` in turns."""
        if not ks:
            raise ContractError("there is no length")
        self._ks, self._turn = ks, 0

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        k = self._ks[self._turn % len(self._ks)]
        self._turn += 1
        depth, num_deeper = divmod(round(k * len(seq_ids)), len(seq_ids))
        return [Budget(depth + (place < num_deeper)) for place in range(len(seq_ids))]

    def observe(self, trace: RoundTrace) -> None:
        del trace


class TimedLLM(LLM):
    """One whose drafter may be asked by itself, while no request runs. `wall` and `delay` are of
    the last call of `advance`: its seconds, and how many times as long it took as this thread had a
    CPU. The calling thread takes part in every operator of a CPU and never sleeps in one, so a
    delay above 1 is what other processes took. Of other devices it is 1."""

    wall: float = 0.0
    delay: float = 1.0

    @property
    def proposer(self) -> Drafter:
        return self._engine.drafter

    def advance(self) -> None:
        began, ran = perf_counter(), thread_time()
        super().advance()
        self.wall, ran = perf_counter() - began, thread_time() - ran
        is_cpu = self.device.type == "cpu"
        self.delay = max(self.wall / ran, 1.0) if is_cpu and ran > 0 else 1.0


@dataclass(frozen=True, slots=True)
class TimedEngine:
    """A contestant's engine. `facts` are those of its runner, `delays` those of its passes by their
    index."""

    contestant: Contestant
    llm: TimedLLM
    dial: Dial
    facts: Mapping[str, object]
    delays: dict[int, float] = field(default_factory=dict[int, float])

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def is_plain(self) -> bool:
        return self.name == OFF

    @property
    def draft_folder(self) -> Path | None:
        """Of the draft model or heads; None if it drafts without."""
        draft = self.facts["draft"]
        return None if draft is None else resolve(str(draft))

    def advance(self, handles: Sequence[RequestHandle]) -> int:
        """The index of the pass that `handles` took part in; -1 before there was one."""
        self.llm.advance()
        ended = (one.reader.traces[-1].pass_index for one in handles if one.reader.traces)
        index = max(ended, default=-1)
        self.delays[index] = self.llm.delay
        return index


@dataclass(frozen=True, slots=True)
class TimedEngines:
    """The plain one first. `notes` say why others are missing."""

    present: Sequence[TimedEngine]
    lineup: Lineup

    @property
    def plain(self) -> TimedEngine:
        return self.present[0]

    @property
    def drafting(self) -> Sequence[TimedEngine]:
        return self.present[1:]

    @property
    def notes(self) -> Sequence[str]:
        return self.lineup.notes

    def named(self, name: str) -> TimedEngine:
        return next(engine for engine in self.present if engine.name == name)

    def close(self) -> None:
        self.lineup.close()


def open_engines(
    contestants: Sequence[Contestant],
    target: str,
    drafts: Drafts,
    base: EngineConfig,
    *,
    most_k: int,
    admit: Callable[[Contestant, Sequence[TimedLLM]], None] | None = None,
) -> TimedEngines:
    """Load them all, ready for drafts of up to `most_k` tokens. With `admit`, which is given what
    was loaded before and raises a CapacityError for one that is not to be loaded, all have the
    weights of one target. Raises OutriderError if not even plain decoding can run, or none of the
    drafters."""
    dials: list[Dial] = []
    llms: list[TimedLLM] = []

    def opener(target: str, draft: str | None, config: EngineConfig) -> LLM:
        dial, weights = Dial(), llms[0] if llms and admit is not None else None
        llm = TimedLLM(target, draft=draft, config=config, controller=dial, weights_of=weights)
        llms.append(llm)
        dials.append(dial)
        return llm

    base = replace(
        base,
        k=most_k,
        tree_nodes=0,
        schedule="single",
        controller="fixed",
        # Requests without an end would ask for the whole window each, and wait for it.
        reserve=0.0,
    )
    chains = [replace(one, k=None, tree_nodes=0) for one in contestants]

    def ask(one: Contestant) -> None:
        if admit is not None:
            admit(one, llms)

    lineup = line_up(
        chains, target, drafts, base, opener=opener, admit=None if admit is None else ask
    )
    by_name = {one.name: one for one in chains}
    present = [
        TimedEngine(by_name[runner.name], llm, dial, runner.facts)
        for runner, llm, dial in zip(lineup.present, llms, dials, strict=True)
    ]
    return TimedEngines(present, lineup)
