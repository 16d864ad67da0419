"""Names to parts: what a configuration builds, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from checks.engine import PROMPT, greedy, plain
from checks.state import VOCAB
from doubles.rig import Request, Rig, first_maximum, round_of
from doubles.tiny_attention import TinyAttentionLM
from outrider.control.goodput import GoodputController
from outrider.control.heuristics import FixedController
from outrider.core.config import EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.errors import ConfigError
from outrider.core.plugins import MODEL
from outrider.core.resolve import resolve
from outrider.drafters.common.context import LoadedModels
from outrider.engine.build import (
    DRAFT_CONTEXT,
    build_engine,
    resolve_window,
)
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes
from outrider.engine.round import StepwiseLM
from outrider.engine.stages import Stages
from outrider.plugins.controllers import BandController
from outrider.verify.exact import MatchRule, TokenRule


def built(config: EngineConfig, *, with_draft: bool = True) -> tuple[Engine, list[RoundTrace]]:
    traces: list[RoundTrace] = []
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=config.page_size)
    draft = TinyAttentionLM(vocab_size=VOCAB, seed=5) if with_draft else None
    parts = LoadedModels(target, draft, first_maximum)
    return build_engine(parts.resolve(config), parts, num_slots=256, sink=traces.append), traces


@pytest.mark.parametrize(
    ("config", "has_draft", "name"),
    [
        (EngineConfig(), True, "model"),
        (EngineConfig(), False, "suffix"),
        (EngineConfig(drafter="ngram"), True, "ngram"),
        (EngineConfig(drafter="none"), True, "none"),
        (EngineConfig(k=0), True, "none"),
        (EngineConfig(drafter="model", k=0), False, "none"),
    ],
)
def test_the_drafter_a_configuration_means(
    config: EngineConfig, has_draft: bool, name: str
) -> None:
    assert resolve(config, MODEL if has_draft else None).drafter.name == name
    assert built(config, with_draft=has_draft)[0].drafter.name == name


def test_a_model_drafter_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="draft model") as caught:
        resolve(EngineConfig(drafter="model"), None)
    assert caught.value.hint


@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("sampler", ["token", "match"])
@pytest.mark.parametrize("batched_verify", [True, False])
def test_whatever_is_built_decodes_plainly(
    drafter: str, sampler: str, batched_verify: bool
) -> None:
    config = EngineConfig(
        drafter=drafter,
        sampler=sampler,
        batched_verify=batched_verify,
        prefill_chunk=3,
        page_size=4,
    )
    engine, traces = built(config)
    stages = cast(Stages, round_of(engine))
    assert isinstance(stages.rule, TokenRule if sampler == "token" else MatchRule)
    assert isinstance(engine.residents.target, StepwiseLM) != batched_verify
    seq = Rig(engine.residents.target).live(0, Request(PROMPT, greedy(9)))
    engine.submit(seq)
    while engine.has_work:
        engine.step()
    assert tuple(seq.tokens[len(PROMPT) :]) == plain(TinyAttentionLM, PROMPT, 9)
    assert {trace.drafter for trace in traces} == {drafter}
    assert max(trace.num_drafted for trace in traces) == (0 if drafter == "none" else 4)


def test_the_window_is_the_narrowest_bound() -> None:
    config = EngineConfig()
    assert resolve_window(config, 100, has_draft=False, k=4) == 100
    assert resolve_window(config, 100_000, has_draft=False, k=4) == 100_000
    assert resolve_window(config, 100, has_draft=True, k=4) == 100
    assert resolve_window(config, 100_000, has_draft=True, k=4) == DRAFT_CONTEXT
    wide = EngineConfig(context=9000)
    assert resolve_window(wide, 100_000, has_draft=True, k=4) == 9000
    assert resolve_window(wide, 100, has_draft=True, k=4) == 100


def test_a_window_without_room_for_a_round_is_refused() -> None:
    assert resolve_window(EngineConfig(), 7, has_draft=False, k=4) == 7
    with pytest.raises(ConfigError, match="k=4"):
        resolve_window(EngineConfig(), 6, has_draft=False, k=4)


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        (EngineConfig(), "single"),
        (EngineConfig(drafter_home="process"), "single"),
        (EngineConfig(device="cpu", drafter_device="cpu"), "single"),
        (EngineConfig(device="cuda", drafter_device="cpu"), "ssd"),
        (EngineConfig(device="cuda", drafter_device="cuda:1"), "ssd"),
        (EngineConfig(drafter_device="cuda:1"), "ssd"),
        (EngineConfig(device="cuda", drafter_device="cpu", drafter="ngram"), "single"),
    ],
)
def test_auto_drafts_ahead_where_the_draft_model_has_a_memory_of_its_own(
    config: EngineConfig, schedule: str
) -> None:
    resolved = resolve(replace(config, schedule="auto"), MODEL)
    assert resolved.settings.schedule == schedule
    # Operators draw and judge by numbers of one device.
    apart = schedule == "ssd" or config.drafter_home == "process"
    assert resolved.settings.drafter_home == ("process" if apart else "thread")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EngineConfig(watchdog="off"), FixedController),
        (EngineConfig(schedule="auto"), GoodputController),
        (EngineConfig(schedule="auto", controller="band", watchdog="off"), BandController),
        (EngineConfig(controller="goodput"), GoodputController),
        (EngineConfig(schedule="auto", k=0), FixedController),
    ],
)
def test_the_controller_a_configuration_means(config: EngineConfig, kind: type[object]) -> None:
    executor = built(config)[0].executor
    assert isinstance(executor, InlineLanes)
    controllers = [runner.stages.controller for runner in executor.runners.values()]
    assert all(isinstance(controller, kind) for controller in controllers)
