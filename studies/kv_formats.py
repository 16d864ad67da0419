"""What int8 keys and values do to the time of a pass: `run.py kv_formats [--output FILE]`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from statistics import median

from common import (
    TARGET,
    Report,
    fill,
    in_turns,
    note,
    real_folder,
    step_pass,
    study,
    target_of,
    timed,
)
from options import Options

from outrider import LLM
from outrider.plugins.measure.turns import Neighbours
from outrider_lab.measure.frame import paired_ratio

FORMATS = ("auto", "int8")
ROWS = (1, 5, 16)
CONTEXTS, QUICK_CONTEXTS = (256, 2048, 8000), (64,)


@study(real="", repeats=15)
def kv_formats(options: Options, report: Report) -> None:
    """Does a cache in 8 bits cost time, or save some?

    Passes of the same model over the same text, with keys and values of the weights' precision and
    in int8, take turns: of one row, as plain decoding has, and of several, as verification has.
    Ratios are of the seconds of a pass, turn by turn, int8 the faster where above 1.
    """
    place = real_folder(options.real)
    target = TARGET if options.quick else str(place)
    contexts = QUICK_CONTEXTS if options.quick else CONTEXTS
    room = sum(contexts) + 512
    with ExitStack() as stack, Neighbours() as neighbours:
        sides = {
            kind: stack.enter_context(
                closing(LLM(target, kv_dtype=kind, drafter="none", arena_tokens=room))
            )
            for kind in FORMATS
        }
        for context in contexts:
            calls: dict[tuple[str, int], Callable[[], float]] = {}
            for kind, llm in sides.items():
                model = target_of(llm)
                fill(model, context, context)
                for rows in ROWS:
                    calls[kind, rows] = timed(step_pass(model, context, rows))
            found = in_turns(calls, 2 if options.quick else options.repeats)
            for rows in ROWS:
                plain, kept = (dict(enumerate(found[kind, rows])) for kind in FORMATS)
                ratio = paired_ratio(plain, kept)
                note(
                    report,
                    context=context,
                    rows=rows,
                    auto_ms=round(1e3 * median(plain.values()), 3),
                    int8_ms=round(1e3 * median(kept.values()), 3),
                    int8_over_auto=ratio and asdict(ratio),
                )
    report |= {
        "target": place.name,
        "kv_bytes_per_token": {k: llm.spec.kv_bytes_per_token for k, llm in sides.items()},
        "foreign_cpu_share": neighbours.share,
    }
