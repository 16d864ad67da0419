"""The verb `explain`, for the table of all verbs: words alone, so that its help imports nothing."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Argument, Verb
from outrider.core.fields import setting

# In the order of explain_topics.py.
NAMES = (
    "round",
    "acceptance",
    "speed-up",
    "best-k",
    "roofline",
    "batch",
    "ssd",
    "fan-out",
    "energy",
    "published",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(JsonOption):
    """Of `explain`. What is None is as in docs/theory.md."""

    alpha: float | None = setting(
        None, "Chance that a drafted token is accepted (0.8).", minimum=0, maximum=1
    )
    k: int | None = setting(None, "Drafted tokens of a round (4).", minimum=1, maximum=64)
    c: float | None = setting(
        None, "A pass of the drafter, in plain passes of the target (0.1).", minimum=0, maximum=100
    )
    verify: float | None = setting(
        None, "The pass that verifies, in plain passes (1).", minimum=0.01, maximum=1000
    )
    batch: int | None = setting(None, "Sequences of a round (1).", minimum=1, maximum=100_000)
    context: int | None = setting(
        None, "Tokens that each sequence has already (0).", minimum=0, maximum=10_000_000
    )
    p_hit: float | None = setting(
        None, "Share of the verdicts that are foreseen (0.9).", minimum=0, maximum=1
    )
    branches: int | None = setting(
        None, "Verdicts that are drafted for (24).", minimum=1, maximum=10_000
    )
    parameters: float | None = setting(
        None, "Parameters of the target, in billions (7).", minimum=0.001, maximum=100_000
    )
    bandwidth: float | None = setting(
        None, "Memory bandwidth in GB/s (900).", minimum=0.1, maximum=1_000_000
    )
    tflops: float | None = setting(
        None, "Arithmetic in TFLOP/s (300).", minimum=0.001, maximum=1_000_000
    )
    watts: float | None = setting(
        None, "Power that does not depend on the work, in watts (100).", minimum=0, maximum=100_000
    )


EXPLAIN = Verb(
    name="explain",
    target="outrider.cli.explain:explain",
    text="Explain a formula with your numbers; without a topic, list them.",
    example="outrider explain speed-up --alpha 0.8 --k 4 --c 0.1",
    arguments=(Argument(name="TOPIC", text="What to explain.", choices=NAMES),),
    options=ExplainOptions,
)
