"""Every bug of the table fits the source and is caught; one that nothing catches is reported."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from outrider.plugins.proof.check import Check
from outrider_lab.proof.mutants import (
    DECISIONS,
    KEYS,
    ROUNDS,
    Mutant,
    attempt,
    catch_by_algebra,
    catch_by_chi_square,
    catch_by_parity,
    embedded_texts,
    mutants,
    planted,
)

pytestmark = pytest.mark.wide

ALL = (*DECISIONS, *KEYS, *ROUNDS)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_bug_fits_the_source(mutant: Mutant) -> None:
    with planted(mutant):
        pass


def test_the_table_has_the_known_losses_of_exactness() -> None:
    names = " ".join(mutant.name for mutant in ALL)
    known = (
        "residual is p,|p - q|,times 1.02,temperature times 0.97,one-hot,number used again,"
        "wrong row,keys without the round,penalties"
    )
    assert all(words in names for words in known.split(","))
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("mutant", DECISIONS, ids=lambda mutant: mutant.name)
def test_the_algebra_catches_it(mutant: Mutant) -> None:
    assert attempt(mutant, catch_by_algebra).caught_by == "algebra"


# Other seeds show the same once more.
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (1, 2))]
)
@pytest.mark.parametrize("mutant", KEYS, ids=lambda mutant: mutant.name)
def test_chi_square_catches_it(mutant: Mutant, seed: int) -> None:
    assert attempt(mutant, lambda: catch_by_chi_square(seed)).caught_by == "chi-square"


@pytest.mark.weights
@pytest.mark.slow
def test_parity_catches_what_the_engine_does_wrong() -> None:
    wanted = embedded_texts("none")
    assert catch_by_parity(wanted) == (None, "")
    for mutant in ROUNDS:
        assert attempt(mutant, lambda: catch_by_parity(wanted)).caught_by == "parity"
    assert catch_by_parity(wanted) == (None, "")


def test_what_cannot_be_planted_is_not_caught() -> None:
    stale = Mutant("stale", "outrider.verify.exact", "no such text", "")
    found = attempt(stale, lambda: ("algebra", "never asked"))
    assert found.caught_by is None
    assert found.obstacle is not None


def check_of(monkeypatch: pytest.MonkeyPatch, table: tuple[Mutant, ...]) -> Check:
    """The part's check, with `table` and no other bugs."""
    monkeypatch.setattr("outrider_lab.proof.mutants.DECISIONS", table)
    monkeypatch.setattr("outrider_lab.proof.mutants.KEYS", ())
    monkeypatch.setattr("outrider_lab.proof.mutants.ROUNDS", ())
    part: Generator[str, None, tuple[Check, ...]] = mutants(seed=0)
    steps: list[str] = []
    while True:
        try:
            steps.append(next(part))
        except StopIteration as end:
            assert steps[: len(table)] == [mutant.name for mutant in table]
            return end.value[0]


@pytest.mark.weights
def test_an_uncaught_bug_fails_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = Mutant("harmless", "outrider.verify.exact", "if total > 0", "if total > 1e-300")
    monkeypatch.setattr("outrider_lab.proof.mutants.catch_by_algebra", lambda: (None, ""))
    check = check_of(monkeypatch, (DECISIONS[0], harmless))
    assert check.holds is False
    assert check.summary == "0 of 2 caught"
    assert "harmless (outrider.verify.exact): not caught" in check.problems


@pytest.mark.weights
def test_an_unplanted_bug_is_not_checked_rather_than_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = Mutant("stale", "outrider.verify.exact", "no such text", "")
    check = check_of(monkeypatch, (DECISIONS[0], stale))
    assert check.holds is None
    assert check.summary == "1 of 2 caught: 1 by algebra"
    assert "stale: not checked" in check.warnings[0]
