"""Published studies as sweeps: what each varies, what it printed, and what it claimed.

A recipe fills in what the command line leaves open. Its pairs are those of `outrider pairs`; with
another pair the shape of the study runs on models that are at hand. Published figures come from
other engines, machines and counters, and stand beside ours to be compared with care.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.engines.reference import PUBLISHED
from outrider.bench.presets import PRESETS, REFERENCES, Preset, Reference
from outrider.bench.sweeps.axes import CONCURRENCY
from outrider.bench.sweeps.claims import Claim, GainClaim, SameAcceptance
from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.fields import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`grids` are the words of `--over`, one list for each grid that is run; `settings` what is
    fixed. `remark` says what to know before comparing."""

    text: str
    grids: tuple[tuple[str, ...], ...]
    settings: Mapping[str, Value]
    prompts: int = 10
    iterations: int = 1
    warmup: int = 1
    plots: bool = True
    references: Sequence[Reference] = ()
    claims: Sequence[Claim] = ()
    remark: str = ""


def recipe(name: str) -> Recipe:
    """Raises ConfigError for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"unknown preset {name!r}.", hint=did_you_mean(name, RECIPES))
    return RECIPES[name]


def _of_preset(preset: Preset, *, prefix: str, claims: Sequence[Claim] = ()) -> Recipe:
    """A recipe of `outrider bench k` as a grid."""
    return Recipe(
        text=preset.text,
        grids=((f"pair={preset.pair}", f"k={preset.ks}"),),
        settings={
            "dtype": preset.dtype,
            "deterministic": preset.deterministic,
            "max_tokens": preset.max_tokens,
        },
        prompts=preset.prompts,
        iterations=preset.iterations,
        plots=preset.plots,
        references=[one for one in REFERENCES if one.pair.startswith(prefix)],
        claims=claims,
    )


def _engine_claims() -> list[Claim]:
    """What is claimed of three lanes over two, tied where it says so."""
    gains = [((0, 1, 3), 1.0, 1.0), ((5,), 1.115, 1.115), ((7, 9, 10), 1.01, 1.02)]
    found: list[Claim] = [
        GainClaim(
            axis="schedule",
            ours="pdv",
            theirs="pd",
            where={CONCURRENCY: level},
            measure="throughput",
            low=low,
            high=high,
        )
        for levels, low, high in gains
        for level in levels
    ]
    found.append(
        GainClaim(
            axis="schedule",
            ours="pdv",
            theirs="pd",
            where={CONCURRENCY: 5},
            measure="cumulative p95",
            low=0.925,
            high=0.925,
        )
    )
    return found


_PHASE_4A = PRESETS["phase-4a"]
_BATCHES = SameAcceptance(axis="batch_size", published="0.858, 0.649, 0.618 at batch 1, 2, 4")
_CPU_PAIR = "pair=embedded"

RECIPES: Mapping[str, Recipe] = {
    "phase-3d": _of_preset(PRESETS["phase-3d"], prefix="GPT-2"),
    "phase-4a": Recipe(
        text="Llama 3.2 3B with 1B at K=1 and batches of 1, 2 and 4, the last with 32 tokens",
        grids=(
            (f"pair={_PHASE_4A.pair}", "k=1", "batch=1,2", "max_tokens=64"),
            (f"pair={_PHASE_4A.pair}", "k=1", "batch=4", "max_tokens=32"),
        ),
        settings={"dtype": _PHASE_4A.dtype, "deterministic": _PHASE_4A.deterministic},
        references=[one for one in REFERENCES if one.pair.startswith("Llama")],
        claims=[_BATCHES],
    ),
    "batch": Recipe(
        text="throughput and acceptance by batch size",
        grids=((_CPU_PAIR, "batch=1,2,4", "k=1,4"),),
        settings={"max_tokens": 64},
        prompts=20,
        claims=[_BATCHES],
    ),
    "verify-time": Recipe(
        text="time of a verifying pass by K",
        grids=((_CPU_PAIR, "k=1,2,3,4,6,8,12,16", "context=128,512,1000"),),
        settings={"max_tokens": 64},
        remark="The source holds this time to be constant in K; here it is measured with the "
        "prompt in memory, at several lengths.",
    ),
    "end-to-end": Recipe(
        text="four pairs, three domains, K of 1, 2, 4 and 8",
        grids=(
            (
                "pair=gpt2_dev,tinyllama_llama3,phi3_llama3,llama3_self",
                "domain=code,conversation,summarization",
                "k=1,2,4,8",
            ),
        ),
        settings={"max_tokens": 64},
        remark="Two of the pairs have different vocabularies and draft over the bridge.",
    ),
    "baseline": Recipe(
        text="plain decoding by domain at temperatures 0 and 0.6, five runs",
        grids=((_CPU_PAIR, "domain=code,conversation,summarization", "temperature=0,0.6"),),
        settings={"drafter": "none", "max_tokens": 128},
        iterations=5,
        warmup=3,
    ),
    "domains": Recipe(
        text="acceptance by domain of prompts, greedy and sampled",
        grids=(
            (
                _CPU_PAIR,
                "domain=code,maths,conversation,summarization,translation,retrieval",
                "temperature=0,0.6",
                "k=2,4,8",
            ),
        ),
        settings={"max_tokens": 64},
    ),
    "engines": Recipe(
        text="three engines by requests in flight: 0, 1, 3, 5, 7, 9, 10",
        grids=((_CPU_PAIR, "concurrency=0,1,3,5,7,9,10", "engine=single,pd,pdv"),),
        settings={"max_tokens": 64},
        prompts=50,
        references=[
            Reference(
                {"single": "Baseline", "pd": "PD", "pdv": "PDV"}[one.engine],
                "the source's GPU",
                f"concurrency {one.level}",
                one.tokens_per_second,
                one.acceptance,
                f"its Token P95, of cumulative time: {one.cumulative_p95_ms:g} ms",
            )
            for one in PUBLISHED
        ],
        claims=_engine_claims(),
        remark="The source's concurrency is an arrival rate; here it is requests in flight. "
        "`outrider bench engines` measures the same with lanes, queues and memory.",
    ),
    "ssd": Recipe(
        text="drafting ahead by fan-out, K and share of hits",
        grids=((_CPU_PAIR, "k=2,4,6", "fan_out=1,4,16", "p_hit=0,0.5,0.9,1"),),
        settings={"schedule": "ssd", "max_tokens": 64},
        prompts=5,
        remark="Acceptance is the pair's own here; `outrider bench ssd` sets it.",
    ),
}
