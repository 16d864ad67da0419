"""Gates: `python studies/gate.py [--output FILE]`, what CI runs after the tests."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TypeAlias

import torch
from common import TARGET, Report, fill, first_prompts, step_pass, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve

FORWARD_BAND = (3.0, 60.0)
# More than K + 1 tokens a pass cannot be.
SPECULATION_BAND = (0.9, 5.0)
K = 4
ROWS = (1, 9)
CONTEXT = 256
NUM_PASSES = 4
NUM_TOKENS = 48
NUM_PROMPTS = 3

# Does the work of turn number n and says how much of it that was: tokens, or passes.
Side: TypeAlias = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Gate:
    """`low` <= rate of `ours` / rate of `other` <= `high`, by the median of so many turns.
    `refusal` says why the ratio cannot be taken here; such a gate is shut for nobody."""

    name: str
    low: float
    high: float
    ours: Side
    other: Side
    num_turns: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a gate's record says; the ratio is None where the gate was refused."""

    name: str
    ratio: float | None
    low: float
    high: float
    num_turns: int
    holds: bool
    refusal: str | None

    def line(self) -> str:
        """For people."""
        if self.ratio is None:
            return f"{self.name}: refused, {self.refusal}"
        return (
            f"{self.name}: {self.ratio:.2f}, band {self.low:g} to {self.high:g}, "
            f"{self.num_turns} turns: {'ok' if self.holds else 'OUTSIDE'}"
        )


def judge(
    gate: Gate, *, num_attempts: int = 3, clock: Callable[[], float] = perf_counter
) -> Finding:
    """The gate's turns after one untimed, by `clock`, which gives seconds. If their median lies
    outside the band, as many are taken again, up to `num_attempts` times, and the median is that of
    all turns so far: a slow minute passes, a slow side stays."""
    ratios: list[float] = []

    def found(ratio: float | None, holds: bool) -> Finding:
        shown = None if ratio is None else round(ratio, 3)
        return Finding(gate.name, shown, gate.low, gate.high, len(ratios), holds, gate.refusal)

    if gate.refusal is not None:
        return found(None, True)
    _turn(gate, 0, clock)
    ratio, holds = 0.0, False
    for _ in range(num_attempts):
        ratios += [_turn(gate, len(ratios) + i, clock) for i in range(gate.num_turns)]
        ratio = statistics.median(ratios)
        holds = gate.low <= ratio <= gate.high
        if holds:
            break
    return found(ratio, holds)


def _turn(gate: Gate, number: int, clock: Callable[[], float]) -> float:
    """One ratio of rates; who begins changes from turn to turn."""
    sides = (gate.ours, gate.other)
    rates = [0.0, 0.0]
    for place in (0, 1) if number % 2 == 0 else (1, 0):
        started = clock()
        amount = sides[place](number)
        rates[place] = amount / (clock() - started)
    return rates[0] / rates[1]


@study()
def gate(options: Options, report: Report) -> bool:
    """Two ratios that a change must not spoil, each with its band; CI runs this after the tests.

    - The native forward against the reference forward: a pass of the embedded target over 1 row and
      over 9, at context 256. Without a compiler it is refused, and says so.
    - Speculation against plain decoding: tokens a second of the embedded pair, greedy, K = 4. Their
      texts must be equal.

    Both sides take turns on one thread each and the median of many turns counts, so a busy machine
    slows both alike. The bands leave room for other machines, and have an upper edge too, since a
    side that is too fast has left out work; `studies/pages/gates.md` has what was measured. Exit
    code 1: a ratio is outside its band.
    """
    # A pool of two whose second core is busy makes the reference ten times slower.
    torch.set_num_threads(1)
    findings = [judge(one, num_attempts=1 if options.quick else 3) for one in gates()]
    for finding in findings:
        print(finding.line())
    report["gates"] = [asdict(finding) for finding in findings]
    report["holds"] = all(finding.holds for finding in findings)
    return report["holds"]


def gates() -> Iterator[Gate]:
    """Passes over each number of rows, then greedy texts with a draft and without."""
    native, reference = embedded(force_reference=False), embedded(force_reference=True)
    choice = native.kernels.choices[0]
    refusal = None if choice.name.startswith("native") else "; ".join(choice.refusals)
    for rows in ROWS:
        name = f"native / reference forward, {rows} row{'s' * (rows > 1)}"
        yield Gate(name, *FORWARD_BAND, passes(native, rows), passes(reference, rows), 15, refusal)
    drafted, plain = texts_of({"model": K, "none": 0})
    yield Gate(f"speculation / plain decoding, K = {K}", *SPECULATION_BAND, drafted, plain, 9)


def embedded(*, force_reference: bool) -> LlamaModel:
    """The embedded target, with a sequence of CONTEXT tokens in memory."""
    capacity = ModelCapacity(num_slots=CONTEXT + 256, max_logits=max(ROWS))
    options = LoadOptions(
        capacity=capacity, device="cpu", threads=1, force_reference=force_reference
    )
    model = load_model(resolve(TARGET), options)
    assert isinstance(model, LlamaModel)
    fill(model, 0, CONTEXT)
    return model


def passes(model: LlamaModel, rows: int) -> Side:
    """Passes over a chain of so many rows, all of whose logits are wanted; nothing is kept."""
    once = step_pass(model, 0, rows)

    def run(turn: int) -> int:
        del turn
        for _ in range(NUM_PASSES):
            once()
        return NUM_PASSES

    return run


def texts_of(drafters: dict[str, int]) -> list[Side]:
    """Greedy texts of the same prompts by each drafter with its K; all must write the same."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    prompts = first_prompts(NUM_PROMPTS)
    texts: dict[str, tuple[int, ...]] = {}

    def side(drafter: str, k: int) -> Side:
        llm = LLM(config=EngineConfig(drafter=drafter, k=k, device="cpu", threads=1))

        def run(turn: int) -> int:
            prompt = prompts[turn % len(prompts)]
            ids = llm.generate(prompt, params)[0].token_ids
            if texts.setdefault(prompt, ids) != ids:
                raise SystemExit(f"speculation changed a greedy text: {prompt[:60]!r}")
            return len(ids)

        return run

    return [side(drafter, k) for drafter, k in drafters.items()]


if __name__ == "__main__":
    sys.exit(gate.main(sys.argv[1:]))
