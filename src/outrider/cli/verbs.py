"""The verbs of the command line: one module each, imported only when the verb runs.

Everything that help, parsing and completion need to know is in this table, so `--help` of any verb
costs little more than a bare Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cli.bench_options import BENCH_PEERS, BENCH_QUALITY, BENCH_SSD, BENCH_SWEEP
from outrider.cli.model_options import BENCH_DRAFTERS, DRAFT, PULL, REPORT
from outrider.cli.options import (
    ChatOptions,
    CommOptions,
    DoctorOptions,
    EnginesOptions,
    ExportOptions,
    GenerateOptions,
    InflateOptions,
    JsonOption,
    KSweepOptions,
    LoadOptions,
    LoadTestOptions,
    OllamaOptions,
    PingOptions,
    PromptsOptions,
    TraceOptions,
    VerifyOptions,
)
from outrider.cli.plan_options import EXPLAIN, PLAN, SimulateOptions
from outrider.cli.train_options import TRAIN
from outrider.cli.verb import Argument, Verb

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


MODEL = Argument(name="MODEL", text="A name from the list, a folder or a hub id.")

VERBS = (
    Verb(
        name="generate",
        target="outrider.cli.generate:generate",
        text="Complete a prompt, coloured by where each token came from.",
        example='outrider generate "def quicksort(items):" --max-tokens 64',
        arguments=(Argument(name="PROMPT", text="Text to go on from."),),
        options=GenerateOptions,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="chat",
        alias="run",
        target="outrider.cli.chat:chat",
        text="Talk to a model, with history and commands such as /stats.",
        example='echo "What is 3 plus 4?" | outrider chat --max-tokens 32',
        options=ChatOptions,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="models",
        text="Pull, list, inspect, load, inflate, export models; ask other servers.",
        example="outrider models list",
        parts=(
            PULL,
            Verb(
                name="list",
                target="outrider.cli.models:list_models",
                text="List the embedded models and those in the local hub cache.",
                example="outrider models list --json",
                options=JsonOption,
            ),
            Verb(
                name="inspect",
                target="outrider.cli.models:inspect_model",
                text="Print a model's sizes from its config.json, without loading weights.",
                example="outrider models inspect outrider/embedded",
                arguments=(MODEL,),
                options=JsonOption,
            ),
            Verb(
                name="load",
                target="outrider.cli.models:load_model",
                text="Load a model and write a few tokens: does it work here?",
                example="outrider models load outrider/embedded --n-tokens 8",
                arguments=(MODEL,),
                options=LoadOptions,
            ),
            Verb(
                name="inflate",
                target="outrider.cli.inflate:inflate",
                text="Write a bigger model that computes the same as a small one, to measure "
                "speed at real cost with real acceptance.",
                example="outrider models inflate 0.4b inflated-0.4b",
                arguments=(
                    Argument(
                        name="SHAPE",
                        text="Its sizes.",
                        choices=("0.4b", "1b", "8b", "70b-layer"),
                    ),
                    Argument(name="FOLDER", text="Where to write it; a new folder."),
                ),
                options=InflateOptions,
            ),
            Verb(
                name="export",
                target="outrider.cli.export:export",
                text="Write a Llama-shaped model as a GGUF file, for llama.cpp and others that "
                "read it.",
                example="outrider models export outrider/embedded embedded.gguf --gguf q8_0 "
                "--pre-tokenizer gpt-2",
                arguments=(
                    MODEL,
                    Argument(name="FILE", text="Where to write it; a new file."),
                ),
                options=ExportOptions,
            ),
            Verb(
                name="ollama",
                target="outrider.cli.ollama:ollama",
                text="Look at an Ollama server: its models, and a test completion. To check a "
                "model's text only; without logits it cannot take part in a benchmark.",
                example="outrider models ollama",
                options=OllamaOptions,
            ),
            Verb(
                name="ping",
                target="outrider.cli.ping:ping",
                text="Ask an OpenAI-compatible server such as vLLM for a completion, and time it.",
                example="outrider models ping --url http://localhost:8000",
                options=PingOptions,
            ),
        ),
    ),
    Verb(
        name="pairs",
        target="outrider.cli.pairs:pairs",
        text="List known pairs of target and draft, or show one.",
        example="outrider pairs gpt2_dev",
        arguments=(Argument(name="NAME", text="Show this pair's models, memory and command."),),
        options=JsonOption,
    ),
    DRAFT,
    Verb(
        name="bench",
        text="Measure what speculation gains, each time beside plain decoding.",
        example="outrider bench k --domains code --prompts 2 --ks 2,4",
        parts=(
            Verb(
                name="k",
                target="outrider.cli.bench:k",
                text="Sweep K over pairs and domains: a table, figures and every sample.",
                example="outrider bench k --domains code --prompts 2 --ks 2,4",
                options=KSweepOptions,
                settings=ALL_SETTINGS,
                without=DECIDED_BY_SWEEPS,
            ),
            BENCH_SWEEP,
            Verb(
                name="comm",
                target="outrider.cli.bench_comm:comm",
                text="Time sums over processes or devices, and messages between two, by size.",
                example="outrider bench comm --largest-mb 1",
                options=CommOptions,
            ),
            BENCH_DRAFTERS,
            BENCH_PEERS,
            BENCH_QUALITY,
            BENCH_SSD,
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
                target="outrider.cli.bench_load:load",
                text="Put engines under load: Poisson arrivals, closed loops or a recorded trace.",
                example="outrider bench load --engines single --rate 20 --requests 4 "
                "--max-tokens 8",
                options=LoadTestOptions,
                settings=ALL_SETTINGS,
                without=DECIDED_BY_ENGINES,
            ),
        ),
    ),
    PLAN,
    Verb(
        name="simulate",
        target="outrider.cli.simulate:simulate",
        text="Run engines on an invented clock: machines that one does not have, and what-ifs.",
        example="outrider simulate --target llama-8b --draft llama-1b --device h100 --alpha .8",
        options=SimulateOptions,
    ),
    REPORT,
    Verb(
        name="trace",
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
        name="prompts",
        target="outrider.cli.prompts:prompts",
        text="Count the tokens of the benchmark prompts, and save a set of them.",
        example="outrider prompts --tiny-output tiny.json",
        options=PromptsOptions,
    ),
    TRAIN,
    Verb(
        name="verify",
        target="outrider.cli.verify:verify",
        text="Certify on this machine that speculation changes nothing.",
        example="outrider verify outrider/embedded --seed 1",
        arguments=(
            Argument(name="TARGET", text="The same as --target."),
            Argument(name="DRAFT", text="The same as --draft."),
        ),
        options=VerifyOptions,
        settings=ALL_SETTINGS,
    ),
    EXPLAIN,
    Verb(
        name="doctor",
        target="outrider.cli.doctor:doctor",
        text="Say what this machine has, which kernels run, and what fits.",
        example="outrider doctor",
        options=DoctorOptions,
        settings=("program", "engine"),
    ),
    Verb(
        name="config",
        target="outrider.cli.config:config",
        text="Show every setting, its value, and where the value comes from.",
        example="outrider config --k 6",
        options=JsonOption,
        settings=ALL_SETTINGS,
    ),
    Verb(
        name="completion",
        target="outrider.cli.completion:completion",
        text="Print a completion script for bash, zsh or fish.",
        example="outrider completion bash",
        arguments=(Argument(name="SHELL", text="The shell.", choices=("bash", "zsh", "fish")),),
    ),
)


def names(verbs: Sequence[Verb]) -> list[str]:
    """Every word that calls one of `verbs`."""
    return [name for verb in verbs for name in (verb.name, verb.alias) if name]


def find(verbs: Sequence[Verb], word: str) -> Verb | None:
    return next((verb for verb in verbs if word in (verb.name, verb.alias)), None)
