"""What `outrider bench sweep` may be told besides settings, and its row in the table of verbs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(JsonOption):
    """Of `bench sweep`. What is None is left to a preset, or to the default that the help names."""

    over: tuple[str, ...] = setting(
        (),
        "Vary this, as NAME=A,B; again for another axis: k, drafter, rule, temperature, domain, "
        "context (prompt tokens), batch, concurrency, pair, engine, fan-out, p-hit, any setting.",
    )
    preset: str | None = setting(None, "Fill in a published study; --presets lists them.")
    presets: bool = setting(False, "List the presets, and measure nothing.")
    pair: str | None = setting(
        None, "Pairs of `outrider pairs`, between commas, instead of a preset's or of --target."
    )
    experiment: str | None = setting(
        None, "Read these options and settings from a YAML file; flags go before it."
    )
    prompts: int | None = setting(None, "Prompts of each domain (10).", minimum=1, maximum=10_000)
    prompt_set: str | None = setting(
        None, "Take the prompts from this file of `outrider prompts --output`."
    )
    iterations: int | None = setting(
        None, "Measure every prompt this often (1).", minimum=1, maximum=1_000_000
    )
    requests: int = setting(
        10, "Requests of one piece of work with --over concurrency.", minimum=1, maximum=10_000
    )
    warmup: int | None = setting(
        None, "Untimed visits before the first (1).", minimum=0, maximum=1000
    )
    at_once: int = setting(
        8, "Most engines in memory together, besides plain decoding.", minimum=1, maximum=64
    )
    output_dir: str | None = setting(
        None, "Folder of results; results/DATE-DEVICE-PAIR-NAME if not given. A run goes on in it."
    )
    fresh: bool = setting(False, "Measure again what the folder has already.")
    no_plots: bool = setting(False, "Draw no figures.")


# Settings that a sweep decides for all cells alike.
DECIDED_BY_GRIDS = ("profile", "n", "logprobs", "top_logprobs")

BENCH_SWEEP = Verb(
    name="sweep",
    target="outrider.cli.bench_sweep:sweep",
    text="Vary anything: K, drafter, rule, temperature, domain, context, batch, load, pair; each "
    "cell beside plain decoding.",
    example="outrider bench sweep --over k=2,4 --over domain=code,maths --prompts 2 "
    "--max-tokens 16",
    options=SweepOptions,
    settings=("program", "engine", "sampling"),
    without=DECIDED_BY_GRIDS,
)
