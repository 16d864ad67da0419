"""The verbs that write, look at text and explain, and what they may be told."""

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
    Argument("PROMPT", "Text to go on from."),
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
        "The prompt is a message, which goes through the model's chat template; for an instruct "
        "model it is one anyway.",
    )
    raw: bool = setting(False, "Go on from the prompt as it is, with an instruct model too.")
    compare: bool = setting(False, "Also run without speculation, and print the speed-up.")
    quiet: bool = setting(False, "Print the text and nothing else.")
    stats: bool = setting(False, "Say all that was counted: times, rounds, memory.")
    html: str | None = setting(
        None, "Also write a web page to this file: the text token by token and round by round."
    )


@verb(
    "chat",
    "chat:chat",
    Argument("MODEL", "The same as --target.", setting="target"),
    Argument("PROMPT", "Answer this one message, and end."),
    group="Write text",
    alias="run",
    settings=ALL,
)
class ChatOptions(StructureOption, JsonOption):
    """Talk to a model, with history and commands such as /help.

    outrider run outrider/embedded "What is 3 plus 4?" --max-tokens 32
    """

    prompt: str | None = setting(None, "The same as PROMPT.")
    system: str | None = setting(None, "System message that opens the conversation.")
    stats: bool = setting(False, "Say all that was counted of each reply.")
    greedy: bool = setting(
        False, "Take the likeliest token always, whatever sampling the checkpoint advises."
    )


@verb(
    "trace",
    "outrider_lab.cli.trace:trace",
    Argument("PROMPT", "Texts to go on from; 8 shipped ones if none is given.", many=True),
    group="Measure speed",
    settings=ALL,
    without=DECIDED,
)
class TraceOptions(JsonOption):
    """Record what runs when, for Perfetto.

    outrider trace "def quicksort(items):" "Once upon a time" --schedule pdv --max-tokens 24
    """

    output: str = setting("trace.json", "Write the trace to this file.")
    figure: str | None = setting(
        None, "Also draw what ran when: an .svg file; .png and dark ones come beside it."
    )
    figure_seconds: float = setting(
        0.0, "Draw so much from the beginning; 0 is as much as can be told apart.", minimum=0
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

    deep: bool = setting(False, "More of everything: a million texts a test (many minutes).")


@verb("doctor", "doctor:doctor", group="This machine", settings=("program", "engine"))
class DoctorOptions(JsonOption):
    """Say what this machine has and what fits.

    outrider doctor
    """

    measure: bool = setting(False, "Forget which kernels were faster here, and measure again.")


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
    """Make one web page of results, with figures and tables.

    outrider report results --output report.html
    """

    output: str = setting("report.html", "Write the page to this file.")
    figures: str | None = setting(
        None, "Also write every figure to this folder, as SVG and PNG, for light and dark pages."
    )


@verb("bench prompts, prompts", "outrider_lab.cli.prompts:prompts")
class PromptsOptions(JsonOption):
    """Count the tokens of the benchmark prompts, and save a set of them.

    outrider bench prompts --tiny-output tiny.json
    """

    tokenizer: str = setting("outrider/embedded", "Model whose tokenizer counts.")
    source: str = setting(
        "builtin",
        "builtin; hub fetches HumanEval, Alpaca, CNN/DailyMail and others by name, and what fails "
        "is built in; or a question.jsonl as of Spec-Bench.",
    )
    domains: str = setting(
        "code,conversation,summarization", "Between commas; also maths, translation, retrieval."
    )
    output: str | None = setting(None, "Save 50 prompts a domain to this file.")
    tiny_output: str | None = setting(None, "Save 5 prompts a domain to this file.")
