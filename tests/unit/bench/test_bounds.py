"""Seconds and memory of an answer, on an invented clock: what is not begun, and when parts come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from doubles.planned import costs, flat, sloped
from outrider.core.config import EngineConfig
from outrider.core.errors import CapacityError
from outrider.core.params import SamplingParams
from outrider.core.spec import ModelSpec
from outrider_lab.bench.calibrate import answer as module
from outrider_lab.bench.calibrate.answer import answer
from outrider_lab.bench.calibrate.extent import BESIDE_WEIGHTS, Bounds, extent_of
from outrider_lab.bench.calibrate.found import Answer, Asked, Found, Watch
from outrider_lab.bench.calibrate.probe import Ahead, Probe
from outrider_lab.bench.calibrate.session import Calibrated
from outrider_lab.bench.studies.drafters_lineup import PLAIN, Contestant, Drafts

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


def test_what_would_not_fit_is_not_begun() -> None:
    machine = Machine()
    bounds = machine.bounds(30, most_bytes=GB)
    bounds.must_fit("a model", num_bytes=GB // 2)
    with pytest.raises(CapacityError, match=r"would take 900 MB more, and 750 MB of 1.0 GB"):
        bounds.must_fit("a model", num_bytes=900_000_000)
    assert machine.bounds(math.inf).left == math.inf


def test_time_is_kept_to_end_and_never_more_than_there_is() -> None:
    machine = Machine()
    bounds = machine.bounds(30)
    assert 27 <= bounds.left < 30
    machine.now = 40
    assert bounds.left < 0
    assert bounds.part(0.5) == machine.now


def test_a_program_that_took_long_to_start_keeps_more_time_to_end() -> None:
    usual, slow = Machine(), Machine(now=10)
    assert usual.bounds(30).left == 28
    bounds = Bounds(seconds=30, clock=slow, began=0, held=slow.held)
    assert bounds.left == 30 - 10 - 5
    # Never most of it.
    late = Machine(now=60)
    assert Bounds(seconds=100, clock=late, began=0, held=late.held).left == 100 - 60 - 30


def test_what_does_not_count_leaves_as_much_time() -> None:
    machine = Machine()
    bounds = machine.bounds(30)
    machine.now = 60
    bounds.add_time(60)
    assert bounds.left == 28


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
    for machine.now in [float(second) for second in range(80)]:
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


def twenty(text: str) -> list[int]:
    """Ids of any text."""
    assert text
    return [1] * 20


@dataclass
class Target:
    """A model whose passes take `seconds`, and one request of it at a time."""

    machine: Machine
    seconds: float = 0.1
    delay: float = 1.0
    wall: float = 0.0
    num_left: int = 0
    has_read: bool = False
    num_passes: int = 0
    tokenizer: Any = field(default_factory=lambda: SimpleNamespace(encode=twenty))

    def submit(self, ids: Sequence[int], params: SamplingParams) -> Target:
        assert len(ids) < 20
        self.num_left, self.has_read = params.max_tokens, False
        return self

    @property
    def done(self) -> bool:
        return not self.num_left

    def advance(self) -> None:
        self.machine.now += self.seconds
        self.wall, self.has_read = self.seconds, True
        self.num_left, self.num_passes = self.num_left - 1, self.num_passes + 1

    def cancel(self, handle: object) -> None:
        assert handle is self


@dataclass
class Engines:
    """As `open_engines` gives them; every one costs `seconds` and `num_bytes` to open."""

    machine: Machine
    seconds: float
    num_bytes: int
    target: Any = None
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
        admit: Callable[[Contestant, Sequence[Any]], None],
    ) -> Any:
        del target, drafts, most_k
        assert base.arena_tokens
        self.target = self.target or Target(self.machine)
        for one in contestants:
            try:
                admit(one, [self.target])
            except CapacityError as error:
                self.notes.append(f"{one.name}: {error}")
                continue
            size = self.num_bytes if one == PLAIN else self.num_bytes // 10
            self.machine.take(size, self.seconds if one == PLAIN else self.seconds / 10)
            self.opened.append(one.name)
        plain = SimpleNamespace(llm=self.target, is_plain=True, name="off")
        return SimpleNamespace(
            plain=plain, present=[plain], drafting=[], notes=self.notes, close=lambda: None
        )


NAMES = ("ngram", "suffix", "model")


def asked(machine: Machine, *, seconds: float, most_bytes: int | None = None) -> Asked:
    target = spec()
    estimated = flat(*(costs(0.1, [0.6], name=name) for name in NAMES))
    contestants = [PLAIN, *(Contestant(name=name, drafter=name) for name in NAMES)]
    return Asked(
        target="target",
        spec=target,
        engine=EngineConfig(device="cpu"),
        contestants=contestants,
        drafts=Drafts(None, {}),
        estimated=estimated,
        num_bytes={"model": 80_000_000},
        extent=extent_of(target, batch=1, num_engines=4, left_bytes=300_000_000),
        bounds=machine.bounds(seconds, most_bytes),
        texts=["def add(a, b):"],
        encoder=lambda _: lambda _, __: [1],
        params=SamplingParams(max_tokens=32),
        timing=10,
    )


def gives(answer: object) -> Callable[..., object]:
    """A function that answers so whatever it is asked."""

    def function(*words: object, **named: object) -> object:
        del words, named
        return answer

    return function


@dataclass
class Answered:
    """An answer whose engines are a double; what is counted, timed and compared takes no time."""

    patch: pytest.MonkeyPatch
    did: list[str] = field(default_factory=list[str])
    warned: list[str] = field(default_factory=list[str])
    compiles: bool = False

    def __call__(self, wish: Asked, engines: Engines) -> Found:
        counting = SimpleNamespace(compared=self.noted("compared", []))
        self.patch.setattr(module, "open_engines", engines)
        self.patch.setattr(module, "must_compile", gives(self.compiles))
        self.patch.setattr(module, "built_kernels", self.compiled(engines.machine))
        self.patch.setattr(module, "_prompts", gives([[1]]))
        self.patch.setattr(module, "_count", self.noted("counted", (counting, ())))
        self.patch.setattr(module, "_time", self.noted("timed", None))
        watch = Watch(warns=self.warned.append)
        return answer(wish, cache=None, fresh=False, watch=watch)

    def noted(self, what: str, answer: object) -> Callable[..., object]:
        """Answers so, and keeps that it was called."""

        def function(*words: object, **named: object) -> object:
            del words, named
            self.did.append(what)
            return answer

        return function

    def compiled(self, machine: Machine) -> Callable[..., object]:
        def function(*words: object) -> None:
            del words
            machine.take(0, 60)

        return function


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Answered:
    return Answered(monkeypatch)


def test_acceptance_is_counted_before_rounds_are_timed(answered: Answered) -> None:
    machine = Machine()
    found = answered(asked(machine, seconds=30), Engines(machine, seconds=5, num_bytes=GB))
    assert answered.did == ["counted", "timed", "compared"]
    assert answered.warned == []
    assert found.origins.target_pass == "measured"


def test_a_target_that_takes_longer_than_there_is_has_one_pass_measured(answered: Answered) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=50, num_bytes=GB, target=Target(machine, seconds=3, delay=2))
    found = answered(asked(machine, seconds=2), engines)
    # It is loaded, a prompt is read, and one pass goes on from there.
    assert engines.target.num_passes == 2
    # Nothing else is opened: there would be no time to count.
    assert engines.opened == ["off"]
    assert found.seconds == 50 + 2 * 3
    assert found.origins.target_pass == "measured"
    # Half of the time somebody else had the CPU.
    assert found.calibration.target.rows.at(1) == pytest.approx(1.5)
    assert found.origins.basis == "estimated"
    (warning,) = answered.warned
    assert "loading target takes about 7 s, which is more than is left of --seconds 2" in warning
    assert "the target was loaded after 50.0 s, and nothing was left" in found.notes[0]


def test_a_pass_is_measured_where_nothing_drafts(answered: Answered) -> None:
    machine = Machine()
    wish = replace(asked(machine, seconds=30), contestants=[PLAIN])
    engines = Engines(machine, seconds=5, num_bytes=GB)
    assert answered(wish, engines).origins.target_pass == "measured"
    assert engines.target.num_passes == 9


def test_0_seconds_load_nothing(answered: Answered) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=5, num_bytes=GB)
    found = answered(asked(machine, seconds=0), engines)
    assert not engines.opened
    assert machine.now == 0
    assert "nothing was measured: --seconds 0" in found.notes[0]
    assert found.origins.target_pass == "estimated"
    # An answer there is all the same.
    assert [one.name for one in found.calibration.drafters] == list(NAMES)


def test_a_target_that_does_not_fit_is_not_loaded(answered: Answered) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=5, num_bytes=GB)
    found = answered(asked(machine, seconds=30, most_bytes=900_000_000), engines)
    assert not engines.opened
    assert "of 900 MB are left" in found.notes[0]
    assert found.peak_bytes == 250_000_000
    assert found.most_bytes == 900_000_000


def test_kernels_that_must_be_compiled_are_and_that_does_not_count(answered: Answered) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=1, num_bytes=GB)
    answered.compiles = True
    found = answered(asked(machine, seconds=30), engines)
    assert engines.opened[0] == "off"
    assert machine.now > 60
    assert found.seconds == machine.now - 60
    assert "compiled first" in answered.warned[0]


def test_drafters_are_opened_while_memory_lasts_and_the_rest_is_estimated(
    answered: Answered,
) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=5, num_bytes=GB)
    most = 250_000_000 + GB + 120_000_000
    found = answered(asked(machine, seconds=30, most_bytes=most), engines)
    assert engines.opened == ["off", "ngram"]
    assert all("of 1.4 GB are left" in note for note in found.notes)
    assert found.peak_bytes <= most
    assert found.origins.of("model") == ("estimated", "estimated")


def test_a_draft_model_is_not_opened_when_opening_has_taken_its_share(answered: Answered) -> None:
    machine = Machine()
    engines = Engines(machine, seconds=60, num_bytes=GB)
    found = answered(asked(machine, seconds=100), engines)
    # Lookups take six seconds each here, and a model would come after them.
    assert engines.opened == ["off", "ngram", "suffix", "model"]
    assert found.seconds <= 100
    slow = Engines(machine := Machine(), seconds=88, num_bytes=GB)
    answered(asked(machine, seconds=100), slow)
    assert slow.opened == ["off", "ngram"]
    assert machine.now <= 100


def test_a_lookup_that_was_replayed_needs_no_rounds_of_its_own() -> None:
    """Once passes of several rows are known; before, all its times are estimates."""
    so_far = Answer(asked(Machine(), seconds=30), pass_seconds=1.0)
    texts = ((Ahead(2, 1), Ahead(1, 0), Ahead(0, 0), *[Ahead(2, 0)] * 40),)
    so_far.probes = {"ngram": Probe("ngram", 8, texts, None, hit_seconds=0.25)}
    assert so_far.found().origins.of("ngram") == ("estimated", "measured")
    for rows, origin in (
        (flat(costs(0.1, name="model")), "estimated"),
        (sloped(costs(0.1, name="model"), per_row=0.1), "measured"),
    ):
        so_far.calibrated = Calibrated(rows, None, is_old=False)
        found = so_far.found()
        assert found.origins.of("ngram") == (origin, "measured")
        assert found.origins.of("suffix") == ("estimated", "estimated")
    (ngram,) = [one for one in found.calibration.drafters if one.name == "ngram"]
    assert ngram.seconds(1, 1, 0) == 0.25
