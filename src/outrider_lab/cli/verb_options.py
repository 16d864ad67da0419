"""Options of the other verbs of the lab: plans, drafters, training, reports, conversions."""

from __future__ import annotations

from outrider.cli.options import ALL, DECIDED, Argument, JsonOption, shared, verb
from outrider.core.fields import setting

# Settings that a plan varies, has its own option for, or does not need.
DECIDED_BY_PLANS = (
    *("drafter", "k", "tree_nodes", "controller", "schedule", "watchdog"),
    *("batch_size", "context", "device", "max_tokens", *DECIDED),
)


@shared
class CountingOption(JsonOption):
    """Options of verbs that measure acceptance on prompts."""

    prompts: str | None = setting(
        None,
        "Your own prompts: a text file with one in each line, or a .jsonl file whose lines are "
        '{"prompt": "..."} or {"turns": ["..."]}. The first 16 are used. `outrider generate '
        "--compare --prompts` runs each of them and prints its times.",
    )
    raw: bool = setting(False, "Continue prompts as they are, even with an instruct model.")
    domains: str = setting(
        "code,maths",
        "Otherwise comma-separated domains of shipped prompts: code, maths, conversation, "
        "summarization, echo, adversarial.",
    )
    fresh: bool = setting(False, "Ignore stored measurements of this machine, and measure again.")


@verb(
    "plan",
    "outrider_lab.cli.plan:plan",
    Argument("TARGET", "The same as --target.", setting="target"),
    group="Measure speed",
    settings=ALL,
    without=DECIDED_BY_PLANS,
)
class PlanOptions(CountingOption):
    """Predict whether speculation pays here, with which drafter, and how much.

    outrider plan outrider/embedded --domains code
    """

    drafters: str = setting(
        "auto",
        "Comma-separated drafters to try, each as NAME[=DRAFT]; auto means the draft model, the "
        "target's own heads, ngram and suffix.",
    )
    batch: int = setting(
        1, "Number of texts written at once, on all replicas.", minimum=1, maximum=16_384
    )
    replicas: int = setting(
        1,
        "Number of devices that each run the model on their share of the texts.",
        minimum=1,
        maximum=256,
    )
    price: float | None = setting(
        None, "Price of one device for an hour, in any currency.", minimum=0
    )
    context: int | None = setting(
        None,
        "Tokens of a prompt; by default the mean of the prompts, or 512 with a data sheet.",
        minimum=0,
    )
    max_tokens: int = setting(128, "Tokens written for each text.", minimum=1)
    device: str = setting(
        "auto",
        "auto, cpu, cuda or mps measure on this machine; for another device, name its data sheet: "
        "v100, a100, h100, h200, rtx4090, m2-max, cpu-2core, cpu-32core, or a JSON or YAML file.",
    )
    draft_device: str | None = setting(
        None, "With a data sheet for --device, the data sheet of the draft model's own device."
    )
    alpha: str | None = setting(
        None,
        "With a data sheet, assume this acceptance instead of measuring it: one rate, or "
        "comma-separated rates for each position.",
    )
    seconds: float = setting(
        30.0,
        "Answer within this many seconds, loading included. One pass of TARGET is always measured; "
        "figures that are not measured by then are estimated, and marked so. 0 estimates all.",
        minimum=0,
        maximum=600,
    )
    save: str | None = setting(None, "Also write the plan as JSON to this file.")


@verb("bench simulate, simulate", "outrider_lab.cli.simulate:simulate")
class SimulateOptions(JsonOption):
    """Simulate engines: other machines, loads and acceptance rates.

    outrider bench simulate --target llama-8b --draft llama-1b --device h100 --alpha .8
    """

    target: str | None = setting(
        None,
        "Sizes of the target: llama-8b (the default), another known name, a model of "
        "`outrider models pairs`, or a config.json.",
    )
    draft: str | None = setting(None, "Sizes of the draft model, in the same form (llama-1b).")
    device: str | None = setting(
        None, "Device of both models: the name of a data sheet (h100), or a file with one."
    )
    draft_device: str | None = setting(None, "Device of the draft model, if it is another one.")
    calibration: str | None = setting(
        None, "Use measured costs from a file of `outrider plan --save`, instead of data sheets."
    )
    drafter: str | None = setting(
        None, "A drafter of the calibration; by default the first one that drafts."
    )
    alpha: float | None = setting(
        None,
        "Probability that a draft token is accepted if all before it were (.8, or as measured).",
        minimum=0,
        maximum=1,
    )
    places: str | None = setting(
        None, "Comma-separated probabilities for each position of a draft, such as .8,.7,.6."
    )
    k: int = setting(4, "Draft tokens per round.", minimum=0, maximum=64)
    engines: str = setting(
        "single,pd,pdv,ssd", "Comma-separated engines; plain decoding always runs too."
    )
    p_hit: float | None = setting(
        None,
        "Hit rate of ssd: how often it drafted for the right outcome; by default as predicted.",
        minimum=0,
        maximum=1,
    )
    fan_out: int = setting(
        16, "Outcomes per sequence that ssd drafts for in advance.", minimum=1, maximum=256
    )
    batch: int = setting(1, "Run at most this many requests at once.", minimum=1, maximum=1024)
    context: int = setting(512, "Mean tokens of a prompt.", minimum=1, maximum=1_000_000)
    max_tokens: int = setting(128, "Mean number of generated tokens.", minimum=1, maximum=100_000)
    requests: int = setting(8, "Number of requests.", minimum=1, maximum=100_000)
    spread: float = setting(
        0.0,
        "Lengths are uniform between this share below and above their means.",
        minimum=0,
        maximum=0.99,
    )
    arrivals: str = setting(
        "closed",
        "closed: --batch users, each with one request at a time; together: all at once; or a "
        "number of requests per second, as a Poisson process.",
    )
    contention: float = setting(
        0.0,
        "0: drafter and target have a device each; 1: they share the bandwidth of one memory.",
        minimum=0,
        maximum=1,
    )
    sync_us: float = setting(
        0.0, "Microseconds of a synchronisation between drafter and target.", minimum=0
    )
    prefill_chunk: int | None = setting(
        None,
        "Maximum number of prompt tokens in one target pass; unset is the engine's default.",
        minimum=1,
        maximum=65536,
        kind=int,
    )
    hybrid_threshold: int = setting(
        3,
        "With pdv, up to this many requests draft and verify in one lane; 0 keeps lanes separate. "
        "With ssd, 0 drafts ahead even if drafting and verifying in turn is faster.",
        minimum=0,
    )
    decode_batch: int = setting(
        0, "Maximum sequences in one drafting job; 0 is --batch.", minimum=0, maximum=1024
    )
    verify_batch: int = setting(
        0, "Maximum sequences in one verifying job; 0 is --batch.", minimum=0, maximum=1024
    )
    replicas: int = setting(
        1,
        "Number of engines with the same model, each on its own devices.",
        minimum=1,
        maximum=256,
    )
    routing: str = setting(
        "beginning",
        "Choice of the replica for a request. beginning, the server's own: the one that has cached "
        "most of its prompt, unless it is much busier; queue: the shortest queue; turns: in turn.",
        choices=("beginning", "queue", "turns"),
    )
    families: int = setting(
        8, "Families of prompts that share a beginning.", minimum=1, maximum=100_000
    )
    shared: int = setting(
        0, "Tokens that the prompts of a family share.", minimum=0, maximum=1_000_000
    )
    failures: str | None = setting(
        None,
        "Comma-separated failures REPLICA@START+SECONDS, such as 0@10+5; replicas count from 0. "
        "Their requests continue at other replicas.",
    )
    price: str | None = setting(
        None,
        "Price of a replica for an hour, in any currency; or of each device, as in h100=3,a100=2.",
    )
    seed: int = setting(0, "Seed of acceptance, hits, lengths, families and arrivals.", minimum=0)
    sweep: str | None = setting(
        None, "Run once for each value of one of these options, as in k=1,2,4,8."
    )
    figure: str | None = setting(
        None, "Draw the sweep, or without one the timeline of each engine: an .svg file."
    )
    trace: str | None = setting(
        None, "Write a timeline for Perfetto to this file, one for each engine."
    )


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


@verb("models load", "outrider_lab.cli.models:load_model", MODEL)
class LoadOptions(JsonOption):
    """Load a model and write a few tokens, to check that it works here.

    outrider models load outrider/embedded --n-tokens 8
    """

    dtype: str = setting(
        "auto",
        "float32, bfloat16 or float16; auto is the checkpoint's own; int8 or int4 quantises it.",
    )
    n_tokens: int = setting(16, "Write this many tokens.", minimum=1, maximum=4096)


@verb("models ollama", "outrider_lab.cli.models:ollama")
class OllamaOptions(JsonOption):
    """Show the models of an Ollama server, and a test completion. This only checks a model's text;
    Ollama returns no logits, so it cannot take part in a benchmark.

    outrider models ollama
    """

    host: str = setting("http://localhost:11434", "Address of the Ollama server.")
    model: str = setting("", "Also write a completion with this model of the server.")
    prompt: str = setting("The quick brown fox", "The prompt of the completion.")
    max_tokens: int = setting(32, "Write at most this many tokens.", minimum=1, maximum=4096)


@verb("models ping", "outrider_lab.cli.models:ping")
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


DEFAULT_MINUTES = 10.0


_TRAINED = (
    Argument(name="FOLDER", text="The folder to write it to: new, or that of a stopped run."),
    Argument(
        name="TEXTS",
        text="Files, folders or JSON lines; python means the Python source on this machine.",
        many=True,
    ),
)


@shared
class TextOptions(JsonOption):
    """Options of every verb that reads texts."""

    field: str = setting("", "Key of JSON lines that holds the text; by default the usual ones.")
    tokens: int = setting(0, "Train on about this many tokens of the texts; 0 is all.", minimum=0)


@shared
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


@shared
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


@verb("train dflash", "outrider_lab.cli.train:dflash", *_TRAINED)
class DFlashOptions(DrafterOptions):
    """Train DFlash layers, which draft a block of tokens in one pass.

    outrider train dflash my-layers python --tokens 9000 --steps 5 --exam-prompts 2
    """

    block: int = setting(
        8, "Rows of a block: the pending token and the tokens to draft.", minimum=2, maximum=64
    )
    layers: int = setting(2, "Layers.", minimum=1, maximum=16)
    ffn: int = setting(0, "Size of the layers' FFN; 0 is the target's.", minimum=0, maximum=1 << 17)


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
