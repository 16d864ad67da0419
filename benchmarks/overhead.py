"""How much of a round is spent outside the models: packing, laws, rules, commits, text.

    python benchmarks/overhead.py [--prompts 6] [--max-tokens 128] [--output FILE] [--quick]

Every engine step and every model step within it are timed from inside a normal run; what an engine
step takes beyond its model steps is overhead. A whole round in one native call says itself how long
its passes took, its verdicts left out. Greedy and sampled, batch 1 and 8. The last line is one JSON
object.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import product
from time import perf_counter
from typing import Any

from common import options_of, reported

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.workload import WORKLOADS, load_prompts
from outrider.engine.engine import Engine
from outrider.kernels.native.rounds import Decided, NativeRounds
from outrider.models.llama import LlamaModel

CELLS = (("none", 0), ("ngram", 4), ("ngram", 8), ("model", 4), ("model", 8))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--prompts", type=int, default=6, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    grid = list(product((0.0, 0.8), (1, 8), CELLS))
    if options.quick:
        options.prompts, options.max_tokens, grid = 1, 8, grid[-2:]
    prompts = [p for name in WORKLOADS for p in load_prompts(name)[: options.prompts]]
    with reported("overhead", options) as report:
        cells: list[dict[str, Any]] = []
        report["cells"] = cells
        for temperature, batch_size, (drafter, k) in grid:
            config = EngineConfig(drafter=drafter, k=k, batch_size=batch_size, dtype=options.dtype)
            params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature)
            cells.append(measure(config, params, prompts))
            print(describe(cells[-1]))


def measure(config: EngineConfig, params: SamplingParams, prompts: list[str]) -> dict[str, Any]:
    """The share of the wall clock outside model steps, and microseconds of it a round."""
    llm = LLM(config=config)
    with StepClock(Engine) as rounds, StepClock(LlamaModel) as models, fused(models):
        llm.generate(prompts[: config.batch_size], params)
        rounds.seconds = models.seconds = 0.0
        rounds.calls = 0
        started = perf_counter()
        results = llm.generate(prompts, params)
        total = perf_counter() - started
    outside = rounds.seconds - models.seconds
    return {
        "drafter": config.drafter,
        "k": config.k,
        "batch_size": config.batch_size,
        "temperature": params.temperature,
        "dtype": config.dtype,
        "share_outside": round(outside / rounds.seconds, 4),
        "outside_us_per_round": round(outside / rounds.calls * 1e6, 1),
        "round_us": round(rounds.seconds / rounds.calls * 1e6, 1),
        "tokens_per_second": round(sum(len(r.token_ids) for r in results) / total, 1),
    }


def describe(cell: dict[str, Any]) -> str:
    return (
        f"T={cell['temperature']} batch {cell['batch_size']} {cell['drafter']:6} k={cell['k']}: "
        f"{100 * cell['share_outside']:.1f} % outside ({cell['outside_us_per_round']:.0f} of "
        f"{cell['round_us']:.0f} us a round), {cell['tokens_per_second']:.0f} tok/s"
    )


@contextmanager
def fused(models: StepClock) -> Generator[None]:
    """While entered, adds the passes of whole rounds in one call to `models`."""
    owner: Any = NativeRounds
    inner: Any = owner.__call__

    def timed(*args: Any) -> Decided | None:
        decided: Decided | None = inner(*args)
        if decided is not None:
            models.seconds += decided.draft_seconds + decided.verify_seconds
        return decided

    owner.__call__ = timed
    try:
        yield
    finally:
        owner.__call__ = inner


class StepClock:
    """While entered, adds up the calls of `owner.step` and the seconds spent in them."""

    def __init__(self, owner: type[LlamaModel] | type[Engine]) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._owner: Any = owner
        self._step: Any = owner.step

    def __enter__(self) -> StepClock:
        clock, inner = self, self._step

        def timed(*args: Any) -> Any:
            started = perf_counter()
            try:
                return inner(*args)
            finally:
                clock.seconds += perf_counter() - started
                clock.calls += 1

        self._owner.step = timed
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.step = self._step


if __name__ == "__main__":
    main()
