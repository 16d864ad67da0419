"""MTP blocks through the engine: greedy text is plain decoding's, whatever the blocks guess."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from checks.engine import check_greedy, greedy, plain
from doubles.counting import CyclingController
from doubles.kinds import llama, stored
from doubles.rig import Request, Rig, first_maximum
from doubles.tiny_mtp import block_like, mtp_tensors, write_mtp
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.protocols import CausalLM, Drafter
from outrider.drafters.common.growth import DraftSampler
from outrider.engine.round import StepwiseLM
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model, resolve
from outrider.plugins.heads.mtp import mtp_drafter

CAPACITY = ModelCapacity(num_slots=512, page_size=4, max_rows=64, max_logits=64, hidden_layers=(2,))
SAMPLER = DraftSampler(first_maximum, "the MTP block")
PROMPTS = ((7, 90, 3, 7, 90), (1,), (40, 41, 42, 43, 44, 45, 46, 47, 48))
prompts = st.lists(st.lists(st.integers(0, 95), min_size=1, max_size=9), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    config = target().config
    found: dict[int, Path] = {}
    for depth in (1, 2, 3):
        own = block_like(config, depth=depth)
        folder = tmp_path_factory.mktemp(f"mtp{depth}")
        found[depth] = write_mtp(folder, own, mtp_tensors(own))
    return found


@cache
def target() -> LlamaModel:
    model = load_model(stored("llama2", 0), LoadOptions(capacity=CAPACITY, device="cpu"))
    assert isinstance(model, LlamaModel)
    return model


def drafter(folder: Path, *, chunk: int = 256, batch_size: int = 8) -> Drafter:
    heads = HeadsToLoad(folder, "mtp", CAPACITY)
    return mtp_drafter(heads, target(), SAMPLER, chunk=chunk, batch_size=batch_size)


@examples(12)
@given(
    depth=st.integers(1, 3), k=st.integers(1, 6), chunk=st.sampled_from([2, 5, 64]), prompts=prompts
)
def test_greedy_text_is_that_of_plain_decoding(
    folders: dict[int, Path], depth: int, k: int, chunk: int, prompts: list[list[int]]
) -> None:
    rig = Rig(target(), drafter(folders[depth], chunk=chunk), k=k, chunk=chunk)
    check_greedy(rig, llama, prompts, 9)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_batches_and_waiting_change_nothing(
    folders: dict[int, Path], depth: int, batch_size: int
) -> None:
    own = drafter(folders[depth], batch_size=batch_size)
    rig = Rig(target(), own, k=3, batch_size=batch_size, chunk=4)
    check_greedy(rig, llama, [*PROMPTS, PROMPTS[0]], 12)
    assert sum(trace.num_drafted for trace in rig.traces) > 20


def test_budgets_that_change_change_nothing(folders: dict[int, Path]) -> None:
    controller = CyclingController((2, 0, 5, 0, 0, 1, 3))
    rig = Rig(target(), drafter(folders[2]), controller=controller, chunk=3)
    check_greedy(rig, llama, PROMPTS, 14)


def test_token_by_token_verification_changes_nothing(folders: dict[int, Path]) -> None:
    stepwise: CausalLM = StepwiseLM(target())
    rig = Rig(stepwise, drafter(folders[1]), k=4)
    check_greedy(rig, llama, PROMPTS, 12)
    together = Rig(target(), drafter(folders[1]), k=4)
    check_greedy(together, llama, PROMPTS, 12)
    assert [t.num_accepted for t in rig.traces] == [t.num_accepted for t in together.traces]


def test_a_stop_anywhere_ends_all_memories_there(folders: dict[int, Path]) -> None:
    text = plain(llama, PROMPTS[0], 10)
    for stop in sorted(set(text)):
        place = text.index(stop)
        own = drafter(folders[1])
        rig = Rig(target(), own, k=3)
        seq = rig.alone(Request(PROMPTS[0], greedy(10), stop_ids=frozenset({stop})))
        assert tuple(seq.tokens[5:]) == text[: place + 1]
        assert target().state.length(0) == 5 + place
        rig.end()


def test_requests_that_wait_again_write_what_they_would(folders: dict[int, Path]) -> None:
    """Memory of the target ends early, so the youngest are put off, and their blocks' memory is
    made anew."""
    small = replace(CAPACITY, num_slots=44)
    scarce = load_model(stored("llama2", 0), LoadOptions(capacity=small, device="cpu"))
    heads = HeadsToLoad(folders[2], "mtp", CAPACITY)
    own = mtp_drafter(heads, scarce, SAMPLER, chunk=4, batch_size=3)
    rig = Rig(scarce, own, k=3, batch_size=3, chunk=4, spare=4, reserve=0.0)
    texts = rig.outputs(PROMPTS, greedy(16))
    assert texts == [list(plain(llama, prompt, 16)) for prompt in PROMPTS]
    assert any(seq.num_preempted for seq in rig.sequences)
    assert any(trace.num_drafted for trace in rig.traces)


def test_a_full_memory_of_the_block_costs_drafts_alone(folders: dict[int, Path]) -> None:
    small = replace(CAPACITY, num_slots=16)
    heads = HeadsToLoad(folders[1], "mtp", small)
    own = mtp_drafter(heads, target(), SAMPLER, chunk=64, batch_size=2)
    rig = Rig(target(), own, k=3, batch_size=2)
    check_greedy(rig, llama, [PROMPTS[0], PROMPTS[2]], 12)
    last = [trace.num_drafted for trace in rig.traces if trace.num_emitted][-2:]
    assert last == [0, 0]
    assert any(trace.num_drafted for trace in rig.traces)


def test_a_shorter_window_of_the_block_is_told_and_ends_drafting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = target().config
    own = block_like(config)
    folder = write_mtp(tmp_path, own, mtp_tensors(own))
    path = folder / "config.json"
    path.write_text(
        path.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 16')
    )
    with caplog.at_level("WARNING"):
        short = drafter(folder)
    assert "16 positions and the target 256" in caplog.text
    rig = Rig(target(), short, k=3)
    check_greedy(rig, llama, [PROMPTS[0]], 30)
    drafted = [trace.num_drafted for trace in rig.traces]
    assert any(drafted[1:4])
    assert not any(drafted[-10:])


@pytest.fixture(scope="module")
def embedded_block(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block of random weights for the embedded target."""
    options = LoadOptions(capacity=ModelCapacity(num_slots=64), device="cpu")
    model = load_model(resolve("outrider/embedded"), options)
    assert isinstance(model, LlamaModel)
    own = block_like(model.config)
    return write_mtp(tmp_path_factory.mktemp("embedded"), own, mtp_tensors(own))


@pytest.mark.weights
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_embedded_target_writes_the_same_with_a_random_block(
    embedded_block: Path, temperature: float
) -> None:
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3)
    texts = ["def add(a, b):", "Question: How many", "x = 1"]
    # Under the match rule a seed's text does not depend on what was drafted.
    sampler = "block" if temperature == 0 else "match"
    plainly = LLM(config=EngineConfig(drafter="none", sampler=sampler))
    wanted = [result.text for result in plainly.generate(texts, params)]
    for batch_size in (1, 3):
        config = EngineConfig(k=3, batch_size=batch_size, sampler=sampler)
        with_block = LLM(draft=str(embedded_block), config=config)
        assert with_block.drafter == "mtp"
        results = with_block.generate(texts, params)
        assert [result.text for result in results] == wanted
        assert all(result.stats.num_drafted > 0 for result in results)


@pytest.mark.weights
def test_what_is_missing_is_said_before_anything_runs(folders: dict[int, Path]) -> None:
    with pytest.raises(ConfigError, match="needs an MTP block, and --draft names a draft model"):
        LLM(draft="outrider/embedded-draft", config=EngineConfig(drafter="mtp"))
    with pytest.raises(CheckpointError, match="hidden_size 64, the target 256"):
        LLM(draft=str(folders[1]))
    with pytest.raises(ConfigError, match="needs a draft model, and --draft names an MTP block"):
        LLM(draft=str(folders[1]), config=EngineConfig(drafter="model"))
