"""What the topics of `outrider explain` compute: values by the names that explain.yaml has in
braces, and the rows of a table. The formulas are those of estimate/theory.py and of the planner.

The energies are orders of magnitude: 30 pJ a byte is HBM2 (O'Connor et al. 2017, Fine-grained DRAM,
3.9 pJ a bit), 0.75 pJ an operation half of an FP16 multiply and add (Horowitz 2014, Computing's
energy problem).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from outrider.bench.reference import AheadPrediction, ahead_predictions
from outrider.cli.run_options import ExplainOptions
from outrider.cli.simulate_setup import spec_named
from outrider.core.spec import ModelSpec
from outrider.estimate.theory import (
    AheadTimes,
    Misses,
    RoundStats,
    acceptance_rate,
    chances,
    expected_hit_rate,
    expected_tokens,
    geometric,
    optimal,
    prefix_products,
    speed_up,
    uniform,
)
from outrider.planner import rounds
from outrider.planner.devices import DeviceSheet, Power
from outrider.planner.overlap import crossover_batch, hide_limit
from outrider.planner.roofline import (
    Energy,
    Joules,
    PassWork,
    context_seconds,
    pass_seconds,
    reading_seconds,
    ridge_rows,
    round_joules,
    row_seconds,
)
from outrider.planner.rounds import DecodeLoad

Worked: TypeAlias = tuple[dict[str, Any], Iterable[Sequence[object]]]

_MOST_K = 64


def _sum_of(alpha: float, k: int) -> str:
    return f"{k} + 1" if alpha == 1 else f"(1 - {alpha:g}^{k + 1}) / (1 - {alpha:g})"


def _expected(given: ExplainOptions) -> dict[str, Any]:
    alpha, k = given.alpha, given.k
    return {"sum": _sum_of(alpha, k), "E": expected_tokens(alpha, k)}


def _verdict(gain: float) -> str:
    if gain > 1:
        return f"{gain:.2f} times as fast as plain decoding."
    return f"{gain:.2f} times the speed of plain decoding: speculation loses here."


def acceptance(given: ExplainOptions) -> Worked:
    table = [(n, n + 1, chance) for n, chance in enumerate(chances(given.alpha, given.k))]
    return _expected(given) | {"rate": acceptance_rate(given.alpha, given.k)}, table


def round_time(given: ExplainOptions, k: int) -> float:
    """In plain passes; without a draft nothing is verified."""
    return k * given.c + given.verify if k else 1.0


def gain(given: ExplainOptions, k: int) -> float:
    return expected_tokens(given.alpha, k) / round_time(given, k)


def one_round_gain(given: ExplainOptions) -> Worked:
    found, time = gain(given, given.k), round_time(given, given.k)
    return _expected(given) | {"T": time, "S": found, "verdict": _verdict(found)}, ()


def best_k(given: ExplainOptions) -> Worked:
    best = max(range(_MOST_K + 1), key=lambda k: gain(given, k))
    stride = 1 + best // 12
    shown = sorted({best, *range(0, min(best + 3 * stride, _MOST_K) + 1, stride)})

    def row(k: int) -> tuple[object, ...]:
        time = round_time(given, k)
        price = round_time(given, k + 1) - time
        more = f"{given.alpha ** (k + 1) / price:.3f}" if price > 0 else "free"
        return (k, expected_tokens(given.alpha, k), time, gain(given, k), more)

    verdict = _verdict(gain(given, best)) if best else "So do not speculate."
    return {"best": best, "S": gain(given, best), "verdict": verdict}, map(row, shown)


WORDS = ("the", "cat", "sat", "on", "mat")
DRAFT = ("cat", "sat", "mat", "on")
# The drafter's distributions of the drafted words, then the target's, which has one more.
Q = (
    (0.05, 0.40, 0.10, 0.05, 0.40),
    (0.10, 0.05, 0.60, 0.15, 0.10),
    (0.07, 0.08, 0.15, 0.20, 0.50),
    (0.30, 0.10, 0.20, 0.35, 0.05),
)
P = (
    (0.02, 0.45, 0.08, 0.05, 0.40),
    (0.07, 0.05, 0.48, 0.25, 0.15),
    (0.11, 0.10, 0.09, 0.45, 0.25),
    (0.25, 0.10, 0.15, 0.45, 0.05),
    (0.40, 0.05, 0.05, 0.05, 0.45),
)
# One uniform number a word that is looked at, and one for the word after the last accepted.
COINS = (0.91, 0.35, 0.72)
LAST = 0.60


def residual(p: Sequence[float], q: Sequence[float]) -> tuple[float, ...]:
    """What the target has above the drafter, as a distribution."""
    above = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return tuple(one / sum(above) for one in above)


def walk(coins: Sequence[float], last: float) -> tuple[int, str]:
    """How many words the rule accepts with these uniform numbers, and the last one of the round."""
    for position, word in enumerate(DRAFT):
        p, q = P[position], Q[position]
        index = WORDS.index(word)
        if coins[position] >= p[index] / q[index]:
            return position, _drawn(residual(p, q), last)
    return len(DRAFT), _drawn(P[-1], last)


def _drawn(probs: Sequence[float], number: float) -> str:
    """The first word whose share of the distribution, with all before it, lies above `number`."""
    total = 0.0
    for word, share in zip(WORDS, probs, strict=True):
        total += share
        if number < total:
            return word
    return max(zip(probs, WORDS, strict=True))[1]


def by_hand(_: ExplainOptions) -> Worked:
    num_kept, last = walk(COINS, LAST)
    p, q = P[num_kept], Q[num_kept]
    above = [a - b for a, b in zip(p, q, strict=True) if a > b]
    index = WORDS.index(last)
    share = residual(p, q)[index]
    values = {
        "draft": " ".join(DRAFT),
        "above": " + ".join(f"{one:.2f}" for one in above),
        "last": {"word": last, "p": p[index], "q": q[index], "residual": share},
        "mass": sum(above),
        "kept": num_kept,
        "emitted": " ".join((*DRAFT[:num_kept], last)),
        "num_emitted": num_kept + 1,
    }

    def row(position: int) -> tuple[object, ...]:
        index = WORDS.index(DRAFT[position])
        p, q = P[position][index], Q[position][index]
        seen = position <= num_kept
        decision = ("accepted" if position < num_kept else "refused") if seen else "never looked at"
        coin = f"{COINS[position]:.2f}" if seen else ""
        return (position + 1, DRAFT[position], p, q, p / q, coin, decision)

    return values, map(row, range(len(DRAFT)))


_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_ROWS = (1, 5, 64, 256, 1024)
BYTE, OPERATION = 30e-12, 0.75e-12


def model_of(parameters: float) -> ModelSpec:
    """A model of so many billion parameters, shaped as Llama-2-7B, whose keys and values of a token
    take 0.5 MiB beside 14 GB. Models of other sizes have layers in proportion."""
    like = spec_named("llama2-7b")
    return replace(
        like,
        name=f"{parameters:g}B",
        num_layers=max(1, round(like.num_layers * parameters / 7)),
        num_parameters=max(1, round(parameters * 1e9)),
    )


class Device:
    """The given model on the given device, which reaches its peaks, takes rows one by one, and
    turns sharply from one limit to the other. A pass of the drafter takes its share of a plain
    one. Times are milliseconds."""

    def __init__(self, given: ExplainOptions) -> None:
        self.given = given
        self.work = PassWork(model_of(given.parameters))
        self.sheet = DeviceSheet(
            name="device",
            bandwidth=given.bandwidth * 1e9,
            flops={"bfloat16": given.tflops * 1e12},
            memory_bytes=0,
            row_tile=1,
            bandwidth_share=1.0,
            flops_share=1.0,
            p_norm=math.inf,
        )
        # Reading the weights, the products of a row, and the rows at which both take as long.
        self.reading = 1e3 * reading_seconds(self.work, self.sheet, 1)
        self.row = 1e3 * row_seconds(self.work, self.sheet)
        self.ridge = ridge_rows(self.work, self.sheet)

    def takes(self, batch: int, rows_each: int) -> float:
        """A pass over `rows_each` rows of each of `batch` sequences."""
        load = DecodeLoad(batch, self.given.context)
        return 1e3 * pass_seconds(self.work, self.sheet, load, rows_each)

    def round(self, batch: int, k: int) -> float:
        return k * self.given.c * self.takes(batch, 1) + self.takes(batch, k + 1)

    def gain(self, batch: int, k: int) -> float:
        """Speed-up of `batch` sequences."""
        expected = expected_tokens(self.given.alpha, k)
        return expected * self.takes(batch, 1) / self.round(batch, k)

    def worked(self, rows_each: int) -> str:
        """A pass of the given batch: what it waits for, and what its contexts take."""
        size, context = self.given.batch, self.given.context
        reading, attending = context_seconds(self.work, self.sheet)
        contexts = context * size * (reading + rows_each * attending)
        waits = f"max({self.reading:.3f}, {size * rows_each} x {self.row:.3f})"
        return f"{waits} + {1e3 * contexts:.3f}"

    def break_even(self) -> int | None:
        """The smallest batch at which speculation loses; None if it never does."""
        # Beyond the ridge every ratio of times stays as it is.
        most = max(2, 2 * round(self.ridge))
        return rounds.break_even(lambda batch: self.gain(batch, self.given.k), least=1, most=most)

    def spent(self, k: int) -> Joules:
        """By one sequence in a round of `k`; 0 is plain decoding."""
        given = self.given
        kept = tuple(prefix_products([given.alpha] * k))
        stats = RoundStats(kept, 1.0 if k else 0.0, float(k))
        draft = PassWork(model_of(given.c * given.parameters)) if given.c else None
        energy = Energy(Power(given.watts, BYTE, OPERATION), self.work, draft)
        return round_joules(energy, DecodeLoad(), stats, 1e-3 * self.round(1, k), depth=k)

    def joules(self, k: int) -> float:
        """A token."""
        return self.spent(k).total / expected_tokens(self.given.alpha, k)


def roofline(given: ExplainOptions) -> Worked:
    device = Device(given)

    def pass_over(num_rows: int) -> tuple[object, ...]:
        reading, computing = device.reading, num_rows * device.row
        bound = "memory" if reading >= computing else "arithmetic"
        return (num_rows, reading, computing, max(reading, computing), bound)

    share = 100 * min(1, device.row / device.reading)
    return {"device": device, "twice": 2 * given.parameters, "share": share}, map(pass_over, _ROWS)


def batch(given: ExplainOptions) -> Worked:
    device, size, each = Device(given), given.batch, given.k + 1
    limit = device.break_even()
    loses = f"Speculation loses from a batch of {limit} on."

    def row(size: int) -> tuple[object, ...]:
        ratio = device.takes(size, each) / device.takes(size, 1)
        return (size, size * each, ratio, device.gain(size, given.k))

    values = {
        "plain": device.takes(size, 1),
        "plain_worked": device.worked(1),
        "verifying": device.takes(size, each),
        "verifying_worked": device.worked(each),
        "round": device.round(size, given.k),
        "S": device.gain(size, given.k),
        "verdict": "Speculation gains at every batch here." if limit is None else loses,
    }
    return values, map(row, _BATCHES)


def energy(given: ExplainOptions) -> Worked:
    device, k, ks = Device(given), given.k, range(_MOST_K + 1)
    least, fastest = min(ks, key=device.joules), max(ks, key=lambda k: device.gain(1, k))
    plain, own = device.joules(0), device.joules(k)
    values = {
        "joules": {"plain": plain, "own": own, "saved": plain / own},
        "spent": {"plain": device.spent(0), "own": device.spent(k)},
        "E": {"plain": 1.0, "own": expected_tokens(given.alpha, k)},
        "best": {"joules": least, "speed": fastest},
        "cost": {"byte": BYTE * 1e12, "operation": OPERATION * 1e12},
    }
    shown = sorted({0, 1, 2, 4, 8, 16, least, fastest, k})
    return values, (
        (n, device.joules(n), plain / device.joules(n), device.gain(1, n)) for n in shown
    )


_SHARES = (0.0, 0.5, 0.7, 0.9, 1.0)


def ahead(given: ExplainOptions) -> Worked:
    expected, draft = expected_tokens(given.alpha, given.k), given.k * given.c
    in_turns = speed_up(expected, draft)
    drafting = AheadTimes(
        given.p_hit, expected, expected, ahead=draft, fallback=draft, batch=given.batch
    )
    # Nothing drafted after a miss costs no time and gives the target's own token alone.
    plain = replace(drafting, tokens_miss=1.0, fallback=0.0)
    most, h = hide_limit(1.0, given.c), given.p_hit**given.batch
    fits = "and all of it fits beside one" if draft <= 1 else "which is more than fits beside it"
    values = {
        "E": expected,
        "T": draft,
        "one_more_T": 1 + draft,
        "h": h,
        "missed": 1 - h,
        "ahead": drafting,
        "longest": max(1.0, draft),
        "in_turns": in_turns,
        "over": drafting.speed / in_turns,
        "hidden": f"{fits}{'.' if most is None else f'; up to K = {most} does.'}",
        "better": "drafting" if drafting.speed >= plain.speed else "plain decoding",
        "turn": _turn(given, drafting, plain),
    }

    def row(share: float) -> tuple[object, ...]:
        speed, bare = replace(drafting, p_hit=share).speed, replace(plain, p_hit=share).speed
        return (share, speed, bare, speed / in_turns)

    return values, map(row, _SHARES)


def _turn(given: ExplainOptions, drafting: AheadTimes, plain: AheadTimes) -> str:
    """From which batch on plain decoding after a miss is better, where all work ahead is hidden."""
    if drafting.ahead > 1 or given.p_hit in (0, 1):
        return ""
    turn = crossover_batch(given.p_hit, drafting.tokens, plain.tokens, drafting.fallback)
    if math.isinf(turn):
        return " (as in any batch)"
    return f" (plain decoding from a batch of {max(1, math.ceil(turn))} on)"


def fan_out(given: ExplainOptions) -> Worked:
    misses, likely = Misses(), chances(given.alpha, given.k)
    curve = misses.recovered
    exact = geometric(given.branches, likely, curve.power)
    whole, even = optimal(given.branches, likely, misses), uniform(given.branches, len(likely))
    found, alike = (expected_hit_rate(counts, likely, misses) for counts in (whole, even))
    values = {"scale": curve.scale, "power": curve.power, "found": found, "alike": alike}
    table = zip(range(len(likely)), likely, exact, whole, even, strict=True)
    return {**values, "points": 100 * (found - alike)}, table


def published(_: ExplainOptions) -> Worked:
    found = ahead_predictions()
    first = found[0]
    excess = [100 * (one.predicted / one.by_formula - 1) for one in found]
    values = {
        "first": first,
        "least": min(excess),
        "most": max(excess),
        "explained": sum(one.follows for one in found),
        "num": len(found),
    }

    def row(one: AheadPrediction) -> tuple[object, ...]:
        rounding = "{:.3f}-{:.3f}".format(*one.rounding)
        own = (one.k, one.draft_time, one.by_formula, one.predicted, one.achieved)
        return (*own, one.implied, rounding)

    return values, map(row, found)


WORKED: Mapping[str, Callable[[ExplainOptions], Worked]] = {
    "round": by_hand,
    "acceptance": acceptance,
    "speed-up": one_round_gain,
    "best-k": best_k,
    "roofline": roofline,
    "batch": batch,
    "ssd": ahead,
    "fan-out": fan_out,
    "energy": energy,
    "published": published,
}
