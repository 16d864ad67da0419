"""Is this checkout as fast as another commit was, and does it write the same?

    scripts/against COMMIT [--cells PATTERN,...] [--seconds N] [--threads N] [--json FILE]

COMMIT's sources are unpacked into a temporary folder, and a process a side (against_worker.py) runs
what it is told: whole rounds with a draft model and n-grams, rounds stage by stage, trees, heads,
plain decoding, batches, prompts, and single passes of 1, 4 and 16 rows. Tier A is the embedded
target, tier B the same inflated to 0.4 billion weights, which is made once and kept in the cache
folder, tier R the real model that scripts/real_model fetches, if it is there. The sides take turns
in blocks of old, new, new, old and its mirror image, never at once, so what drifts falls on both. A
block's ratio is old over new seconds, which is the speed of new over old; a cell's is the median of
blocks, with the bootstrap's 95 % interval (measure/frame.py).

Two processes of the same code may differ by some percent for as long as they live, by where their
memory lies. So a cell whose interval lies wholly below 0.98 is measured again by fresh processes,
and is slower only if it does so again. Exit status 1: some cell is slower, or runs no more.
Texts are greedy and of the same prompts; those that differ are named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from common import DRAFT, TARGET, real_folder
from options import Flag, read

from outrider.core.env import cache_folder
from outrider.plugins.measure.turns import (
    MIN_PAIRS,
    Neighbours,
    Ratio,
    provenance,
    ratio_of_medians,
)
from outrider_lab.bench.peers.compare import WeightsFolder, tier_folders
from outrider_lab.bench.peers.process import Peer, PeerError
from outrider_lab.bench.workload import load_prompts
from outrider_lab.measure.store import write_json

BAR = 0.98
ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("against_worker.py")
ANSWER_SECONDS = 600.0
# A turn of passes takes about so long, as texts do.
TURN_SECONDS = 0.03
MAX_TIMES = 2000
SIDES = ("old", "new")
MAX_SITTINGS = 2


@dataclass(frozen=True, slots=True)
class Cell:
    """What both sides run: `kind` is text, prompt or pass, as in against_worker.py."""

    name: str
    tier: str
    config: dict[str, Any]
    kind: str = "text"
    model: str = TARGET
    draft: str | None = None
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    texts: tuple[str, ...] = ()
    at_once: int = 1
    rows: int = 1
    context: int = 256
    role: str = "target"


@dataclass(slots=True)
class Found:
    """A cell's ratio of every sitting, and prompts after which the sides wrote differently."""

    cell: str
    ratios: list[Ratio] = field(default_factory=list[Ratio])
    differing: dict[int, tuple[Any, Any]] = field(default_factory=dict[int, tuple[Any, Any]])
    kernels: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    errors: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def seems_slower(self) -> bool:
        """In the newest sitting."""
        high = self.ratios[-1].high if self.ratios else None
        return high is not None and high < BAR

    @property
    def fails(self) -> bool:
        """Slower in every sitting there may be, or something that the new side no longer runs."""
        slower = self.seems_slower and len(self.ratios) == MAX_SITTINGS
        return slower or set(self.errors) == {"new"}

    def line(self) -> str:
        if self.errors:
            told = "; ".join(f"{side}: {error}" for side, error in self.errors.items())
            return f"{self.cell:24} not compared: {told}"
        sittings = ", again ".join(
            f"{r.value:6.3f} [{r.low:.3f}, {r.high:.3f}] {r.num_pairs:4} blocks"
            for r in self.ratios
            if r.low is not None and r.high is not None
        )
        verdict = "  SLOWER" if self.fails else ""
        texts = f"  other tokens: {len(self.differing)} prompts" if self.differing else ""
        return f"{self.cell:24} {sittings}{verdict}{texts}"


FLAGS = {
    "commit": Flag(kind=str, is_word=True, text="what to compare this checkout with"),
    "cells": Flag(
        kind=str,
        default="*",
        text="names between commas, as a-bf16/* (default: all); an unknown one lists them",
    ),
    "seconds": Flag(kind=float, default=900, text="to measure, models aside"),
    "threads": Flag(kind=int, default=0, text="of each side; 0: what it chooses"),
    "json": Flag(kind=Path | None, default=None, text="also write the results here"),
}


def main(words: Sequence[str] | None = None) -> int:
    options = read("scripts/against", __doc__, FLAGS, words)
    cells = chosen(options.cells, options.threads)
    with unpacked(options.commit) as (old, commit), Neighbours() as neighbours:
        found = compare({"old": old, "new": ROOT / "src"}, cells, options.seconds)
    for one in found:
        for piece, (before, after) in one.differing.items():
            print(f"{one.cell}, piece {piece}: tokens differ\n  old {before}\n  new {after}")
    report: dict[str, object] = {
        "benchmark": "against",
        "old": commit,
        "provenance": provenance(),
        "bar": BAR,
        "foreign_cpu_share": neighbours.share,
        "cells": [asdict(one) | {"fails": one.fails} for one in found],
    }
    if options.json:
        write_json(options.json, report)
    slow = [one.cell for one in found if one.fails]
    others = sum(bool(one.differing) for one in found)
    print(
        f"{len(found)} cells against {commit[:12]}: {len(slow)} fail, {others} write other tokens"
    )
    return 1 if slow else 0


def chosen(patterns: str, threads: int) -> list[Cell]:
    """The cells by `patterns`; leaves with their names if there are none."""
    names = patterns.split(",")
    cells = [cell for cell in all_cells(threads) if any(fnmatchcase(cell.name, p) for p in names)]
    if not cells:
        known = "\n  ".join(cell.name for cell in all_cells(threads))
        raise SystemExit(f"error: no cell is called {patterns}. They are:\n  {known}")
    return cells


def all_cells(threads: int) -> list[Cell]:
    """Neighbours have the same models where that can be, since models are loaded once in a row."""
    tiers = ("a", "b", "r") if real_folder("").is_dir() else ("a", "b")
    return [
        cell
        for tier in tiers
        for precision in ("bf16", "int8", "int4")
        for cell in _cells(tier, precision, threads)
    ]


def _cells(tier: str, precision: str, threads: int) -> Iterator[Cell]:
    quantise = "none" if precision == "bf16" else precision
    common = {"dtype": "bfloat16", "quantise": quantise, "threads": threads, "device": "cpu"}
    is_real = tier == "r"
    common |= {"context": 8192, "batch_size": 2} if is_real else {"context": 512, "batch_size": 16}
    prompts = (*load_prompts("humaneval")[:6], *load_prompts("gsm8k")[:2])
    params = {"max_tokens": 48 if tier == "a" else 16}

    def cell(name: str, kind: str = "text", drafter: str = "none", **rest: Any) -> Cell:
        options = {key: rest.pop(key) for key in ("tree_nodes", "fused_round") if key in rest}
        draft = DRAFT if drafter == "model" else None
        return Cell(
            name=f"{tier}-{precision}/{name}",
            tier=tier,
            config={**common, "drafter": drafter, **options},
            kind=kind,
            model=str(real_folder("")) if is_real else TARGET,
            draft=draft,
            params={**params, **rest.pop("params", {})},
            texts=prompts if kind == "text" else (),
            **rest,
        )

    yield cell("plain")
    for rows in (1, 4, 16):
        yield cell(f"pass-{rows}", "pass", rows=rows)
    yield cell("prompt", "prompt", rows=200)
    yield cell("ngram", drafter="ngram")
    if is_real:
        yield cell("copy", drafter="quantised-self")
        for rows in (1, 5):
            yield cell(f"long-pass-{rows}", "pass", rows=rows, context=7168)
        return
    yield cell("model", drafter="model")
    yield cell("draft-pass", "pass", drafter="model", role="draft")
    yield cell("tree-model", drafter="model", tree_nodes=12)
    if tier == "b" or precision == "int4":
        return
    yield cell("batch", drafter="model", at_once=8)
    yield cell("sampled", drafter="model", params={"temperature": 0.8, "seed": 7})
    yield cell("staged", drafter="model", fused_round=False)
    for head in ("eagle", "medusa", "mtp"):
        yield cell(head, drafter=head)
    yield cell("tree-eagle", drafter="eagle", tree_nodes=12)


@contextmanager
def unpacked(commit: str) -> Generator[tuple[Path, str]]:
    """The sources of `commit` in a temporary folder, and its id."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    known = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not known:
        raise SystemExit(f"error: {commit} is no commit here.\n  try: git fetch, or git log")
    with TemporaryDirectory(prefix="outrider-against-") as folder:
        archive = Path(folder) / "source.tar"
        with archive.open("wb") as file:
            words = ["git", "-C", str(ROOT), "archive", known, "src"]
            subprocess.run(words, stdout=file, check=True)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder) / "src", known


def compare(sources: dict[str, Path], cells: Sequence[Cell], seconds: float) -> list[Found]:
    """Every cell on the sources of "old" and "new", in at most about `seconds` a sitting; rows are
    printed as they are found."""
    if any(cell.tier == "b" for cell in cells):
        made = _tier_b()
        cells = [replace(c, model=made) if c.tier == "b" else c for c in cells]
    # A text of the others takes several times as long as one of tier A.
    shares = {cell.name: 1.0 if cell.tier == "a" else 3.0 for cell in cells}
    share = seconds / sum(shares.values())
    found = {cell.name: Found(cell.name) for cell in cells}
    waiting = list(cells)
    for _ in range(MAX_SITTINGS):
        with ExitStack() as stack:
            workers = {side: stack.enter_context(worker(sources[side])) for side in SIDES}
            for cell in waiting:
                _sit(workers, cell, share * shares[cell.name], found[cell.name])
                print(found[cell.name].line(), flush=True)
        waiting = [cell for cell in waiting if found[cell.name].seems_slower]
        if not waiting:
            break
    return list(found.values())


def _tier_b() -> str:
    """The folder of tier B, made once."""
    base = cache_folder()
    if base is None:
        raise SystemExit("error: tier B needs a cache folder.\n  try: --cells 'a-*'")

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    target, _ = tier_folders("b", WeightsFolder(base / "against", tell))
    return str(target)


@contextmanager
def worker(source: Path) -> Generator[Peer]:
    """A process over the package in `source`; compiled kernels are kept by their sources, so each
    side has its own."""
    environment = {
        **os.environ,  # noqa: TID251 - a process that differs in its sources alone
        "PYTHONPATH": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with TemporaryDirectory(prefix="outrider-against-") as folder:
        command = [sys.executable, str(WORKER)]
        log = Path(folder) / "log"
        side = Peer("a side", command, log, ANSWER_SECONDS, environment=environment)
        try:
            yield side
        finally:
            side.close(hurry=True)


def _sit(workers: dict[str, Peer], cell: Cell, seconds: float, found: Found) -> None:
    """One sitting of `cell`: both sides open it, warm up and take turns; writes into `found`."""
    times: int | None = None
    for side in SIDES:
        try:
            found.kernels[side] = workers[side].ask("open", cell=asdict(cell))["kernels"]
            warm = [workers[side].ask("run", piece=0, times=1)["seconds"] for _ in range(3)]
        except PeerError as error:
            found.errors[side] = str(error)
            continue
        if times is None:
            times = min(MAX_TIMES, max(1, round(TURN_SECONDS / max(min(warm), 1e-6))))
    if found.errors or times is None:
        return
    try:
        found.ratios.append(_blocks(workers, cell, times, seconds, found))
    except PeerError as error:
        found.errors["a side"] = str(error)


def _blocks(
    workers: dict[str, Peer], cell: Cell, times: int, seconds: float, found: Found
) -> Ratio:
    pieces = max(1, len(cell.texts) // cell.at_once)
    ratios: list[float] = []
    ends = perf_counter() + seconds
    while len(ratios) < MIN_PAIRS + 1 or perf_counter() < ends:
        piece = len(ratios) % pieces
        order = SIDES + SIDES[::-1] if len(ratios) % 2 == 0 else SIDES[::-1] + SIDES
        taken = dict.fromkeys(SIDES, 0.0)
        wrote: dict[str, Any] = {}
        for side in order:
            answer = workers[side].ask("run", piece=piece, times=times)
            taken[side] += answer["seconds"]
            wrote[side] = answer["ids"]
        ratios.append(taken["old"] / taken["new"])
        if wrote["old"] != wrote["new"]:
            found.differing.setdefault(piece, (wrote["old"], wrote["new"]))
    return ratio_of_medians(ratios, [1.0] * len(ratios))


if __name__ == "__main__":
    sys.exit(main())
