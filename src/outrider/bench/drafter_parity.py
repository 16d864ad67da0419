"""Parity of every drafter: chains and trees, dense and hybrid targets, both ways to roll back,
batches, chunked prompts, pre-emption.

A row of the matrix is one configuration on one ground: a target, and what each drafter that rides
with it drafts from. Greedily its tokens must be those of plain decoding, one request at a time.
In tight memory requests are pre-empted, and read their text again. A new drafter joins by a line of
`bench/studies/drafters_lineup.py`; it rides on every ground that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.bench.pairwise import Factors, Row, covering_rows
from outrider.bench.parity import first_difference, num_equal
from outrider.bench.studies.drafters_lineup import known
from outrider.core.config import ROLLBACKS, EngineConfig
from outrider.core.params import SamplingParams

SHAPES = ("chain", "tree")
_TREE_NODES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A target, and what each of its drafters drafts from (None: nothing but the text and the
    target). `recurrent` targets have state to roll back in one of two ways."""

    name: str
    target: str
    drafts: Mapping[str, str | None]
    recurrent: bool = False

    def factors(self) -> Factors:
        return {
            "ground": (self.name,),
            "drafter": tuple(self.drafts),
            "shape": SHAPES,
            "rollback": ROLLBACKS if self.recurrent else ROLLBACKS[:1],
            "k": ("1", "4"),
            "batch_size": ("1", "3", "8"),
            "prefill_chunk": ("3", "16", "256"),
            "memory": ("ample", "tight"),
        }

    def all_rows(self) -> list[Row]:
        """The full product, each configuration once: what cannot branch has no trees."""
        factors = self.factors()
        rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
        return [row for row in rows if row == meant(row)]

    def pair_rows(self) -> list[Row]:
        """A few rows that meet every pair of two settings."""
        return list({tuple(row.items()): row for row in map(meant, self._covering())}.values())

    def _covering(self) -> list[Row]:
        return covering_rows(self.factors())


@dataclass(frozen=True, slots=True)
class DrafterCell:
    """A row's result. `most_nodes` is the largest draft, `first_difference` (request, token) or
    None."""

    row: Row
    num_tokens: int
    num_equal: int
    num_accepted: int
    num_drafted: int
    num_rounds: int
    num_preempted: int
    most_nodes: int
    first_difference: tuple[int, int] | None

    @property
    def holds(self) -> bool:
        return self.first_difference is None

    @property
    def branched(self) -> bool:
        """Whether some draft was larger than any chain could be."""
        return self.most_nodes > int(self.row["k"])

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class DrafterMatrix:
    """Runs rows of one ground over `prompts`, each for `max_tokens` greedy tokens; the plain texts
    are kept."""

    ground: Ground
    prompts: Sequence[str]
    max_tokens: int
    _plain: list[GenerationResult] = field(default_factory=list[GenerationResult])

    def run(self, rows: Sequence[Row]) -> Iterator[DrafterCell]:
        """Yield each row's result as it is done."""
        if not self._plain:
            with_nothing = EngineConfig(drafter="none", batch_size=1, context=_CONTEXT)
            self._plain, _ = self._results(with_nothing, None)
        for row in rows:
            yield self._cell(row)

    def _cell(self, row: Row) -> DrafterCell:
        config = config_of(row)
        results, num_preempted = self._results(config, self.ground.drafts[row["drafter"]])
        plain = [result.token_ids for result in self._plain]
        got = [result.token_ids for result in results]
        traces = [trace for result in results for trace in result.rounds]
        return DrafterCell(
            row=row,
            num_tokens=sum(map(len, plain)),
            num_equal=num_equal(plain, got),
            num_accepted=sum(result.stats.num_accepted for result in results),
            num_drafted=sum(result.stats.num_drafted for result in results),
            num_rounds=sum(result.stats.num_rounds for result in results),
            num_preempted=num_preempted,
            most_nodes=max((trace.num_drafted for trace in traces), default=0),
            first_difference=first_difference(plain, got),
        )

    def _results(
        self, config: EngineConfig, draft: str | None
    ) -> tuple[list[GenerationResult], int]:
        llm = LLM(self.ground.target, draft=draft, config=config)
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        each = [params] * len(self.prompts)
        if config.drafter == "prediction":
            each = [replace(params, prediction=_edited(plain.text)) for plain in self._plain]
        try:
            return llm.generate(self.prompts, each), llm.counts.preempted
        finally:
            llm.close()


# Room for the longest prompt of a check; tight memory holds one such text and little more.
_CONTEXT = 112


def config_of(row: Row) -> EngineConfig:
    """The configuration that a row names."""
    tight = row["memory"] == "tight"
    return EngineConfig(
        drafter=row["drafter"],
        k=int(row["k"]),
        tree_nodes=_TREE_NODES if row["shape"] == "tree" else 0,
        batch_size=int(row["batch_size"]),
        prefill_chunk=int(row["prefill_chunk"]),
        # Room for the longest request, and more of them let in than fit.
        reserve=0.0 if tight else 1.0,
        arena_tokens=_CONTEXT if tight else 0,
        context=_CONTEXT,
        page_size=4 if tight else 32,
        state_rollback=row["rollback"],
        profile=True,
    )


def meant(row: Row) -> Row:
    """The row, with the first value of each factor that has no effect in it."""
    branches = known(row["drafter"]).branches
    return row if branches else {**row, "shape": SHAPES[0]}


def _edited(text: str) -> str:
    """A guess that is right but for one word in the middle, as a caller's would be."""
    words = text.split(" ")
    words[len(words) // 2] = "changed"
    return " ".join(words)
