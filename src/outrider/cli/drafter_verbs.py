"""The verbs about drafters, for the table of all verbs."""

from __future__ import annotations

from outrider.cli.drafter_options import DraftCheckOptions, DraftersOptions, DraftSuggestOptions
from outrider.cli.verb import Argument, Verb

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
