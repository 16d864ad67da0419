"""How many requests a server should run at once: `run.py served_batch --target MODEL`."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from common import TARGET, Report, first_prompts, note, study
from options import Options
from serving import ask_all, served

from outrider.plugins.measure.turns import rotated
from outrider_lab.measure.frame import medians, paired_ratio

CLIENTS = 32
# More than CLIENTS would be CLIENTS again.
SIZES = (8, 16, 32)
BAR = 0.95
DEFAULT = "default"


@study(target=TARGET, turns=14, tokens=64)
def served_batch(options: Options, report: Report) -> bool:
    """Is the number of requests that a server runs at once by default as good as the best one?

    A server with default settings and one for each `--batch-size` of 8, 16 and 32 answer 32
    clients at once, each server in its turn, the first turn unmeasured. The default should have
    0.95 of the tokens a second of the best size, which the other half of the turns chooses.
    """
    turns, tokens = (2, 8) if options.quick else (options.turns, options.tokens)
    sizes: tuple[str, ...] = (DEFAULT, *map(str, SIZES))
    prompts = first_prompts(CLIENTS)[:CLIENTS]
    rates = defaultdict[str, list[tuple[str, float]]](list)
    with ExitStack() as stack:
        urls = {size: stack.enter_context(served(options.target, *_flags(size))) for size in sizes}
        for turn in range(turns + 1):
            asked = [f"{turn}. {prompt}" for prompt in prompts]
            for size in rotated(sizes, turn):
                began = time.perf_counter()
                ask_all(urls[size], asked, tokens)
                if turn:
                    seconds = time.perf_counter() - began
                    rates[size].append((str(turn), len(asked) * tokens / seconds))
    return _judged(report, options, rates)


def _flags(size: str) -> tuple[str, ...]:
    return () if size == DEFAULT else ("--batch-size", size)


def _judged(report: Report, options: Options, rates: dict[str, list[tuple[str, float]]]) -> bool:
    """The best size by every other turn; the ratio by the turns between."""
    choosing = {size: medians(pairs[::2]) for size, pairs in rates.items() if size != DEFAULT}
    best = max(choosing, key=lambda size: sum(choosing[size].values()))
    ratios = {
        size: paired_ratio(medians(rates[DEFAULT]), medians(rates[size])) for size in choosing
    }
    judged = paired_ratio(medians(rates[DEFAULT][1::2]), medians(rates[best][1::2]))
    holds = judged is None or judged.value >= BAR
    for size, pairs in rates.items():
        ratio = ratios.get(size)
        note(
            report,
            target=Path(options.target).name,
            batch_size=size,
            clients=CLIENTS,
            tokens_per_second=[round(rate) for _, rate in pairs],
            default_over_it=None if ratio is None else round(ratio.value, 3),
            interval=None
            if ratio is None or ratio.low is None or ratio.high is None
            else [round(ratio.low, 3), round(ratio.high, 3)],
        )
    share = None if judged is None else round(judged.value, 3)
    note(report, target=Path(options.target).name, best=best, share_of_best=share, holds=holds)
    return holds
