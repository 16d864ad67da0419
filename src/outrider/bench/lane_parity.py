"""Parity of every way to arrange the work: schedules, executors, batches, drafters ahead, memory.

A row of the matrix is one configuration of the engine. Greedily its tokens must be those of plain
decoding, one request at a time. In tight memory requests are pre-empted, and read their text again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.bench.pairwise import Row
from outrider.bench.parity import first_difference, num_equal
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams

FACTORS: Mapping[str, Sequence[str]] = {
    "schedule": ("single", "pd", "pdv", "ssd", "auto"),
    "executor": ("inline", "threads"),
    "batch_size": ("1", "2", "5", "16"),
    "drafter": ("none", "ngram", "model"),
    "k": ("0", "1", "4", "8"),
    "fallback": ("jit", "ngram", "none", "auto"),
    "force_hits": ("off", "0", "0.5", "1"),
    "prefill_chunk": ("3", "16", "256"),
    "memory": ("ample", "tight"),
}


@dataclass(frozen=True, slots=True)
class LaneCell:
    """A row's result. `first_difference` is (request, token) or None."""

    row: Row
    num_tokens: int
    num_equal: int
    num_accepted: int
    num_drafted: int
    num_preempted: int
    first_difference: tuple[int, int] | None

    @property
    def holds(self) -> bool:
        return self.first_difference is None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class LaneMatrix:
    """Runs rows over `prompts`, each for `max_tokens` greedy tokens; the plain texts are kept."""

    prompts: Sequence[str]
    max_tokens: int
    _plain: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def run(self, rows: Sequence[Row]) -> Iterator[LaneCell]:
        """Yield each row's result as it is done."""
        if not self._plain:
            with_nothing = EngineConfig(drafter="none", batch_size=1)
            self._plain = [result.token_ids for result in self._results(LLM(config=with_nothing))]
        for row in rows:
            yield self._cell(row)

    def _cell(self, row: Row) -> LaneCell:
        llm = LLM(config=config_of(row))
        results = self._results(llm)
        llm.close()
        got = [result.token_ids for result in results]
        return LaneCell(
            row=row,
            num_tokens=sum(map(len, self._plain)),
            num_equal=num_equal(self._plain, got),
            num_accepted=sum(result.stats.num_accepted for result in results),
            num_drafted=sum(result.stats.num_drafted for result in results),
            num_preempted=llm.counts.preempted,
            first_difference=first_difference(self._plain, got),
        )

    def _results(self, llm: LLM) -> list[GenerationResult]:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        return llm.generate(self.prompts, params)


def config_of(row: Row) -> EngineConfig:
    """The configuration that a row names."""
    tight = row["memory"] == "tight"
    return EngineConfig(
        schedule=row["schedule"],
        concurrent_lanes=row["executor"] == "threads",
        batch_size=int(row["batch_size"]),
        drafter=row["drafter"],
        k=int(row["k"]),
        fallback=row["fallback"],
        force_hits=-1.0 if row["force_hits"] == "off" else float(row["force_hits"]),
        prefill_chunk=int(row["prefill_chunk"]),
        # Room for the longest request, and more of them let in than fit.
        reserve=0.0 if tight else 1.0,
        arena_tokens=160 if tight else 0,
        context=160 if tight else 0,
        page_size=4 if tight else 32,
    )


def all_rows() -> list[Row]:
    """The full product, each configuration once: factors that mean nothing beside the others of
    their row keep their first value."""
    rows = (dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values()))
    return [row for row in rows if row == _meant(row)]


def _meant(row: Row) -> Row:
    """The row, with the first value of each factor that has no effect in it."""
    idle: list[str] = []
    if row["drafter"] == "none" or row["k"] == "0":
        idle += ["drafter", "k", "fallback", "force_hits"]
    elif row["schedule"] != "ssd" or row["drafter"] != "model":
        idle += ["fallback", "force_hits"]
    if row["schedule"] in ("single", "auto"):
        idle.append("executor")
    return {name: FACTORS[name][0] if name in idle else value for name, value in row.items()}


def acceptance_by_draft(cells: Sequence[LaneCell]) -> dict[str, set[tuple[int, int]]]:
    """(accepted, drafted) by drafter and k, of rows that draft on the same terms: in ample memory,
    and where every draft is the drafter's own. One entry each says that acceptance is a property
    of the pair, whatever the schedule and batch."""
    found: dict[str, set[tuple[int, int]]] = {}
    for cell in cells:
        row = cell.row
        own = row["schedule"] != "ssd" or row["fallback"] == "jit"
        # With `auto` a controller may draft less, as time goes.
        if row["memory"] == "ample" and row["schedule"] != "auto" and own:
            name = f"{row['drafter']} k={row['k']}"
            found.setdefault(name, set()).add((cell.num_accepted, cell.num_drafted))
    return found
