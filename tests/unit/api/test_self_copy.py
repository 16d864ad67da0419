"""A target that drafts for itself without being told: where that is planned, and that it changes
no text and takes no memory that texts would have had."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.gguf_writer import wide_llama
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api import loading
from outrider.api.loading import load_pair
from outrider.api.memory import files_of, fitted, memory_parts
from outrider.api.plan import LoadPlan, plan_pair
from outrider.core.errors import CapacityError
from outrider.core.plugins import COPY, WITH_FOUND, WITHOUT_DRAFT
from outrider.core.spec import ModelSpec
from outrider.drafters.common import draft_model
from outrider.drafters.common.draft_model import copy_pays, why_no_copy
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.models.families import read_config
from outrider.models.loading import resolve

pytestmark = pytest.mark.weights

PROMPTS = ["def add(a, b):", "for i in range(10):\n    print(i)\nfor i in range(10):\n    print("]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the embedded target with nothing beside it, taken for a large one."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(draft_model, "_LEAST_BYTES", 0)
    monkeypatch.setattr(draft_model, "_TIMES_CACHE", 0)
    place = tmp_path / "models" / "target"
    place.parent.mkdir()
    return Path(shutil.copytree(resolve("outrider/embedded"), place))


@pytest.mark.usefixtures("native_library")
def test_auto_drafts_with_a_copy_and_says_so(target: Path) -> None:
    wanted = [r.token_ids for r in LLM(target, drafter="none").generate(PROMPTS, GREEDY)]
    llm = LLM(target, k=4)
    assert llm.drafter == WITH_FOUND
    assert llm._pair.plan.settings.controller == "goodput"  # pyright: ignore[reportPrivateUsage]
    assert any("a copy of the model in int4" in note for note in llm.notes)
    for _ in range(2):
        assert [r.token_ids for r in llm.generate(PROMPTS, GREEDY)] == wanted
    drafter = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    assert isinstance(drafter, PortfolioDrafter)
    assert drafter.needs.shares_memory
    # Who is asked, and whether drafting pays here, is a matter of time.
    assert COPY in drafter.names


@pytest.mark.usefixtures("native_library")
def test_whoever_names_something_else_gets_that(target: Path) -> None:
    other: list[tuple[dict[str, Any], str]] = [
        ({"drafter": "ngram"}, "ngram"),
        ({"drafter": "portfolio"}, "lookup"),
        ({"controller": "fixed"}, WITHOUT_DRAFT),
        ({"k": 0}, "none"),
        ({"quantise": "int8"}, WITHOUT_DRAFT),
        ({"force_reference": True}, WITHOUT_DRAFT),
        ({"drafter_home": "process"}, WITHOUT_DRAFT),
        ({"drafter": "quantised-self"}, "quantised-self"),
    ]
    for settings, drafter in other:
        plan = plan_pair(str(target), None, EngineConfig(**settings))
        drafts = plan.resolved.drafter.name
        assert drafts == drafter, settings
        assert not plan.found, settings
    assert plan_pair(str(target), None, EngineConfig(), without=[COPY]).own is None


@pytest.mark.usefixtures("native_library")
def test_small_and_quantised_and_other_models_make_no_copy(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(target)
    assert not why_no_copy(target, config, EngineConfig())
    blocks = wide_llama(["Q8_0"]).write(tmp_path / "a.gguf")
    assert "quantised already" in why_no_copy(blocks, read_config(blocks), EngineConfig())
    stored = json.loads((target / "config.json").read_text())
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps({**stored, "quantization_config": scheme}))
    assert "quantised already" in why_no_copy(target, config, EngineConfig())
    (target / "config.json").write_text(json.dumps(stored))
    monkeypatch.setattr(draft_model, "_TIMES_CACHE", 1 << 20)
    assert "caches hold" in why_no_copy(target, config, EngineConfig())
    monkeypatch.setattr(draft_model, "_TIMES_CACHE", 0)
    monkeypatch.setattr(draft_model, "_WEIGHTS_A_CORE", 1000)
    assert "would take long" in why_no_copy(target, config, EngineConfig())
    monkeypatch.undo()
    assert why_no_copy(target, config, EngineConfig())


@pytest.mark.usefixtures("native_library")
def test_a_copy_that_does_not_fit_is_left_out(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(plan: LoadPlan, *, has_weights: bool) -> object:
        if plan.own is not None:
            raise CapacityError("memory ends", hint="")
        return fitted(plan, has_weights=has_weights)

    monkeypatch.setattr(loading, "fitted", too_small)
    assert LLM(target).drafter == WITHOUT_DRAFT

    def shorter(plan: LoadPlan, *, has_weights: bool) -> object:
        found, parts = fitted(plan, has_weights=has_weights)
        return (found if plan.own is None else replace(found, num_slots=64)), parts

    monkeypatch.setattr(loading, "fitted", shorter)
    llm = LLM(target)
    assert llm.drafter == WITHOUT_DRAFT
    assert any("cannot be used: it would leave memory for less text" in n for n in llm.notes)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_copy_takes_what_is_planned(target: Path, scheme: str) -> None:
    config = EngineConfig(drafter="quantised-self", self_quantise=scheme)
    plan = plan_pair(str(target), None, config)
    told = {part.name: part.num_bytes for part in memory_parts(plan, files_of(plan))}
    pair = load_pair(str(target), None, config)
    assert pair.own is not None
    copy = pair.own.of(pair.target)
    held = sum(one.nbytes for one in copy.streamed)
    assert held <= 1.05 * told["weights of the copy that drafts"] + 200_000
    assert held >= 0.7 * told["weights of the copy that drafts"]
    assert copy.logits.nbytes <= told["scratch and logits of the copy"]


def test_a_copy_pays_where_it_reads_few_of_the_bytes_of_the_target() -> None:
    spec = ModelSpec(
        name="target", family="llama", vocab_size=8192, hidden_size=1024, num_layers=24,
        num_heads=16, num_kv_heads=8, head_dim=64, ffn_size=4096, max_tokens=2048,
        num_parameters=400_000_000, bytes_per_weight=2, bytes_per_kv=2,
    )  # fmt: skip
    assert copy_pays(spec, "int8")
    assert copy_pays(spec, "int4")
    in_bytes = replace(spec, bytes_per_weight=1)
    assert not copy_pays(in_bytes, "int8")
    assert not copy_pays(in_bytes, "int4"), "0.63 of the bytes"
    assert not copy_pays(replace(spec, quantise="int4"), "int4")


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(
    ("kind", "said"), [("Q8_0", "times as fast, even if"), ("Q4_0", "cannot make a text faster")]
)
def test_a_target_in_few_bits_hears_the_bound(tmp_path: Path, kind: str, said: str) -> None:
    path = wide_llama([kind]).write(tmp_path / "a.gguf")
    llm = LLM(path, config=EngineConfig(drafter=COPY, self_quantise="int8"))
    (note,) = (one for one in llm.notes if "a pass of the copy" in one)
    assert said in note
