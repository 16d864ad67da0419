"""The verbs about models and those of `outrider train`, with their options. `pull`, `list` and
`pairs` exist at the top level and below `models`."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import Argument, CountingOption, JsonOption, verb
from outrider.core.fields import setting

_TARGET = Argument(name="TARGET", text="An alias, a folder, a GGUF file or a hub id.")

MODEL = Argument(name="MODEL", text="A name from the list, a folder, a GGUF file or a hub id.")


@verb(
    "draft check",
    "outrider_lab.cli.draft:check",
    _TARGET,
    Argument("DRAFT", "The same; or a folder of draft heads."),
)
class DraftCheckOptions(JsonOption):
    """May DRAFT draft for TARGET? Compares vocabularies, windows, sizes, weights.

    outrider draft check outrider/embedded outrider/embedded-draft --measure
    """

    measure: bool = setting(False, "Also complete some shipped prompts, and count acceptance.")
    prompts: int = setting(6, "With --measure, the number of prompts.", minimum=1, maximum=1000)
    max_tokens: int = setting(32, "Write at most this many tokens of each.", minimum=1)
    k: int = setting(4, "Draft at most this many tokens at once.", minimum=1, maximum=64)


@verb("draft suggest", "outrider_lab.cli.draft:suggest", _TARGET)
class DraftSuggestOptions(CountingOption):
    """Rank what can draft for TARGET by measured costs: pairs, heads, itself, its text.

    outrider draft suggest outrider/embedded --seconds 0
    """

    seconds: float = setting(
        30.0,
        "Answer within this many seconds, loading included. One pass of TARGET is always measured; "
        "figures that are not measured by then are estimated, and marked so. 0 estimates all.",
        minimum=0,
        maximum=600,
    )
    temperature: float = setting(0.0, "Count acceptance at this temperature.", minimum=0)


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
        "Also fetch this draft model or these heads; auto is the draft of TARGET's pair in "
        "`outrider models pairs`, none fetches no draft.",
    )
    revision: str | None = setting(
        None, "A branch, tag or commit of TARGET; TARGET@REVISION says the same."
    )


@verb("models load", "models:load_model", MODEL)
class LoadOptions(JsonOption):
    """Load a model and write a few tokens, to check that it works here.

    outrider models load outrider/embedded --n-tokens 8
    """

    dtype: str = setting(
        "auto",
        "float32, bfloat16 or float16; auto is the checkpoint's own; int8 or int4 quantises it.",
    )
    n_tokens: int = setting(16, "Write this many tokens.", minimum=1, maximum=4096)


@verb(
    "models inflate",
    "outrider_lab.cli.models:inflate",
    Argument("SHAPE", "Its size.", choices=("0.4b", "1b", "8b", "70b-layer")),
    Argument("FOLDER", "The new folder to write it to."),
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


@verb(
    "models export",
    "outrider_lab.cli.models:export",
    MODEL,
    Argument("FILE", "The new file to write it to."),
)
class ExportOptions(JsonOption):
    """Write a Llama-shaped model as a GGUF file, for llama.cpp and others that read it.

    outrider models export outrider/embedded embedded.gguf --gguf q8_0 --pre-tokenizer gpt-2
    """

    gguf: str = setting(
        "bf16", "Number format of the GGUF file.", choices=("f32", "f16", "bf16", "q8_0", "q4_0")
    )
    pre_tokenizer: str = setting(
        "auto",
        "llama.cpp's pre-tokenizer; auto is the checkpoint's own, if llama.cpp has it.",
        choices=("auto", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken"),
    )
    force: bool = setting(False, "Replace an existing file.")


@verb("models ollama", "models:ollama")
class OllamaOptions(JsonOption):
    """Show the models of an Ollama server, and a test completion. This only checks a model's text;
    Ollama returns no logits, so it cannot take part in a benchmark.

    outrider models ollama
    """

    host: str = setting("http://localhost:11434", "Address of the Ollama server.")
    model: str = setting("", "Also write a completion with this model of the server.")
    prompt: str = setting("The quick brown fox", "The prompt of the completion.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)


@verb("models ping", "models:ping")
class PingOptions(JsonOption):
    """Request a completion from an OpenAI-compatible server such as vLLM, and time it.

    outrider models ping --url http://localhost:8000
    """

    url: str = setting("http://localhost:8000", "Address of the server, before /v1.")
    model: str = setting("", "A model of the server; by default the first.")
    prompt: str = setting("The quick brown fox", "The prompt of the completion.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)
    timeout: float = setting(30.0, "Seconds to wait for an answer.", minimum=0.1, maximum=3600)
    retries: int = setting(2, "Try again this often when it does not answer.", minimum=0, maximum=9)


@verb("models list, list", "models:list_models", group="Models")
class ListOptions(JsonOption):
    """List the models on this machine.

    outrider list --json
    """


@verb(
    "models pairs, pairs",
    "pull:pairs",
    Argument("NAME", "Show this pair's models, memory and command."),
)
class PairsOptions(JsonOption):
    """List known pairs of target and draft, or show one.

    outrider models pairs gpt2_dev
    """


@verb("models inspect", "models:inspect_model", MODEL)
class InspectOptions(JsonOption):
    """Print a model's sizes from its config.json, without loading weights.

    outrider models inspect outrider/embedded
    """


DEFAULT_MINUTES = 10.0

_TRAINED = (
    Argument(name="FOLDER", text="The folder to write it to: new, or that of a stopped run."),
    Argument(
        name="TEXTS",
        text="Files, folders or JSON lines; python means the Python source on this machine.",
        many=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(JsonOption):
    """Options of every verb that reads texts."""

    field: str = setting("", "Key of JSON lines that holds the text; by default the usual ones.")
    tokens: int = setting(0, "Train on about this many tokens of the texts; 0 is all.", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(TextOptions):
    """Options of every training run."""

    minutes: float | None = setting(
        None, "Minutes of training in all; 10 without --steps.", minimum=0.001, maximum=1e6
    )
    steps: int | None = setting(None, "Training steps in all.", minimum=1, maximum=10**9)
    batch: int = setting(4, "Windows per step.", minimum=1, maximum=4096)
    window: int = setting(256, "Tokens per window.", minimum=8, maximum=1 << 17)
    learning_rate: float = setting(3e-3, "Peak of the learning rate.", minimum=1e-7, maximum=1)
    warmup: int = setting(20, "Steps until that peak.", minimum=0, maximum=10**6)
    held_out: float = setting(
        0.02, "Share of the texts that is held out from training.", minimum=0, maximum=0.9
    )
    seed: int = setting(0, "Seed of initial weights and data order.", minimum=0, maximum=2**31)
    save_seconds: float = setting(
        30.0, "Seconds between saved states, the most that is lost.", minimum=0.1, maximum=60
    )
    measure_seconds: float = setting(
        60.0, "Seconds between measurements on held-out text.", minimum=0.1, maximum=1e6
    )
    device: str = setting(
        "auto", "auto is cuda, then mps, then cpu.", choices=("auto", "cpu", "cuda", "mps")
    )
    threads: int = setting(0, "CPU threads; 0 leaves it to PyTorch.", minimum=0, maximum=1024)
    fresh: bool = setting(False, "Start again in a folder that holds a run.")
    dtype: str = setting(
        "bfloat16", "Type of the finished weights.", choices=("bfloat16", "float16", "float32")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(RunOptions):
    """Options of runs that train a drafter."""

    target: str = setting("outrider/embedded", "The model to draft for.")
    prompts: str = setting(
        "code",
        "Prompts for measuring acceptance: code, maths, conversation, summarization, mixed, or a "
        "file.",
    )
    written: int = setting(
        0,
        "Train on this many tokens of the target's own continuations of the texts instead.",
        minimum=0,
    )
    exam_prompts: int = setting(24, "Number of these prompts.", minimum=1, maximum=10_000)


@verb("train draft", "outrider_lab.cli.train:draft", *_TRAINED)
class DraftOptions(DrafterOptions):
    """Distil a draft model from a target.

    outrider train draft my-draft python --tokens 9000 --steps 5 --exam-prompts 2
    """

    hidden: int = setting(0, "Hidden size; 0 is half the target's.", minimum=0, maximum=16384)
    layers: int = setting(0, "Layers; 0 is 2.", minimum=0, maximum=256)
    start: str = setting("", "Start from this model instead of random weights.")
    reverse: float = setting(
        0.0, "Share of the loss that is the reverse divergence.", minimum=0, maximum=1
    )
    on_policy: float = setting(
        0.0, "Share of steps that train on the draft's own text.", minimum=0, maximum=1
    )
    temperature: float = setting(1.0, "Temperature of the draft's own text.", minimum=0, maximum=10)


@verb("train mtp", "outrider_lab.cli.train:mtp", *_TRAINED)
class MtpOptions(DrafterOptions):
    """Train MTP blocks, which draft from a target's hidden states.

    outrider train mtp my-block python --tokens 9000 --steps 5 --exam-prompts 2
    """

    blocks: int = setting(
        1, "Blocks; the last one drafts all further tokens.", minimum=1, maximum=8
    )
    turns: int = setting(3, "Draft tokens per round in training.", minimum=1, maximum=16)


@verb("train medusa", "outrider_lab.cli.train:medusa", *_TRAINED)
class MedusaOptions(DrafterOptions):
    """Train Medusa heads, which draft several tokens at once.

    outrider train medusa heads python --tokens 9000 --steps 5 --exam-prompts 2
    """

    heads: int = setting(4, "Heads: draft tokens per round.", minimum=1, maximum=16)
    layers: int = setting(1, "Residual blocks of a head.", minimum=1, maximum=16)
    init: str = setting(
        "tie",
        "Output matrix of a head: tie uses the target's, copy trains a copy of it, random trains "
        "one from random values.",
        choices=("tie", "copy", "random"),
    )


@verb("train eagle", "outrider_lab.cli.train:eagle", *_TRAINED)
class EagleOptions(DrafterOptions):
    """Train EAGLE heads, which draft from a target's hidden states.

    outrider train eagle heads python --tokens 9000 --steps 5 --exam-prompts 2
    """

    draft_vocab: int = setting(
        0, "Size of the draft vocabulary, the text's most frequent ids; 0 is all ids.", minimum=0
    )
    ffn: int = setting(0, "Size of the layer's FFN; 0 is the target's.", minimum=0, maximum=1 << 17)
    turns: int = setting(3, "Draft tokens per round in training.", minimum=1, maximum=16)


@verb("train block", "outrider_lab.cli.train:block", *_TRAINED)
class BlockOptions(DrafterOptions):
    """Train a block net, which drafts several positions in one pass.

    outrider train block my-net python --tokens 9000 --steps 5 --exam-prompts 2
    """

    places: int = setting(4, "Positions: draft tokens per round.", minimum=1, maximum=64)
    context_tokens: int = setting(
        8, "Tokens whose hidden states the net reads.", minimum=1, maximum=1024
    )
    layers: int = setting(1, "Layers of the net.", minimum=1, maximum=16)


@verb("train pretrain", "outrider_lab.cli.train:pretrain", *_TRAINED)
class PretrainOptions(RunOptions):
    """Train a language model from scratch.

    outrider train pretrain my-model python --tokens 20000 --steps 5
    """

    family: str = setting(
        "llama",
        "llama; or hybrid, with mostly recurrent layers (Qwen3.5) and an MTP block.",
        choices=("llama", "hybrid"),
    )
    teacher: str = setting("", "For a hybrid, a model whose distributions it is trained on.")
    tokenizer: str = setting("outrider/embedded", "Model or folder whose tokenizer is used.")
    hidden: int = setting(256, "Hidden size, in heads of 64.", minimum=64, maximum=16384)
    layers: int = setting(8, "Layers.", minimum=1, maximum=256)


@verb("train tokenizer", "outrider_lab.cli.train:tokenizer", *_TRAINED)
class TokenizerOptions(TextOptions):
    """Train a byte-level BPE vocabulary.

    outrider train tokenizer my-tokenizer python --tokens 100000 --size 2048
    """

    size: int = setting(8192, "Tokens of the vocabulary.", minimum=257, maximum=1 << 20)
