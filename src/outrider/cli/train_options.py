"""The verbs of `outrider train`, and what they may be told."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import Argument, JsonOption, verb
from outrider.core.fields import setting

DEFAULT_MINUTES = 10.0

_TRAINED = (
    Argument(name="FOLDER", text="Where to write it; a new folder, or that of a stopped run."),
    Argument(
        name="TEXTS",
        text="Files, folders or JSON lines; python is the Python source of this machine.",
        many=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(JsonOption):
    """Of every verb that reads texts."""

    field: str = setting("", "Key of JSON lines that holds the text; by default the usual ones.")
    tokens: int = setting(0, "Learn from about so many tokens of the texts; 0 is all.", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(TextOptions):
    """Of every run of training."""

    minutes: float | None = setting(
        None, "Train so long in all; 10 if no --steps.", minimum=0.001, maximum=1e6
    )
    steps: int | None = setting(None, "Train so many steps in all.", minimum=1, maximum=10**9)
    batch: int = setting(4, "Windows of a step.", minimum=1, maximum=4096)
    window: int = setting(256, "Tokens of a window.", minimum=8, maximum=1 << 17)
    learning_rate: float = setting(3e-3, "Peak of the learning rate.", minimum=1e-7, maximum=1)
    warmup: int = setting(20, "Steps until that peak.", minimum=0, maximum=10**6)
    held_out: float = setting(
        0.02, "Share of the texts that is never learned from.", minimum=0, maximum=0.9
    )
    seed: int = setting(0, "Seed of first weights and of the order.", minimum=0, maximum=2**31)
    save_seconds: float = setting(
        30.0, "Save the state this often; a killed run loses no more.", minimum=0.1, maximum=60
    )
    measure_seconds: float = setting(
        60.0, "Measure on held-out text this often.", minimum=0.1, maximum=1e6
    )
    device: str = setting(
        "auto", "auto is cuda, then mps, then cpu.", choices=("auto", "cpu", "cuda", "mps")
    )
    threads: int = setting(0, "CPU threads; 0 leaves it to PyTorch.", minimum=0, maximum=1024)
    fresh: bool = setting(False, "Start anew in a folder that holds a run.")
    dtype: str = setting(
        "bfloat16", "Type of the finished weights.", choices=("bfloat16", "float16", "float32")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(RunOptions):
    """Of runs that make something that drafts."""

    target: str = setting("outrider/embedded", "The model to draft for.")
    prompts: str = setting(
        "code",
        "What figures are measured after: code, maths, conversation, summarization, mixed, or a "
        "file.",
    )
    written: int = setting(
        0,
        "Learn from so many tokens that the target writes after the texts, not the texts.",
        minimum=0,
    )
    exam_prompts: int = setting(24, "Use so many of these prompts.", minimum=1, maximum=10_000)


@verb("train draft", "train:draft", *_TRAINED)
class DraftOptions(DrafterOptions):
    """Distil a draft model from a target.

    outrider train draft my-draft python --tokens 9000 --steps 5 --exam-prompts 2
    """

    hidden: int = setting(0, "Hidden size; 0 is half the target's.", minimum=0, maximum=16384)
    layers: int = setting(0, "Layers; 0 is 2.", minimum=0, maximum=256)
    start: str = setting("", "Begin from this model instead of random weights.")
    reverse: float = setting(
        0.0, "Share of the loss that is the reverse divergence.", minimum=0, maximum=1
    )
    on_policy: float = setting(
        0.0, "Share of steps that learn from the draft's own text.", minimum=0, maximum=1
    )
    temperature: float = setting(1.0, "Temperature of the draft's own text.", minimum=0, maximum=10)


@verb("train mtp", "train:mtp", *_TRAINED)
class MtpOptions(DrafterOptions):
    """Train MTP blocks, which draft from a target's hidden states.

    outrider train mtp my-block python --tokens 9000 --steps 5 --exam-prompts 2
    """

    blocks: int = setting(1, "Blocks, one for each draft but later ones.", minimum=1, maximum=8)
    turns: int = setting(3, "Drafts of a round that it learns to make.", minimum=1, maximum=16)


@verb("train medusa", "train:medusa", *_TRAINED)
class MedusaOptions(DrafterOptions):
    """Train Medusa heads, which guess several tokens at once.

    outrider train medusa heads python --tokens 9000 --steps 5 --exam-prompts 2
    """

    heads: int = setting(4, "Heads: drafts of a round.", minimum=1, maximum=16)
    layers: int = setting(1, "Residual blocks of a head.", minimum=1, maximum=16)
    init: str = setting(
        "tie",
        "What a head ends in: tie is the target's own output matrix, copy one that begins as it "
        "and is trained, random one that begins as noise.",
        choices=("tie", "copy", "random"),
    )


@verb("train eagle", "train:eagle", *_TRAINED)
class EagleOptions(DrafterOptions):
    """Train EAGLE heads, which draft from a target's hidden states.

    outrider train eagle heads python --tokens 9000 --steps 5 --exam-prompts 2
    """

    draft_vocab: int = setting(
        0, "Draft only so many ids, the text's most frequent; 0 is all.", minimum=0
    )
    ffn: int = setting(0, "Size of the layer's FFN; 0 is the target's.", minimum=0, maximum=1 << 17)
    turns: int = setting(3, "Drafts of a round that it learns to make.", minimum=1, maximum=16)


@verb("train block", "train:block", *_TRAINED)
class BlockOptions(DrafterOptions):
    """Train a block net, which guesses several places in one pass.

    outrider train block my-net python --tokens 9000 --steps 5 --exam-prompts 2
    """

    places: int = setting(4, "Places: drafts of a round.", minimum=1, maximum=64)
    context_tokens: int = setting(
        8, "Tokens whose states are read for a guess.", minimum=1, maximum=1024
    )
    layers: int = setting(1, "Layers of the net.", minimum=1, maximum=16)


@verb("train pretrain", "train:pretrain", *_TRAINED)
class PretrainOptions(RunOptions):
    """Train a language model from scratch.

    outrider train pretrain my-model python --tokens 20000 --steps 5
    """

    family: str = setting(
        "llama",
        "llama; or hybrid, most of whose layers are recurrences (Qwen3.5), with an MTP block.",
        choices=("llama", "hybrid"),
    )
    teacher: str = setting("", "Learn the distributions of this model; of a hybrid.")
    tokenizer: str = setting("outrider/embedded", "Model or folder whose tokenizer is used.")
    hidden: int = setting(256, "Hidden size, in heads of 64.", minimum=64, maximum=16384)
    layers: int = setting(8, "Layers.", minimum=1, maximum=256)


@verb("train tokenizer", "train:tokenizer", *_TRAINED)
class TokenizerOptions(TextOptions):
    """Make a byte-level BPE vocabulary.

    outrider train tokenizer my-tokenizer python --tokens 100000 --size 2048
    """

    size: int = setting(8192, "Tokens of the vocabulary.", minimum=257, maximum=1 << 20)
