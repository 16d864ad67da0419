"""What the verbs about drafters may be told besides settings."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
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
