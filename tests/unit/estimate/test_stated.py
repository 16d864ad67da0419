"""What folders state of their drafts: read, refused, and the K that follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.core.config import EngineConfig
from outrider.core.resolve import Measured, resolve
from outrider.estimate.forecast import KEY, StatedWorth
from outrider.models.heads import worth_of
from outrider_lab.train.worth import fitted

GOOD = StatedWorth((0.85, 0.7, 0.55, 0.4), first=0.5, later=0.1, row=0.05)
POOR = StatedWorth((0.4, 0.2, 0.1, 0.0), first=0.6, later=0.5, row=0.05)


def test_the_best_k_by_hand() -> None:
    """Of K = 1 to 4: 1.85 / 1.55, 2.55 / 1.7, 3.1 / 1.85, 3.5 / 2."""
    assert [GOOD.speed_up(k) for k in (1, 2, 3, 4)] == pytest.approx(
        [1.1935, 1.5, 1.6757, 1.75], abs=1e-4
    )
    assert (GOOD.best_k, GOOD.pays) == (4, True)
    # 1.4 / 1.65 is the least bad.
    assert (POOR.best_k, POOR.pays) == (1, False)


def test_times_are_fitted_between_the_shortest_and_the_longest() -> None:
    """A plain round of 2 s; K = 1 drafts for 1 s and verifies for 2.1 s, K = 4 for 2.5 and 2.4."""
    made = fitted((0.8, 0.6, 0.4, 0.2), draft=(1.0, 2.5), verify=(2.1, 2.4), plain=2.0)
    assert (made.later, made.row) == pytest.approx((0.25, 0.05))
    assert made.first + 1 + made.row == pytest.approx(3.1 / 2)
    # What is no longer than a plain round costs nothing.
    assert fitted((0.5,), draft=(0.1, 0.1), verify=(1.9, 1.9), plain=2.0).row == 0


@pytest.mark.parametrize(
    "change",
    [
        {"kept": []},
        {"kept": [1.2]},
        {"kept": "no"},
        {"kept": "111"},
        {"kept": [10**400]},
        {"kept": [0.5] * 65},
        {"kept": [0.1, 0.9]},
        {"kept": [True]},
        {"kept": {"0.5": 1}},
        {"first": 10**400},
        {"first": "0.5"},
        {"first": -1},
        {"later": float("nan")},
        {"row": None},
    ],
)
def test_what_has_another_form_says_nothing(change: dict[str, Any]) -> None:
    values = json.loads(json.dumps(GOOD.values()))
    assert StatedWorth.of(values) == GOOD
    assert StatedWorth.of({**values, **change}) is None
    assert StatedWorth.of({}) is None


def test_it_is_read_from_a_folder(tmp_path: Path) -> None:
    assert worth_of(tmp_path, "mtp") is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "outrider_mtp"}))
    assert worth_of(tmp_path, "mtp") is None
    stated = {KEY: {"drafter": "mtp", **GOOD.values()}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert worth_of(tmp_path, "mtp") == GOOD
    # A target with a block may draft for another one.
    assert worth_of(tmp_path, "model") is None


@pytest.mark.parametrize(
    ("options", "given", "known", "wanted"),
    [
        # k, controller, whether sampled texts keep the lengths of `fixed`.
        ({}, "mtp", Measured(2, pays=True), (2, "fixed", False)),
        ({}, "mtp", Measured(1, pays=False), (4, "goodput", True)),
        ({}, "mtp", None, (4, "goodput", True)),
        ({}, "model", Measured(6, pays=True), (6, "fixed", False)),
        ({}, "model", Measured(1, pays=False), (4, "goodput", True)),
        ({}, "model", None, (4, "fixed", False)),
        # What was said holds.
        ({"k": 4}, "mtp", Measured(2, pays=True), (4, "fixed", False)),
        ({"k": 4}, "mtp", None, (4, "fixed", False)),
        ({"controller": "fixed"}, "eagle", None, (4, "fixed", False)),
        ({"controller": "fixed"}, "eagle", Measured(3, pays=False), (4, "fixed", False)),
        # Controllers choose up to the usual length, and trees have their own.
        ({"controller": "goodput"}, "mtp", Measured(2, pays=True), (4, "goodput", False)),
        ({"controller": "band"}, "mtp", Measured(2, pays=True), (4, "band", False)),
        ({"tree_nodes": 15}, "eagle", Measured(2, pays=True), (4, "fixed", False)),
        # What the heads say is not about look-ups.
        ({"drafter": "ngram"}, "mtp", Measured(2, pays=True), (4, "fixed", False)),
    ],
)
def test_the_default_k(
    options: dict[str, Any], given: str, known: Measured | None, wanted: tuple[int, str, bool]
) -> None:
    found = resolve(EngineConfig(**options), given, known)
    assert (found.k, found.settings.controller, found.keeps_lengths) == wanted
