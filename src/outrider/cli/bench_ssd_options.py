"""What `bench ssd` may be told, and its part of the table of verbs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdOptions(JsonOption):
    """Of `bench ssd`."""

    pairs: str = setting(
        "8b/1b,70b/1b",
        "Pairs of costs, between commas: 8b/1b, 70b/1b, or TARGET/DRAFT of llama-1b, llama-8b, "
        "llama-70b or sizes such as 1024x4096x24x16x8. Engines go over most with the first.",
    )
    studies: str = setting(
        "alpha,hits,fan_out,batch", "What engines go over, between commas; none is no engines."
    )
    ks: str | None = setting(None, "Draft lengths, between commas (2,4,6,8,10,12).")
    alphas: str | None = setting(
        None, "Rates at which drafts are kept, between commas (0.5,0.7,0.9)."
    )
    hits: str | None = setting(
        None, "Shares of verdicts foreseen, between commas (0,0.5,0.7,0.9,1)."
    )
    fan_outs: str | None = setting(
        None, "Verdicts drafted for ahead, between commas (1,2,4,8,16,32)."
    )
    batches: str | None = setting(None, "Sequences at once, between commas (1,2,4,8).")
    costs: str | None = setting(
        None,
        "What passes do besides matrix products, between commas: attention, norms, head; by "
        "default nothing.",
    )
    layer_share: int | None = setting(
        None, "Engines run one of so many layers (16), of target and draft.", minimum=1, maximum=80
    )
    scale: int | None = setting(None, "Engines run widths over this (4).", minimum=1, maximum=64)
    pass_scale: int | None = setting(
        None, "Passes and products are timed at widths over this (1).", minimum=1, maximum=64
    )
    max_tokens: int | None = setting(
        None, "Tokens that each sequence emits while it is timed (96).", minimum=4, maximum=100_000
    )
    repeats: int | None = setting(
        None, "Measure everything this often (5); below 5 no intervals.", minimum=1, maximum=1000
    )
    seed: int = setting(0, "Chooses texts and which drafts are kept.", minimum=0)
    dtype: str = setting(
        "bfloat16", "Type of the weights.", choices=("bfloat16", "float16", "float32")
    )
    quantise: str = setting(
        "none", "Hold the target's matrices in fewer bits.", choices=("none", "int8", "int4")
    )
    device: str = setting("auto", "Where the models run.", choices=("auto", "cpu", "cuda", "mps"))
    threads: int = setting(0, "CPU threads; 0 as engines choose.", minimum=0, maximum=1024)
    tensor_parallel: int = setting(
        1,
        "Processes or devices that share each target; above 1 models have all --costs.",
        minimum=1,
        maximum=64,
    )
    quick: bool = setting(
        False, "A taste in under a minute: smaller models, fewer cells; figures mean nothing."
    )
    output_dir: str | None = setting(
        None, "Folder of results; results/DATE-DEVICE-ssd if not given. A run goes on in it."
    )


BENCH_SSD = Verb(
    name="ssd",
    target="outrider.cli.bench_ssd:ssd",
    text="Study plain decoding, drafting in turns and drafting ahead at the cost of big models: "
    "T_SD, roofline, windows, speed-ups beside theory.",
    example="outrider bench ssd --quick",
    options=SsdOptions,
)
