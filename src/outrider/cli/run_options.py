"""The verbs that write, look at text, plan and explain, and what they may be told."""

from __future__ import annotations

from outrider.cli.options import (
    ALL,
    DECIDED,
    Argument,
    CountingOption,
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


@verb(
    "trace",
    "trace:trace",
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
    "report:report",
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


@verb("bench prompts, prompts", "prompts:prompts")
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
        "code,conversation,summarization",
        "Between commas; also maths, translation, retrieval.",
    )
    output: str | None = setting(None, "Save 50 prompts a domain to this file.")
    tiny_output: str | None = setting(None, "Save 5 prompts a domain to this file.")


# Settings that a plan tries, has an option of its own for, or has no use for.
DECIDED_BY_PLANS = (
    *("drafter", "k", "tree_nodes", "controller", "schedule", "watchdog"),
    *("batch_size", "context", "device", "max_tokens", *DECIDED),
)

# In the order of explain.yaml.
EXPLAIN_TOPICS = (
    *("round", "acceptance", "speed-up", "best-k", "roofline"),
    *("batch", "ssd", "fan-out", "energy", "published"),
)


@verb(
    "plan",
    "plan:plan",
    Argument("TARGET", "The same as --target.", setting="target"),
    group="Measure speed",
    settings=ALL,
    without=DECIDED_BY_PLANS,
)
class PlanOptions(CountingOption):
    """Will speculation pay here, with which drafter, and how much?

    outrider plan outrider/embedded --domains code
    """

    drafters: str = setting(
        "auto",
        "Drafters to try, between commas, each as NAME[=DRAFT]; auto is the draft model, heads "
        "that lie with the target, ngram and suffix.",
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
        30.0,
        "Answer in so many seconds, loading included; what is not measured by then is guessed, and "
        "says so.",
        minimum=0.5,
        maximum=600,
    )
    save: str | None = setting(None, "Also write the plan as JSON to this file.")


@verb("bench simulate, simulate", "simulate:simulate")
class SimulateOptions(JsonOption):
    """Run engines on an invented clock: machines that one does not have, and what-ifs.

    outrider bench simulate --target llama-8b --draft llama-1b --device h100 --alpha .8
    """

    target: str | None = setting(
        None,
        "Sizes of the target: llama-8b (if none is named), another known name, a model of "
        "`outrider models pairs`, or a config.json.",
    )
    draft: str | None = setting(None, "Sizes of the draft model, the same way (llama-1b).")
    device: str | None = setting(
        None, "Machine of both, by its data sheet (h100), or a file with a sheet."
    )
    draft_device: str | None = setting(None, "Machine of the draft model alone, where it differs.")
    calibration: str | None = setting(
        None, "Take measured costs instead, from a file of `outrider plan --save`."
    )
    drafter: str | None = setting(
        None, "Which drafter of the calibration; by default its first that drafts."
    )
    alpha: float | None = setting(
        None,
        "How often a draft token is kept if all before it were (.8, or as it was measured).",
        minimum=0,
        maximum=1,
    )
    places: str | None = setting(
        None, "The same for each place of a draft, between commas, as in .8,.7,.6."
    )
    k: int = setting(4, "Draft this many tokens a round.", minimum=0, maximum=64)
    engines: str = setting(
        "single,pd,pdv,ssd", "Engines, between commas; plain decoding is always run."
    )
    p_hit: float | None = setting(
        None,
        "How often ssd drafted for the right outcome; if not given, what its fan-out should reach.",
        minimum=0,
        maximum=1,
    )
    fan_out: int = setting(
        16, "Outcomes that ssd drafts for ahead, at once for a sequence.", minimum=1, maximum=256
    )
    batch: int = setting(1, "Run at most this many requests at once.", minimum=1, maximum=1024)
    context: int = setting(512, "Mean tokens of a prompt.", minimum=1, maximum=1_000_000)
    max_tokens: int = setting(128, "Mean tokens that are written.", minimum=1, maximum=100_000)
    requests: int = setting(8, "Requests in all.", minimum=1, maximum=100_000)
    spread: float = setting(
        0.0,
        "Lengths lie evenly up to this share below and above their means.",
        minimum=0,
        maximum=0.99,
    )
    arrivals: str = setting(
        "closed",
        "closed: --batch users, each asks again when answered; together: all at once; or a number "
        "of requests a second, as a Poisson process.",
    )
    contention: float = setting(
        0.0,
        "0 gives drafter and target a device each; 1 has both share one memory's bandwidth.",
        minimum=0,
        maximum=1,
    )
    sync_us: float = setting(
        0.0, "Microseconds of a hand-over between drafter and target.", minimum=0
    )
    prefill_chunk: int = setting(
        256, "Prompt tokens in one target pass at most.", minimum=1, maximum=65536
    )
    hybrid_threshold: int = setting(
        3,
        "With pdv, up to this many requests draft and verify in one lane; 0 keeps lanes apart. "
        "With ssd, 0 drafts ahead even where rounds in turns are shorter.",
        minimum=0,
    )
    decode_batch: int = setting(
        0, "Sequences in one drafting job at most; 0 is --batch.", minimum=0, maximum=1024
    )
    verify_batch: int = setting(
        0, "Sequences in one verifying job at most; 0 is --batch.", minimum=0, maximum=1024
    )
    seed: int = setting(0, "Of acceptance, hits, lengths and arrivals.", minimum=0)
    sweep: str | None = setting(
        None, "Run once for each value of one of these options, as in k=1,2,4,8."
    )
    figure: str | None = setting(
        None, "Draw the sweep, or else what each engine ran when: an .svg file."
    )
    trace: str | None = setting(
        None, "Write what ran when to this file, one for each engine, for Perfetto."
    )


@verb(
    "explain",
    "explain:explain",
    Argument("TOPIC", "What to explain.", choices=EXPLAIN_TOPICS),
    group="Check exactness",
)
class ExplainOptions(JsonOption):
    """Explain a formula with your numbers.

    outrider explain speed-up --alpha 0.8 --k 4 --c 0.1
    """

    alpha: float = setting(
        0.8, "Chance that a drafted token is accepted (0.8).", minimum=0, maximum=1
    )
    k: int = setting(4, "Drafted tokens of a round (4).", minimum=1, maximum=64)
    c: float = setting(
        0.1, "A pass of the drafter, in plain passes of the target (0.1).", minimum=0, maximum=100
    )
    verify: float = setting(
        1.0, "The pass that verifies, in plain passes (1).", minimum=0.01, maximum=1000
    )
    batch: int = setting(1, "Sequences of a round (1).", minimum=1, maximum=100_000)
    context: int = setting(
        0, "Tokens that each sequence has already (0).", minimum=0, maximum=10_000_000
    )
    p_hit: float = setting(
        0.9, "Share of the outcomes that were drafted for (0.9).", minimum=0, maximum=1
    )
    branches: int = setting(24, "Outcomes that are drafted for (24).", minimum=1, maximum=10_000)
    parameters: float = setting(
        7.0, "Parameters of the target, in billions (7).", minimum=0.001, maximum=100_000
    )
    bandwidth: float = setting(
        900.0, "Memory bandwidth in GB/s (900).", minimum=0.1, maximum=1_000_000
    )
    tflops: float = setting(300.0, "Arithmetic in TFLOP/s (300).", minimum=0.001, maximum=1_000_000)
    watts: float = setting(
        100.0, "Power that does not depend on the work, in watts (100).", minimum=0, maximum=100_000
    )
