"""The verbs that write text, examine runs and show this machine, with their options."""

from __future__ import annotations

from outrider.cli.options import (
    ALL,
    DECIDED,
    Argument,
    JsonOption,
    Options,
    OutputOption,
    StructureOption,
    verb,
)
from outrider.core.fields import setting


@verb(
    "generate",
    "generate:generate",
    Argument("MODEL", "The same as --target, before a prompt.", setting="target", optional=True),
    Argument("PROMPT", "The text to continue."),
    group="Write text",
    settings=ALL,
)
class GenerateOptions(StructureOption, OutputOption):
    """Complete a prompt, coloured by where each token came from.

    outrider generate "def quicksort(items):" --max-tokens 64
    """

    prompt: str | None = setting(None, "The same as PROMPT.")
    stdin: bool = setting(False, "Read the prompt from stdin; a lone - means the same.")
    chat: bool = setting(
        False,
        "Treat the prompt as a message in the model's chat template; the default for an instruct "
        "model.",
    )
    raw: bool = setting(False, "Continue the prompt as it is, even with an instruct model.")
    compare: bool = setting(False, "Also run without speculation, and print the speed-up.")
    quiet: bool = setting(False, "Print only the text.")
    stats: bool = setting(False, "Print all statistics: times, rounds, memory.")
    html: str | None = setting(
        None, "Also write a web page to this file: the text token by token and round by round."
    )


@verb(
    "chat",
    "chat:chat",
    Argument("MODEL", "The same as --target.", setting="target"),
    Argument("PROMPT", "Answer only this message."),
    group="Write text",
    alias="run",
    settings=ALL,
)
class ChatOptions(StructureOption, JsonOption):
    """Talk to a model, with history and commands such as /help.

    outrider run outrider/embedded "What is 3 plus 4?" --max-tokens 32
    """

    prompt: str | None = setting(None, "The same as PROMPT.")
    system: str | None = setting(None, "System message of the conversation.")
    stats: bool = setting(False, "Print all statistics of each reply.")
    greedy: bool = setting(
        False, "Always take the likeliest token, whatever sampling the checkpoint recommends."
    )


@verb(
    "trace",
    "outrider_lab.cli.trace:trace",
    Argument("PROMPT", "Texts to continue; 8 shipped ones if none is given.", many=True),
    group="Measure speed",
    settings=ALL,
    without=DECIDED,
)
class TraceOptions(JsonOption):
    """Record a timeline of a run, for Perfetto.

    outrider trace "def quicksort(items):" "Once upon a time" --schedule pdv --max-tokens 24
    """

    output: str = setting("trace.json", "Write the trace to this file.")
    figure: str | None = setting(
        None, "Also draw the timeline: an .svg file; .png and dark versions are written with it."
    )
    figure_seconds: float = setting(
        0.0, "Seconds to draw, from the beginning; 0 is as much as stays legible.", minimum=0
    )


@verb(
    "verify",
    "verify:verify",
    Argument("TARGET", "The same as --target.", setting="target"),
    Argument("DRAFT", "The same as --draft.", setting="draft"),
    group="Check exactness",
    settings=ALL,
)
class VerifyOptions(OutputOption):
    """Certify on this machine that speculation changes nothing.

    outrider verify outrider/embedded --seed 1
    """

    deep: bool = setting(False, "Test more thoroughly: a million texts per test (many minutes).")


@verb("doctor", "doctor:doctor", group="This machine", settings=("program", "engine"))
class DoctorOptions(JsonOption):
    """Show this machine's hardware and kernels, and the models that fit.

    outrider doctor
    """

    measure: bool = setting(False, "Measure again which kernels are faster on this machine.")


@verb("config", "config:config", group="This machine", settings=ALL)
class ConfigOptions(JsonOption):
    """Show every setting, its value and its origin.

    outrider config --k 6
    """


@verb(
    "completion",
    "config:completion",
    Argument("SHELL", "The shell.", choices=("bash", "zsh", "fish")),
)
class CompletionOptions(Options):
    """Print a completion script for bash, zsh or fish.

    outrider completion bash
    """


@verb(
    "report",
    "outrider_lab.cli.report:report",
    Argument("FOLDER", "Folders that benchmarks wrote, or single results files.", many=True),
    group="Measure speed",
)
class ReportOptions(JsonOption):
    """Write one web page of results, with figures and tables.

    outrider report results --output report.html
    """

    output: str = setting("report.html", "Write the page to this file.")
    figures: str | None = setting(
        None, "Also write every figure to this folder, as SVG and PNG, for light and dark pages."
    )


@verb("bench prompts, prompts", "outrider_lab.cli.prompts:prompts")
class PromptsOptions(JsonOption):
    """Count the tokens of the benchmark prompts, and save a set of prompts.

    outrider bench prompts --tiny-output tiny.json
    """

    tokenizer: str = setting("outrider/embedded", "Model whose tokenizer counts.")
    source: str = setting(
        "builtin",
        "builtin; hub fetches HumanEval, Alpaca, CNN/DailyMail and others by name, and uses "
        "builtin for those that fail; or a question.jsonl in Spec-Bench's format.",
    )
    domains: str = setting(
        "code,conversation,summarization",
        "Comma-separated domains; also maths, translation, retrieval.",
    )
    output: str | None = setting(None, "Save 50 prompts of each domain to this file.")
    tiny_output: str | None = setting(None, "Save 5 prompts of each domain to this file.")
