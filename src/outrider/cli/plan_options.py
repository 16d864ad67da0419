"""The verb `plan`, for the table of all verbs, and what it may be told besides settings."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Argument, Verb
from outrider.core.fields import setting

# Settings that a plan tries, has an option of its own for, or has no use for.
DECIDED_BY_PLANS = (
    "drafter",
    "k",
    "tree_nodes",
    "controller",
    "schedule",
    "watchdog",
    "batch_size",
    "context",
    "device",
    "profile",
    "max_tokens",
    "n",
    "logprobs",
    "top_logprobs",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(JsonOption):
    """Of `plan`."""

    drafters: str = setting(
        "auto",
        "Drafters to try, between commas, each as NAME[=DRAFT]; auto is the draft model, heads "
        "that lie with the target, ngram and suffix.",
    )
    prompts: str | None = setting(
        None,
        "Your prompts, whose acceptance counts: question.jsonl, or a text file with one a line.",
    )
    domains: str = setting(
        "code,maths",
        "Shipped prompts instead, between commas: code, maths, conversation, summarization, echo, "
        "adversarial.",
    )
    batch: int = setting(1, "Texts that will be written at once.", minimum=1, maximum=1024)
    context: int | None = setting(
        None,
        "Tokens of a prompt; if not given the mean of the prompts, or 512 with a sheet.",
        minimum=0,
    )
    max_tokens: int = setting(128, "Tokens that will be written of each text.", minimum=1)
    device: str = setting(
        "auto",
        "auto, cpu, cuda or mps measure here; a device that you do not have is planned for by its "
        "sheet: v100, a100, h100, h200, rtx4090, m2-max, cpu-2core, or a JSON or YAML file.",
    )
    draft_device: str | None = setting(
        None,
        "With a sheet for --device, the sheet of a device of its own for the draft model.",
    )
    alpha: str | None = setting(
        None,
        "With a sheet, suppose this acceptance instead of counting it: one rate, or one for each "
        "place, between commas.",
    )
    seconds: float = setting(
        20.0, "Time rounds for so long at most, if they were not before.", minimum=0.5, maximum=600
    )
    fresh: bool = setting(False, "Measure anew what was measured before on this machine.")
    save: str | None = setting(None, "Also write the plan as JSON to this file.")


PLAN = Verb(
    name="plan",
    target="outrider.cli.plan:plan",
    text="Will speculation pay here? With which drafter and K, by how much, up to where.",
    example="outrider plan outrider/embedded --domains code",
    arguments=(Argument(name="TARGET", text="The same as --target."),),
    options=PlanOptions,
    settings=("program", "engine", "sampling"),
    without=DECIDED_BY_PLANS,
)
