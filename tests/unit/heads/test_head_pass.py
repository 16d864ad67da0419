"""A block's native pass has the bits of its operators, and a whole draft is that of the loop.

Shapes:  P = tokens, K = captured layers, D = hidden size, M = logits rows, V = vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch import Tensor

from doubles.eagle_heads import EagleFolder
from doubles.rig import first_maximum
from doubles.tiny_checkpoints import random_llama, variant, write_checkpoint
from doubles.tiny_mtp import block_like, mtp_tensors, write_mtp
from outrider import LLM, EngineConfig
from outrider.api.result import GenerationResult
from outrider.core.draft import Budget, Draft
from outrider.core.errors import CapacityError, NumericsError
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng, Rng, inverse_cdf, race_node
from outrider.core.tree import ROOT
from outrider.drafters.common.growth import DraftSampler, FusedDraft, FusedDrafts, TextPart
from outrider.drafters.common.native import FusedChains
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.eagle import load_eagle
from outrider.plugins.heads.hidden import HeadLimits, HeadNet, HiddenDrafter
from outrider.plugins.heads.mtp import load_mtp, read_mtp_config
from outrider.plugins.heads.passes import HeadPass, NetOutput, fused_head_drafts
from outrider.testing import check_same

SIZE, VOCAB = 64, 96
IDS = (3, 4, 9, 17, 40, 41, 95)
EAGLE3 = EagleFolder(SIZE, VOCAB, layers=(0, 1, 2), ids=IDS)
EAGLE1 = EagleFolder(SIZE, VOCAB, fused=False)
EAGLES = {
    "EAGLE 3": EAGLE3,
    "EAGLE 3, all ids": replace(EAGLE3, ids=None),
    "EAGLE 3, normed residual": replace(EAGLE3, changes={"norm_before_residual": True}),
    "EAGLE 1": EAGLE1,
    "EAGLE 1, no bias": replace(EAGLE1, bias=False),
}
FAMILIES = ("llama", "qwen3")
NAMES = (*EAGLES, *FAMILIES)
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.2, top_k=9, top_p=0.9, min_p=0.01, seed=5)
SAMPLER = DraftSampler(first_maximum, "the heads")
TEXT = (5, 12, 0, 77, 31, 5, 90, 8)


class Net(HeadNet, Protocol):
    native: HeadPass | None


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LlamaModel]:
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), variant("llama2"), seed=0)

    def loaded(dtype: str) -> LlamaModel:
        if dtype == "float32":
            return random_llama()
        options = LoadOptions(capacity=ModelCapacity(num_slots=64), dtype=dtype, device="cpu")
        model = load_model(folder, options)
        assert isinstance(model, LlamaModel)
        return model

    return loaded


def loaded(name: str, folder: Path, target: LlamaModel, *, num_slots: int = 256) -> Net:
    net = unchecked(name, folder, target, num_slots=num_slots)
    if net.native is None:
        pytest.skip("no compiler, no native kernels")
    return net


def unchecked(name: str, folder: Path, target: LlamaModel, *, num_slots: int = 256) -> Net:
    layers = EAGLES[name].layers or (2,) if name in EAGLES else (2,)
    # Rows for the levels of three trees.
    capacity = ModelCapacity(
        num_slots=num_slots, page_size=4, max_rows=64, max_logits=48, hidden_layers=layers
    )
    if name in EAGLES:
        return load_eagle(HeadsToLoad(EAGLES[name].write(folder), "eagle", capacity), target)
    config = block_like(target.config, family=name)
    written = write_mtp(folder, config, mtp_tensors(config))
    (net,) = load_mtp(written, read_mtp_config(written, target.spec), target, capacity)
    return net


def states_of(text: Sequence[int], num_layers: int, start: int, stop: int) -> Tensor:
    """hidden_PKD that a target might have had of these tokens."""
    found = [
        torch.randn(num_layers, SIZE, generator=torch.Generator().manual_seed(97 * place + token))
        for place, token in enumerate(text[start:stop], start)
    ]
    return torch.stack(found) if found else torch.empty(0, num_layers, SIZE)


def passes(net: Net) -> list[NetOutput]:
    """A text in two chunks, trees below two texts, and tokens without logits."""
    found: list[NetOutput] = []
    rng = torch.Generator().manual_seed(1)

    def step(rows: Sequence[StepRow], keep: int) -> None:
        count = sum(len(row.tokens) for row in rows)
        states_ND = torch.randn(count, SIZE, generator=rng)
        out = net.step(rows, states_ND)
        found.append(NetOutput(out.logits_MV.clone(), out.hidden_ND))
        net.state.commit({row.seq_id: range(keep) for row in rows})

    for seq_id in (1, 2):
        net.state.open(seq_id, ())
        step([StepRow.chain(seq_id, TEXT, logits_from=8)], 8)
        step([StepRow.chain(seq_id, TEXT[3 + seq_id :])], 3)
    tree = (ROOT, 0, 0, 1, ROOT)
    step([StepRow(1, (3, 4, 5, 6, 7), tree), StepRow(2, (8, 9, 1, 2, 3), tree, logits_from=2)], 0)
    for seq_id in (1, 2):
        net.state.close(seq_id)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_native_pass_has_the_bits_of_the_operators(
    name: str, dtype: str, targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    net = loaded(name, tmp_path, targets(dtype))
    native = passes(net)
    net.native = None
    for one, other in zip(native, passes(net), strict=True):
        assert torch.equal(one.logits_MV, other.logits_MV)
        assert torch.equal(one.hidden_ND, other.hidden_ND)
        assert not one.hidden_ND.isnan().any()


@pytest.mark.parametrize("name", ["EAGLE 3", "llama"])
def test_reference_kernels_have_no_native_pass(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "target", variant("llama2"), seed=0)
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu", force_reference=True)
    target = load_model(folder, options)
    assert isinstance(target, LlamaModel)
    net = unchecked(name, tmp_path / "heads", target)
    assert net.native is None
    assert fused_head_drafts(net.native, net.fuse, SAMPLER, batch_size=2) is None
    assert len(passes(net)) == 5


@dataclass(slots=True)
class Counted:
    """FusedDrafts that count how often they were asked and how often they answered."""

    inner: FusedDrafts
    asked: int = 0
    answered: int = 0

    def try_rows(self, parts: Sequence[TextPart]) -> Sequence[FusedDraft] | None:
        self.asked += 1
        drafts = self.inner.try_rows(parts)
        self.answered += drafts is not None
        return drafts


def drafters(
    name: str,
    target: LlamaModel,
    folder: Path,
    sampler: DraftSampler = SAMPLER,
    *,
    num_slots: int = 256,
) -> tuple[HiddenDrafter, HiddenDrafter, Counted]:
    """One that drafts at once where it can, and one that never does, over equal blocks."""
    limits = HeadLimits(chunk=3, reach=5, window=1000, first=int(name in EAGLES))
    nets = [loaded(name, folder / place, target, num_slots=num_slots) for place in ("one", "other")]
    fused = fused_head_drafts(nets[0].native, nets[0].fuse, sampler, batch_size=3)
    assert fused is not None
    counted = Counted(fused)
    at_once = HiddenDrafter("it", nets[:1], sampler, limits, counted)
    return at_once, HiddenDrafter("it", nets[1:], sampler, limits), counted


def row(
    name: str,
    seq_id: int,
    text: Sequence[int],
    *,
    depth: int = 4,
    params: SamplingParams = GREEDY,
    rng: Rng | None = None,
    shaper: LogitsProcessor | None = None,
) -> DraftRow:
    told = tuple(text)
    layers = len(EAGLES[name].layers) or 1 if name in EAGLES else 1
    return DraftRow(
        seq_id,
        told,
        None,
        Budget(depth, temperature=1.3),
        params,
        rng or KeyedRng(params.rng_seed, 0, len(told)),
        hidden=HiddenStates(len(told) - 1, partial(states_of, told, layers)),
        shaper=shaper,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_at_once_is_the_loop_s(
    name: str, targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    """Greedy texts and drawn ones share batches; rounds keep some of a draft or go by unasked."""
    at_once, loop, counted = drafters(name, targets("float32"), tmp_path)
    rng = random.Random(2)
    texts = [list(TEXT), [3, 3], [40] * 17]
    kinds = (GREEDY, DRAWN, replace(DRAWN, top_k=0, seed=9))
    for seq_id, text in enumerate(texts):
        at_once.open(seq_id, text)
        loop.open(seq_id, text)
    for _ in range(12):
        ids = [seq_id for seq_id in range(3) if rng.random() < 0.7]
        rows = [row(name, i, texts[i], depth=rng.randint(1, 6), params=kinds[i]) for i in ids]
        drafts = at_once.propose(rows)
        for draft, other, one in zip(drafts, loop.propose(rows), rows, strict=True):
            check_same(draft, other)
            assert len(draft) == one.budget.depth
        for i, draft in zip(ids, drafts, strict=True):
            texts[i] += [*draft.tokens[: rng.randint(0, len(draft))], rng.randrange(VOCAB)]
    assert counted.asked == counted.answered > 8


def only(one: DraftRow, drafter: HiddenDrafter) -> Draft:
    drafter.open(one.seq_id, one.tokens)
    try:
        return drafter.propose([one])[0]
    finally:
        drafter.close(one.seq_id)


def test_what_a_call_cannot_choose_the_loop_chooses(
    targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    """Drawn drafts whose numbers are not keyed. The call chooses penalised drafts of heads that
    know few ids, and drafts under bans."""
    name = "EAGLE 3"
    at_once, loop, counted = drafters(name, targets("float32"), tmp_path / "plain")
    params = replace(DRAWN, presence_penalty=1.5)
    shaped = row(name, 0, TEXT, params=params, shaper=LogitsProcessor(params, prompt_length=3))
    check_same(only(shaped, at_once), only(shaped, loop))
    whole, whole_loop, answers = drafters("llama", targets("float32"), tmp_path / "whole")
    bans = LogitsProcessor(params, prompt_length=3, bad_words=((7,),))
    banned = row("llama", 0, TEXT, params=params, shaper=bans)
    check_same(only(banned, whole), only(banned, whole_loop))
    assert (answers.asked, answers.answered) == (1, 1)
    own = KeyedRng(3, 0, len(TEXT), choose=partial(inverse_cdf))
    foreign = row(name, 0, TEXT, params=DRAWN, rng=own)
    check_same(only(foreign, at_once), only(foreign, loop))
    assert (counted.asked, counted.answered) == (2, 1)
    assert only(row(name, 0, TEXT), at_once).tokens
    assert counted.answered == 2


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_call_penalises_as_the_loop_does(
    params: SamplingParams, targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    at_once, loop, counted = drafters("llama", targets("float32"), tmp_path)
    plain = only(row("llama", 0, TEXT, params=params), at_once)
    params = replace(
        params,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        logit_bias={plain.tokens[0]: -100.0, 40: 1.0},
    )
    shaper = LogitsProcessor(params, prompt_length=3)
    shaped = row("llama", 0, TEXT, params=params, shaper=shaper)
    check_same(only(shaped, at_once), only(shaped, loop))
    assert (counted.asked, counted.answered) == (2, 2)
    assert only(shaped, at_once).tokens[0] != plain.tokens[0]


def test_a_call_draws_by_races_as_the_loop_does(
    targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    name, racing = "EAGLE 3", replace(SAMPLER, draw=race_node)
    at_once, loop, counted = drafters(name, targets("float32"), tmp_path, racing)
    plain, _, _ = drafters(name, targets("float32"), tmp_path / "plain")
    differing = 0
    for seed in range(8):
        drawn = row(name, 0, TEXT, params=replace(DRAWN, seed=seed))
        check_same(only(drawn, at_once), only(drawn, loop))
        differing += only(drawn, at_once).tokens != only(drawn, plain).tokens
    assert (counted.asked, counted.answered) == (16, 16)
    assert differing


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_logits_that_are_no_numbers_are_told(
    params: SamplingParams, targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    target = targets("float32")
    sampler = DraftSampler(target.kernels.argmax, "the heads", sampling=target.kernels.sampling)
    at_once, _, counted = drafters("llama", target, tmp_path, sampler)
    told = row("llama", 0, TEXT, params=params)
    bad = replace(told, hidden=HiddenStates(len(TEXT) - 1, _no_numbers))
    with pytest.raises(NumericsError, match="the heads gave logits"):
        only(bad, at_once)
    assert (counted.asked, counted.answered) == (1, 0)
    assert len(only(row("llama", 0, TEXT[1:], params=params), at_once)) == 4


def _no_numbers(start: int, stop: int) -> Tensor:
    return torch.full((stop - start, 1, SIZE), torch.nan)


def test_full_memory_costs_the_draft_alone(
    targets: Callable[[str], LlamaModel], tmp_path: Path
) -> None:
    at_once, loop, _ = drafters("llama", targets("float32"), tmp_path, num_slots=12)
    at_once.open(0, TEXT)
    with pytest.raises(CapacityError):
        at_once.propose([row("llama", 0, TEXT, depth=6)])
    longer = row("llama", 0, (*TEXT, 1), depth=2)
    check_same(at_once.propose([longer])[0], only(longer, loop))
    at_once.close(0)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize("drafter", ["eagle", "mtp"])
def test_the_shipped_heads_draft_alike_either_way(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(drafter=drafter, k=4, batch_size=3, profile=True, watchdog="off")
    prompts = ["def add(a, b):", "Question: Tom has 3 apples and buys 4 more.", "x = [1, 2, 3, 4,"]
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=3)
        for temperature in (0.0, 0.7, 0.0)
    ]
    told = told_rounds(LLM(config=config).generate(prompts, params))
    monkeypatch.setattr(FusedChains, "try_rows", _no_drafts)
    assert told_rounds(LLM(config=config).generate(prompts, params)) == told
    monkeypatch.setattr(HeadPass, "step", _refuse)
    monkeypatch.setattr("outrider.plugins.heads.hidden.head_pass", _no_pass)
    assert told_rounds(LLM(config=config).generate(prompts, params)) == told


def _no_drafts(*_: object) -> None:
    return None


def _no_pass(*_: object, **__: object) -> None:
    return None


def _refuse(*_: object) -> None:
    raise AssertionError("a native pass ran")


def told_rounds(results: Sequence[GenerationResult]) -> list[object]:
    return [
        (one.token_ids, [(each.num_drafted, each.num_accepted) for each in one.rounds])
        for one in results
    ]
