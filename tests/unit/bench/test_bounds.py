"""Seconds and memory of an answer, on an invented clock: what is not begun, and when parts come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doubles.planned import costs, flat
from outrider.bench.calibrate import answer as module
from outrider.bench.calibrate.answer import Asked, Found, Watch, answer
from outrider.bench.calibrate.bounds import BESIDE_WEIGHTS, LOAD_RATE, Bounds
from outrider.bench.calibrate.extent import extent_of
from outrider.bench.studies.drafters_lineup import PLAIN, Contestant, Drafts
from outrider.core.config import EngineConfig
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.core.spec import ModelSpec

GB = 1_000_000_000


@dataclass
class Machine:
    """Time and memory that only loading takes."""

    now: float = 0.0
    bytes_held: int = 250_000_000
    peak: int = 250_000_000

    def __call__(self) -> float:
        return self.now

    def held(self) -> tuple[int, int]:
        return self.bytes_held, self.peak

    def take(self, num_bytes: int, seconds: float) -> None:
        self.now += seconds
        self.bytes_held += num_bytes
        self.peak = max(self.peak, self.bytes_held)

    def bounds(self, seconds: float, most_bytes: int | None = None) -> Bounds:
        return Bounds(seconds=seconds, most_bytes=most_bytes, clock=self, held=self.held)


def spec(num_parameters: int = 400_000_000) -> ModelSpec:
    return ModelSpec(
        name="target",
        family="llama",
        vocab_size=8192,
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=4096,
        max_tokens=2048,
        num_parameters=num_parameters,
        bytes_per_weight=2,
        bytes_per_kv=2,
    )


def test_what_would_not_end_in_time_or_would_not_fit_is_not_begun() -> None:
    machine = Machine()
    bounds = machine.bounds(30, most_bytes=GB)
    bounds.check("a model", num_bytes=GB // 2, seconds=20)
    machine.now = 15
    with pytest.raises(CapacityError, match="a model would take about 20 s"):
        bounds.check("a model", num_bytes=0, seconds=20)
    with pytest.raises(CapacityError, match=r"would take 900 MB more, and 750 MB of 1.0 GB"):
        bounds.check("a model", num_bytes=900_000_000, seconds=1)
    assert machine.bounds(math.inf).left == math.inf


def test_time_is_kept_to_end_and_never_more_than_there_is() -> None:
    machine = Machine()
    bounds = machine.bounds(30)
    assert 27 <= bounds.left < 30
    machine.now = 40
    assert bounds.left < 0
    assert bounds.part(0.5) == machine.now


def test_loading_is_reckoned_by_the_rate_at_which_the_target_was_loaded() -> None:
    bounds = Machine().bounds(30)
    before = bounds.loading_seconds(GB)
    bounds.note_loading(GB, 1.0)
    assert bounds.loading_seconds(GB) < before
    # A model of a few bytes says nothing of the rate.
    bounds.note_loading(1000, 1.0)
    assert bounds.loading_seconds(GB) < before


def test_partial_answers_are_due_from_the_tenth_second_on() -> None:
    machine = Machine()
    bounds, due = machine.bounds(60), list[float]()
    for machine.now in [float(second) for second in range(60)]:
        due += [machine.now] if bounds.answer_is_due() else []
    assert due == [10, 20, 30, 40, 50]


def test_a_large_target_is_measured_with_less_and_engines_keep_to_the_memory() -> None:
    small = extent_of(spec(4_000_000), batch=1, num_engines=8, left_bytes=BESIDE_WEIGHTS)
    large = extent_of(spec(), batch=1, num_engines=8, left_bytes=400_000_000)
    assert (small.deepest, large.deepest) == (16, 8)
    assert large.batch_size < small.batch_size == 16
    assert 8 * large.engine_bytes(spec()) < 500_000_000
    assert (small.is_large, large.is_large) == (False, True)
    # The texts that will run fit, whatever is left.
    many = extent_of(spec(), batch=16, num_engines=8, left_bytes=0)
    assert many.batch_size == 16
    assert many.room >= 16 * 256


@dataclass
class Engines:
    """As `open_engines` gives them; every one costs `seconds` and `num_bytes` to open."""

    machine: Machine
    seconds: float
    num_bytes: int
    opened: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def __call__(
        self,
        contestants: Sequence[Contestant],
        target: str,
        drafts: Drafts,
        base: EngineConfig,
        *,
        most_k: int,
        admit: Callable[[Contestant], None],
    ) -> Any:
        del target, drafts, most_k
        assert base.arena_tokens
        for one in contestants:
            try:
                admit(one)
            except CapacityError as error:
                self.notes.append(f"{one.name}: {error}")
                continue
            size = self.num_bytes if one == PLAIN else self.num_bytes // 10
            self.machine.take(size, self.seconds if one == PLAIN else self.seconds / 10)
            self.opened.append(one.name)
        plain = SimpleNamespace(llm=None, is_plain=True, name="off")
        return SimpleNamespace(
            plain=plain, present=[plain], drafting=[], notes=self.notes, close=lambda: None
        )


NAMES = ("ngram", "suffix", "model")


def asked(machine: Machine, *, seconds: float, most_bytes: int | None = None) -> Asked:
    target = spec()
    guessed = flat(*(costs(0.1, [0.6], name=name) for name in NAMES))
    contestants = [PLAIN, *(Contestant(name=name, drafter=name) for name in NAMES)]
    return Asked(
        target="target",
        spec=target,
        engine=EngineConfig(device="cpu"),
        contestants=contestants,
        drafts=Drafts(None, {}),
        guessed=guessed,
        num_bytes={"model": 80_000_000},
        extent=extent_of(target, batch=1, num_engines=4, left_bytes=300_000_000),
        bounds=machine.bounds(seconds, most_bytes),
        texts=["def add(a, b):"],
        params=SamplingParams(max_tokens=32),
        timing=10,
    )


def gives(answer: object) -> Callable[..., object]:
    """A function that answers so whatever it is asked."""

    def function(*words: object, **named: object) -> object:
        del words, named
        return answer

    return function


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Asked, Engines], Found]:
    """An answer whose engines are a double; nothing is timed or counted."""
    parts: list[Found] = []

    def run(wish: Asked, engines: Engines) -> Found:
        monkeypatch.setattr(module, "open_engines", engines)
        monkeypatch.setattr(module, "must_compile", gives(False))
        monkeypatch.setattr(module, "_prompts", gives([[1]]))
        monkeypatch.setattr(module, "_time", gives(None))
        monkeypatch.setattr(module, "_count", gives(None))
        watch = Watch(partly=parts.append)
        return answer(wish, cache=None, fresh=False, watch=watch)

    return run


def test_a_target_that_takes_longer_than_there_is_is_not_loaded(
    answered: Callable[[Asked, Engines], Found],
) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=5, num_bytes=GB)
    found = answered(asked(machine, seconds=2), engines)
    assert not engines.opened
    assert machine.now == 0
    assert "nothing was measured: loading target would take" in found.notes[0]
    assert not found.origins.is_whole
    # An answer there is all the same.
    assert [one.name for one in found.calibration.drafters] == list(NAMES)


def test_a_target_that_does_not_fit_is_not_loaded(
    answered: Callable[[Asked, Engines], Found],
) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=5, num_bytes=GB)
    found = answered(asked(machine, seconds=30, most_bytes=900_000_000), engines)
    assert not engines.opened
    assert "of 900 MB are left" in found.notes[0]
    assert found.peak_bytes == 250_000_000
    assert found.most_bytes == 900_000_000


def test_kernels_that_must_be_compiled_take_time_too(
    answered: Callable[[Asked, Engines], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=1, num_bytes=GB)
    wish = asked(machine, seconds=30)
    answered(wish, engines)
    assert engines.opened
    monkeypatch.setattr(module, "must_compile", gives(True))
    found = answer(wish, cache=Path(), fresh=False)
    assert "compiling the kernels would take" in found.notes[0]
    assert "outrider doctor" in found.notes[0]


def test_drafters_are_opened_while_memory_lasts_and_the_rest_is_guessed(
    answered: Callable[[Asked, Engines], Found],
) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=5, num_bytes=GB)
    most = 250_000_000 + GB + 120_000_000
    found = answered(asked(machine, seconds=30, most_bytes=most), engines)
    assert engines.opened == ["off", "ngram"]
    assert all("of 1.4 GB are left" in note for note in found.notes)
    assert found.peak_bytes <= most
    assert found.origins.of("model") == ("guessed", "guessed")


def test_a_draft_model_is_not_opened_when_opening_has_taken_its_share(
    answered: Callable[[Asked, Engines], Found],
) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=60, num_bytes=GB)
    wish = asked(machine, seconds=100)
    wish.bounds.note_loading(round(LOAD_RATE * 50), 50)
    found = answered(wish, engines)
    # Lookups take six seconds each here, and a model would come after them.
    assert engines.opened == ["off", "ngram", "suffix", "model"]
    assert found.seconds <= 100
    slow = Engines(machine := Machine(), seconds=88, num_bytes=GB)
    answered(asked(machine, seconds=100), slow)
    assert slow.opened == ["off", "ngram"]
    assert machine.now <= 100
