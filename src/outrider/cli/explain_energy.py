"""The topic `energy`: joules a token.

The formula is the planner's (planner/energy.py). The energies are orders of magnitude: 30 pJ a
byte is HBM2 (O'Connor et al. 2017, Fine-grained DRAM, 3.9 pJ a bit), 0.75 pJ an operation half of
an FP16 multiply and add (Horowitz 2014, Computing's energy problem).
"""

from __future__ import annotations

from dataclasses import replace

from outrider.cli.explain_machine import Device, model_of
from outrider.cli.explain_page import Explanation, Numbers, Step, fixed
from outrider.estimate.theory import RoundLaw, expected_tokens, prefix_products
from outrider.planner.devices import Power
from outrider.planner.energy import Energy, Joules, joules_a_token, round_joules
from outrider.planner.roofline import PassWork
from outrider.planner.rounds import Load

BYTE, OPERATION = 30e-12, 0.75e-12
_MOST_K = 64


def joules(numbers: Numbers, k: int) -> float:
    """A token, of one sequence in rounds of `k`; 0 is plain decoding."""
    law, seconds = _round(numbers, k)
    return joules_a_token(_energy(numbers), Load(), law, seconds, depth=k)


def _spent(numbers: Numbers, k: int) -> Joules:
    law, seconds = _round(numbers, k)
    return round_joules(_energy(numbers), Load(), law, seconds, depth=k)


def _round(numbers: Numbers, k: int) -> tuple[RoundLaw, float]:
    """What it brings, and its seconds."""
    device = Device.of(numbers)
    law = RoundLaw(tuple(prefix_products([numbers.alpha] * k)), 1.0 if k else 0.0, float(k))
    return law, device.seconds(1, k + 1) + k * numbers.c * device.seconds(1, 1)


def _energy(numbers: Numbers) -> Energy:
    draft = PassWork(model_of(numbers.c * numbers.parameters)) if numbers.c else None
    return Energy(Power(numbers.watts, BYTE, OPERATION), Device.of(numbers).work, draft)


def _sum_of(numbers: Numbers, k: int) -> str:
    spent = _spent(numbers, k)
    parts = f"{spent.static:.3f} + {spent.moving:.3f} + {spent.counting:.3f}"
    return f"({parts}) / {expected_tokens(numbers.alpha, k):.3f}"


def gain(numbers: Numbers, k: int) -> float:
    """Speed-up of one sequence."""
    return Device.of(numbers).gain(replace(numbers, k=k), 1)


def energy(numbers: Numbers) -> Explanation:
    k, plain = numbers.k, joules(numbers, 0)
    least = min(range(_MOST_K + 1), key=lambda k: joules(numbers, k))
    fastest = max(range(_MOST_K + 1), key=lambda k: gain(numbers, k))
    shown = sorted({0, 1, 2, 4, 8, 16, least, fastest, k})
    saved = plain / joules(numbers, k)
    return Explanation(
        title="Joules a token",
        idea="What a device draws while it waits is saved as time is. Bytes are saved because one "
        "reading of the weights serves several tokens. Arithmetic is not saved: every token that "
        "is drafted is computed, also those that are refused.",
        formula=(
            "J = (P T_round + e_byte bytes + e_flop operations) / E",
            f"here e_byte = {BYTE * 1e12:g} pJ, e_flop = {OPERATION * 1e12:g} pJ",
        ),
        steps=(
            Step("J(0)", _sum_of(numbers, 0), plain, "J a token"),
            Step(f"J({k})", _sum_of(numbers, k), joules(numbers, k), "J a token"),
            Step(f"J(0) / J({k})", f"{plain:.3f} / {joules(numbers, k):.3f}", saved),
        ),
        header=("K", "J a token", "times less", "S"),
        rows=tuple(
            (str(n), *fixed(joules(numbers, n), plain / joules(numbers, n), gain(numbers, n)))
            for n in shown
        ),
        result=f"Fastest at K = {fastest}, least energy at K = {least}: refused tokens cost energy "
        "even where they cost no time.",
        more=("docs/theory.md, section 12",),
    )
