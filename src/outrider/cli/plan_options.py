"""Options of `outrider plan` and `outrider bench simulate`."""

from __future__ import annotations

from outrider.cli.options import ALL, DECIDED, Argument, CountingOption, JsonOption, verb
from outrider.core.fields import setting

# Settings that a plan varies, has its own option for, or does not need.
DECIDED_BY_PLANS = (
    *("drafter", "k", "tree_nodes", "controller", "schedule", "watchdog"),
    *("batch_size", "context", "device", "max_tokens", *DECIDED),
)


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
    prefill_chunk: int = setting(
        256, "Maximum number of prompt tokens in one target pass.", minimum=1, maximum=65536
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
