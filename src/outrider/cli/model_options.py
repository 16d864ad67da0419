"""The verbs about models, for the table of all verbs, and what they may be told.

`outrider pull`, `list`, `pairs` and `draft` stand at the top level as well as below `models`.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import Argument, JsonOption, Verb
from outrider.core.fields import setting


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


_TARGET = Argument(name="TARGET", text="An alias, a folder or a hub id.")

DRAFT = Verb(
    name="draft",
    group="Models",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(JsonOption):
    """Of `pull`."""

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
    text="Fetch a model from the hub, and its draft.",
    example="outrider pull Qwen/Qwen3-8B",
    arguments=(Argument(name="TARGET", text="A hub id, such as Qwen/Qwen3-8B."),),
    options=PullOptions,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(JsonOption):
    """Of `models load`."""

    dtype: str = setting(
        "auto",
        "float32, bfloat16 or float16, auto for the checkpoint's own; int8 or int4 quantises that.",
    )
    n_tokens: int = setting(16, "Write this many tokens.", minimum=1, maximum=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class InflateOptions(JsonOption):
    """Of `models inflate`."""

    source: str = setting("outrider/embedded", "The Llama-shaped model to inflate.")
    dtype: str = setting(
        "bfloat16", "Type of the new weights.", choices=("bfloat16", "float16", "float32")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(JsonOption):
    """Of `models export`."""

    gguf: str = setting(
        "bf16", "Number format of the GGUF file.", choices=("f32", "f16", "bf16", "q8_0", "q4_0")
    )
    pre_tokenizer: str = setting(
        "auto",
        "The rule by which llama.cpp cuts text; auto is the checkpoint's own, if it has that one.",
        choices=("auto", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken"),
    )
    force: bool = setting(False, "Replace a file that is there.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions(JsonOption):
    """Of `models ollama`."""

    host: str = setting("http://localhost:11434", "Address of the Ollama server.")
    model: str = setting("", "Also write a completion with this one of its models.")
    prompt: str = setting("The quick brown fox", "What to go on from.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class PingOptions(JsonOption):
    """Of `models ping`."""

    url: str = setting("http://localhost:8000", "Address of the server, before /v1.")
    model: str = setting("", "Which of its models; by default the first.")
    prompt: str = setting("The quick brown fox", "What to go on from.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)
    timeout: float = setting(30.0, "Seconds to wait for an answer.", minimum=0.1, maximum=3600)
    retries: int = setting(2, "Try again this often when it does not answer.", minimum=0, maximum=9)


MODEL = Argument(name="MODEL", text="A name from the list, a folder or a hub id.")
LIST = Verb(
    name="list",
    target="outrider.cli.models:list_models",
    text="List the models that are on this machine.",
    example="outrider list --json",
    options=JsonOption,
)
PAIRS = Verb(
    name="pairs",
    target="outrider.cli.pull:pairs",
    text="List known pairs of target and draft, or show one.",
    example="outrider pairs gpt2_dev",
    arguments=(Argument(name="NAME", text="Show this pair's models, memory and command."),),
    options=JsonOption,
)
MODELS = Verb(
    name="models",
    group="Models",
    text="Inspect, load, inflate, export models; known pairs.",
    example="outrider models list",
    parts=(
        PULL,
        LIST,
        PAIRS,
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
            target="outrider.cli.models:inflate",
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
            target="outrider.cli.models:export",
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
            target="outrider.cli.models:ollama",
            text="Look at an Ollama server: its models, and a test completion. To check a "
            "model's text only; without logits it cannot take part in a benchmark.",
            example="outrider models ollama",
            options=OllamaOptions,
        ),
        Verb(
            name="ping",
            target="outrider.cli.models:ping",
            text="Ask an OpenAI-compatible server such as vLLM for a completion, and time it.",
            example="outrider models ping --url http://localhost:8000",
            options=PingOptions,
        ),
    ),
)
