"""What `simulate` may be told. It reads no settings: it runs on a machine that need not exist."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(JsonOption):
    """Of `simulate`. What is None is found out, as the help says."""

    target: str | None = setting(
        None,
        "Sizes of the target: llama-8b (if none is named), another known name, a model of "
        "`outrider pairs`, or a config.json.",
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
        "How often ssd foresees a verdict; by default what its fan-out is expected to reach.",
        minimum=0,
        maximum=1,
    )
    fan_out: int = setting(
        16, "Verdicts that ssd drafts for ahead, a sequence and round.", minimum=1, maximum=256
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
        "0 gives every lane a device of its own; 1 has all share one memory's bandwidth.",
        minimum=0,
        maximum=1,
    )
    sync_us: float = setting(
        0.0, "Microseconds of a hand-over between drafting and verifying lanes.", minimum=0
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
    seed: int = setting(0, "Of verdicts, hits, lengths and arrivals.", minimum=0)
    sweep: str | None = setting(
        None, "Run once for each value of one of these options, as in k=1,2,4,8."
    )
    figure: str | None = setting(
        None, "Draw the sweep, or else each engine's lanes over time: an .svg file."
    )
    trace: str | None = setting(
        None, "Write what lanes did to this file, one for each engine, for Perfetto."
    )
