"""Structures that are meant to cost much end soon, and grammars that are kept have a bound."""

from __future__ import annotations

from contextlib import suppress
from time import thread_time

import pytest

from doubles.hostile_structures import HOSTILE
from doubles.letters import letters
from outrider.api import grammar as module
from outrider.api.grammar import Grammars
from outrider.api.output import ProcessGauge
from outrider.core.errors import ConfigError

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,. _-'


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    made = letters(LETTERS)
    return Grammars(made, made.vocab_size, frozenset([0]))


@pytest.mark.parametrize("kind", HOSTILE)
def test_it_ends_soon_and_never_as_a_defect(grammars: Grammars, kind: str) -> None:
    """Of the processor's time it takes far less than ten seconds on any machine; a second time,
    next to nothing."""
    most = 10.0
    for _ in range(2):
        started = thread_time()
        with suppress(ConfigError):
            grammars.of(HOSTILE[kind], tried=True)  # pyright: ignore[reportArgumentType]
        took = thread_time() - started
        assert took < most
        # A busy machine takes longer for both.
        most = max(1.0, took / 2)


def test_one_that_takes_for_ever_is_ended(grammars: Grammars) -> None:
    started = thread_time()
    with pytest.raises(ConfigError, match="processor time"):
        grammars.of(HOSTILE["sixty thousand letters"], tried=True)  # pyright: ignore[reportArgumentType]
    assert thread_time() - started < 1
    # Another one is read as ever.
    assert grammars.of({"regex": "[a-c]{5}"}, tried=True) is not None


def test_reading_has_a_budget(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READING_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="processor time"):
        grammars.of({"regex": "[0-9]{3}x"})
    monkeypatch.undo()
    # It is not tried again.
    with pytest.raises(ConfigError, match="processor time"):
        grammars.of({"regex": "[0-9]{3}x"})


def test_grammars_are_kept_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    made = letters(LETTERS)
    kept = Grammars(made, made.vocab_size, frozenset([0]))
    first = kept.of({"regex": "a+"})
    for number in range(1, 100):
        kept.of({"choices": ["a" * number]})
    assert kept.of({"regex": "a+"}) is first
    monkeypatch.setattr(module, "_KEPT_BYTES", 20_000)
    for number in range(1, 100):
        kept.of({"choices": ["b" * number]})
    assert kept.of({"regex": "a+"}) is not first


@pytest.mark.wide
@pytest.mark.slow
def test_memory_has_a_bound_however_many_are_asked_for(grammars: Grammars) -> None:
    def ask(start: int, number: int) -> None:
        for i in range(start, start + number):
            properties = {f"name{i}_{j}": {"type": "string", "maxLength": i} for j in range(9)}
            grammars.of({"schema": {"type": "object", "properties": properties}})

    before = ProcessGauge().now()
    ask(0, 400)
    ask(400, 1_200)
    assert ProcessGauge().now() - before < 80 << 20
