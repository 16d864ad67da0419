"""Bugs in random numbers: the generator, its keys, and drawing from weights."""

from __future__ import annotations

from checks.rng import (
    check_inverse_cdf_edges,
    check_keys_do_not_meet,
    check_no_number_is_used_twice,
    check_picks_and_coins_share_numbers,
    check_positions_are_absolute,
    check_published_vectors,
    check_race_frequencies,
    check_race_numbers,
    check_races,
)
from checks.runs import engine_distribution
from mutants.planting import Mutant

NOISE = "outrider.core.rng"
PHILOX = "outrider.core.philox"
SEQUENCE = "outrider.engine.round"

MUTANTS = (
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
        PHILOX,
        "(seed >> 32) & _MASK",
        "0 & _MASK",
        check_keys_do_not_meet,
    ),
    Mutant(
        "rounds keyed by the prompt",
        SEQUENCE,
        "self.rng_at(len(self.tokens))",
        "self.rng_at(self.prompt_length)",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "rounds of the engine keyed by the prompt",
        SEQUENCE,
        "self.rng_at(len(self.tokens))",
        "self.rng_at(self.prompt_length)",
        engine_distribution,
    ),
    Mutant(
        "places counted from the round",
        NOISE,
        "self._uniform(self.start + depth, ROOT, Role.POSITION)",
        "self._uniform(depth, ROOT, Role.POSITION)",
        check_positions_are_absolute,
    ),
    Mutant("a round too few", PHILOX, "range(10)", "range(9)", check_published_vectors),
    Mutant(
        "halves of a word swapped",
        PHILOX,
        "(first << 21) | (second >> 11)",
        "(second << 21) | (first >> 11)",
        check_published_vectors,
    ),
    Mutant(
        "logarithm of the inverse",
        PHILOX,
        "_LN_2 - 2 * s * series",
        "_LN_2 + 2 * s * series",
        check_race_numbers,
    ),
    Mutant(
        "race numbers with room for none",
        PHILOX,
        "(second >> 12)) + 0.5)",
        "(second >> 12)) + 0.0)",
        check_race_numbers,
    ),
    Mutant(
        "races counted from the round",
        NOISE,
        "self._race_numbers(part, self.start + depth)",
        "self._race_numbers(part, depth)",
        check_races,
    ),
    Mutant(
        "all ids race with one number",
        NOISE,
        "(ids.astype(np.uint64), position, self.sample, int(Role.RACE))",
        "(0 * ids.astype(np.uint64), position, self.sample, int(Role.RACE))",
        check_races,
    ),
    Mutant(
        "samples race alike",
        NOISE,
        "position, self.sample, int(Role.RACE))",
        "position, 0, int(Role.RACE))",
        check_races,
    ),
    Mutant(
        "races share the numbers of drafts",
        NOISE,
        "position, self.sample, int(Role.RACE))",
        "position, self.sample, int(Role.DRAFT))",
        check_no_number_is_used_twice,
    ),
    Mutant(
        "the last in the race wins",
        NOISE,
        "np.argmin(times / weights[ids])",
        "np.argmax(times / weights[ids])",
        check_race_frequencies,
    ),
    Mutant(
        "weights slow the race down",
        NOISE,
        "np.argmin(times / weights[ids])",
        "np.argmin(times * weights[ids])",
        check_race_frequencies,
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
