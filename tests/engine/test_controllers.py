"""Controllers change time and nothing else: whatever they choose, the text is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import PROMPT, check_greedy
from checks.state import VOCAB
from doubles.counting import Guessing
from doubles.drafters import OUT_OF_STEP, random_chains
from doubles.rig import BRANCHING, Request, Rig, model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider import LLM, EngineConfig
from outrider.control.goodput import GoodputController
from outrider.control.heuristics import FixedController
from outrider.core.draft import Budget
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Controller, Drafter
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.plugins.controllers import BandController, SloController
from outrider.verify.exact import CoupledRule, MatchRule

K = 6
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "fixed": lambda: FixedController(Budget(K)),
    "band": lambda: BandController(k=K, min_k=1, target=0.7),
    "band from nought": lambda: BandController(k=K, min_k=0, target=0.9),
    # No round of a toy model is as quick, or as slow.
    "slo, always late": lambda: SloController(k=K, min_k=1, target_ms=1e-6),
    "slo, never late": lambda: SloController(k=K, min_k=1, target_ms=1e6),
    "goodput": lambda: GoodputController(k=K),
}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5), chunk=3),
    "target itself": lambda: model_drafter(ToyHybrid(vocab_size=VOCAB)),
    "ngram": lambda: NgramDrafter(max_n=2, min_n=1),
    "prediction": lambda: Guessing((1, 4, 2, 0, 3, 1, 1, 2)),
    "chains": lambda: random_chains(VOCAB),
    "out of step": lambda: OUT_OF_STEP,
}
every_controller = pytest.mark.parametrize("name", CONTROLLERS)


@pytest.mark.sample(3)
@every_controller
@examples(10)
@given(
    drafter=st.sampled_from(sorted(DRAFTERS)),
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=6
    ),
    batch_size=st.integers(1, 4),
    num_tokens=st.integers(1, 30),
)
def test_greedy_text_is_plain_decodings(
    name: str, drafter: str, prompts: list[list[int]], batch_size: int, num_tokens: int
) -> None:
    target = ToyHybrid(vocab_size=VOCAB)
    rig = Rig(target, DRAFTERS[drafter](), controller=CONTROLLERS[name](), batch_size=batch_size)
    check_greedy(rig, ToyHybrid, prompts, num_tokens)
    assert max(trace.num_drafted for trace in rig.traces) <= K


# Each controller, both rules. Other combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@every_controller
@pytest.mark.parametrize("rule", [MatchRule(), CoupledRule()], ids=lambda rule: type(rule).__name__)
def test_text_tied_to_a_seed_stays(name: str, rule: MatchRule | CoupledRule) -> None:
    asked = [
        Request(PROMPT[i:], SamplingParams(temperature=0.9, seed=i, max_tokens=30))
        for i in range(3)
    ]
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), rule=rule).run(asked)
    for drafter in ("model", "ngram", "chains"):
        target, controller = ToyHybrid(vocab_size=VOCAB), CONTROLLERS[name]()
        assert Rig(target, DRAFTERS[drafter](), rule, controller=controller).run(asked) == wanted


TREES: dict[str, Callable[[], Controller]] = {
    "band": lambda: BandController(k=K, min_k=1, target=0.7, num_nodes=3 * K),
    "slo": lambda: SloController(k=K, min_k=1, target_ms=1e6, num_nodes=3 * K),
    "goodput": lambda: GoodputController(k=K, num_nodes=3 * K),
}


@pytest.mark.parametrize("name", TREES)
def test_drafters_that_branch_do_so_under_every_controller(name: str) -> None:
    drafter = ModelDrafter(ToyHybrid(vocab_size=VOCAB, seed=5), BRANCHING, chunk=3)
    target = ToyHybrid(vocab_size=VOCAB)
    rig = Rig(target, drafter, controller=TREES[name](), batch_size=2, spare=3 * K + 1)
    check_greedy(rig, ToyHybrid, [list(PROMPT), [1, 2]], 40)
    drafted = [trace for trace in rig.traces if trace.num_drafted]
    assert all(trace.num_accepted <= trace.draft_depth <= K for trace in drafted)
    assert any(trace.num_drafted > trace.draft_depth for trace in drafted)
    # Toys draft too slowly for goodput to go on with it.
    assert name == "goodput" or len({trace.draft_depth for trace in drafted}) > 1


def test_drafts_grow_where_all_is_accepted_and_shrink_where_nothing_is() -> None:
    def drafted(drafter: str) -> list[int]:
        controller = BandController(k=K, min_k=1, target=0.7)
        rig = Rig(ToyHybrid(vocab_size=VOCAB), DRAFTERS[drafter](), controller=controller)
        rig.outputs([PROMPT], SamplingParams(max_tokens=60))
        return [trace.num_drafted for trace in rig.traces]

    assert drafted("target itself")[:8] == [4, 4, 4, 4, 5, 6, 6, 6]
    assert 1 in drafted("out of step")


def test_latency_above_the_target_shortens_drafts_for_all() -> None:
    rig = Rig(
        ToyHybrid(vocab_size=VOCAB),
        random_chains(VOCAB),
        controller=CONTROLLERS["slo, always late"](),
    )
    rig.outputs([PROMPT, (1,), (2, 2)], SamplingParams(max_tokens=60))
    drafted = [trace.num_drafted for trace in rig.traces]
    assert (max(drafted[:30]), max(drafted[-20:])) == (4, 2)


def test_traces_tell_how_many_requests_wait() -> None:
    rig = Rig(ToyHybrid(vocab_size=VOCAB), batch_size=2)
    rig.outputs([PROMPT] * 5, SamplingParams(max_tokens=4))
    waiting = [trace.num_waiting for trace in rig.traces]
    assert (waiting[0], waiting[-1]) == (3, 0)
    assert waiting == sorted(waiting, reverse=True)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("controller", ["band", "slo", "goodput"])
def test_a_model_pair_writes_the_same_text(controller: str) -> None:
    params = SamplingParams(max_tokens=28)
    prompts = ["def fibonacci(n):", "Question: What is 2 + 3?\nAnswer:"]
    plain = LLM(config=EngineConfig(drafter="none", dtype="float32"))
    config = EngineConfig(controller=controller, k=8, dtype="float32", target_ms=1e-3)
    results = LLM(config=config).generate(prompts, params)
    wanted = plain.generate(prompts, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in wanted]


@pytest.mark.weights
def test_a_shortest_draft_above_the_longest_is_refused() -> None:
    for controller in ("band", "slo"):
        with pytest.raises(ConfigError, match="min_k=5 is above k=4") as caught:
            LLM(config=EngineConfig(controller=controller, min_k=5, k=4))
        assert caught.value.hint
    assert LLM(config=EngineConfig(min_k=5, k=4)).drafter == "model"
