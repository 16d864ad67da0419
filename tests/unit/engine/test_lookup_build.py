"""What a configuration builds of lookups, portfolios and the watchdog."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from checks.engine import PROMPT, greedy, plain
from checks.state import VOCAB
from doubles.rig import Request, Rig, first_maximum, round_of
from doubles.tiny_attention import TinyAttentionLM
from outrider.control.goodput import GoodputController
from outrider.control.heuristics import FixedController, Watchdog
from outrider.control.scored import ScoredController
from outrider.core.config import DEFAULT_K, EngineConfig
from outrider.core.draft import Budget, RoundTrace
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.plugins import COPY, KINDS, MODEL
from outrider.core.protocols import Drafter
from outrider.core.resolve import AUTO_CHAIN, AUTO_NODES, MOST_DRAFTED, resolve
from outrider.drafters.common.context import BuildContext, LoadedModels
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.round import LiveSequence
from outrider.engine.stages import Stages


def parts_for(config: EngineConfig, *, with_draft: bool) -> LoadedModels:
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=config.page_size)
    draft = TinyAttentionLM(vocab_size=VOCAB, seed=5) if with_draft else None
    return LoadedModels(target, draft, first_maximum, corpus=((1, 2, 3, 4),))


def drafter_of(config: EngineConfig, parts: LoadedModels) -> Drafter:
    resolved = parts.resolve(config)
    return BuildContext(resolved, parts, resolved.drafter).build()


def built(config: EngineConfig, *, with_draft: bool = True) -> tuple[Engine, list[RoundTrace]]:
    traces: list[RoundTrace] = []
    parts = parts_for(config, with_draft=with_draft)
    return build_engine(parts.resolve(config), parts, num_slots=256, sink=traces.append), traces


@pytest.mark.parametrize(
    ("drafter", "has_draft", "name"),
    [
        ("suffix", True, "suffix"),
        ("recycling", False, "recycling"),
        ("lookup", True, "lookup"),
        ("portfolio", True, "portfolio"),
        ("portfolio", False, "lookup"),
    ],
)
@pytest.mark.parametrize("tree_nodes", [0, 9])
def test_whatever_is_built_decodes_plainly(
    drafter: str, has_draft: bool, name: str, tree_nodes: int
) -> None:
    config = EngineConfig(
        drafter=drafter, tree_nodes=tree_nodes, sampler="token", prefill_chunk=3, page_size=4
    )
    assert resolve(config, MODEL if has_draft else None).drafter.name == name
    engine, traces = built(config, with_draft=has_draft)
    assert engine.drafter.name == name
    seq = Rig(engine.residents.target).live(0, Request(PROMPT, greedy(30)))
    engine.submit(seq)
    while engine.has_work:
        engine.step()
    assert not seq.no_drafts
    assert tuple(seq.tokens[len(PROMPT) :]) == plain(TinyAttentionLM, PROMPT, 30)
    assert any(trace.num_drafted for trace in traces)


def test_the_members_of_a_portfolio() -> None:
    config = EngineConfig(drafter="portfolio")
    drafter = drafter_of(config, parts_for(config, with_draft=True))
    assert isinstance(drafter, PortfolioDrafter)
    assert list(drafter.names) == ["forced", "prediction", "suffix", "ngram", "model"]


def test_a_corpus_is_read_before_the_first_request() -> None:
    config = EngineConfig(drafter="suffix", suffix_tokens=256)
    parts = parts_for(config, with_draft=False)
    with_corpus = drafter_of(config, parts)
    without = drafter_of(config, replace(parts, corpus=()))
    assert isinstance(with_corpus, SuffixDrafter)
    assert isinstance(without, SuffixDrafter)
    assert with_corpus.num_states > without.num_states


def test_a_portfolio_with_a_process_is_refused() -> None:
    config = EngineConfig(drafter="portfolio", drafter_home="process")
    with pytest.raises(ConfigError, match="portfolio") as caught:
        resolve(config, MODEL)
    assert caught.value.hint
    assert resolve(config, None).drafter.name == "lookup"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EngineConfig(), Watchdog),
        (EngineConfig(drafter="suffix", controller="goodput"), ScoredController),
        (EngineConfig(controller="band"), Watchdog),
        (EngineConfig(watchdog="engine"), Watchdog),
        (EngineConfig(watchdog="off"), FixedController),
        (EngineConfig(controller="goodput"), GoodputController),
        (EngineConfig(k=0), FixedController),
    ],
)
def test_who_is_watched(config: EngineConfig, kind: type) -> None:
    engine, _ = built(replace(config, page_size=4))
    assert isinstance(cast(Stages, round_of(engine)).controller, kind)


@pytest.mark.parametrize(
    ("config", "controller", "left_to_us", "size"),
    [
        (EngineConfig(), "goodput", True, AUTO_NODES),
        (EngineConfig(schedule="auto"), "goodput", True, AUTO_NODES),
        (EngineConfig(schedule="pd"), "goodput", True, DEFAULT_K),
        (EngineConfig(controller="goodput", k=3), "goodput", True, 3),
        (EngineConfig(controller="fixed"), "fixed", False, DEFAULT_K),
        (EngineConfig(drafter="suffix"), "fixed", False, DEFAULT_K),
    ],
)
def test_look_ups_that_nobody_named_draft_as_far_as_they_pay(
    config: EngineConfig, controller: str, left_to_us: bool, size: int
) -> None:
    resolved = resolve(config, None)
    assert resolved.drafter.name == "suffix"
    assert (resolved.settings.controller, resolved.left_to_us) == (controller, left_to_us)
    assert resolved.draft_size == size
    # A seed has one text whatever is drafted; a draft model's own draws are judged by block.
    rule = resolved.of_request(SamplingParams(temperature=0.8)).sampler
    assert rule == ("match" if left_to_us else "")
    found = resolve(config, MODEL, found=True)
    assert found.of_request(SamplingParams(temperature=0.8)).sampler == ""


def test_a_model_that_nobody_named_joins_look_ups_on_one_lane() -> None:
    assert resolve(EngineConfig(), MODEL, found=True).drafter.name == "portfolio"
    assert resolve(EngineConfig(), MODEL).drafter.name == "model"
    for apart in (EngineConfig(schedule="ssd"), EngineConfig(drafter_home="process")):
        assert resolve(apart, MODEL, found=True).drafter.name == "model"


def test_sizes_follow_the_target_and_the_lane() -> None:
    resolved = resolve(EngineConfig(), None)
    chains = resolved.sized(branches=False)
    assert (chains.k, chains.num_nodes) == (AUTO_CHAIN, 0)
    assert resolved.sized(branches=True).num_nodes == AUTO_NODES
    small = resolved.sized(branches=True, window=9)
    assert (small.k, small.num_nodes) == (6, 0)
    lanes = resolve(EngineConfig(schedule="pdv"), None)
    assert (lanes.k, lanes.num_nodes) == (DEFAULT_K, 0)
    named = resolve(EngineConfig(k=3), None).sized(branches=True)
    assert (named.k, named.num_nodes) == (3, 0)


def test_a_lossy_rule_has_look_ups_in_the_requests_own_text_and_fixed_lengths() -> None:
    resolved = resolve(EngineConfig(sampler="typical"), None)
    assert (resolved.drafter.name, resolved.settings.controller) == ("ngram", "fixed")
    assert not resolved.left_to_us


@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_drafts_of_a_pass_are_bounded_where_nobody_chose_their_size(batch_size: int) -> None:
    resolved = resolve(EngineConfig(batch_size=batch_size), None)
    wanted = min(batch_size * AUTO_NODES, max(MOST_DRAFTED, batch_size))
    assert resolved.pass_rows == batch_size + wanted
    named = resolve(EngineConfig(batch_size=batch_size, drafter="suffix"), None)
    assert named.pass_rows == batch_size * (DEFAULT_K + 1)


def test_a_controller_of_the_callers_own_is_asked_for_all_texts() -> None:
    parts = parts_for(EngineConfig(page_size=4), with_draft=False)
    resolved = parts.resolve(EngineConfig(page_size=4))
    traces: list[RoundTrace] = []
    own = FixedController(Budget(0))
    engine = build_engine(resolved, parts, num_slots=256, sink=traces.append, controller=own)
    params = replace(greedy(20), temperature=0.9, seed=3)
    engine.submit(Rig(engine.residents.target).live(0, Request(PROMPT, params)))
    while engine.has_work:
        engine.step()
    assert traces
    assert not any(trace.num_drafted for trace in traces)


def test_a_request_names_the_members_that_draft_for_it() -> None:
    found = resolve(EngineConfig(), MODEL, found=True)
    assert found.members == ("suffix", "ngram", "prediction", "model")
    for names in (("model",), ("ngram", "model"), ("suffix",)):
        chosen = found.of_request(SamplingParams(drafters=names))
        assert (chosen.drafter, chosen.members) == ("", names)
    given = SamplingParams(speculative={"drafters": ["ngram"]})
    assert (given.speculative, given.drafters) == (True, ("ngram",))
    # An engine without a portfolio has look-ups all the same, and its own drafter.
    alone = resolve(EngineConfig(drafter="model"), MODEL)
    homes = {
        names: alone.of_request(SamplingParams(drafters=names)).drafter
        for names in (
            ("model",),
            ("ngram",),
            ("suffix", "ngram"),
        )
    }
    assert homes == {("model",): "", ("ngram",): "ngram", ("suffix", "ngram"): "lookup"}


@pytest.mark.parametrize(
    "names",
    [("model", "eagle"), ("modle",), ("suffix", "nothing"), ("dflash",), ("none",)],
)
def test_a_member_that_is_not_here_is_refused_with_those_that_are(names: tuple[str, ...]) -> None:
    found = resolve(EngineConfig(), MODEL, found=True)
    with pytest.raises(ConfigError, match=r"^drafters: .* cannot draft here") as refused:
        found.of_request(SamplingParams(drafters=names))
    there = str(refused.value.hint).partition(";")[0]
    assert there.split(" has ")[1] == "suffix, ngram, prediction, model"


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": {"drafters": []}},
        {"speculative": {"drafter": "ngram"}},
        {"speculative": {"drafters": ["ngram"], "k": 3}},
        {"drafters": ["ngram"], "drafter": "model"},
        {"drafters": [3]},
    ],
)
def test_other_choices_of_members_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**options)


def test_nothing_can_be_chosen_where_nothing_is_drafted() -> None:
    with pytest.raises(ConfigError, match="this engine has none"):
        resolve(EngineConfig(k=0), None).of_request(SamplingParams(drafters=("ngram", "suffix")))


def test_several_drafts_make_a_portfolio() -> None:
    several = resolve(EngineConfig(), "eagle", more=[MODEL, COPY])
    assert (several.drafter.name, several.left_to_us) == ("portfolio", True)
    assert [kind.name for kind in several.sources] == ["eagle", MODEL, COPY]
    assert several.has_heads
    assert several.copy is KINDS[COPY]
    assert resolve(EngineConfig(drafter="portfolio"), MODEL, more=[COPY]).copy is KINDS[COPY]
    heads = resolve(EngineConfig(), "eagle", more=["mtp"])
    assert (heads.drafter.name, heads.members[-2:]) == ("portfolio", ("eagle", "mtp"))
    assert heads.of_request(SamplingParams(drafters=("mtp",))).members == ("mtp",)
    assert heads.of_request(SamplingParams(drafter="mtp")).drafter == "mtp"


@pytest.mark.parametrize(
    ("config", "more", "why"),
    [
        (EngineConfig(drafter="model"), ["eagle"], "one source of drafts"),
        (EngineConfig(), [MODEL], "different kinds"),
        (EngineConfig(), ["eagle", "eagle"], "different kinds"),
        (EngineConfig(schedule="pdv"), [COPY], "one lane"),
    ],
)
def test_several_drafts_that_cannot_join_are_refused(
    config: EngineConfig, more: list[str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(config, MODEL, more=more)


def test_a_seed_repeats_a_text_that_look_ups_draft_for() -> None:
    """The controller is told nonsense of costs in between, and may choose other lengths."""

    def written(seed: int, between: int) -> list[int]:
        engine, _ = built(EngineConfig(page_size=4), with_draft=False)
        stages = cast(Stages, round_of(engine))
        rig = Rig(engine.residents.target)
        params = replace(greedy(40), temperature=0.9, seed=seed)
        rule = resolve(EngineConfig(), None).of_request(params).sampler
        seq = rig.live(0, Request(PROMPT, replace(params, sampler=rule)))
        engine.submit(seq)
        for step in range(200):
            if not engine.has_work:
                break
            if between and step % 3 == 0:
                stages.controller.budgets([900 + step])
            engine.step()
        return seq.tokens

    assert written(3, 0) == written(3, 1) != written(4, 0)


@pytest.mark.slow
def test_a_dead_drafter_is_turned_off_with_a_reason_and_the_text_stays() -> None:
    """The draft model knows nothing of the target: hardly a token is kept, and rows are wasted."""

    def run(config: EngineConfig) -> tuple[LiveSequence, list[int]]:
        engine, traces = built(replace(config, page_size=4))
        seq = Rig(engine.residents.target).live(0, Request((1,), greedy(120)))
        engine.submit(seq)
        while engine.has_work:
            engine.step()
        return seq, [trace.num_drafted for trace in traces]

    plainly, _ = run(EngineConfig(drafter="none"))
    watched, drafted = run(EngineConfig(k=8))
    unwatched, always = run(EngineConfig(k=8, watchdog="off"))
    assert watched.tokens == unwatched.tokens == plainly.tokens
    assert "'model' gained" in watched.rested
    assert (unwatched.rested, plainly.rested) == ("", "")
    assert sum(drafted) < sum(always) / 2
