"""`outrider bench quality` and `ssd`.

`quality`: does speculation keep the text, and what do formats and lossy rules change of it.
`ssd`: plain decoding, drafting in turns and drafting ahead on models that are costs alone, with
scripted acceptance.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from outrider.api.tokenizer import Tokenizer
from outrider.api.wrapper import load_wrapper
from outrider.bench.gemm.engines import Text
from outrider.bench.gemm.pair import Make, pair_shape
from outrider.bench.gemm.record import SAMPLES
from outrider.bench.gemm.record import sections as cost_sections
from outrider.bench.gemm.results import results_of, study_record
from outrider.bench.gemm.study import QUICK, CostStudy, Grid, Sizes, grid_asked, outstanding, run
from outrider.bench.gemm.units import SamplesFile, Unit
from outrider.bench.machine import new_run_id, provenance
from outrider.bench.pages import Page
from outrider.bench.quality import (
    FORMATS,
    QUANTISED,
    RULES,
    FormatRow,
    Nats,
    Quality,
    RuleRow,
    RuleStudy,
    compare_formats,
    compare_rules,
    load_judge,
    read,
    sections,
    windows_of,
)
from outrider.bench.self_drafts import SelfDrafts
from outrider.bench.workload import builtin_texts
from outrider.cache.capacity import free_bytes
from outrider.cli import engine_setup
from outrider.cli.bench_options import QualityOptions, SsdOptions
from outrider.cli.call import Call
from outrider.cli.engine_setup import Results, Subject, subject
from outrider.cli.main import INTERRUPTED
from outrider.cli.output import answer, say
from outrider.cli.paint import Meter
from outrider.cli.session import start_logging
from outrider.core.errors import ConfigError, MachineError
from outrider.core.fields import numbers_of, split, words_of
from outrider.core.files import FileKind, read_text
from outrider.lab.gemm import NonGemmCosts
from outrider.models.loading import pick_device, resolve

WINDOW_TOKENS = 256
_ALL, _NONE = "all", "none"
# What a wrapper's arena holds of one text.
_MOST_TOKENS = 4096

T = TypeVar("T")


def quality(call: Call[QualityOptions]) -> int:
    start_logging(call.resolved.program())
    options = call.options
    forms = _words("--formats", options.formats, FORMATS)
    rules = _words("--rules", options.rules, RULES)
    if not forms and not rules:
        raise ConfigError("neither a format nor a rule to check.", hint="--rules all")
    about = subject(call.resolved, most_in_flight=8)
    prompts = _prompts(options)
    formats: list[FormatRow] = []
    kept: list[RuleRow] = []
    whole = True
    try:
        _collect("formats", len(forms), _formats(call, about, forms, prompts), formats)
        _collect("rules", len(rules) + bool(rules), _rules(call, about, rules, prompts), kept)
    except KeyboardInterrupt:
        whole = False
        say("\ninterrupted: below is what was measured until then")
    _show(call, about, Quality(formats, kept), whole=whole)
    if not whole:
        return INTERRUPTED
    return 1 if any(row.broken for row in kept) else 0


def _words(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    if text.strip() in (_ALL, _NONE):
        return tuple(known) if text.strip() == _ALL else ()
    return engine_setup.chosen_words(flag, text, known)


def _prompts(options: QualityOptions) -> list[str]:
    names = words_of("--domains", options.domains, hint="--domains code,maths")
    return [text for name in names for text in builtin_texts(name)[: options.prompts]]


def _formats(
    call: Call[QualityOptions], about: Subject, forms: Sequence[str], prompts: Sequence[str]
) -> Iterable[FormatRow]:
    options = call.options
    texts = prompts if options.text is None else [_file(Path(options.text))]
    target = about.models.target
    ids = Tokenizer.load(resolve(target)).encode_batch(texts)
    windows = windows_of(ids, WINDOW_TOKENS, options.text_tokens)
    if not windows:
        raise ConfigError(
            "the text has no two tokens, so there is no perplexity.", hint="name a longer --text"
        )
    load = partial(load_judge, target, device=about.engine.device)
    copies = _words("--self-drafts", options.self_drafts, QUANTISED)
    drafts = SelfDrafts(
        target=target,
        engine=about.engine,
        params=engine_setup.sampling(call.resolved, options.max_tokens),
        prompts=prompts,
        copies=copies,
    )
    return drafts.measured(compare_formats(load, forms, windows))


def _rules(
    call: Call[QualityOptions], about: Subject, rules: Sequence[str], prompts: Sequence[str]
) -> Iterable[RuleRow]:
    if not rules:
        return ()
    target, engine = about.models.target, about.engine
    judge, _ = load_wrapper(target, engine.dtype, engine.device, quantise=engine.quantise)

    def nats(prompt: Sequence[int], written: Sequence[int]) -> Nats:
        ids = [*prompt, *written][:_MOST_TOKENS]
        return read(judge, ids, max(len(prompt), 1))

    study = RuleStudy(
        target=target,
        draft=about.models.draft,
        engine=engine,
        params=engine_setup.sampling(call.resolved, call.options.max_tokens),
        prompts=prompts,
        read=nats,
    )
    return compare_rules(study, rules)


def _file(path: Path) -> str:
    try:
        return read_text(path, FileKind.PROMPTS)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8.", hint="convert it first") from None


def _collect(title: str, total: int, rows: Iterable[T], into: list[T]) -> None:
    """Fill `into` row by row, so that an interrupt keeps those before it; with a bar on stderr,
    where that is a terminal."""
    with Meter(title, total, unit="rows", hidden=not total) as meter:
        for row in rows:
            into.append(row)
            meter.step()


def _show(call: Call[QualityOptions], about: Subject, found: Quality, *, whole: bool) -> None:
    record: dict[str, object] = {
        "benchmark": "quality",
        "provenance": provenance(),
        "complete": whole,
        **engine_setup.origins(about, call.resolved),
        "max_tokens": call.options.max_tokens,
        **found.to_record(),
    }
    page = Page(f"Quality, {about.name}", list(sections(found)))
    answer(call.options, record, engine_setup.page_text(page))


_AXES = {"ks": int, "alphas": float, "hits": float, "fan_outs": int, "batches": int}
NO_STUDIES = "none"
# Of a taste: repeats, tokens, divisors for engines and for passes.
_USUAL, _TASTE = (5, 96, 4, 1), (2, 24, 8, 4)
_LAYER_SHARE = 16
EVERY_COST = NonGemmCosts(attention=True, norms=True, head=True)


def ssd(call: Call[SsdOptions]) -> int:
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
