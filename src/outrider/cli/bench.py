"""`outrider bench k`: the K sweep, measured, summed up in words and drawn.

`outrider prompts`: how long the benchmark prompts are, and a set of them as a file.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from outrider.api.tokenizer import Tokenizer
from outrider.bench import drawing
from outrider.bench.frame import MIN_PAIRS
from outrider.bench.machine import provenance, said_of
from outrider.bench.published import PUBLISHED, published_texts, questions_of
from outrider.bench.studies.sweep import Lineup, run_visits
from outrider.bench.studies.sweep_cells import Cell, cells
from outrider.bench.studies.sweep_plan import Pair, missing
from outrider.bench.studies.sweep_recipes import REFERENCES
from outrider.bench.studies.sweep_record import FILE_NAME, ResultsFolder
from outrider.bench.studies.sweep_report import spread_text
from outrider.bench.studies.sweep_summary import write_summary
from outrider.bench.workload import PER_DOMAIN, PromptDataset, builtin_texts
from outrider.cli.call import Call
from outrider.cli.main import INTERRUPTED, report
from outrider.cli.options import KSweepOptions, PromptsOptions
from outrider.cli.output import check_writable, json_line, screen_table, table
from outrider.cli.paint import Meter
from outrider.cli.session import start_logging
from outrider.cli.sweep_setup import Setup, set_up
from outrider.core.config import EXACT_SAMPLERS
from outrider.core.errors import ConfigError, MachineError, OutriderError, did_you_mean
from outrider.models.loading import resolve

HEADER = (
    "K",
    "samples",
    "failed",
    "ok %",
    "latency ms",
    "tok/s",
    "speed-up (95 %)",
    "accepted %",
    "drafted",
    "accepted",
    "tok/round",
)


def pages(folder: ResultsFolder, record: Mapping[str, Any]) -> Iterator[str]:
    """The tables, then the sentences that go with them."""
    found = cells(folder)
    for (pair, domain), group in groupby(found, key=lambda cell: (cell.pair, cell.domain)):
        title = f"{pair}, {domain}: {_how(folder, pair)}"
        yield f"{title}\n{screen_table([_row(cell) for cell in group], header=HEADER)}"
    yield "\n".join(_sentences(found, record))


def reference_table() -> str:
    """Published figures. They are of other engines, machines and counters."""
    rows = [
        (
            item.pair,
            item.device,
            item.setting,
            "-" if item.tokens_per_second is None else f"{item.tokens_per_second:g}",
            "-" if item.acceptance is None else f"{100 * item.acceptance:.1f}",
            item.note,
        )
        for item in REFERENCES
    ]
    header = ("pair", "device", "setting", "tok/s", "accepted %", "note")
    return f"Published elsewhere, by other engines:\n{screen_table(rows, header=header)}"


def _how(folder: ResultsFolder, pair: str) -> str:
    run = next(run for run in reversed(folder.runs) if run["pair"] == pair)
    settings: Mapping[str, Any] = run["settings"]
    heat = settings["temperature"]
    parts = [
        "greedy" if heat == 0 else f"temperature {heat:g}",
        f"{settings['max_tokens']} tokens",
        f"batch {settings['batch_size']}",
        f"drafter {settings.get('drafter', 'none')}",
    ]
    if settings["sampler"] not in EXACT_SAMPLERS:
        parts.append(f"LOSSY sampler {settings['sampler']}")
    return ", ".join(parts)


def _row(cell: Cell) -> tuple[str, ...]:
    ratio = cell.speedup
    speedup = "1" if cell.k == 0 else "-"
    if ratio is not None:
        interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
        speedup = f"{ratio.value:.2f}{interval}"
    return (
        str(cell.k),
        str(cell.num_samples),
        str(cell.num_failures),
        f"{100 * cell.success_rate:.0f}",
        spread_text(cell.latency_ms, 1),
        spread_text(cell.tokens_per_second, 1),
        speedup,
        spread_text(cell.acceptance, 1, scale=100),
        spread_text(cell.num_drafted, 1) if cell.k else "-",
        spread_text(cell.num_accepted, 1) if cell.k else "-",
        "-" if cell.tokens_per_round is None else f"{cell.tokens_per_round:.2f}",
    )


def _sentences(found: list[Cell], record: Mapping[str, Any]) -> Iterator[str]:
    same = record["greedy_identical"]
    if same is not None:
        verb = "are" if same else "are NOT"
        yield f"Greedy tokens at every K {verb} those of plain decoding, in this same run."
    yield from record["verdicts"]
    if any(cell.speedup and cell.speedup.low is None for cell in found):
        num = MIN_PAIRS * max(run["settings"]["batch_size"] for run in record["runs"])
        yield f"An interval and a verdict need {MIN_PAIRS} pieces (--prompts {num})."
    reasons: Counter[str] = Counter()
    for cell in found:
        reasons.update(cell.failures)
    for reason, num in reasons.most_common(5):
        yield f"{num} failed: {reason}"
    if said := said_of(record["foreign_cpu_share"]):
        yield said


def k(call: Call[KSweepOptions]) -> int:
    start_logging(call.resolved.program())
    setup = set_up(call)
    for note in setup.notes:
        _say(f"note: {note}")
    folder = ResultsFolder.open(setup.folder)
    try:
        refused = _measure(setup, folder)
    except KeyboardInterrupt:
        _say(
            f"\ninterrupted: {len(folder.samples)} samples are safe in {folder.path}; "
            f"the same command with --output-dir {folder.path} goes on from there"
        )
        return INTERRUPTED
    if len(refused) < len(setup.pairs):
        return max(_show(setup, folder), *refused, 0)
    return max(refused)


def _measure(setup: Setup, folder: ResultsFolder) -> list[int]:
    """Run what is outstanding. The exit codes of pairs that cannot run; the others go on."""
    refused: list[int] = []
    with Meter(unit="visits") as meter:
        for pair in setup.pairs:
            try:
                _measure_pair(setup, pair, folder, meter)
            except OutriderError as error:
                if len(setup.pairs) == 1 or isinstance(error, ConfigError):
                    raise
                report(f"pair {pair.name}: {error}", error.hint)
                refused.append(error.exit_code)
    return refused


def _measure_pair(setup: Setup, pair: Pair, folder: ResultsFolder, meter: Meter) -> None:
    group = setup.sweep.group(pair)
    terms = group.circumstances()
    folder.check(terms)
    everything = group.visits()
    fresh = setup.options.fresh
    todo = everything if fresh else missing(everything, folder)
    if not todo:
        _say(f"note: {pair.name}: {folder.path} has all samples already; --fresh measures again")
        return
    with closing(Lineup(pair.target, group.ways)) as lineup:
        for note in lineup.notes:
            _say(f"note: {note}")
        run = folder.add_run(
            terms,
            {
                "target": pair.target,
                "draft": pair.draft,
                "provenance": provenance(),
                **lineup.facts(),
            },
        )
        done = len(everything) - len(todo)
        meter.reach(done, total=len(everything), title=pair.name)
        for _ in run_visits(lineup, todo, folder, run=run, warmup=setup.sweep.warmup):
            meter.step()


def _show(setup: Setup, folder: ResultsFolder) -> int:
    """Write summary and figures, and print them; 1 if any sample failed."""
    record = write_summary(folder)
    drawn = _draw(setup, folder)
    if setup.options.json:
        print(json_line({"folder": str(folder.path), "figures": drawn, **record}))
    else:
        for page in pages(folder, record):
            print(page, end="\n\n")
        if setup.options.reference:
            print(reference_table(), end="\n\n")
        print(f"results: {folder.path} ({FILE_NAME}, summary.json, summary.csv)")
        if drawn:
            print(f"figures: {folder.path / 'figures'} ({len(drawn)} files)")
    return 1 if any(cell.num_failures for cell in cells(folder)) else 0


def _draw(setup: Setup, folder: ResultsFolder) -> Sequence[str]:
    if not setup.plots:
        return []
    reason = drawing.why_not()
    if reason is not None:
        _say(f"note: {reason}")
        return []
    from outrider.bench.figures import draw_all

    return [str(path) for path in draw_all(folder)]


def _say(text: str) -> None:
    print(text, file=sys.stderr)


SOURCES = ("builtin", "hub")


def prompts(call: Call[PromptsOptions]) -> int:
    options = call.options
    outputs = [Path(name) for name in (options.output, options.tiny_output) if name]
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise ConfigError("--output and --tiny-output name one file.", hint="name two files")
    for path in outputs:
        check_writable(path)
    tokenizer = Tokenizer.load(resolve(options.tokenizer))
    found = _build(options, lambda text: len(tokenizer.encode(text)))
    stats = found.statistics()
    if options.json:
        record = {"tokenizer": found.tokenizer, "domains": [asdict(one) for one in stats]}
        print(json_line(record))
    else:
        print(f"tokens by the tokenizer of {found.tokenizer}")
        rows = [(s.domain, s.source, s.n, s.min, f"{s.mean:.1f}", s.max) for s in stats]
        print(table(rows, header=("domain", "source", "n", "min", "mean", "max")))
    for name, saved in ((options.output, found), (options.tiny_output, found.tiny())):
        if name:
            saved.save(Path(name))
            print(f"saved {len(saved)} prompts to {name}", file=_stream(options))
    return 0


def _build(options: PromptsOptions, count: Callable[[str], int]) -> PromptDataset:
    texts: dict[str, list[str]] = {}
    sources: dict[str, str] = {}
    own = None if options.source in SOURCES else questions_of(_file(options.source))
    for domain in dict.fromkeys(word.strip() for word in options.domains.split(",")):
        if own is None:
            texts[domain], sources[domain] = _known(domain, options, count)
        elif domain in own:
            texts[domain], sources[domain] = own[domain][:PER_DOMAIN], options.source
        else:
            raise ConfigError(
                f"{options.source} has no {domain}.", hint=f"--domains {','.join(own)}"
            )
    return PromptDataset.build(texts, count, tokenizer=options.tokenizer, sources=sources)


def _known(
    domain: str, options: PromptsOptions, count: Callable[[str], int]
) -> tuple[list[str], str]:
    """The prompts of a domain, and where they are from."""
    builtin = builtin_texts(domain)[:PER_DOMAIN]
    if options.source == "hub":
        try:
            return published_texts(domain, PER_DOMAIN, count), PUBLISHED[domain].repo
        except MachineError as error:
            print(f"note: {domain}: built-in prompts, since {error}", file=sys.stderr)
    return builtin, "builtin"


def _file(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"--source: {name!r} is neither {' nor '.join(SOURCES)}, and no such file.",
            hint=did_you_mean(name, SOURCES),
        )
    return path


def _stream(options: PromptsOptions) -> TextIO:
    """What is said beside JSON goes to stderr, so that the output stays one object."""
    return sys.stderr if options.json else sys.stdout
