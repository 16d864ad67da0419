"""Results of every kind that a report reads, invented, and a drafter without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from doubles.clocks import FakeClock
from doubles.engine_runs import all_contestants, evidence_of, measured, plan
from doubles.study_results import PROVENANCE, Record, head, plain, study
from doubles.sweeps import small_sweep
from outrider.api.callers import Prompt
from outrider.api.result import GenerationResult
from outrider.core.draft import RoundTrace
from outrider.core.params import SamplingParams
from outrider.metrics import summarise
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.quality import FormatRow, Quality, RuleRow
from outrider_lab.bench.studies import drafters_report as drafters_record
from outrider_lab.bench.studies.drafters import Race, RacePlan, pieces_of
from outrider_lab.bench.studies.drafters_lineup import Lineup, Runner
from outrider_lab.bench.studies.engines_plan import Prompts, closed_case, load_plan, scenario
from outrider_lab.bench.studies.engines_report import evidence_record, load_record


@dataclass(slots=True)
class FakeWriter:
    """Every round drafts `drafted` tokens in `draft_seconds`, keeps `kept` of them, and takes
    `round_seconds` in all. Its text is `lie` if that is not empty. It fails for `broken` prompts;
    `asked` notes what it was given."""

    clock: FakeClock
    round_seconds: float
    drafted: int = 0
    kept: int = 0
    draft_seconds: float = 0.0
    lie: tuple[int, ...] = ()
    broken: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list[str])
    num_forgotten: int = 0

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, /
    ) -> list[GenerationResult]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self.asked += texts
        return [self._result(text, params.max_tokens) for text in texts]

    def forget(self) -> None:
        self.num_forgotten += 1

    def runner(self, name: str) -> Runner:
        return Runner(name, writer=self, k=self.drafted)

    def _result(self, prompt: str, num_tokens: int) -> GenerationResult:
        if prompt in self.broken:
            raise ValueError(f"cannot write {prompt}")
        rounds: list[RoundTrace] = []
        left = num_tokens
        while left:
            emitted = min(self.kept + 1, left)
            left -= emitted
            rounds.append(self._round(len(rounds), emitted))
            self.clock.advance(self.round_seconds)
        stats = summarise(rounds, drafter="fake", k=self.drafted, total_seconds=1.0)
        ids = self.lie or tuple(range(num_tokens))
        return GenerationResult("", ids, "length", stats, rounds=tuple(rounds))

    def _round(self, number: int, emitted: int) -> RoundTrace:
        return RoundTrace(
            seq_id=0,
            pass_index=len(self.asked) * 1000 + number,
            drafter="fake",
            batch_size=1,
            num_target_passes=1,
            num_prompt_tokens=0,
            num_drafted=self.drafted,
            num_accepted=emitted - 1,
            num_emitted=emitted,
            num_rows_copied=0,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.round_seconds - self.draft_seconds,
            accept_seconds=0.0,
        )


PARAMS = SamplingParams(max_tokens=12)


def drafters() -> Record:
    """`good` gains in both domains and `bad` loses."""
    clock = FakeClock()
    runners = [
        FakeWriter(clock, 0.010).runner("off"),
        FakeWriter(clock, 0.012, drafted=4, kept=3, draft_seconds=0.003).runner("good"),
        FakeWriter(clock, 0.020, drafted=4, kept=0, draft_seconds=0.010).runner("bad"),
    ]
    texts = {name: [f"{name} {i}" for i in range(6)] for name in ("code", "maths")}
    asked = RacePlan(pieces=pieces_of(texts, at_once=1), repeats=1, params=PARAMS)
    samples = [sample for visit in Race(asked, runners, clock).run() for sample in visit]
    lineup = Lineup([*runners, Runner("eagle", reason="no heads")], [])
    evidence = drafters_record.evidence_record(drafters_record.evidence_of(asked, lineup, samples))
    return plain({**head("drafters", drafters_record.SCHEMA), "pair": "toy", **evidence})


def engines() -> Record:
    evidence = evidence_record(evidence_of(measured(plan(), all_contestants())))
    asked = {"repeats": 5, "num_requests": 3, "max_tokens": 4}
    schema = "outrider-bench-engines/1"
    return plain({**head("engines", schema), "pair": "toy", "plan": asked, **evidence})


def load(*, closed: bool = False) -> Record:
    """Two cases: scenarios, or closed loops of 2 and 4 in flight."""
    cases = (
        [closed_case(place, n, num_requests=3) for place, n in enumerate((2, 4))]
        if closed
        else [scenario(0, "single", 1), scenario(1, "low", 3)]
    )
    asked = load_plan(cases, Prompts(texts=["a"], max_tokens=4), PARAMS, 5)
    samples = [one.sample for one in measured(plan(levels=(0, 1)), all_contestants())]
    return plain(
        {**head("load", "outrider-bench-load/1"), "pair": "toy", **load_record(asked, samples)}
    )


def peers() -> Record:
    names = ("outrider none bf16", "theirs none bf16", "outrider model bf16")
    scores = [
        {
            "contestant": name,
            "peer": name.partition(" ")[0],
            "format": "bf16",
            "temperature": 0.0,
            "tokens_per_second": rate,
            "same_text": {"equal": 5, "of": 6, "shortest_common_beginning": 9},
        }
        for name, rate in zip(names, (20.0, 10.0, 30.0), strict=True)
    ]
    ratio = {"temperature": 0.0, "ours": names[0], "theirs": names[1], "format": "bf16"}
    return {
        **head("vs_peers"),
        "tier": "b",
        "threads": 2,
        "versions": {"theirs": {"theirs": "1.0"}},
        "scores": scores,
        "ratios": [
            {**ratio, "faster": 2.0, "low": 1.8, "high": 2.2, "pairs": 6},
            {**ratio, "faster": 0.9, "low": None, "high": None, "pairs": 2},
            {
                **ratio,
                "what": "speculation over plain",
                "ours": names[2],
                "theirs": names[0],
                "faster": 1.5,
                "low": 1.4,
                "high": 1.6,
                "pairs": 6,
            },
        ],
    }


def plan_cells() -> list[Record]:
    """The lines of a study of predictions: one of three cells is still to be measured."""
    cells = [
        {
            "number": number,
            "stratum": stratum,
            "drafter": drafter,
            "k": 4,
            "batch": 1,
            "context": 100,
            "domain": "code",
        }
        for number, (stratum, drafter) in enumerate(
            (("easy", "model"), ("text", "ngram"), ("size", "model"))
        )
    ]
    return [
        {"record": "draw", "schema": "outrider-plan-cells/1", "seed": 1, "cells": cells},
        {"record": "run", "provenance": PROVENANCE},
        {"record": "prediction", "cell": 0, "speed_up": 1.5},
        {"record": "measured", "cell": 0, "plain": [2.0] * 5, "drafted": [1.25] * 5, "same": True},
        {"record": "prediction", "cell": 1, "speed_up": 0.9},
        {"record": "measured", "cell": 1, "plain": [1.0] * 5, "drafted": [1.25] * 5, "same": False},
        {"record": "prediction", "cell": 2, "speed_up": 0.9},
    ]


def predicted() -> Record:
    cells = [
        {
            "tier": "a",
            "drafter": drafter,
            "k": k,
            "predicted_tokens_per_second": 100.0 * k,
            "achieved_tokens_per_second": 100.0 * k * factor,
        }
        for drafter, factor in (("model", 0.9), ("ngram", 1.0))
        for k in (1, 2, 4)
    ]
    return {**head("predicted"), "cells": cells}


def verify_cost() -> Record:
    cells = [
        {"context": context, "rows": rows, "ms": 1 + 0.1 * rows, "share_of_read_ceiling": 0.9}
        for context in (256, 2048)
        for rows in (1, 2, 8, 16)
    ]
    return {**head("verify_cost"), "target": "tier b", "num_parameters": 4e8, "cells": cells}


def memory_cost() -> Record:
    return {
        **head("memory_cost"),
        "append_us": {"256": 150.0, "2048": 151.0},
        "rollback_us": {"1": 5.0, "16": 5.5, "64": 5.7},
    }


def certificate() -> Record:
    return {
        "holds": True,
        "verdict": "Speculation changes nothing here.",
        "about": {"target": {"name": "toy"}, "machine": "abacus", "versions": {"torch": "2"}},
        "checks": [{"name": "algebra", "holds": True, "summary": "4 rules"}],
    }


def parity() -> Record:
    cells = [{"row": {"k": "1"}, "num_tokens": 8, "num_equal": 8}]
    return {**head("engines_parity"), "num_tokens": 8, "num_equal": 8, "cells": cells}


def quality() -> Record:
    """A format and a rule that kept its promise, and a lossy one."""
    form = FormatRow(form="bf16", reference="bf16", num_windows=3, num_tokens=90, perplexity=12.5)
    kept = RuleRow(
        rule="block", drafter="model", exact=True, must_match=True, num_texts=6, num_same=6
    )
    ratio = Ratio(1.1, 1.0, 1.2, 6)
    lossy = replace(
        kept, rule="typical", exact=False, must_match=False, num_same=2, against_plain=ratio
    )
    found = Quality(formats=[form], rules=[kept, lossy])
    return plain({**head("quality"), "pair": "toy", **found.to_record()})


def limits() -> Record:
    return {**head("limits"), "bar": 0.9, "cells": [{"tier": "a", "ms": 1.25, "kernels": {}}]}


EVERY = {
    "drafters": drafters,
    "engines": engines,
    "load": load,
    "study": study,
    "peers": peers,
    "predicted": predicted,
    "verify_cost": verify_cost,
    "memory_cost": memory_cost,
    "certificate": certificate,
    "parity": parity,
    "quality": quality,
    "limits": limits,
}


@cache
def stored(name: str) -> str:
    """The text of a kind's file."""
    return json.dumps(EVERY[name]())


def write(folder: Path, name: str, record: Mapping[str, object]) -> Path:
    """As `folder`/`name`/results.json."""
    path = folder / name / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def everything(folder: Path) -> Path:
    """A folder a kind, a K sweep, and a study of predictions that was stopped."""
    for name in EVERY:
        write(folder, name, json.loads(stored(name)))
    small_sweep(folder / "sweep")
    lines = "".join(json.dumps(line) + "\n" for line in plan_cells())
    (folder / "cells.jsonl").write_text(lines + '{"record": "meas')
    return folder
