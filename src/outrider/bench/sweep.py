"""A sweep as it runs: the same prompts in every way, each beside plain decoding of that moment.

A visit takes one piece of work (a prompt, or a batch of them) and decodes it plainly and in every
other way, in an order that rotates from visit to visit: drift of the machine falls on all alike.
Speed-ups are ratios within visits and never between runs. Greedy ids are compared with those of
plain decoding in the same visit. Whatever error one sample ends in is recorded as its reason, and
the sweep goes on.

There is one engine for each way, since an engine is made for its configuration; all of a lineup are
in memory together, which is what taking turns costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.api.llm import LLM
from outrider.bench.machine import Neighbours
from outrider.bench.sweep_attempt import Attempt, attempt
from outrider.bench.sweep_plan import Piece, Visit, Way
from outrider.bench.sweep_results import ResultsFolder
from outrider.bench.sweep_samples import Sample
from outrider.core.params import SamplingParams


class Lineup:
    """Engines of one target, one for each way, loaded and ready to take turns. `ways` has those
    that are there, plain decoding first; `refused` says for the others why they are not."""

    def __init__(self, target: str, ways: Sequence[Way], *, tolerant: bool = False) -> None:
        """Raises what loading plain decoding, or unless `tolerant` any way, raises."""
        self.ways: list[Way] = []
        self.llms: list[LLM] = []
        self.refused: dict[Way, str] = {}
        for way in ways:
            try:
                llm = LLM(target, draft=way.draft, config=way.engine)
            # Memory that is full is no error of ours, and must not end hours of others.
            except Exception as error:
                if not (tolerant and self.llms):
                    self.close()
                    raise
                self.refused[way] = f"{type(error).__name__}: {error}"
                continue
            self.ways.append(way)
            self.llms.append(llm)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for llm in self.llms for note in llm.notes))

    def facts(self) -> dict[str, object]:
        """What was found while loading, for the record of a run."""
        llm = self.llms[-1]
        return {
            "drafter": llm.drafter,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "row_exact_kernels": llm.kernels.exact,
            "num_engines": len(self.llms),
            "notes": list(self.notes),
        }

    def close(self) -> None:
        """End their threads and processes."""
        for llm in self.llms:
            llm.close()

    def warm_up(self, visit: Visit) -> None:
        """Run its piece untimed in every way. A failure is the timed run's to report."""
        params = self._params(replace(visit, iteration=0))
        for llm in self.llms:
            attempt(llm, visit.piece, params)

    def measure(self, visit: Visit, *, run: int, number: int) -> list[Sample]:
        """One sample for each way, in order; `number` is the visit's in the results."""
        params = self._params(visit)
        found: dict[int, Attempt] = {}
        with Neighbours() as neighbours:
            for place in range(len(self.ways)):
                turn = (visit.turn + place) % len(self.ways)
                found[turn] = attempt(self.llms[turn], visit.piece, params)
        plain = found[0]
        exact = [params.greedy and self.llms[0].exact and llm.exact for llm in self.llms]
        same = [_identical(found[i], plain) if exact[i] else None for i in range(len(exact))]
        return [
            Sample(
                run=run,
                visit=number,
                config=visit.configs[i],
                piece=visit.piece.name,
                prompt_ids=[prompt.prompt_id for prompt in visit.piece.prompts],
                iteration=visit.iteration,
                reason=self._reason(found[i], plain, same=same[i]),
                numbers=found[i].numbers(way.k, identical=same[i]),
                foreign_cpu_share=neighbours.share,
            )
            for i, way in enumerate(self.ways)
        ]

    def _params(self, visit: Visit) -> SamplingParams:
        """Every repetition has a seed of its own. All ways stop at the shortest limit among them,
        for a larger K leaves less of the window to the text."""
        params = visit.params
        params = replace(params, seed=(params.seed + visit.iteration) % 2**63)
        try:
            limits = _limits(self.llms, visit.piece, params)
        except Exception:  # noqa: BLE001 - the timed run meets it again, and reports it
            return params
        return replace(params, max_tokens=min(limits), min_tokens=min(params.min_tokens, *limits))

    def _reason(self, ours: Attempt, plain: Attempt, *, same: bool | None) -> str | None:
        if ours.reason is not None or same is not False:
            return ours.reason
        place = _first_difference(ours.ids, plain.ids)
        exact = "" if self.llms[0].kernels.exact else "; the kernels are not row-exact"
        return f"DifferentTokens: not the ids of plain decoding from {place} on{exact}"


def run_visits(
    lineup: Lineup, todo: Sequence[Visit], folder: ResultsFolder, *, run: int, warmup: int
) -> Iterator[Sequence[Sample]]:
    """Measure and append each visit of `todo`; yields the samples of a visit once they are safe."""
    for _ in range(warmup if todo else 0):
        lineup.warm_up(todo[0])
    for visit in todo:
        samples = lineup.measure(visit, run=run, number=folder.next_visit())
        folder.add(samples)
        yield samples


def _limits(llms: Sequence[LLM], piece: Piece, params: SamplingParams) -> list[int]:
    return [llm.fitting_tokens(prompt.text, params) for llm in llms for prompt in piece.prompts]


def _identical(ours: Attempt, plain: Attempt) -> bool | None:
    """Greedy text of an exact rule is the target's own; nothing else has to be."""
    whole = ours.reason is None and plain.reason is None
    return ours.ids == plain.ids if whole else None


def _first_difference(ours: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> str:
    for row, (a, b) in enumerate(zip(ours, plain, strict=True)):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            token = min(len(a), len(b)) if place is None else place
            return f"token {token}" if len(plain) == 1 else f"token {token} of prompt {row}"
    raise AssertionError("called for equal ids")
