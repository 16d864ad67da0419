"""What the studies of this folder share: words, models of two tiers, turns, the report.

A study is a function with @study: its docstring is the question, its name that of the result files,
and run.py starts it.

Tier A is the embedded target, which fits into a cache. Tier B is the same target inflated to 0.4
billion weights, which come from memory: `--model FOLDER`, or made in a temporary folder (0.8 GB,
some seconds). `--quick` shrinks everything, tier B included, to see that a benchmark runs; its
figures mean nothing.

Shapes:  M = logits rows, V = vocabulary.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeVar

import torch
from options import Flag, Options, read

from outrider import LLM
from outrider.core.env import cache_folder
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.kernels.operators import Choice, Kernels
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve
from outrider.plugins.measure.turns import Neighbours, provenance, rotated
from outrider_lab.bench.workload import WORKLOADS, load_prompts
from outrider_lab.measure.store import write_json
from outrider_lab.models.inflate import ModelShape, shape_called
from outrider_lab.models.inflate_files import write_inflated

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Report = dict[str, Any]
Run = Callable[[Options, Report], bool | None]

TARGET, DRAFT = "outrider/embedded", "outrider/embedded-draft"
SHAPE_B = "0.4b"
QUICK_SHAPE = ModelShape(256, 9, 4, 2, 704)
NEEDS = DraftNeeds()
CHUNK = 128


# Flags that every study has, and one more of those that use tier B.
FLAGS: Mapping[str, Flag] = {
    "output": Flag(kind=Path | None, default=None, text="also write the result here"),
    "quick": Flag(kind=bool, default=False, text="seconds, to see that it runs"),
}
TIER_FLAGS: Mapping[str, Flag] = {
    **FLAGS,
    "model": Flag(
        kind=Path | None,
        default=None,
        text="tier B, as `outrider models inflate` writes it; made anew if not given",
    ),
}


@dataclass(frozen=True, slots=True)
class Study:
    """`run` fills a report from options, and returns False if what must hold does not."""

    run: Run
    tiers: bool
    flags: Mapping[str, Any]

    def main(self, words: Sequence[str]) -> int:
        """The report is written to `--output` and printed as the last line."""
        name = self.run.__name__
        flags = {**(TIER_FLAGS if self.tiers else FLAGS), **self.flags}
        options = read(f"run.py {name}", inspect.getdoc(self.run), flags, words)
        origin = provenance() | {"command": told_command(options)}
        report: Report = {"benchmark": name, "provenance": origin, "quick": options.quick}
        with Neighbours() as neighbours:
            holds = self.run(options, report)
        report["foreign_cpu_share"] = neighbours.share
        if options.output:
            write_json(options.output, report)
        print(json.dumps(report))
        return int(holds is False)


def study(*, tiers: bool = False, **flags: Any) -> Callable[[Run], Study]:
    """A study with these flags: by name a default, or choices of which the first is the default;
    with `tiers`, of a folder of tier B too."""
    return lambda run: Study(run, tiers, flags)


def note(report: Report, **cell: Any) -> None:
    """Add a row to the study's table, and print what of it is short."""
    report.setdefault("cells", []).append(cell)
    short = ((name, value) for name, value in cell.items() if not isinstance(value, dict | list))
    print("  ".join(f"{name} {value}" for name, value in short), flush=True)


def told_command(options: Options) -> str:
    """What was run, without the places of files that mean nothing elsewhere."""
    places = {str(options.output): "FILE", str(getattr(options, "model", None)): "FOLDER"}

    def told(word: str) -> str:
        return places.get(word) or (Path(word).name if Path(word).is_absolute() else word)

    return " ".join([Path(sys.argv[0]).name, *map(told, sys.argv[1:])])


def cells_before(output: Path | None) -> list[dict[str, Any]]:
    """The cells that an earlier run wrote to `output`."""
    if output is None or not output.exists():
        return []
    return json.loads(output.read_text())["cells"]


def real_folder(named: str) -> Path:
    """The folder of tier R, a real model, by default where scripts/real_model writes it."""
    usual = (cache_folder() or Path()) / "real" / "SmolLM2-135M-Instruct"
    return Path(named) if named else usual


@contextmanager
def tier_folders(options: Options) -> Generator[dict[str, Path]]:
    """The folders of tiers "a" and "b"."""
    embedded = resolve(TARGET)
    if options.model is not None:
        yield {"a": embedded, "b": resolve(str(options.model))}
        return
    with TemporaryDirectory(prefix="outrider-tier-b-") as folder:
        shape = QUICK_SHAPE if options.quick else shape_called(SHAPE_B)
        for _ in write_inflated(embedded, shape, Path(folder), torch.bfloat16):
            pass
        yield {"a": embedded, "b": Path(folder)}


def kernel_names(kernels: Kernels) -> dict[str, str]:
    """What each operator got, and the number of threads."""
    choices: list[Choice] = [*kernels.choices, *([kernels.threads] if kernels.threads else [])]
    return {choice.op: f"{choice.name} {choice.kind}".strip() for choice in choices}


def target_of(llm: LLM) -> LlamaModel:
    target = llm.models["target"]
    assert isinstance(target, LlamaModel)
    return target


def draft_of(llm: LLM) -> LlamaModel:
    draft = llm.models["draft"]
    assert isinstance(draft, LlamaModel)
    return draft


def fill(model: CausalLM, seq_id: int, context: int) -> None:
    """Open a sequence and commit `context` tokens to it."""
    model.state.open(seq_id, ())
    ids = [(7 * i) % model.spec.vocab_size for i in range(context)]
    for start in range(0, context, CHUNK):
        part = ids[start : start + CHUNK]
        model.step([StepRow.chain(seq_id, part, logits_from=len(part))], NEEDS)
        model.state.commit({seq_id: range(len(part))})


def step_pass(model: LlamaModel, seq_id: int, rows: int) -> Callable[[], object]:
    """A pass over a chain of so many rows as the engine's stages ask for it; nothing is kept."""
    row = _row(model, seq_id, rows)

    def run() -> None:
        model.step([row], NEEDS)
        model.state.commit({seq_id: ()})

    return run


def bare_pass(model: LlamaModel, seq_id: int, rows: int) -> Callable[[], object]:
    """The same pass as one native call on a plan that is made now; without native kernels, a step
    as above."""
    forward = model.forward()
    if forward is None:
        return step_pass(model, seq_id, rows)
    plan = model.state.plan([_row(model, seq_id, rows)])
    # The plan's slots stay the sequence's own, as dead space.
    model.state.commit({seq_id: ()})
    wanted_M = torch.arange(rows, dtype=torch.int32)
    logits_MV = torch.empty(rows, model.spec.vocab_size)
    return lambda: forward(plan, wanted_M, logits_MV)


def _row(model: LlamaModel, seq_id: int, rows: int) -> StepRow:
    return StepRow.chain(seq_id, [(11 * i) % model.spec.vocab_size for i in range(rows)])


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    """So many calls as one turn, after one that warms caches which others emptied; a turn's
    seconds, over `times` + 1, are then close to a warm call's."""

    def run() -> None:
        for _ in range(times + 1):
            call()

    return run


def in_turns(
    contestants: Mapping[K, Callable[[], T]], repeats: int, *, warm_ups: int = 1
) -> dict[K, list[T]]:
    """What each contestant returned in every turn after the warm-ups; the order rotates."""
    found: dict[K, list[T]] = {name: [] for name in contestants}
    for repeat in range(repeats + warm_ups):
        for name in rotated(list(contestants), repeat):
            answer = contestants[name]()
            if repeat >= warm_ups:
                found[name].append(answer)
    return found


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """The seconds of a call."""

    def run() -> float:
        started = perf_counter()
        call()
        return perf_counter() - started

    return run


def take_turns(contestants: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, list[float]]:
    """Seconds of every turn but the first, which warms up."""
    return in_turns({name: timed(call) for name, call in contestants.items()}, repeats)


def first_prompts(number: int | None) -> list[str]:
    """The first prompts of each workload, or all of them."""
    return [prompt for name in WORKLOADS for prompt in load_prompts(name)[:number]]


def medians(seconds: Mapping[K, Sequence[float]]) -> dict[K, float]:
    return {name: statistics.median(found) for name, found in seconds.items()}
