"""What the verbs about drafters may be told besides settings.

The verbs about drafters, for the table of all verbs.

The verb that fetches models, for the table of verbs.

The verb that makes a page of results, for the table of all verbs.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Argument, Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftersOptions(JsonOption):
    """Of `bench drafters`."""

    drafters: str = setting(
        "all",
        "Drafters, between commas, each as NAME[=DRAFT][:K][+NODES], such as eagle=FOLDER:6+24; "
        "all is every one that this version has, and trees where it can branch.",
    )
    domains: str = setting(
        "code,maths,echo,adversarial",
        "Prompts, between commas: code, maths, conversation, summarization; echo begins a copy of "
        "itself; adversarial repeats nothing, and is sampled unless --temperature is given.",
    )
    prompts: int = setting(
        8,
        "Prompts of each domain; below 5 pieces of work there is no verdict.",
        minimum=1,
        maximum=10_000,
    )
    repeats: int = setting(1, "Measure every prompt this often.", minimum=1, maximum=1000)
    max_tokens: int = setting(64, "Emit at most this many tokens.", minimum=1)
    csv: str | None = setting(None, "Also write a row for every sample to this file.")
    output_dir: str | None = setting(
        None, "New folder of results; results/DATE-DEVICE-MODEL-drafters if not given."
    )
    no_plots: bool = setting(False, "Draw no figures.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckOptions(JsonOption):
    """Of `draft check`."""

    measure: bool = setting(False, "Also write some shipped prompts with it: is anything accepted?")
    prompts: int = setting(6, "So many of them, with --measure.", minimum=1, maximum=1000)
    max_tokens: int = setting(32, "Emit at most this many tokens of each.", minimum=1)
    k: int = setting(4, "Draft at most this many tokens a round.", minimum=1, maximum=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSuggestOptions(JsonOption):
    """Of `draft suggest`."""


# Settings that a comparison of drafters sets for each of them.
DECIDED_BY_DRAFTERS = (
    "drafter",
    "tree_nodes",
    "profile",
    "max_tokens",
    "n",
    "logprobs",
    "top_logprobs",
)
_TARGET = Argument(name="TARGET", text="An alias, a folder or a hub id.")

DRAFT = Verb(
    name="draft",
    text="Choose what drafts for a target.",
    example="outrider draft suggest outrider/embedded",
    parts=(
        Verb(
            name="suggest",
            target="outrider.cli.draft:suggest",
            text="Say what can draft for TARGET, why, and how: pairs, heads, itself, its text.",
            example="outrider draft suggest outrider/embedded",
            arguments=(_TARGET,),
            options=DraftSuggestOptions,
        ),
        Verb(
            name="check",
            target="outrider.cli.draft:check",
            text="May DRAFT draft for TARGET? Compares vocabularies, windows, sizes, weights.",
            example="outrider draft check outrider/embedded outrider/embedded-draft --measure",
            arguments=(
                _TARGET,
                Argument(name="DRAFT", text="The same; or a folder of draft heads."),
            ),
            options=DraftCheckOptions,
        ),
    ),
)
BENCH_DRAFTERS = Verb(
    name="drafters",
    target="outrider.cli.bench_drafters:drafters",
    text="Compare drafters: acceptance, tokens a round, time, speed-up over plain decoding.",
    example="outrider bench drafters --drafters ngram,model --domains code --prompts 2 "
    "--max-tokens 16",
    options=DraftersOptions,
    settings=("program", "engine", "sampling"),
    without=DECIDED_BY_DRAFTERS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(JsonOption):
    """Of `models pull`."""

    draft: str = setting(
        "auto",
        "Fetch this draft model or these heads too; auto is what `outrider pairs` knows for "
        "TARGET, none is none.",
    )
    revision: str | None = setting(
        None, "A branch, tag or commit of TARGET; TARGET@REVISION says the same."
    )


PULL = Verb(
    name="pull",
    target="outrider.cli.pull:pull",
    text="Fetch a model from the hub, and the draft that goes with it.",
    example="outrider models pull Qwen/Qwen3-8B",
    arguments=(Argument(name="TARGET", text="A hub id, such as Qwen/Qwen3-8B."),),
    options=PullOptions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions(JsonOption):
    """Of `report`."""

    output: str = setting("report.html", "Write the page to this file.")
    figures: str | None = setting(
        None, "Also write every figure to this folder, as SVG and PNG, for light and dark pages."
    )


REPORT = Verb(
    name="report",
    target="outrider.cli.report:report",
    text="Make one web page of results: figures, tables, and where speculation gains or loses.",
    example="outrider report results --output report.html",
    arguments=(
        Argument(
            name="FOLDER",
            text="Folders that benchmarks wrote, or single results files.",
            many=True,
        ),
    ),
    options=ReportOptions,
)
