"""Engines by level: turns, failures, pairing of ratios; on servers without models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from doubles.engine_runs import FakeServer, all_contestants, contestant, measured, plan
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider_lab.bench.studies.engines_cells import (
    EngineSample,
    SameTexts,
    Taken,
    agreement,
    best_fixed,
    cells,
    comparisons,
)
from outrider_lab.bench.studies.engines_plan import (
    ENGINES,
    Contestant,
    config_of,
    line_up,
)
from outrider_lab.bench.studies.engines_run import run


@pytest.fixture(scope="module")
def taken() -> list[Taken]:
    return measured(plan(), all_contestants())


@pytest.fixture(scope="module")
def samples(taken: list[Taken]) -> list[EngineSample]:
    return [one.sample for one in taken]


def test_engines_take_turns_over_the_same_requests() -> None:
    clock_owner = FakeServer()
    order: list[str] = []

    class Noting(FakeServer):
        name: str = ""

        def submit(self, prompt: str, params: SamplingParams, /) -> Any:
            order.append(f"{self.name}:{prompt}")
            return super().submit(prompt, params)

    contestants: list[Contestant] = []
    for name in ("a", "b", "c"):
        server = Noting(clock=clock_owner.clock)
        server.name = name
        contestants.append(contestant(name, server))
    list(run(plan(levels=(2,), repeats=3, num_requests=1), contestants, time=clock_owner.time))
    # An untimed visit each, with prompts that are nobody's yet, then a visit a repeat in an order
    # that rotates.
    assert order == [
        *("a:prompt 3", "b:prompt 3", "c:prompt 3"),
        *("a:prompt 0", "b:prompt 0", "c:prompt 0"),
        *("b:prompt 1", "c:prompt 1", "a:prompt 1"),
        *("c:prompt 2", "a:prompt 2", "b:prompt 2"),
    ]


def test_cells_have_medians_of_what_happened(samples: list[EngineSample]) -> None:
    found = {(cell.level, cell.engine): cell for cell in cells(samples)}
    assert list(found) == [(level, engine) for level in (0, 2) for engine in ENGINES]
    off, pd = found[0, "off"], found[2, "pd"]
    # One request at a time: four steps each. Two in flight: three requests in two turns of two.
    assert off.tokens_per_second == pytest.approx(100)
    assert pd.tokens_per_second == pytest.approx(3 * 4 / (2 * 2 * 0.011), rel=1e-3)
    assert (off.itl_p95_ms, pd.itl_p95_ms, pd.round_p50_ms) == pytest.approx((10, 5.5, 11))
    assert (off.acceptance, pd.acceptance) == (None, 0.25)
    assert off.cumulative_p95_ms == pytest.approx(40)
    # Level 0 rests half a second after each of its requests.
    assert pd.busy == pytest.approx(1)
    assert off.busy == pytest.approx(0.12 / 1.12, abs=1e-3)
    assert pd.status == "success"


def test_ratios_are_paired_and_have_intervals_from_five_repeats(
    samples: list[EngineSample],
) -> None:
    found = {(c.level, c.role): c for c in comparisons(samples)}
    gain = found[2, "pdv over pd"]
    assert gain.throughput.value == pytest.approx(1.1)
    assert gain.throughput.num_pairs == 5
    assert gain.throughput.low == pytest.approx(1.1)
    assert gain.itl_p95 is not None
    assert gain.itl_p95.value == pytest.approx(1 / 1.1)
    assert best_fixed(samples, 2) == "pdv"
    assert found[2, "auto over best fixed"].theirs == "pdv"
    assert found[2, "auto over best fixed"].throughput.value == pytest.approx(1)
    assert found[2, "auto over off"].throughput.value == pytest.approx(2)
    four = [sample for sample in samples if sample.repeat < 4]
    assert all(c.throughput.low is None for c in comparisons(four))


def test_failures_have_reasons_and_take_nobody_else_along() -> None:
    broken = contestant("pd", FakeServer(broken=("prompt 1",)))
    absent = Contestant("ssd", EngineConfig(), reason="ConfigError: not here")
    whole = contestant("single", FakeServer())
    found = [
        *measured(plan(levels=(1,), repeats=1), [broken]),
        *measured(plan(levels=(1,), repeats=1), [whole]),
        *next(iter(run(plan(levels=(1,), repeats=1), [absent]))),
    ]
    by_engine = {cell.engine: cell for cell in cells([t.sample for t in found])}
    assert by_engine["single"].status == "success"
    assert by_engine["pd"].status == (
        "failure (1 of 1): 1 of 3 requests failed: ValueError: broken"
    )
    assert by_engine["pd"].tokens_per_second is None
    assert by_engine["ssd"].status == "failure (1 of 1): ConfigError: not here"
    assert comparisons([t.sample for t in found]) == []


def test_other_tokens_of_an_exact_engine_are_a_failure() -> None:
    server, liar = FakeServer(), Shortened()
    both = [contestant("off", server), contestant("single", liar)]
    liar.clock = server.clock
    (visit,) = run(plan(levels=(1,), repeats=1), both, time=server.time)
    assert visit[0].sample.reason is None
    assert visit[1].sample.reason == "DifferentTokens: not those of off"
    assert agreement([t.sample for t in visit]) == SameTexts(1, 0)
    both[1].exact = False
    (visit,) = run(plan(levels=(1,), repeats=1), both, time=server.time)
    assert visit[1].sample.reason is None


class Shortened(FakeServer):
    """Ends every text a token early."""

    def submit(self, prompt: str, params: SamplingParams, /) -> Any:
        return super().submit(prompt, SamplingParams(max_tokens=params.max_tokens - 1))


def test_an_engine_that_raises_is_a_failed_sample_not_the_end() -> None:
    class Raising(FakeServer):
        def advance(self) -> None:
            if self.num_steps >= 8:
                raise RuntimeError("defect")
            super().advance()

    server = Raising()
    found = measured(plan(levels=(1,), repeats=2, num_requests=1), [contestant("pd", server)])
    assert [t.sample.reason for t in found] == [None, "RuntimeError: defect"]
    assert server.cancelled


def test_a_job_of_the_visit_before_is_nobody_s(taken: list[Taken]) -> None:
    class Late(FakeServer):
        def advance(self) -> None:
            if self.on_job is not None:
                self.on_job(replace(taken[-1].jobs[0], lane="late", began=self.clock() - 9))
            super().advance()

    (one,) = measured(plan(levels=(1,), repeats=1), [contestant("ssd", Late())])
    assert {job.lane for job in one.jobs} == {"main"}


def test_a_configuration_follows_from_the_name() -> None:
    base = EngineConfig(k=3, controller="band")
    assert config_of("off", base, own_controller=False).drafter == "none"
    assert config_of("pdv", base, own_controller=False).schedule == "pdv"
    auto = config_of("auto", base, own_controller=False)
    assert (auto.schedule, auto.controller, auto.k) == ("auto", "goodput", 3)
    assert config_of("auto", base, own_controller=True).controller == "band"
    # What is called ssd drafts ahead, whether that pays or not; others join lanes as they would.
    assert config_of("ssd", base, own_controller=False).hybrid_threshold == 0
    assert config_of("pdv", base, own_controller=False).hybrid_threshold == 3


def test_an_engine_that_cannot_be_loaded_keeps_its_reason() -> None:
    def opener(one: Contestant) -> None:
        if one.name == "ssd":
            raise ConfigError("no drafter can do that.")
        one.server = FakeServer()

    found = line_up(["single", "ssd"], EngineConfig(), opener)
    assert [one.reason for one in found] == [None, "ConfigError: no drafter can do that."]
