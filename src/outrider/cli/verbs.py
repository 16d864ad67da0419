"""The verbs of the command line: one module each, imported only when the verb runs.

Everything that help, parsing and completion need to know is in this table, so `--help` of any verb
costs little more than a bare Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.cli.bench_options import (
    BENCH_DRAFTERS,
    BENCH_PEERS,
    BENCH_QUALITY,
    BENCH_SSD,
    BENCH_SWEEP,
    REPORT,
    KSweepOptions,
)
from outrider.cli.model_options import DRAFT, LIST, MODELS, PAIRS, PULL
from outrider.cli.options import (
    Argument,
    ChatOptions,
    CommOptions,
    DoctorOptions,
    EnginesOptions,
    GenerateOptions,
    JsonOption,
    LoadTestOptions,
    PromptsOptions,
    TraceOptions,
    Verb,
    VerifyOptions,
)
from outrider.cli.plan_options import EXPLAIN, PLAN, SimulateOptions
from outrider.cli.train_options import TRAIN

# The headings of the front page.
GROUPS = ("Write text", "Models", "Measure speed", "Check exactness", "This machine")
ALL_SETTINGS = ("program", "engine", "sampling")
# Settings that a sweep sets for each cell, or that have an option with another default.
DECIDED_BY_SWEEPS = (
    "k",
    "profile",
    "batch_size",
    "max_tokens",
    "n",
    "logprobs",
    "top_logprobs",
)
# Those that ask for more than a trace shows.
DECIDED_BY_TRACES = ("profile", "n", "logprobs", "top_logprobs")
# Those that a comparison of engines sets for each of them.
DECIDED_BY_ENGINES = ("schedule", "profile", "max_tokens", "n", "logprobs", "top_logprobs")


_GENERATE = Verb(
    name="generate",
    group="Write text",
    target="outrider.cli.generate:generate",
    text="Complete a prompt, coloured by where each token came from.",
    example='outrider generate "def quicksort(items):" --max-tokens 64',
    arguments=(Argument(name="PROMPT", text="Text to go on from."),),
    options=GenerateOptions,
    settings=ALL_SETTINGS,
)
_CHAT = Verb(
    name="chat",
    group="Write text",
    alias="run",
    target="outrider.cli.chat:chat",
    text="Talk to a model, with history and commands such as /stats.",
    example='echo "What is 3 plus 4?" | outrider chat --max-tokens 32',
    arguments=(
        Argument(name="MODEL", text="The same as --target.", setting="target"),
        Argument(name="PROMPT", text="Answer this one message, and end."),
    ),
    options=ChatOptions,
    settings=ALL_SETTINGS,
)
_SIMULATE = Verb(
    name="simulate",
    target="outrider.cli.simulate:simulate",
    text="Run engines on an invented clock: machines that one does not have, and what-ifs.",
    example="outrider simulate --target llama-8b --draft llama-1b --device h100 --alpha .8",
    options=SimulateOptions,
)
_PROMPTS = Verb(
    name="prompts",
    target="outrider.cli.prompts:prompts",
    text="Count the tokens of the benchmark prompts, and save a set of them.",
    example="outrider prompts --tiny-output tiny.json",
    options=PromptsOptions,
)
_BENCH = Verb(
    name="bench",
    group="Measure speed",
    text="Measure what speculation gains, each time beside plain decoding.",
    example="outrider bench k --domains code --prompts 2 --ks 2,4",
    parts=(
        Verb(
            name="k",
            target="outrider.cli.bench_sweep:k",
            text="Sweep K over pairs and domains: a table, figures and every sample.",
            example="outrider bench k --domains code --prompts 2 --ks 2,4",
            options=KSweepOptions,
            settings=ALL_SETTINGS,
            without=DECIDED_BY_SWEEPS,
        ),
        BENCH_SWEEP,
        Verb(
            name="comm",
            target="outrider.cli.bench_studies:comm",
            text="Time sums over processes or devices, and messages between two, by size.",
            example="outrider bench comm --largest-mb 1",
            options=CommOptions,
        ),
        BENCH_DRAFTERS,
        BENCH_PEERS,
        BENCH_QUALITY,
        BENCH_SSD,
        _SIMULATE,
        _PROMPTS,
        Verb(
            name="engines",
            target="outrider.cli.bench_engines:engines",
            text="Compare engines by requests in flight: latency, throughput, overlap, and "
            "what theory says of them.",
            example="outrider bench engines --engines off,single --levels 0,2 --requests 2 "
            "--repeats 1 --max-tokens 8",
            options=EnginesOptions,
            settings=ALL_SETTINGS,
            without=DECIDED_BY_ENGINES,
        ),
        Verb(
            name="load",
            target="outrider.cli.bench_engines:load",
            text="Put engines under load: Poisson arrivals, closed loops or a recorded trace.",
            example="outrider bench load --engines single --rate 20 --requests 4 --max-tokens 8",
            options=LoadTestOptions,
            settings=ALL_SETTINGS,
            without=DECIDED_BY_ENGINES,
        ),
    ),
)

VERBS = (
    _GENERATE,
    _CHAT,
    replace(PULL, group="Models"),
    replace(LIST, group="Models"),
    MODELS,
    DRAFT,
    TRAIN,
    PLAN,
    _BENCH,
    REPORT,
    Verb(
        name="trace",
        group="Measure speed",
        target="outrider.cli.trace:trace",
        text="Record what lanes do while prompts run, for Perfetto.",
        example='outrider trace "def quicksort(items):" "Once upon a time" --schedule pdv '
        "--max-tokens 24",
        arguments=(
            Argument(
                name="PROMPT",
                text="Texts to go on from; 8 shipped ones if none is given.",
                many=True,
            ),
        ),
        options=TraceOptions,
        settings=ALL_SETTINGS,
        without=DECIDED_BY_TRACES,
    ),
    Verb(
        name="verify",
        group="Check exactness",
        target="outrider.cli.verify:verify",
        text="Certify on this machine that speculation changes nothing.",
        example="outrider verify outrider/embedded --seed 1",
        arguments=(
            Argument(name="TARGET", text="The same as --target.", setting="target"),
            Argument(name="DRAFT", text="The same as --draft.", setting="draft"),
        ),
        options=VerifyOptions,
        settings=ALL_SETTINGS,
    ),
    EXPLAIN,
    Verb(
        name="doctor",
        group="This machine",
        target="outrider.cli.doctor:doctor",
        text="Say what this machine has and what fits.",
        example="outrider doctor",
        options=DoctorOptions,
        settings=("program", "engine"),
    ),
    Verb(
        name="config",
        group="This machine",
        target="outrider.cli.config:config",
        text="Show every setting, its value and its origin.",
        example="outrider config --k 6",
        options=JsonOption,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="completion",
        group="This machine",
        target="outrider.cli.config:completion",
        text="Print a completion script for bash, zsh or fish.",
        example="outrider completion bash",
        arguments=(Argument(name="SHELL", text="The shell.", choices=("bash", "zsh", "fish")),),
    ),
    # Their older places.
    PAIRS,
    _SIMULATE,
    _PROMPTS,
)


def names(verbs: Sequence[Verb]) -> list[str]:
    """Every word that calls one of `verbs`."""
    return [name for verb in verbs for name in (verb.name, verb.alias) if name]


def find(verbs: Sequence[Verb], word: str) -> Verb | None:
    return next((verb for verb in verbs if word in (verb.name, verb.alias)), None)
