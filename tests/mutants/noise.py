"""Bugs in random numbers: the generator, its keys, and drawing from weights."""

from __future__ import annotations

from checks.noise import (
    check_inverse_cdf_edges,
    check_keys_do_not_meet,
    check_picks_and_coins_share_numbers,
    check_positions_are_absolute,
    check_published_vectors,
)
from checks.noise_keys import check_no_number_is_used_twice
from checks.runs import engine_law
from mutants.planting import Mutant

NOISE = "outrider.core.noise"
SEQUENCE = "outrider.core.sequence"

MUTANTS = (
    Mutant(
        "start left out of the key",
        NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (node + 1, 0, self.sample, int(role))",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "node left out of the key",
        NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (0, start, self.sample, int(role))",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "role left out of the key",
        NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (node + 1, start, self.sample, 0)",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "sample left out of the key",
        NOISE,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (node + 1, start, 0, int(role))",
        check_keys_do_not_meet,
    ),
    Mutant(
        "upper half of the seed ignored",
        NOISE,
        "(seed >> 32) & _MASK",
        "0 & _MASK",
        check_keys_do_not_meet,
    ),
    Mutant(
        "rounds keyed by the prompt",
        SEQUENCE,
        "self.sample, len(self.tokens))",
        "self.sample, self.prompt_length)",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "rounds of the engine keyed by the prompt",
        SEQUENCE,
        "self.sample, len(self.tokens))",
        "self.sample, self.prompt_length)",
        engine_law,
    ),
    Mutant(
        "places counted from the round",
        NOISE,
        "self._uniform(self.start + depth, ROOT, Role.POSITION)",
        "self._uniform(depth, ROOT, Role.POSITION)",
        check_positions_are_absolute,
    ),
    Mutant("a round too few", NOISE, "range(10)", "range(9)", check_published_vectors),
    Mutant(
        "halves of a word swapped",
        NOISE,
        "(c0 << 21) | (c1 >> 11)",
        "(c1 << 21) | (c0 >> 11)",
        check_published_vectors,
    ),
    Mutant("zero weights drawn", NOISE, "right=True", "right=False", check_inverse_cdf_edges),
    Mutant(
        "rounding up to the total",
        NOISE,
        "min(uniform * total, math.nextafter(total, 0.0))",
        "uniform * total",
        check_inverse_cdf_edges,
    ),
    Mutant(
        "coins toss the complement",
        NOISE,
        "self._uniform(self.start, node, role) < probability",
        "self._uniform(self.start, node, role) > 1 - probability",
        check_picks_and_coins_share_numbers,
    ),
)
