"""What `outrider plan` and `outrider bench simulate` may be told."""

from __future__ import annotations

from outrider.cli.options import ALL, DECIDED, Argument, CountingOption, JsonOption, verb
from outrider.core.fields import setting

# Settings that a plan tries, has an option of its own for, or has no use for.
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
    """Will speculation pay here, with which drafter, and how much?

    outrider plan outrider/embedded --domains code
    """

    drafters: str = setting(
        "auto",
        "Drafters to try, between commas, each as NAME[=DRAFT]; auto is the draft model, heads "
        "that lie with the target, ngram and suffix.",
    )
    batch: int = setting(
        1, "Texts that will be written at once, on all replicas.", minimum=1, maximum=16_384
    )
    replicas: int = setting(
        1,
        "Devices that each run the model and take their share of the texts.",
        minimum=1,
        maximum=256,
    )
    price: float | None = setting(
        None, "What an hour of one device costs, in any money.", minimum=0
    )
    context: int | None = setting(
        None,
        "Tokens of a prompt; if not given the mean of the prompts, or 512 with a sheet.",
        minimum=0,
    )
    max_tokens: int = setting(128, "Tokens that will be written of each text.", minimum=1)
    device: str = setting(
        "auto",
        "auto, cpu, cuda or mps measure here; a device that you do not have is planned for by its "
        "sheet: v100, a100, h100, h200, rtx4090, m2-max, cpu-2core, cpu-32core, or a JSON or YAML "
        "file.",
    )
    draft_device: str | None = setting(
        None, "With a sheet for --device, the sheet of a device of its own for the draft model."
    )
    alpha: str | None = setting(
        None,
        "With a sheet, suppose this acceptance instead of counting it: one rate, or one for each "
        "place, between commas.",
    )
    seconds: float = setting(
        30.0,
        "Answer in so many seconds, loading included; one pass of TARGET is measured in any case, "
        "what is not measured by then is estimated, and says so. 0 estimates all.",
        minimum=0,
        maximum=600,
    )
    save: str | None = setting(None, "Also write the plan as JSON to this file.")


@verb("bench simulate, simulate", "outrider_lab.cli.simulate:simulate")
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
    replicas: int = setting(
        1,
        "Engines that load the same model, each on a device (or devices) of its own.",
        minimum=1,
        maximum=256,
    )
    routing: str = setting(
        "beginning",
        "Which replica gets a request: beginning is the server's own, by what was read of its "
        "prompt before, unless queues differ; queue is the shortest one; turns is one by one.",
        choices=("beginning", "queue", "turns"),
    )
    families: int = setting(
        8, "Kinds of prompts, each as frequent, that begin alike.", minimum=1, maximum=100_000
    )
    shared: int = setting(
        0, "Tokens that the prompts of a family begin with.", minimum=0, maximum=1_000_000
    )
    failures: str | None = setting(
        None,
        "Replicas that fail, from 0 on, when, and for how many seconds, between commas, as in "
        "0@10+5. What they had goes on elsewhere.",
    )
    price: str | None = setting(
        None,
        "What an hour of a replica costs, in any money; or of each device, as in h100=3,a100=2.",
    )
    seed: int = setting(0, "Of acceptance, hits, lengths, families and arrivals.", minimum=0)
    sweep: str | None = setting(
        None, "Run once for each value of one of these options, as in k=1,2,4,8."
    )
    figure: str | None = setting(
        None, "Draw the sweep, or else what each engine ran when: an .svg file."
    )
    trace: str | None = setting(
        None, "Write what ran when to this file, one for each engine, for Perfetto."
    )
