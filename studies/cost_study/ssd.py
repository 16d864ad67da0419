"""The cost study: plain decoding, drafting in turns and drafting ahead on models that are costs
alone, with scripted acceptance (studies/pages/cost-study.md).

    run.py ssd --quick
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_study.engines import Text
from cost_study.pair import Make, pair_shape
from cost_study.results import results_of, study_record
from cost_study.study import QUICK, CostStudy, Grid, Sizes, grid_asked, outstanding, run
from cost_study.units import SamplesFile, Unit
from outrider.cache.pages import free_bytes
from outrider.cli.call import Call, run_verb
from outrider.cli.main import report
from outrider.cli.options import ASKS, JsonOption, Verb
from outrider.cli.output import Meter, say
from outrider.cli.page import verb_page
from outrider.core.errors import ConfigError, OutriderError
from outrider.core.fields import numbers_of, setting, split
from outrider.kernels.operators import pick_device
from outrider.plugins.measure.turns import provenance
from outrider_lab.bench.cost_record import SAMPLES
from outrider_lab.bench.cost_record import sections as cost_sections
from outrider_lab.cli.engine_setup import Results
from outrider_lab.measure.machine import new_run_id
from outrider_lab.measure.store import Page
from outrider_lab.models.gemm import NonGemmCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdOptions(JsonOption):
    """Of the study."""

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
        None, "Shares of outcomes that were drafted for, between commas (0,0.5,0.7,0.9,1)."
    )
    fan_outs: str | None = setting(
        None, "Outcomes drafted for ahead, between commas (1,2,4,8,16,32)."
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


_AXES = {"ks": int, "alphas": float, "hits": float, "fan_outs": int, "batches": int}
NO_STUDIES = "none"
# Of a taste: repeats, tokens, divisors for engines and for passes.
_USUAL, _TASTE = (5, 96, 4, 1), (2, 24, 8, 4)
_LAYER_SHARE = 16
EVERY_COST = NonGemmCosts(attention=True, norms=True, head=True)


def measured(call: Call[SsdOptions]) -> int:
    study = study_of(call.options)
    study.check(free_bytes(pick_device(call.options.device)))
    folder = _folder(call.options)
    file = SamplesFile.open(folder, study.circumstances)
    units = study.units()
    left = outstanding(units, file)
    if not left:
        say(f"note: {folder} has all samples already; name another --output-dir to measure again")
    whole = _measure(study, units, left, file)
    found = results_of(study, file)
    about = {"run_id": new_run_id(), "complete": whole, "provenance": provenance()}
    record = study_record(study, found, about)
    results = Results(
        folder=file.folder,
        record=record,
        page=Page(f"Cost study, run {about['run_id']}", list(cost_sections(record))),
        more=[SAMPLES],
        failed=any(one.reason is not None for one in file.samples.values()),
        resumable=True,
    )
    results.write(shown=not call.options.json)
    return results.end(as_json=call.options.json)


def study_of(options: SsdOptions) -> CostStudy:
    """Raises ConfigError for words that mean nothing."""
    repeats, tokens, scale, pass_scale = _TASTE if options.quick else _USUAL
    names = split(options.pairs)
    if not names:
        raise ConfigError("--pairs names none.", hint="--pairs 8b/1b")
    costs, studies = NonGemmCosts.named(split(options.costs or "")), split(options.studies)
    hint = "as in 0,1"
    axes = {
        name: numbers_of(f"--{name.replace('_', '-')}", text, kind, 0, math.inf, hint=hint)
        if (text := getattr(options, name))
        else ()
        for name, kind in _AXES.items()
    }
    asked = () if studies == (NO_STUDIES,) else studies
    return CostStudy(
        pairs=tuple(pair_shape(name) for name in names),
        make=Make(
            costs=EVERY_COST if options.tensor_parallel > 1 else costs,
            dtype=options.dtype,
            quantise=options.quantise,
            device=options.device,
            threads=options.threads,
            ranks=options.tensor_parallel,
        ),
        grid=grid_asked(QUICK if options.quick else Grid(), asked, axes),
        text=Text(max_tokens=options.max_tokens or tokens),
        sizes=Sizes(
            layer_share=options.layer_share or _LAYER_SHARE,
            divisor=options.scale or scale,
            pass_divisor=options.pass_scale or pass_scale,
        ),
        repeats=options.repeats or repeats,
        seed=options.seed,
        quick=options.quick,
        has_engines=studies != (NO_STUDIES,),
    )


def _folder(options: SsdOptions) -> Path:
    if options.output_dir is not None:
        return Path(options.output_dir)
    today, device = datetime.date.today().isoformat(), pick_device(options.device).type
    return Path("results") / f"{today}-{device}-ssd{'-quick' if options.quick else ''}"


def _measure(
    study: CostStudy, units: Sequence[Unit], left: Sequence[Unit], file: SamplesFile
) -> bool:
    """Whether all of it was measured; else an interrupt came."""
    with Meter("", len(units), unit="turns") as meter:
        meter.reach(len(units) - len(left))
        try:
            for unit in run(study, left, file):
                meter.step(title=unit.title)
        except KeyboardInterrupt:
            return False
    return True


VERB = Verb(
    name="ssd",
    text="Study plain decoding, drafting in turns and drafting ahead at the cost of big models: "
    "T_SD, roofline, windows, speed-ups beside theory.",
    example="python studies/run.py ssd --quick",
    target="cost_study.ssd:measured",
    options=SsdOptions,
)


class _Study:
    """What run.py starts."""

    def main(self, words: Sequence[str]) -> int:
        """The exit code, in the manner of `outrider`."""
        path = ("run.py", "ssd")
        if any(word in ASKS for word in words):
            print(verb_page(VERB, path, everything=True))
            return 0
        try:
            return run_verb(VERB, path, words)
        except OutriderError as error:
            report(str(error), error.hint)
            return error.exit_code


ssd = _Study()
