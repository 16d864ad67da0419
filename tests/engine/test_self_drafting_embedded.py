"""The embedded target drafts for itself, and drops keys, through every part of the engine."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from doubles.rig import round_of
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError
from outrider.core.plugins import KINDS
from outrider.drafters.common.draft_model import SelfDraftSpec, own_copy, skipped_layers
from outrider.engine.native_round import NativeRound
from outrider.engine.stages import Stages
from outrider.models.families import read_config
from outrider.models.llama import LlamaModel
from outrider_lab.bench.workload import WORKLOADS, load_prompts

pytestmark = pytest.mark.weights

PROMPTS = [*(load_prompts(name)[3] for name in WORKLOADS), "1 +", "def f(n):\n"]
SHORT, LONG = 3, 0
GREEDY = SamplingParams(max_tokens=12)
WARM = SamplingParams(max_tokens=12, temperature=0.8, seed=7)
OWN = ("quantised-self", "layer-skip")


def texts(params: SamplingParams, **config: object) -> list[list[int]]:
    llm = LLM(config=EngineConfig(**config))  # pyright: ignore[reportArgumentType]
    found = [list(one.token_ids) for one in llm.generate(PROMPTS, params)]
    drafted = sum(one.stats.num_drafted for one in llm.generate(PROMPTS[LONG], params))
    assert drafted > 0 or llm.drafter == "none"
    return found


@functools.cache
def plain(kv_budget: int = 0) -> list[list[int]]:
    return texts(GREEDY, drafter="none", kv_budget=kv_budget)


@functools.cache
def sampled(drafter: str) -> list[list[int]]:
    return texts(WARM, drafter=drafter, k=3, batch_size=1, prefill_chunk=1024)


# Every arrangement and every drafter, not each with each: tests/engine/test_drafter_matrix.py has
# their pairs. Other combinations are `deep`.
@pytest.mark.sample(6)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
@pytest.mark.parametrize(
    "config",
    [
        {"k": 1, "batch_size": 1},
        {"k": 6, "self_quantise": "int4", "skip_layers": "3"},
        {"k": 3, "prefill_chunk": 7, "fused_round": False},
        {"k": 3, "batched_verify": False},
        {"k": 4, "schedule": "pd", "prefill_chunk": 16},
        {"k": 4, "schedule": "pdv", "hybrid_threshold": 0, "prefill_chunk": 16},
        {"k": 4, "schedule": "ssd"},
        {"k": 4, "controller": "goodput"},
        {"k": 4, "dtype": "float32"},
        {"k": 3, "quantise": "none", "sampler": "coupled"},
    ],
    ids=lambda config: " ".join(f"{name}={value}" for name, value in config.items()),
)
def test_greedy_text_is_that_of_plain_decoding(drafter: str, config: dict[str, object]) -> None:
    wide = config.get("dtype") == "float32"
    wanted = texts(GREEDY, drafter="none", dtype="float32") if wide else plain()
    assert texts(GREEDY, drafter=drafter, **config) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
def test_on_the_reference_kernels(drafter: str) -> None:
    off, on = (
        LLM(config=EngineConfig(drafter=name, k=2, force_reference=True))
        for name in ("none", drafter)
    )
    params = SamplingParams(max_tokens=6)
    (wanted,), (found,) = (llm.generate(PROMPTS[SHORT], params) for llm in (off, on))
    assert found.token_ids == wanted.token_ids
    assert found.stats.num_accepted > 0


@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
@pytest.mark.parametrize(
    "config",
    [
        {"batch_size": 5, "prefill_chunk": 9},
        {"fused_round": False},
        {"schedule": "pdv", "hybrid_threshold": 0},
    ],
    ids=["chunks", "stages", "lanes"],
)
def test_a_sampled_text_is_one_for_every_arrangement(
    drafter: str, config: dict[str, object]
) -> None:
    """What is drafted depends on the text, so a seed gives one text."""
    assert texts(WARM, drafter=drafter, k=3, **config) == sampled(drafter)


@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "model", "quantised-self"])
@pytest.mark.parametrize(
    "config",
    [
        {"batch_size": 1, "prefill_chunk": 1024},
        {"batch_size": 3, "prefill_chunk": 11},
        {"batched_verify": False},
        {"schedule": "pdv", "hybrid_threshold": 0, "prefill_chunk": 16},
    ],
    ids=["alone", "chunks", "token by token", "lanes"],
)
def test_a_compacted_model_has_one_text(drafter: str, config: dict[str, object]) -> None:
    wanted = plain(kv_budget=32)
    assert texts(GREEDY, drafter=drafter, k=4, kv_budget=32, **config) == wanted


def test_whole_rounds_stop_where_keys_were_dropped_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(config=EngineConfig(drafter="ngram", k=4, kv_budget=32))
    whole = round_of(llm._engine)  # pyright: ignore[reportPrivateUsage]
    if not isinstance(whole, NativeRound):
        pytest.skip("no native rounds here")
    staged: list[int] = []
    verify = Stages.verify

    def watched(self: Stages, *args: object, **kwargs: object) -> object:
        staged.append(1)
        return verify(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Stages, "verify", watched)
    (short,) = llm.generate(PROMPTS[SHORT], GREEDY)
    assert not staged
    (long,) = llm.generate(PROMPTS[LONG], GREEDY)
    assert len(staged) == long.stats.num_rounds
    llm.generate(PROMPTS[SHORT], GREEDY)
    assert len(staged) == long.stats.num_rounds
    monkeypatch.undo()
    unlimited = LLM(config=EngineConfig(drafter="none")).generate(
        [PROMPTS[SHORT], PROMPTS[LONG]], GREEDY
    )
    assert short.token_ids == unlimited[0].token_ids
    assert list(long.token_ids) == plain(kv_budget=32)[LONG] != list(unlimited[1].token_ids)


def test_a_copy_shares_all_but_its_matrices() -> None:
    llm = LLM(config=EngineConfig(drafter="quantised-self", self_quantise="int4"))
    target = llm._pair.target  # pyright: ignore[reportPrivateUsage]
    own = llm._pair.own  # pyright: ignore[reportPrivateUsage]
    assert isinstance(target, LlamaModel)
    assert own is not None
    copy = own.of(target)
    assert copy.state is target.state
    assert copy.tables.embeddings is target.tables.embeddings
    assert copy.scratch.x_ND is not target.scratch.x_ND
    sizes = [sum(part.nbytes for part in model.streamed) for model in (copy, target)]
    # 4 bits with scale and minimum, and an output head of 8.
    assert sizes[0] < 0.4 * sizes[1]


def test_what_settings_change_or_do_not_is_said() -> None:
    notes = LLM(config=EngineConfig(drafter="ngram", skip_layers="3", kv_budget=64)).notes
    assert "skip_layers has no effect on drafter ngram" in notes
    assert "prompts of over 65 tokens lose keys, which changes the text" in notes
    notes = LLM(config=EngineConfig(drafter="layer-skip", skip_layers="3")).notes
    # Without a compiler, a note says so.
    assert all(note.startswith("kernels: ") for note in notes)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("", (2, 6)), ("0", (0,)), (" 2, 5-6 ", (2, 5, 6)), ("1-3,2", (1, 2, 3))],
)
def test_layers_are_named_by_numbers_and_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert skipped_layers(text, 8) == layers


@pytest.mark.parametrize("text", ["8", "3-1", "a", "1;2", "-1", "2,", "0-7", "1-", "99999"])
def test_what_names_no_layers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="skip_layers"):
        skipped_layers(text, 8)


def test_who_cannot_draft_for_itself_is_told_before_weights_are_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("gpt2"))
    with pytest.raises(ConfigError, match="gpt2 cannot draft for itself"):
        own_copy(EngineConfig(), KINDS["layer-skip"], folder, read_config(folder))
    llama = read_config(write_checkpoint(tmp_path / "llama", variant("llama2")))
    with pytest.raises(ConfigError, match="shared by processes"):
        own_copy(EngineConfig(tensor_parallel=2), KINDS["layer-skip"], folder, llama)
    with pytest.raises(ConfigError, match="skip_layers"):
        own_copy(EngineConfig(skip_layers="2"), KINDS["quantised-self"], folder, llama)
    assert own_copy(EngineConfig(), KINDS["quantised-self"], folder, llama) == SelfDraftSpec(
        folder, "int4"
    )
    with pytest.raises(ConfigError, match="kv_window"):
        LLM(config=EngineConfig(kv_budget=8))
