"""What a verb may be told besides settings: the same kind of fields, hence the same flags and help.

These are of one run, so they have no variable and no file key.

What a verb is: words that the parser, the help and the completion need, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.fields import setting
from outrider.core.settings import DEFAULT_FILE, SETTINGS, Setting, describe

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


HELP_FLAGS = ("--help", "--help-all")
# Other words for the flag of a setting.
ALIASES = {"target": ("--model", "-m")}
CONFIG_TEXT = f"Read settings from this TOML or YAML file, not ./{DEFAULT_FILE}."
SET_TEXT = "Give any setting by its key, as in --set k=4; may be repeated."


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOption:
    """Of every verb that a program may want to read."""

    json: bool = setting(False, "Print JSON, for programs to read.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(JsonOption):
    """Of `generate`."""

    stdin: bool = setting(False, "Read the prompt from stdin; a lone - means the same.")
    output: str | None = setting(None, "Also write the JSON object to this file.")
    compare: bool = setting(False, "Also run without speculation, and print the speed-up.")
    quiet: bool = setting(False, "Print the text and nothing else.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions(JsonOption):
    """Of `chat`."""

    system: str | None = setting(None, "System message that opens the conversation.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions(JsonOption):
    """Of `bench comm`."""

    ranks: int = setting(2, "Processes or devices that meet.", minimum=2, maximum=64)
    device: str = setting(
        "auto", "cuda gives each rank a device; cpu none.", choices=("auto", "cpu", "cuda")
    )
    largest_mb: int = setting(16, "Largest message in MB of 2^20 bytes.", minimum=1, maximum=4096)
    model: str = setting("outrider/embedded", "Foretell the sums of this model's passes.")
    output: str | None = setting(None, "Also write the JSON object to this file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesOptions(JsonOption):
    """Of `bench engines`."""

    pairs: str | None = setting(
        None, "Pairs of `outrider pairs`, between commas; else --target and --draft."
    )
    engines: str = setting(
        "off,single,pd,pdv,ssd,auto",
        "Engines, between commas (off,single,pd,pdv,ssd,auto); off drafts nothing.",
    )
    levels: str = setting(
        "0,1,3,5,7,9,10",
        "Requests in flight, between commas (0,1,3,5,7,9,10); 0 is one at a time, with gaps.",
    )
    repeats: int = setting(
        5,
        "Measure every level this often (5); below 5 there is no verdict.",
        minimum=1,
        maximum=1000,
    )
    warmup: int = setting(1, "Untimed visits of every level first (1).", minimum=0, maximum=1000)
    requests: int = setting(10, "Requests of a level (10).", minimum=1, maximum=100_000)
    max_tokens: int = setting(64, "Emit at most this many tokens (64).", minimum=1)
    gap: float = setting(
        0.05, "Seconds of rest between requests of level 0 (0.05).", minimum=0, maximum=60
    )
    prompts: str = setting(
        "mixed",
        "mixed (code, maths and conversation in turns), one of these, summarization, or a file: "
        "question.jsonl, or a prompt a line.",
    )
    csv: str | None = setting(None, "Also write a row for every request to this file.")
    output_dir: str | None = setting(
        None, "New folder of results; results/DATE-DEVICE-MODEL-engines if not given."
    )
    no_plots: bool = setting(False, "Draw no figures.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTestOptions(JsonOption):
    """Of `bench load`."""

    engines: str = setting(
        "single,pd,pdv", "Engines, between commas (single,pd,pdv); also off, ssd and auto."
    )
    scenarios: str = setting(
        "single,low,medium,high",
        "Scenarios, between commas (single,low,medium,high): one request; 2, 5 or 10 a second.",
    )
    rate: float | None = setting(
        None, "Requests a second instead, as a Poisson process.", minimum=0.001, maximum=1e6
    )
    concurrency: str | None = setting(
        None, "Closed loops instead: requests in flight, between commas."
    )
    replay: str | None = setting(
        None, "A recorded trace instead: lines of arrival_seconds, prompt, max_tokens."
    )
    requests: int | None = setting(
        None, "Requests of a case (10 where no duration ends it).", minimum=1, maximum=1_000_000
    )
    duration: float | None = setting(
        None, "Seconds in which requests arrive.", minimum=0.001, maximum=1e6
    )
    max_concurrent: int = setting(
        10, "At most this many in flight with --rate or --replay (10).", minimum=1, maximum=1024
    )
    repeats: int = setting(1, "Run every case this often (1).", minimum=1, maximum=1000)
    max_tokens: int = setting(64, "Emit at most this many tokens (64).", minimum=1)
    prompts: str = setting(
        "mixed",
        "mixed (code, maths and conversation in turns), one of these, summarization, or a file: "
        "question.jsonl, or a prompt a line.",
    )
    csv: str | None = setting(None, "Also write a row for every request to this file.")
    output_dir: str | None = setting(
        None, "New folder of results; results/DATE-DEVICE-MODEL-load if not given."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(JsonOption):
    """Of `trace`."""

    output: str = setting("trace.json", "Write the trace to this file.")
    figure: str | None = setting(
        None, "Also draw the lanes over time: an .svg file; .png and dark ones come beside it."
    )
    figure_seconds: float = setting(
        0.0, "Draw so much from the beginning; 0 is as much as can be told apart.", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsOptions(JsonOption):
    """Of `prompts`."""

    tokenizer: str = setting("outrider/embedded", "Model whose tokenizer counts.")
    source: str = setting(
        "builtin",
        "builtin; hub fetches HumanEval, Alpaca, CNN/DailyMail and others by name, and what fails "
        "is built in; or a question.jsonl as of Spec-Bench.",
    )
    domains: str = setting(
        "code,conversation,summarization",
        "Between commas; also maths, translation, retrieval.",
    )
    output: str | None = setting(None, "Save 50 prompts a domain to this file.")
    tiny_output: str | None = setting(None, "Save 5 prompts a domain to this file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(JsonOption):
    """Of `verify`."""

    deep: bool = setting(False, "More of everything: a million texts a test (many minutes).")
    output: str | None = setting(None, "Also write the JSON object to this file.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions(JsonOption):
    """Of `doctor`."""

    measure: bool = setting(False, "Forget which kernels were faster here, and measure again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Of a verb that takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A word that a verb may take without a flag; the last one of a verb may be `many` words. It
    may stand for the flag of a `setting`."""

    name: str
    text: str
    choices: tuple[str, ...] = ()
    many: bool = False
    setting: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """`target` ("module:function") takes a `Call`; a verb with `parts` is only their common name.

    `settings` are the groups of settings whose flags it takes, save those that it decides itself
    (`without`); `options` is a dataclass of its own. `example` is a line that a user can paste.
    The front page lists it under `group`; without one it is an older place of a verb.
    """

    name: str
    text: str
    example: str
    target: str = ""
    alias: str | None = None
    group: str = ""
    arguments: tuple[Argument, ...] = ()
    options: type[DataclassInstance] = NoOptions
    settings: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    parts: tuple[Verb, ...] = ()

    def own_options(self) -> list[Setting]:
        return list(describe(self.options, group="").values())

    def offered_settings(self) -> list[Setting]:
        return [
            item
            for item in SETTINGS.values()
            if item.group in self.settings and item.name not in self.without
        ]

    def flags(self) -> list[str]:
        """Every flag it takes."""
        own = [item.flag for item in self.own_options()]
        offered = [name for item in self.offered_settings() for name in setting_flags(item)]
        return [*own, *offered, *(["--config", "--set"] if self.settings else []), *HELP_FLAGS]


def setting_flags(item: Setting) -> list[str]:
    """A switch among the settings may be on by default, so it has a flag for either side."""
    if item.kind is bool and item.group:
        return [item.flag, f"--no-{item.flag[2:]}"]
    return [item.flag, *ALIASES.get(item.name, ())]
