"""A draft model that nobody named: which folder is taken, and that greedy text does not depend on
it, whether its drafts pay or not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)

from doubles.eagle_heads import EagleFolder
from doubles.in_turn import InTurn
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api import loading
from outrider.api.found import FoundDraft, companion_of, found_drafts
from outrider.api.memory import fitted
from outrider.api.plan import LoadPlan, plan_pair
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.plugins import WITH_FOUND, WITHOUT_DRAFT
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.models.families import read_config
from outrider.models.loading import resolve

PARAMS = SamplingParams(max_tokens=192, ignore_eos=True)
SHORT = SamplingParams(max_tokens=48, ignore_eos=True)
PROMPT = "def add(a, b):"


def copy_of(name: str, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(resolve(name), place))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    from huggingface_hub import constants

    folder = tmp_path / "cache" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def target(tmp_path: Path, cache: Path) -> Path:
    del cache
    return copy_of("outrider/embedded", tmp_path / "models" / "target")


def sources(target: Path) -> tuple[FoundDraft, ...]:
    """The drafts that are found for `target` with the settings as they are."""
    return found_drafts(target, read_config(target), EngineConfig()).drafts


@pytest.fixture
def stranger(target: Path) -> Path:
    """A small model of the same vocabulary beside the target, with weights of chance."""
    small = variant("llama2")
    folder = write_checkpoint(
        target.parent / "small", replace(small, changes={**small.changes, "vocab_size": 8192})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, folder)
    return folder


@pytest.mark.weights
def test_a_model_within_beside_or_cached_is_found_in_this_order(target: Path, cache: Path) -> None:
    assert companion_of(target) is None
    store = cache / "models--some--draft"
    cached = copy_of("outrider/embedded-draft", store / "snapshots" / "abc")
    assert companion_of(target) == cached
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("abc")
    assert companion_of(target) == cached
    beside = copy_of("outrider/embedded-draft", target.parent / "draft")
    assert companion_of(target) == beside


@pytest.mark.weights
def test_a_table_of_another_padding_is_found_and_one_of_another_size_is_not(
    target: Path, stranger: Path
) -> None:
    config = json.loads((stranger / "config.json").read_text())
    for rows, found in ((8256, stranger), (8000, stranger), (16384, None)):
        (stranger / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
        assert companion_of(target) == found


@pytest.mark.weights
def test_what_has_other_ids_or_is_no_smaller_is_left(target: Path) -> None:
    copy_of("outrider/embedded", target.parent / "same-size")
    draft = copy_of("outrider/embedded-draft", target.parent / "draft")
    words = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(words))
    copy_of("outrider/embedded-eagle", target.parent / "heads")
    (target.parent / "broken").mkdir()
    (target.parent / "broken" / "config.json").write_text("{")
    assert companion_of(target) is None


@pytest.mark.weights
def test_auto_drafts_with_what_lies_beside_and_says_so(target: Path) -> None:
    copy_of("outrider/embedded-draft", target.parent / "draft")
    plain = LLM(target, drafter="none").generate([PROMPT], PARAMS)[0]
    llm = LLM(target)
    assert llm.drafter == WITH_FOUND
    assert any("draft, which lies next to the target" in note for note in llm.notes)
    assert llm.generate([PROMPT], PARAMS)[0].token_ids == plain.token_ids
    # Whoever names a drafter or a controller gets that.
    assert LLM(target, drafter="ngram").drafter == "ngram"
    assert LLM(target, controller="fixed").drafter == WITHOUT_DRAFT
    assert LLM(target, k=0).drafter == "none"


@pytest.mark.weights
def test_greedy_text_is_the_same_where_nothing_is_ever_kept(target: Path, stranger: Path) -> None:
    assert companion_of(target) == stranger
    plain = LLM(target, drafter="none").generate([PROMPT], PARAMS)[0]
    llm = LLM(target)
    assert llm.drafter == WITH_FOUND
    found = [llm.generate([PROMPT], PARAMS)[0] for _ in range(3)]
    assert all(one.token_ids == plain.token_ids for one in found)
    # Look-ups draft on; the model is hardly asked, for hardly a token of its drafts is accepted.
    members = [one.stats.members for one in found]
    with_model = sum(one["model"]["num_rounds"] for one in members if "model" in one)
    assert with_model < sum(one.stats.num_rounds for one in found) / 4


@pytest.mark.weights
def test_a_draft_model_that_does_not_fit_is_no_reason_to_fail(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of("outrider/embedded-draft", target.parent / "draft")

    def too_small(plan: LoadPlan, *, has_weights: bool) -> object:
        if plan.model_folder is not None:
            raise CapacityError("memory ends", hint="")
        return fitted(plan, has_weights=has_weights)

    monkeypatch.setattr(loading, "fitted", too_small)
    llm = LLM(target, config=EngineConfig())
    assert llm.drafter == WITHOUT_DRAFT
    (note,) = [note for note in llm.notes if "cannot be used" in note]
    assert "draft, which lies next to the target" in note
    assert "memory ends" in note
    # Heads that fit draft, whatever else was found.
    copy_of("outrider/embedded-eagle", target.parent / "heads")
    assert LLM(target).drafter == WITH_FOUND
    with pytest.raises(CapacityError):
        LLM(target, draft=target.parent / "draft")


@pytest.mark.weights
def test_the_checkpoints_own_block_comes_before_heads_and_models_and_look_ups_join_it(
    tmp_path: Path, cache: Path
) -> None:
    del cache
    hybrid = copy_of("outrider/embedded-hybrid", tmp_path / "models" / "hybrid")
    (found,) = sources(hybrid)
    assert (found.kind, found.folder) == ("mtp", hybrid)
    plain = LLM(hybrid, drafter="none").generate([PROMPT], SHORT)[0]
    llm = LLM(hybrid)
    assert llm.drafter == WITH_FOUND
    assert any("the checkpoint's own MTP block (measured where" in n for n in llm.notes)
    results = llm.generate([PROMPT] * 3, SHORT)
    assert all(one.token_ids == plain.token_ids for one in results)
    assert any("mtp" in one.stats.members for one in results)
    assert LLM(hybrid, drafter="suffix").drafter == "suffix"


@pytest.mark.weights
def test_heads_next_to_the_target_are_found_and_damaged_ones_leave_look_ups(target: Path) -> None:
    heads = copy_of("outrider/embedded-eagle", target.parent / "heads")
    (found,) = sources(target)
    assert (found.kind, found.folder) == ("eagle", heads)
    assert LLM(target).drafter == WITH_FOUND
    (heads / "model.safetensors").write_bytes(b"\0" * 100)
    llm = LLM(target)
    assert llm.drafter == WITHOUT_DRAFT
    assert any("which was found and cannot be used" in note for note in llm.notes)
    wanted = LLM(target, drafter="none").generate([PROMPT], SHORT)[0].token_ids
    assert llm.generate([PROMPT], SHORT)[0].token_ids == wanted


@pytest.mark.weights
def test_with_look_ups_alone_the_note_says_why_there_is_nothing_else(target: Path) -> None:
    llm = LLM(target)
    assert llm.drafter == WITHOUT_DRAFT
    (note,) = [note for note in llm.notes if note.startswith("speculation: ")]
    first, details = note.splitlines()
    assert first == "speculation: look-ups in the text; stops by itself where it does not pay"
    assert "no MTP block, heads or draft model was found" in details
    assert "; no MTP" in details
    assert "a copy in 4 bits would gain little" in note


@pytest.mark.weights
def test_an_mtp_block_is_taken_unannounced_too_or_its_lack_has_a_reason(
    tmp_path: Path, cache: Path
) -> None:
    del cache
    hybrid = copy_of("outrider/embedded-hybrid", tmp_path / "models" / "hybrid")

    def said(**settings: Any) -> str:
        config = EngineConfig(**settings)
        notes = plan_pair(str(hybrid), None, config).notes
        (note,) = [note for note in notes if note.startswith("speculation: ")]
        return note

    assert "the checkpoint's own MTP block (measured where" in said()
    for settings in ({"controller": "fixed"}, {"tensor_parallel": 2}):
        note = said(**settings)
        assert "are searched for only with --controller auto or goodput, and in one process" in note
        assert "was found" not in note
    announced = (hybrid / "config.json").read_text()
    config = json.loads(announced)
    del (config.get("text_config") or config)["mtp_num_hidden_layers"]
    (hybrid / "config.json").write_text(json.dumps(config))
    assert "the checkpoint's own MTP block (measured where" in said()
    (hybrid / "config.json").write_text(announced)
    (weights,) = hybrid.glob("*.safetensors")
    kept = {name: t for name, t in load_file(weights).items() if not name.startswith("mtp.")}
    save_file(kept, weights, {"format": "pt"})
    note = said()
    assert "look-ups in the text (suffix); config.json announces" in note
    assert "an MTP block that is not in the files" in note
    assert not plan_pair(str(hybrid), None, EngineConfig(k=0)).notes


@pytest.fixture
def several(target: Path) -> Path:
    """The target with two kinds of heads and a draft model next to it."""
    copy_of("outrider/embedded-draft", target.parent / "draft")
    for name in ("eagle", "mtp"):
        copy_of(f"outrider/embedded-{name}", target.parent / name)
    return target


def state(folder: Path, **worth: object) -> None:
    """Write what the heads in `folder` were measured to be worth, nothing without `worth`."""
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("outrider_worth", {})
    config |= {"outrider_worth": {**own, **worth}} if worth else {}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.weights
def test_heads_rank_by_their_measured_gain_and_every_source_joins_or_has_a_reason(
    several: Path,
) -> None:
    def found() -> tuple[list[str], str]:
        all_of_them = found_drafts(several, read_config(several), EngineConfig())
        return [one.kind for one in all_of_them.drafts], " | ".join(all_of_them.passed)

    cheap = {"first": 0.1, "later": 0.05, "row": 0.01}
    beside = several.parent
    state(beside / "mtp", kept=[0.5], **cheap)
    state(beside / "eagle", kept=[0.9, 0.8], **cheap)
    kinds, passed = found()
    assert kinds == ["eagle", "model"]
    assert "MTP block in mtp, found with the target (measured where it was made: 1.35 ti" in passed
    assert "one folder of heads drafts, and these were measured to gain less" in passed
    assert "a copy in 4 bits would gain little" in passed
    # Heads that lose where they were measured come after those that nobody measured.
    state(beside / "eagle", kept=[0.0], **cheap)
    state(beside / "mtp")
    assert found()[0] == ["mtp", "model"]
    assert "these were measured to gain less" in found()[1]
    notes = plan_pair(str(several), None, EngineConfig()).notes
    assert "MTP block in mtp, found with the target and draft model draft, which lies" in notes[0]
    names = "look-ups in the text, an MTP block in mtp and draft model draft"
    stops = "stops by itself where it does not pay"
    assert notes[0].splitlines()[0] == f"speculation: {names}; {stops}"
    assert ". Left out: eagle heads in eagle, found with the target" in notes[0]
    # What lies there cannot all draft in a schedule of several lanes: the first drafts alone.
    plan = plan_pair(str(several), None, EngineConfig(schedule="pd"))
    assert [*plan.folders] == ["mtp"]
    assert "several drafts need one lane" in plan.notes[0]
    with pytest.raises(ConfigError, match="names a source twice"):
        plan_pair(str(several), f"{beside / 'mtp'},{beside / 'mtp'}", EngineConfig())
    (beside / "link").symlink_to("mtp")
    with pytest.raises(ConfigError, match="names a source twice"):
        plan_pair(str(several), f"{beside / 'mtp'},{beside / 'link'}", EngineConfig())


@pytest.mark.weights
def test_the_own_block_joins_heads_that_were_found_or_named(tmp_path: Path, cache: Path) -> None:
    del cache
    hybrid = copy_of("outrider/embedded-hybrid", tmp_path / "models" / "hybrid")
    folder = EagleFolder(256, 8192, layers=(2, 1, 3), head_dim=64).write(tmp_path / "eagle")

    def kinds(draft: str | None, **settings: Any) -> list[str]:
        plan = plan_pair(str(hybrid), draft, EngineConfig(**settings))
        assert plan.resolved.drafter.name == ("portfolio" if settings == {} else "eagle")
        return [*plan.folders]

    assert kinds(str(folder)) == ["eagle", "mtp"]
    for settings in ({"drafter": "eagle"}, {"controller": "fixed"}, {"schedule": "pd"}):
        assert kinds(str(folder), **settings) == ["eagle"]
    plan = plan_pair(str(hybrid), str(folder), EngineConfig())
    (note,) = [note for note in plan.notes if note.startswith("drafter auto: ")]
    assert "own MTP block (measured where" in note
    assert "joins what --draft names" in note
    assert "--drafter eagle leaves it out" in note
    shutil.move(folder, hybrid.parent / "eagle")
    assert kinds(None) == ["mtp", "eagle"]
    state(hybrid.parent / "eagle", drafter="eagle", kept=[0.0], first=0.1, later=0.1, row=0.1)
    assert kinds(None) == ["mtp"]
    passed = found_drafts(hybrid, read_config(hybrid), EngineConfig()).passed
    assert "one folder of heads drafts, and these were measured to gain less" in passed[0]


@pytest.mark.weights
def test_heads_of_two_kinds_leave_texts_as_long_as_they_are(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del cache
    hybrid = copy_of("outrider/embedded-hybrid", tmp_path / "models" / "hybrid")
    EagleFolder(256, 8192, layers=(2, 1, 3), head_dim=64).write(hybrid.parent / "eagle")

    def shorter(plan: LoadPlan, *, has_weights: bool) -> object:
        found, parts = fitted(plan, has_weights=has_weights)
        several = len(plan.heads_folders) > 1
        return (replace(found, num_slots=64) if several else found), parts

    monkeypatch.setattr(loading, "fitted", shorter)
    llm = LLM(hybrid)
    drafter = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    assert isinstance(drafter, PortfolioDrafter)
    assert ("mtp" in drafter.names, "eagle" in drafter.names) == (True, False)
    assert any("eagle heads in eagle" in n and "memory for less text" in n for n in llm.notes)


@pytest.mark.weights
def test_two_sources_change_no_greedy_text_and_no_text_of_a_seed(
    several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Members lead in turn, whether that pays here or not.
    monkeypatch.setattr("outrider.drafters.portfolio.Leads", InTurn)
    prompts = [PROMPT, "for i in range(10):\n    print("]
    drawn = [
        SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=seed, sampler=rule)
        for seed, rule in ((1, "match"), (2, "coupled"))
    ]
    plain, llm = LLM(several, drafter="none"), LLM(several)
    drafter = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    assert isinstance(drafter, PortfolioDrafter)
    assert {"mtp", "model", "suffix"} <= {*drafter.names}
    for params in (SHORT, *drawn):
        wanted = [one.token_ids for one in plain.generate(prompts, params)]
        drafted: set[str] = set()
        for _ in range(2):
            found = llm.generate(prompts, params)
            assert [one.token_ids for one in found] == wanted, params
            drafted |= {name for one in found for name in one.stats.members}
        assert {"mtp", "model"} <= drafted, params
    untied = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True, sampler="block")
    assert [one.exact for one in llm.generate(prompts, untied)] == [True] * 2


@pytest.mark.weights
def test_a_found_model_that_cannot_be_read_leaves_the_other_sources(several: Path) -> None:
    weights = several.parent / "draft" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: t for name, t in tensors.items() if "norm" not in name}, weights)
    llm = LLM(several)
    drafter = llm._engine.drafter  # pyright: ignore[reportPrivateUsage]
    assert isinstance(drafter, PortfolioDrafter)
    assert "mtp" in drafter.names
    assert "model" not in drafter.names
    assert any("leaves out model, which was found and cannot be used" in n for n in llm.notes)
    wanted = LLM(several, drafter="none").generate([PROMPT], SHORT)[0].token_ids
    assert llm.generate([PROMPT], SHORT)[0].token_ids == wanted
