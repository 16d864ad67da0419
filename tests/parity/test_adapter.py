"""Models that run through transformers: logits and text are its own, however they are fed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import contract.test_causal_lm as contract
from checks.state import Rollback, check_rollback
from doubles.drafters import random_trees
from doubles.hf_checkpoints import FAMILIES, MIXTURES, VOCAB, tiny_adapter, with_room, write_hf
from doubles.rig import Request, Rig
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM, Drafter, DraftNeeds, StepRow
from outrider.drafters.ngram import NgramDrafter
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from outrider.plugins.transformers.model import AdapterModel, load_adapter
from parity.feeding import feed, greedy
from parity.oracle import Oracle

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]
OPTIONS = LoadOptions(capacity=ModelCapacity(num_slots=512, page_size=16), device="cpu")
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")

    @cache
    def written(family: str) -> Path:
        return write_hf(root / family, family, seed=3)

    return written


@cache
def adapter(family: str, dtype: str = "float32") -> AdapterModel:
    return tiny_adapter(family, dtype=dtype, seed=3)


def kind(
    family: str = "gpt_neox",
    *,
    vocab_size: int = VOCAB,
    seed: int = 0,
    num_slots: int = 256,
    page_size: int = 4,
) -> CausalLM:
    """As in doubles/kinds.py; the weights are loaded once."""
    assert vocab_size <= VOCAB
    assert seed == 0
    return with_room(adapter(family), ModelCapacity(num_slots=num_slots, page_size=page_size))


@every_family
def test_logits_and_hidden_states_are_those_of_transformers(
    family: str, folders: Callable[[str], Path]
) -> None:
    model = load_adapter(folders(family), OPTIONS)
    logits_NV, hidden_NKD = Oracle(folders(family)).run(TEXT)
    model.state.open(1, ())
    out = model.step([StepRow.chain(1, TEXT)], DraftNeeds(hidden_layers=(0, 1)))
    torch.testing.assert_close(out.logits_MV, logits_NV, atol=1e-4, rtol=1e-5)
    assert out.hidden_NKD is not None
    torch.testing.assert_close(out.hidden_NKD, hidden_NKD, atol=1e-4, rtol=1e-5)
    model.state.close(1)
    torch.testing.assert_close(feed(model, TEXT, [1, 20, 7, 32]), logits_NV, atol=1e-4, rtol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "gemma", "stablelm", "starcoder2"])
def test_greedy_text_is_that_of_generate(family: str, folders: Callable[[str], Path]) -> None:
    import transformers  # pyright: ignore[reportMissingTypeStubs]

    loader: Any = transformers.AutoModelForCausalLM
    peer = loader.from_pretrained(folders(family), attn_implementation="eager").eval()
    # Ours goes on past the end of a text, unless the engine stops it.
    peer.generation_config.eos_token_id = None
    prompt = torch.tensor([TEXT[:9]])
    ids = peer.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
    )
    _, lead = Oracle(folders(family)).greedy(TEXT[:9], 40)
    assert lead > 1e-4, "a tie: choose another seed"
    assert greedy(load_adapter(folders(family), OPTIONS), TEXT[:9], 40) == ids[0, 9:].tolist()


def test_a_llama_is_the_same_through_both_doors(tmp_path: Path) -> None:
    for name in ("llama3_rope", "one_kv_head", "tied", "mistral_window"):
        folder = write_checkpoint(tmp_path / name, variant(name), seed=11)
        ours, theirs = load_model(folder, OPTIONS), load_adapter(folder, OPTIONS)
        for field in ("stop_ids", "dtype", "vocab_size", "family"):
            assert getattr(theirs.config, field) == getattr(ours.config, field)
        # Through transformers a context ends where a sliding window would begin to slide.
        window = variant(name).config.get("sliding_window") or ours.spec.max_tokens
        assert theirs.spec == replace(
            ours.spec, max_tokens=window, window=0, reach=0, local_layers=()
        )
        wanted_NV, found_NV = feed(ours, TEXT, [60]), feed(theirs, TEXT, [13, 47])
        torch.testing.assert_close(found_NV, wanted_NV, atol=1e-4, rtol=1e-5)


CONTRACT = [check for name, check in vars(contract).items() if name.startswith("test_")]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_contract_of_every_model_holds(check: Callable[..., None], family: str) -> None:
    def made(**sizes: int) -> CausalLM:
        return kind(family, **sizes)

    lengths = (0, 3, 7) if "length" in inspect.signature(check).parameters else ()
    for length in lengths:
        check(made, length)
    if not lengths:
        check(made)


class AdapterRollback(Rollback):
    kind = staticmethod(kind)


def test_rollback_equals_never_having_fed() -> None:
    check_rollback(AdapterRollback, percent=5)


# Families differ in shapes and not in how rows are cut, dtypes in neither. Other combinations are
# `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@every_family
@settings(max_examples=4)
@given(ends=st.sets(st.integers(1, len(TEXT) - 1), max_size=8))
def test_rows_have_the_same_bits_in_any_company(family: str, dtype: str, ends: set[int]) -> None:
    model = adapter(family, dtype)
    assert model.kernels.exact
    sizes = [end - start for start, end in pairwise([0, *sorted(ends), len(TEXT)])]
    assert torch.equal(feed(model, TEXT, sizes), feed(model, TEXT, [len(TEXT)]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_transformers_own_with_the_same_bits_in_any_company(
    family: str, dtype: str, folders: Callable[[str], Path]
) -> None:
    model = load_adapter(folders(family), replace(OPTIONS, dtype=dtype))
    assert model.kernels.exact
    whole_NV = feed(model, TEXT, [60])
    assert torch.equal(feed(model, TEXT, [1] * 60), whole_NV)
    assert torch.equal(feed(model, TEXT, [7, 1, 20, 2, 30]), whole_NV)
    if dtype == "float32":
        logits_NV, _ = Oracle(folders(family)).run(TEXT)
        torch.testing.assert_close(whole_NV, logits_NV, atol=1e-4, rtol=1e-5)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(max_n=2, min_n=1),
    "trees": lambda: random_trees(VOCAB, num_nodes=6),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "gemma", "phimoe", "solar_open"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_changes_no_token(family: str, dtype: str, drafter: str) -> None:
    capacity = ModelCapacity(num_slots=512, page_size=4)
    prompts = [TEXT[:5], TEXT[5:23], TEXT[30:31]]
    requests = [Request(prompt, SamplingParams(max_tokens=14)) for prompt in prompts]
    plain = Rig(with_room(adapter(family, dtype), capacity), batch_size=3)
    spec = Rig(
        with_room(adapter(family, dtype), capacity), DRAFTERS[drafter](), batch_size=3, chunk=7
    )
    assert spec.run(requests) == plain.run(requests)
    assert sum(trace.num_drafted for trace in spec.traces) > 0
