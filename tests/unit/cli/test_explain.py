"""`outrider explain`: every topic works with defaults and with numbers, says what it was given, and
computes what the engine, the planner and the page compute."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.documents import Document
from doubles.command_line import Command
from doubles.racing import Written
from outrider.cli.explain import explained, topics
from outrider.cli.explain_topics import (
    COINS,
    DRAFT,
    LAST,
    WORDS,
    WORKED,
    Device,
    P,
    Q,
    residual,
    walk,
)
from outrider.cli.run_options import EXPLAIN_TOPICS, ExplainOptions
from outrider.core.draft import Draft
from outrider.core.protocols import VerifyRow
from outrider.core.sampling import Distributions
from outrider.verify.exact import TokenRule

UNIT = st.floats(0, 1, exclude_max=True)


def told(outrider: Command, *words: str) -> dict[str, Any]:
    shown = outrider("explain", *words, "--json")
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


def test_the_verb_the_options_and_the_topics_agree() -> None:
    assert tuple(topics()) == tuple(WORKED) == EXPLAIN_TOPICS
    numbers = {item.name for item in ExplainOptions.verb.own_options()} - {"json"}
    assert {name for topic in topics().values() for name in topic.get("takes", [])} == numbers


def test_without_a_topic_all_are_listed(outrider: Command) -> None:
    shown = outrider("explain")
    assert shown.code == 0
    listed = json.loads(outrider("explain", "--json").out)
    assert [entry["topic"] for entry in listed] == list(EXPLAIN_TOPICS)
    for entry in listed:
        assert entry["text"] in shown.out


@pytest.mark.parametrize("topic", EXPLAIN_TOPICS)
def test_every_topic_shows_formula_numbers_and_where_to_read_more(
    outrider: Command, topic: str
) -> None:
    shown, found = outrider("explain", topic), told(outrider, topic)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(found["title"])
    for line in (*found["formula"], *found["more"]):
        assert line in shown.out
    for step in found["steps"]:
        assert f"{step['name']} = {step['worked']} = {step['value']:.3f}" in shown.out
    for name in topics()[topic].get("takes", []):
        assert f"--{name.replace('_', '-')}" in shown.out
        assert found["given"][name] == getattr(ExplainOptions(), name)
    assert "\x1b[" not in shown.out


def test_numbers_are_put_in(outrider: Command) -> None:
    found = told(outrider, "speed-up", "--alpha", "0.5", "--k", "2", "--c", "0.25")
    assert found["given"] == {"alpha": 0.5, "k": 2, "c": 0.25, "verify": 1.0}
    assert [step["value"] for step in found["steps"]] == [1.75, 1.5, pytest.approx(1.75 / 1.5)]


def test_a_number_that_has_no_place_is_refused(outrider: Command) -> None:
    shown = outrider("explain", "speed-up", "--p-hit", "0.5")
    assert (shown.code, shown.out) == (2, "")
    assert "speed-up has no --p-hit" in shown.err
    assert "--alpha --k --c --verify" in shown.err
    assert outrider("explain", "--k", "3").code == 2
    unknown = outrider("explain", "sped-up")
    assert unknown.code == 2
    assert "did you mean 'speed-up'?" in unknown.err
    assert outrider("explain", "speed-up", "--alpha", "1.5").code == 2


@given(st.lists(UNIT, min_size=4, max_size=4), UNIT)
def test_the_walk_is_that_of_the_shipped_rule(coins: list[float], last: float) -> None:
    p_NV, q_NV = torch.tensor(P, dtype=torch.float64), torch.tensor(Q, dtype=torch.float64)
    draft = Draft.chain([WORDS.index(word) for word in DRAFT], q_NV)
    rng = Written(tuple(coins), last)
    (verdict,) = TokenRule()([VerifyRow(draft, Distributions(probs_NV=p_NV), rng)])
    assert walk(coins, last) == (len(verdict.path), WORDS[verdict.next_token])


def test_the_round_is_that_of_the_page() -> None:
    page = Document.named("theory.md")
    for header, stats in (("| after | q(the)", Q), ("| after | p(the)", P)):
        assert [tuple(map(float, row[1:])) for row in page.rows_under(header)] == list(stats)
    assert [float(row[5]) for row in page.rows_under("| place | word |") if row[5]] == list(COINS)
    assert f"A second uniform number, {LAST:.2f}, falls on `on`" in page.prose
    assert walk(COINS, LAST) == (2, "on")


@given(st.integers(0, 3))
def test_accepted_and_recovered_mass_make_up_the_target(place: int) -> None:
    p, q = P[place], Q[place]
    mass = sum(max(0.0, a - b) for a, b in zip(p, q, strict=True))
    for a, b, left in zip(p, q, residual(p, q), strict=True):
        assert min(a, b) + mass * left == pytest.approx(a)


@given(st.floats(0, 1), st.floats(0, 3), st.floats(0.5, 4))
def test_the_best_k_is_better_than_all_others(alpha: float, c: float, verify: float) -> None:
    numbers = ExplainOptions(alpha=alpha, c=c, verify=verify)
    best = explained("best-k", numbers)["steps"][0]["value"]
    for k in (1, 2, 3, 5, 8, 13, 64):
        gain = explained("speed-up", replace(numbers, k=k))["steps"][-1]["value"]
        assert gain <= max(best, 1) + 1e-9


def test_speculation_gains_below_the_break_even_and_loses_from_it_on() -> None:
    device = Device(ExplainOptions())
    limit = device.break_even()
    assert limit is not None
    assert device.gain(limit, 4) <= 1 < device.gain(limit - 1, 4)
    assert Device(ExplainOptions(context=100_000)).break_even() is None
