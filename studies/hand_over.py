"""What it costs to ask a drafter's process: `run.py hand_over [--output FILE]`."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from common import Report, note, study
from options import Options

from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.core.rng import inverse_cdf
from outrider.plugins.lanes.process.child import Inherited, Inner, serve
from outrider.plugins.lanes.process.client import Home, ProcessDrafter
from outrider.plugins.lanes.process.options import ChildOptions
from outrider.testing import row

K = 4
FOLDER = str(Path(__file__).parent)
CODE = f"import sys; sys.path.insert(0, {FOLDER!r}); import hand_over; hand_over.child()"
# Where messages go: `force_reference` leaves native kernels out, and so their memory.
WAYS = {"memory": False, "socket": True}
PAUSES = {"awake": 0.0, "asleep": 0.02}


@dataclass(frozen=True, slots=True)
class Fixed:
    """Drafts that take no model."""

    name: str = "fixed"
    needs: DraftNeeds = field(default_factory=DraftNeeds)

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        pass

    def close(self, seq_id: int) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.chain(range(one.budget.depth)) for one in rows]


def child() -> None:
    options = ChildOptions.from_json(sys.argv[1])
    serve(
        Inherited.named(sys.argv[2:]),
        options,
        lambda told: Inner(Fixed(), told.vocab_size, inverse_cdf),
    )
    os._exit(0)


@study(asks=300, rows=[1, 8])
def hand_over(options: Options, report: Report) -> None:
    """What does a question to a drafter's process and its answer take, without the model's work?

    From `propose` in the engine to its drafts, less the seconds that the process's drafter took;
    through shared memory and through a socket in turns, for greedy rounds of so many sequences.
    `awake` asks at once again, as a round does whose drafts were made ahead; `asleep` after 20 ms,
    in which the process has gone to sleep. A cell has microseconds: the median, and the tenth and
    ninetieth percentile. Bar: 30 us for one sequence that finds the process awake, by memory.
    """
    asks = 20 if options.quick else options.asks
    with ExitStack() as stack:
        drafters = {way: _started(stack, reference=ref) for way, ref in WAYS.items()}
        for num_rows in map(int, options.rows):
            for pause_name, pause in PAUSES.items():
                taken = _asked(drafters, num_rows, asks, pause)
                for way, seconds in taken.items():
                    cuts = statistics.quantiles(seconds, n=10)
                    note(
                        report,
                        rows=num_rows,
                        process=pause_name,
                        way=way,
                        median_us=round(1e6 * statistics.median(seconds), 1),
                        p10_us=round(1e6 * cuts[0], 1),
                        p90_us=round(1e6 * cuts[-1], 1),
                    )
    report["bars"] = {"memory_us": 30.0}


def _started(stack: ExitStack, *, reference: bool) -> ProcessDrafter:
    options = ChildOptions(
        folder="",
        vocab_size=1000,
        num_distributions=64,
        num_slots=1,
        page_size=1,
        max_rows=1,
        max_logits=1,
        chunk=1,
        batch_size=16,
        force_reference=reference,
    )
    home = Home(timeout=10.0, command=(sys.executable, "-P", "-c", CODE))
    drafter = ProcessDrafter(options, home)
    stack.callback(drafter.shut_down)
    drafter.wait_ready()
    return drafter


def _asked(
    drafters: dict[str, ProcessDrafter], num_rows: int, asks: int, pause: float
) -> dict[str, list[float]]:
    """Seconds of each question; ways take turns, a tenth of the questions at a time."""
    taken: dict[str, list[float]] = {way: [] for way in drafters}
    for _ in range(10):
        for way, drafter in drafters.items():
            taken[way] += _turn(drafter, num_rows, max(asks // 10, 2), pause)
    return taken


def _turn(drafter: ProcessDrafter, num_rows: int, asks: int, pause: float) -> list[float]:
    texts = {seq_id: list(range(50)) for seq_id in range(num_rows)}
    for seq_id, text in texts.items():
        drafter.open(seq_id, text)
    last: dict[int, Outcome] = {}
    taken: list[float] = []
    for _ in range(asks + 5):
        began = perf_counter()
        while perf_counter() < began + pause:
            pass
        rows = [
            replace(row(seq_id, list(text), depth=K), last=last.get(seq_id))
            for seq_id, text in texts.items()
        ]
        before, began = drafter.stats().draft_seconds, perf_counter()
        drafts = drafter.propose(rows)
        seconds = perf_counter() - began
        taken.append(seconds - (drafter.stats().draft_seconds - before))
        for seq_id, draft in zip(texts, drafts, strict=True):
            last[seq_id] = Outcome(seq_id, draft, Verdict((0, 1), 9))
            texts[seq_id] += last[seq_id].tokens
    for seq_id in texts:
        drafter.close(seq_id)
    # The first ones tell the texts.
    return taken[5:]
