"""Dropping keys of prompts: one text for every way of decoding, and the gate in both directions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import greedy
from doubles.drafters import random_chains, random_trees
from doubles.lanes import SCHEDULES
from doubles.rig import Request, Rig, live, model_drafter
from doubles.tiny_checkpoints import random_model, variant
from outrider.cache.pool import Keep
from outrider.control.heuristics import FixedController
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.protocols import Drafter, DraftNeeds
from outrider.drafters.common.draft_model import SelfDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine.round import StepwiseLM
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import CheaperParts, GPT2Model, LlamaModel
from outrider.plugins.compaction import Compaction, compaction_of
from outrider.sched.jobs import LaneSizes
from outrider.verify.exact import MatchRule
from outrider_lab.models.scripted import Script, ScriptedLM

KEEP = Compaction(Keep(budget=9, window=4))
VOCAB = 96
TEXT = tuple((7 * i * i + 3 * i) % VOCAB for i in range(40))
CAPACITY = ModelCapacity(num_slots=512, page_size=4, max_rows=96, max_logits=96)
Family = LlamaModel | GPT2Model


@functools.cache
def model(name: str, seed: int = 0) -> Family:
    """Memory is empty again after every run, so runs may share a model."""
    found = random_model(variant(name), seed=seed, capacity=CAPACITY)
    assert isinstance(found, LlamaModel | GPT2Model)
    return found


def layer_skip(target: Family) -> Drafter:
    assert isinstance(target, LlamaModel)
    assert target.kernels.twin is not None
    parts = CheaperParts(target.kernels.twin(), target.tables.head, target.layers, (0,))
    sampler = DraftSampler(target.kernels.argmax, "the draft model")
    return SelfDrafter(target.cheaper(parts), sampler, name="layer-skip")


DRAFTERS: dict[str, Callable[[Family], Drafter]] = {
    "none": lambda _: NoDrafter(),
    "ngram": lambda _: NgramDrafter(max_n=2, min_n=1),
    "model": lambda _: model_drafter(model("one_kv_head", 5), chunk=7),
    "same": lambda _: model_drafter(model("wide_heads", 1), chunk=64),
    "layer-skip": layer_skip,
    "chains": lambda _: random_chains(VOCAB),
    "trees": lambda _: random_trees(VOCAB),
}


def prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    return [TEXT[i : i + length] for i, length in enumerate(lengths)]


@functools.cache
def plainly(
    name: str, prompt: tuple[int, ...], num_tokens: int, temperature: float = 0.0
) -> tuple[int, ...]:
    """The compacted model's text without drafts, alone and read in one go."""
    rig = Rig(model(name), NoDrafter(), compaction=KEEP, page_size=4)
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=3)
    (text,) = rig.run([Request(prompt, params)])
    return tuple(text)


@pytest.mark.parametrize("drafter", DRAFTERS)
@examples(6)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    k=st.integers(1, 6),
    chunk=st.integers(1, 40),
    batch_size=st.integers(1, 3),
    num_tokens=st.integers(1, 9),
    stepwise=st.booleans(),
)
def test_every_run_is_plain_decoding_of_the_compacted_model(
    drafter: str,
    lengths: list[int],
    k: int,
    chunk: int,
    batch_size: int,
    num_tokens: int,
    stepwise: bool,
) -> None:
    target = model("wide_heads")
    rig = Rig(
        StepwiseLM(target) if stepwise else target,
        DRAFTERS[drafter](target),
        chunk=chunk,
        batch_size=batch_size,
        controller=FixedController(Budget(k, num_nodes=4)),
        compaction=KEEP,
    )
    texts = prompts(lengths)
    outputs = rig.outputs(texts, greedy(num_tokens))
    assert outputs == [list(plainly("wide_heads", text, num_tokens)) for text in texts]
    target.state.check()


def test_dropped_keys_change_the_text_and_a_budget_alone_does_not() -> None:
    """Otherwise the tests above would show nothing."""
    target = model("wide_heads")
    short, long = TEXT[: KEEP.keep.budget], TEXT[:30]
    whole = Rig(target, NoDrafter()).outputs([short, long], greedy(12))
    assert list(plainly("wide_heads", short, 12)) == whole[0]
    assert list(plainly("wide_heads", long, 12)) != whole[1]


def test_gpt2_too() -> None:
    target = model("gpt2")
    rig = Rig(target, NgramDrafter(max_n=2, min_n=1), chunk=5, compaction=KEEP)
    texts = prompts([30, 9, 12])
    assert rig.outputs(texts, greedy(9)) == [list(plainly("gpt2", text, 9)) for text in texts]


@pytest.mark.parametrize("drafter", ["ngram", "layer-skip"])
def test_the_coupled_text_is_that_of_the_seed(drafter: str) -> None:
    """With numbers that are tied to positions, also the sampled text is that of plain decoding."""
    target, params = model("wide_heads"), SamplingParams(max_tokens=12, temperature=0.8, seed=4)
    texts = [Request(text, params) for text in prompts([30, 22])]
    runs = [
        Rig(target, DRAFTERS[name](target), MatchRule(), chunk=chunk, compaction=KEEP).run(texts)
        for name, chunk in (("none", 64), (drafter, 7))
    ]
    assert runs[0] == runs[1]


def test_memory_is_given_back_while_the_text_goes_on() -> None:
    target = model("wide_heads")
    rig = Rig(target, NgramDrafter(), compaction=KEEP, page_size=4)
    free = target.state.num_free_tokens
    seq = rig.alone(Request(TEXT[:33], greedy(6)))
    assert target.state.num_dropped(0) == 32 - KEEP.keep.budget
    assert target.state.length(0) == len(seq.tokens) - 1
    assert free - target.state.num_free_tokens <= KEEP.keep.budget + 6 + rig.k + 4
    rig.end()
    # The prompt's own pages may have been found; its last token has a pass of its own.
    assert [(t.num_prompt_tokens > 0, t.num_emitted) for t in rig.traces[:2]] == [
        (True, 0),
        (False, 1),
    ]


def small_rig(num_slots: int, name: str, chunk: int, reserve: float) -> Rig:
    target = random_model(variant("wide_heads"), capacity=replace(CAPACITY, num_slots=num_slots))
    assert isinstance(target, LlamaModel)
    return Rig(
        target,
        layer_skip(target),
        k=3,
        batch_size=6,
        spare=4,
        reserve=reserve,
        compaction=KEEP,
        schedule=SCHEDULES[name](LaneSizes(chunk)),
        is_watched=True,
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
@examples(5)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=2, max_size=6),
    chunk=st.integers(1, 20),
    reserve=st.sampled_from([0.0, 1.0]),
)
def test_who_is_pre_empted_goes_on_with_the_same_text(
    name: str, sizes: list[tuple[int, int]], chunk: int, reserve: float
) -> None:
    rig = small_rig(56, name, chunk, reserve)
    prompts = [TEXT[i % 3 :][:length] for i, (length, _) in enumerate(sizes)]
    limits = [limit for _, limit in sizes]
    asked = [Request(*one) for one in zip(prompts, map(greedy, limits), strict=True)]
    for got, prompt, limit in zip(rig.run(asked), prompts, limits, strict=True):
        assert tuple(got) == plainly("wide_heads", prompt, limit)
    assert not any(seq.error for seq in rig.sequences)


def test_memory_that_ends_too_early_pre_empts() -> None:
    rig = small_rig(56, "single", 7, 0.0)
    prompts = [TEXT[i:][:14] for i in range(3)]
    texts = rig.outputs(prompts, greedy(20))
    assert rig.counts.preempted > 0
    assert texts == [list(plainly("wide_heads", prompt, 20)) for prompt in prompts]


def test_keys_of_a_longer_prompt_are_not_shared_past_the_end_of_a_shorter_one() -> None:
    """A text that is read again may be another's prompt, whose keys saw all of it."""
    rig = small_rig(CAPACITY.num_slots, "single", 64, 1.0)
    prompt = TEXT[:14]
    wanted = plainly("wide_heads", prompt, 20)
    Rig(rig.target, NoDrafter(), compaction=KEEP).outputs([(*prompt, *wanted)], greedy(2))
    engine = rig.engine()
    seq = live(0, Request(prompt, greedy(20)))
    engine.submit(seq)
    while seq.num_emitted < 10:
        engine.step()
    engine.residents.preempt(seq)
    while engine.has_work:
        engine.step()
    assert tuple(seq.tokens[14:]) == wanted


def test_the_gate_asks_for_what_happens_not_for_the_budget() -> None:
    target = model("wide_heads")
    rig = Rig(target, NoDrafter(), compaction=KEEP)
    for length, dropped in ((KEEP.keep.budget + 1, False), (KEEP.keep.budget + 2, True)):
        seq = rig.alone(Request(TEXT[:length], greedy(2)))
        assert rig.stages().drops_keys([seq]) is dropped
        assert KEEP.num_dropped(target, 0) == int(dropped)
        rig.end()


def test_who_cannot_go_along_is_refused() -> None:
    class Reader(NoDrafter):
        name = "reader"
        needs = DraftNeeds(hidden_layers=(1,))

    target, config = model("wide_heads"), EngineConfig(kv_budget=32)
    assert compaction_of(config, target, NoDrafter()) == Compaction(Keep(32, 16))
    with pytest.raises(ConfigError, match="hidden states"):
        compaction_of(config, target, Reader())
    with pytest.raises(ConfigError, match="keeps all"):
        compaction_of(config, ScriptedLM(Script(vocab_size=5)), NoDrafter())
