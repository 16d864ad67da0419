"""The verbs about models, and what they may be told. `pull`, `list` and `pairs` stand at the top
level as well as below `models`."""

from __future__ import annotations

from outrider.cli.options import Argument, JsonOption, verb
from outrider.core.fields import setting

_TARGET = Argument(name="TARGET", text="An alias, a folder or a hub id.")

MODEL = Argument(name="MODEL", text="A name from the list, a folder or a hub id.")


@verb(
    "draft check",
    "draft:check",
    _TARGET,
    Argument("DRAFT", "The same; or a folder of draft heads."),
)
class DraftCheckOptions(JsonOption):
    """May DRAFT draft for TARGET? Compares vocabularies, windows, sizes, weights.

    outrider draft check outrider/embedded outrider/embedded-draft --measure
    """

    measure: bool = setting(False, "Also write some shipped prompts with it: is anything accepted?")
    prompts: int = setting(6, "So many of them, with --measure.", minimum=1, maximum=1000)
    max_tokens: int = setting(32, "Emit at most this many tokens of each.", minimum=1)
    k: int = setting(4, "Draft at most this many tokens a round.", minimum=1, maximum=64)


@verb("draft suggest", "draft:suggest", _TARGET)
class DraftSuggestOptions(JsonOption):
    """Say what can draft for TARGET, why, and how: pairs, heads, itself, its text.

    outrider draft suggest outrider/embedded
    """


@verb(
    "models pull, pull",
    "pull:pull",
    Argument("TARGET", "A hub id, such as Qwen/Qwen3-8B."),
    group="Models",
)
class PullOptions(JsonOption):
    """Fetch a model from the hub, and its draft.

    outrider pull Qwen/Qwen3-8B
    """

    draft: str = setting(
        "auto",
        "Fetch this draft model or these heads too; auto is what `outrider pairs` knows for "
        "TARGET, none is none.",
    )
    revision: str | None = setting(
        None, "A branch, tag or commit of TARGET; TARGET@REVISION says the same."
    )


@verb("models load", "models:load_model", MODEL)
class LoadOptions(JsonOption):
    """Load a model and write a few tokens: does it work here?

    outrider models load outrider/embedded --n-tokens 8
    """

    dtype: str = setting(
        "auto",
        "float32, bfloat16 or float16, auto for the checkpoint's own; int8 or int4 quantises that.",
    )
    n_tokens: int = setting(16, "Write this many tokens.", minimum=1, maximum=4096)


@verb(
    "models inflate",
    "models:inflate",
    Argument("SHAPE", "Its sizes.", choices=("0.4b", "1b", "8b", "70b-layer")),
    Argument("FOLDER", "Where to write it; a new folder."),
)
class InflateOptions(JsonOption):
    """Write a bigger model that computes the same as a small one, to measure speed at real cost
    with real acceptance.

    outrider models inflate 0.4b inflated-0.4b
    """

    source: str = setting("outrider/embedded", "The Llama-shaped model to inflate.")
    dtype: str = setting(
        "bfloat16", "Type of the new weights.", choices=("bfloat16", "float16", "float32")
    )


@verb("models export", "models:export", MODEL, Argument("FILE", "Where to write it; a new file."))
class ExportOptions(JsonOption):
    """Write a Llama-shaped model as a GGUF file, for llama.cpp and others that read it.

    outrider models export outrider/embedded embedded.gguf --gguf q8_0 --pre-tokenizer gpt-2
    """

    gguf: str = setting(
        "bf16", "Number format of the GGUF file.", choices=("f32", "f16", "bf16", "q8_0", "q4_0")
    )
    pre_tokenizer: str = setting(
        "auto",
        "The rule by which llama.cpp cuts text; auto is the checkpoint's own, if it has that one.",
        choices=("auto", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken"),
    )
    force: bool = setting(False, "Replace a file that is there.")


@verb("models ollama", "models:ollama")
class OllamaOptions(JsonOption):
    """Look at an Ollama server: its models, and a test completion. To check a model's text only;
    without logits it cannot take part in a benchmark.

    outrider models ollama
    """

    host: str = setting("http://localhost:11434", "Address of the Ollama server.")
    model: str = setting("", "Also write a completion with this one of its models.")
    prompt: str = setting("The quick brown fox", "What to go on from.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)


@verb("models ping", "models:ping")
class PingOptions(JsonOption):
    """Ask an OpenAI-compatible server such as vLLM for a completion, and time it.

    outrider models ping --url http://localhost:8000
    """

    url: str = setting("http://localhost:8000", "Address of the server, before /v1.")
    model: str = setting("", "Which of its models; by default the first.")
    prompt: str = setting("The quick brown fox", "What to go on from.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)
    timeout: float = setting(30.0, "Seconds to wait for an answer.", minimum=0.1, maximum=3600)
    retries: int = setting(2, "Try again this often when it does not answer.", minimum=0, maximum=9)


@verb("models list, list", "models:list_models", group="Models")
class ListOptions(JsonOption):
    """List the models that are on this machine.

    outrider list --json
    """


@verb(
    "models pairs, pairs",
    "pull:pairs",
    Argument("NAME", "Show this pair's models, memory and command."),
)
class PairsOptions(JsonOption):
    """List known pairs of target and draft, or show one.

    outrider pairs gpt2_dev
    """


@verb("models inspect", "models:inspect_model", MODEL)
class InspectOptions(JsonOption):
    """Print a model's sizes from its config.json, without loading weights.

    outrider models inspect outrider/embedded
    """
