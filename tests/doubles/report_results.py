"""Results of every kind that a report reads, which nobody measured; as files hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from doubles.engine_runs import evidence_of, field, measured, plan
from doubles.fake_writer import FakeWriter
from doubles.sweeps import small_sweep
from outrider.bench.drafters import record as drafters_record
from outrider.bench.drafters.lineup import Lineup, Runner
from outrider.bench.drafters.samples import Plan, Race, pieces_of
from outrider.bench.engines.cases import ClosedCase, LoadPlan, Prompts, scenario
from outrider.bench.engines.load_report import load_record
from outrider.bench.engines.record import evidence_record
from outrider.bench.gemm.record import SCHEMA as STUDY
from outrider.bench.gemm.record import Ceilings, Cell, DraftShare, ProductRow, Theory, WindowRow
from outrider.bench.interval import Ratio
from outrider.bench.quality.formats import FormatRow
from outrider.bench.quality.report import Quality, to_record
from outrider.bench.quality.rules import RuleRow
from outrider.core.clock import FakeClock
from outrider.core.params import SamplingParams

Record = dict[str, Any]
PROVENANCE: Record = {
    "command": "outrider bench anything",
    "utc": "2026-11-22T04:10:47+00:00",
    "commit": "fea27747ffc04678fc67f58f32c1c3e5666787c7",
    "dirty": False,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "cpu": "abacus",
    "cores": 2,
    "cuda": None,
}
PARAMS = SamplingParams(max_tokens=12)


def plain(record: Mapping[str, object]) -> Record:
    """As it comes back from a file."""
    return json.loads(json.dumps(record, allow_nan=False))


def head(benchmark: str, schema: str | None = None) -> Record:
    named = {"schema": schema} if schema else {}
    return {"benchmark": benchmark, **named, "run_id": "run-1", "provenance": PROVENANCE}


def drafters() -> Record:
    """`good` gains in both domains and `bad` loses."""
    clock = FakeClock()
    runners = [
        FakeWriter(clock, 0.010).runner("off"),
        FakeWriter(clock, 0.012, drafted=4, kept=3, draft_seconds=0.003).runner("good"),
        FakeWriter(clock, 0.020, drafted=4, kept=0, draft_seconds=0.010).runner("bad"),
    ]
    texts = {name: [f"{name} {i}" for i in range(6)] for name in ("code", "maths")}
    asked = Plan(pieces=pieces_of(texts, at_once=1), repeats=1, params=PARAMS)
    samples = [sample for visit in Race(asked, runners, clock).run() for sample in visit]
    lineup = Lineup([*runners, Runner("eagle", reason="no heads")], [])
    evidence = drafters_record.evidence_record(drafters_record.evidence_of(asked, lineup, samples))
    return plain({**head("drafters", drafters_record.SCHEMA), "pair": "toy", **evidence})


def engines() -> Record:
    evidence = evidence_record(evidence_of(measured(plan(), field())))
    asked = {"repeats": 5, "num_requests": 3, "max_tokens": 4}
    schema = "outrider-bench-engines/1"
    return plain({**head("engines", schema), "pair": "toy", "plan": asked, **evidence})


def load(*, closed: bool = False) -> Record:
    """Two cases: scenarios, or closed loops of 2 and 4 in flight."""
    cases = (
        [ClosedCase(name=f"closed-{n}", num_in_flight=n, num_requests=3) for n in (2, 4)]
        if closed
        else [scenario("single", 1), scenario("low", 3)]
    )
    asked = LoadPlan(
        cases=cases, repeats=5, prompts=Prompts(texts=["a"], max_tokens=4, seed=0), params=PARAMS
    )
    samples = [one.sample for one in measured(plan(levels=(0, 1)), field())]
    return plain(
        {**head("load", "outrider-bench-load/1"), "pair": "toy", **load_record(asked, samples)}
    )


def study() -> Record:
    """Two rates, two K, hits, fan-outs and batches; the biggest batch loses."""
    cells = [
        cell("alpha", "ar", 0, speed_up=1.0),
        *(
            cell("alpha", method, k, alpha=alpha, speed_up=1 + alpha * k / 8 + 0.1 * number)
            for number, method in enumerate(("sd", "ssd"))
            for k in (2, 4)
            for alpha in (0.6, 0.9)
        ),
        *(cell("hits", "ssd", 4, p_hit=p, speed_up=1.2 + p) for p in (0.0, 0.5, 1.0)),
        *(cell("fan_out", "ssd", 4, fan_out=n, num_ahead=4.0 * n) for n in (1, 2, 4)),
        *(
            cell("batch", method, 4 if method != "ar" else 0, batch=n, speed_up=speed)
            for n in (1, 4, 16)
            for method, speed in (("ar", 1.0), ("sd", 1.6 - 0.05 * n), ("ssd", 1.7 - 0.05 * n))
        ),
    ]
    shares = DraftShare(
        pair="8b/1b",
        k=4,
        draft_seconds=0.1,
        plain_seconds=0.2,
        verify_seconds=0.25,
        over_plain=0.5,
        over_verify=0.4,
        low=0.48,
        high=0.52,
        published=0.69,
        num_repeats=5,
    )
    windows = [
        WindowRow(
            pair="8b/1b",
            k=k,
            branches=branches,
            verify_seconds=0.25,
            trunk_seconds=0.02,
            pass_seconds=0.02 * branches,
            num_passes=0.23 / (0.02 * branches),
            fits=branches == 1,
            largest_fan_out=1,
        )
        for k in (2, 4)
        for branches in (1, 4)
    ]
    return plain(
        {
            **head("ssd", STUDY),
            "complete": True,
            "setting": {"dtype": "bfloat16", "max_tokens": 32, "repeats": 5, "quick": False},
            "models": [{"pair": "8b/1b", "role": "target", "sampled": "2 of 32 layers"}],
            "draft_shares": [asdict(shares)],
            "ceilings": asdict(
                Ceilings(gigabytes_per_second=16.0, gigaflops_per_second=120.0, threads=2)
            ),
            "products": [asdict(product(rows)) for rows in (1, 16, 256)],
            "windows": [asdict(row) for row in windows],
            "cells": [asdict(one) for one in cells],
            "findings": ["SSD hides drafting."],
        }
    )


def product(rows: int) -> ProductRow:
    return ProductRow(
        shape="llama-1b",
        product="gate",
        num_rows=rows,
        num_in=64,
        num_out=64,
        num_bytes=8192,
        num_flops=8192 * rows,
        seconds=1e-6,
        gigabytes_per_second=8.0,
        gigaflops_per_second=min(8.0 * rows, 100.0),
        intensity=float(rows),
        roof=min(16.0 * rows, 120.0),
        share=0.5,
    )


def cell(study: Any, method: Any, k: int, **changes: Any) -> Cell:
    speed = changes.pop("speed_up", 1.5)
    given: Record = {
        "study": study,
        "pair": "8b/1b",
        "method": method,
        "k": k,
        "alpha": 0.9,
        "p_hit": None,
        "fan_out": 1,
        "batch": 1,
        "num_samples": 5,
        "num_failures": 0,
        "tokens_per_second": 10 * speed * changes.get("batch", 1),
        "token_ms": 100 / speed,
        "token_ms_p95": 120 / speed,
        "speed_up": speed,
        "low": 0.95 * speed,
        "high": 1.05 * speed,
        "tokens_per_round": 1 + k / 2,
        "alpha_seen": 0.9,
        "p_hit_seen": 0.7,
        "draft_ms": 10.0 * k,
        "verify_ms": 100.0,
        "accept_ms": 1.0,
        "rest_ms": 2.0,
        "ahead_over_verify": 0.6,
        "num_ahead": 4.0,
        "theory": Theory(tokens=1 + k / 2, over_plain=speed, over_verify=speed)
        if method != "ar"
        else None,
    }
    return Cell(**(given | changes))


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
    return plain({**head("quality"), "pair": "toy", **to_record(found)})


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
