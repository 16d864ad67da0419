"""`outrider draft suggest` and `check` of heads, windows, weights and acceptance."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider.pairs as pairs
from doubles.command_line import Command
from doubles.eagle_heads import EagleFolder, save_tensors
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider_lab.cli import advice
from outrider_lab.cli import draft as verb
from outrider_lab.cli.draft_fit import DEAD, Measured, some_prompts, upper_bound
from outrider_lab.cli.suggestions import suggestions

pytestmark = pytest.mark.wide

TINY = Path(pairs.__path__[0]) / "tiny"
EMBEDDED = ("outrider/embedded", "outrider/embedded-draft")


def read(outrider: Command, *words: str, code: int = 0) -> Any:
    """Of suggestions what is estimated at once."""
    at_once = ("--seconds", "0") if words[0] == "suggest" else ()
    shown = outrider("draft", *words, *at_once, "--json")
    assert shown.code == code, shown.err
    return json.loads(shown.out)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny random model with the embedded tokenizer, by itself in its folder."""
    folder = write_checkpoint(tmp_path / "models" / "tiny", variant("llama2"))
    edit(folder, vocab_size=8192)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def eagle(folder: Path, **changes: Any) -> Path:
    heads = EagleFolder(64, 8192, fused=False, changes={"max_position_embeddings": 256, **changes})
    return heads.write(folder)


def test_the_embedded_target_has_a_pair_and_its_text(outrider: Command) -> None:
    record = read(outrider, "suggest", EMBEDDED[0])
    found = {(one["drafter"], one["draft"]): one for one in record["suggestions"]}
    assert found["model", EMBEDDED[1]]["ready"]
    assert found["model", EMBEDDED[1]]["command"].startswith("outrider generate --target")
    assert ("ngram", None) in found
    assert not found["model", "my-draft"]["ready"]
    assert "outrider train draft my-draft" in found["model", "my-draft"]["command"]
    assert f"model={EMBEDDED[1]}" in record["measure"]
    shown = outrider("draft", "suggest", EMBEDDED[0], "--seconds", "0").out
    tried = shown.partition("Try them:")[2].partition("Measure")[0]
    for one in record["suggestions"]:
        is_slower = one["expected"] is not None and one["expected"]["high"] <= 1
        assert (one["command"] in tried) is not is_slower
    assert any(one["expected"] and one["expected"]["high"] <= 1 for one in record["suggestions"])
    assert record["measure"] in shown


def test_without_time_every_figure_is_estimated_and_says_so(outrider: Command) -> None:
    record = read(outrider, "suggest", EMBEDDED[0])
    assert record["partial"] is True
    assert record["figures"]["target_pass"] == "estimated"
    ready = [one for one in record["suggestions"] if one["ready"]]
    assert all(one["expected"]["speed_up"] > 0 for one in ready)
    assert all(set(one["figures"].values()) == {"estimated"} for one in ready)
    # Each by one name, although several lists have it.
    models = [one["draft"] for one in ready if one["drafter"] == "model"]
    assert sorted(models) == ["outrider/embedded-draft", "outrider/embedded-hybrid"]
    # What is not here has no figures.
    last = record["suggestions"][-1]
    assert (last["ready"], last["expected"]) == (False, None)
    assert record["peak_memory_bytes"] > 0
    assert "nothing was measured: --seconds 0" in record["notes"][0]
    assert record["basis"] == "estimated"
    # Estimates are sorted as well, and the best two are the best two.
    gains = [one["expected"]["speed_up"] for one in ready]
    assert gains == sorted(gains, reverse=True)
    shown = outrider("draft", "suggest", EMBEDDED[0], "--seconds", "0").out
    assert shown.startswith("Estimated, the fastest first. All figures are estimated")
    assert "estimated, estimated" in shown


@pytest.mark.weights
@pytest.mark.slow
def test_what_was_measured_says_so(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so much time that any machine has it."""
    # The limit is for a process that did nothing else before.
    monkeypatch.setattr(advice, "BESIDE_WEIGHTS", 1 << 40)
    monkeypatch.setattr(verb, "COUNTED_TOKENS", 16)
    monkeypatch.setattr(verb, "_TIMING_SECONDS", 0.4)
    monkeypatch.setattr(verb, "cache_folder", lambda: None)
    # Others are measured in the same way, and planned for in tests/unit/planner.
    monkeypatch.setattr(verb, "available", lambda: ("model", "ngram"))
    words = ("--seconds", "600", "--domains", "code")
    record = json.loads(outrider("draft", "suggest", EMBEDDED[0], *words, "--json").out)
    by_name = {(one["drafter"], one["draft"]): one for one in record["suggestions"]}
    model = by_name["model", EMBEDDED[1]]
    # Whether the moment is enough to time every drafter depends on the machine.
    assert model["figures"]["acceptance"] == "measured"
    assert record["figures"]["target_pass"] == "measured"
    ready = [one for one in record["suggestions"] if one["ready"]]
    gains = [one["expected"]["speed_up"] for one in ready if one["expected"]]
    assert gains == sorted(gains, reverse=True)
    assert not record["suggestions"][-1]["ready"]


def test_heads_beside_a_target_are_found_first(target: Path) -> None:
    heads = eagle(target.parent / "tiny-eagle")
    first = suggestions(str(target))[0]
    assert (first.drafter, first.draft, first.ready) == ("eagle", str(heads), True)


def test_a_copy_in_few_bits_is_no_tip_for_a_file_in_few_bits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "wide", variant("llama2"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, folder)
    tips = {one.drafter for one in suggestions(str(folder))}
    assert "quantised-self" in tips
    # As many bytes for many more parameters.
    edit(folder, num_hidden_layers=80)
    assert {one.drafter for one in suggestions(str(folder))} == tips - {"quantised-self"}


def test_an_mtp_block_of_its_own_is_found_first_if_its_tensors_are_there(target: Path) -> None:
    edit(target, num_nextn_predict_layers=1)
    first = suggestions(str(target))[0]
    assert (first.drafter, first.ready) == ("mtp", False)
    assert "tensors are not in the files" in first.reason
    save_tensors(target, {"mtp.fc.weight": torch.zeros(2, 2)})
    first = suggestions(str(target))[0]
    assert (first.drafter, first.ready) == ("mtp", True)
    assert first.command.endswith("--drafter mtp PROMPT")


def test_a_folder_named_like_a_known_target_has_its_pair(outrider: Command, target: Path) -> None:
    named = target.rename(target.with_name("Qwen3-8B"))
    found = read(outrider, "suggest", str(named))["suggestions"]
    pair = next(one for one in found if one["draft"] == "Qwen/Qwen3-0.6B")
    assert not pair["ready"]
    assert "known pair qwen3" in pair["reason"]


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_training_is_suggested_of_targets_that_can_teach(
    outrider: Command, target: Path, family: str
) -> None:
    def commands() -> list[str]:
        found = read(outrider, "suggest", str(target))["suggestions"]
        return [one["command"] for one in found if one["command"].startswith("outrider train")]

    assert [command.split()[2] for command in commands()] == ["draft", "eagle"]
    edit(target, model_type=family)
    assert commands() == []


def test_a_target_is_needed_and_must_be_there(outrider: Command) -> None:
    assert "TARGET is missing" in outrider("draft", "suggest").err
    assert outrider("draft", "suggest", "nobody/nothing").code == 3


def test_heads_that_fit_are_told_how_to_ride(outrider: Command, target: Path) -> None:
    heads = eagle(target.parent / "tiny-eagle")
    record = read(outrider, "check", str(target), str(heads))
    assert record["kind"] == "eagle"
    assert record["advice"] == (
        f"it fits: outrider generate --target {target} --draft {heads} PROMPT"
    )


@pytest.mark.skipif(not (TINY / "mtp").is_dir(), reason="no trained heads in this checkout")
def test_heads_that_ship_go_by_their_alias(outrider: Command) -> None:
    found = read(outrider, "suggest", EMBEDDED[0])["suggestions"]
    assert "outrider/embedded-mtp" in {one["draft"] for one in found}
    record = read(outrider, "check", EMBEDDED[0], "outrider/embedded-mtp")
    assert (record["kind"], record["fits"]) == ("mtp", True)


def test_heads_of_another_size_are_wrong(outrider: Command, target: Path) -> None:
    heads = eagle(target.parent / "tiny-eagle", hidden_size=32, rope_theta=77.0)
    shown = outrider("draft", "check", str(target), str(heads))
    assert shown.code == 1
    assert "wrong: hidden_size is 32 and the target's 64" in shown.out
    assert "caution: positions turn with theta 77" in shown.out
    assert "it does not fit: hidden_size is 32" in shown.out
    # What cannot be right is not measured.
    assert outrider("draft", "check", str(target), str(heads), "--measure").code == 1


def test_weights_that_are_no_numbers_are_wrong(outrider: Command, target: Path) -> None:
    heads = EagleFolder(64, 8192, fused=False)
    folder, tensors = heads.write(target.parent / "tiny-eagle"), heads.tensors()
    tensors["fc.weight"][0, 0] = float("nan")
    save_tensors(folder, tensors)
    record = read(outrider, "check", str(target), str(folder), code=1)
    assert any("not numbers" in remark["text"] for remark in record["remarks"])


def test_weights_that_are_not_here_are_not_vouched_for(outrider: Command, target: Path) -> None:
    draft = target.parent / "draft"
    shutil.copytree(target, draft, ignore=shutil.ignore_patterns("*.safetensors"))
    record = read(outrider, "check", str(target), str(draft))
    assert any("weights are not here" in remark["text"] for remark in record["remarks"])


def test_commands_can_be_pasted_whatever_a_folder_is_called(
    outrider: Command, target: Path
) -> None:
    named = target.rename(target.with_name("my model"))
    heads = eagle(named.parent / "my heads")
    record = read(outrider, "suggest", str(named))
    (own,) = [one["command"] for one in record["suggestions"] if one["draft"] == str(heads)]
    for command in (record["measure"], own):
        words = shlex.split(command)
        assert str(named) in words
        assert any(str(heads) in word for word in words)
    assert str(heads) in shlex.split(read(outrider, "check", str(named), str(heads))["advice"])


def test_windows_and_positions_of_a_draft_model_are_cautions(
    outrider: Command, target: Path
) -> None:
    draft = target.parent / "draft"
    shutil.copytree(target, draft)
    edit(draft, max_position_embeddings=64, rope_theta=123.0)
    record = read(outrider, "check", str(target), str(draft))
    assert record["fits"]
    window, rope = [remark["text"] for remark in record["remarks"]]
    assert "window is 64 tokens and the target's 256" in window
    assert "theta 123" in rope


@pytest.mark.weights
@pytest.mark.slow
def test_what_is_accepted_is_measured(outrider: Command) -> None:
    words = ("--measure", "--prompts", "3", "--max-tokens", "12")
    measured = read(outrider, "check", *EMBEDDED, *words)["measured"]
    assert measured["num_prompts"] == 3
    assert measured["num_tokens"] == 36
    assert measured["num_accepted"] == 36 - measured["num_rounds"] > 0
    assert not measured["dead"]


@pytest.mark.weights
@pytest.mark.slow
def test_a_draft_of_which_nothing_is_accepted_is_dead(outrider: Command, tmp_path: Path) -> None:
    """Ids and sizes agree, and the weights are noise."""
    changes = {**variant("llama2").changes, "vocab_size": 8192}
    item = type(variant("llama2"))("noise", changes)
    draft = write_checkpoint(tmp_path / "noise", item)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, draft)
    shown = outrider("draft", "check", EMBEDDED[0], str(draft), "--measure")
    assert shown.code == 1
    assert "it fits" in shown.out
    assert "dead acceptance" in shown.out
    # Nothing rests while it is counted.
    assert "rested" not in shown.out + shown.err


def test_the_upper_bound_is_wilsons() -> None:
    # Of no success in n trials: z^2 / (n + z^2).
    assert upper_bound(0, 100) == pytest.approx(1.96**2 / (100 + 1.96**2))
    assert upper_bound(50, 100) == pytest.approx(0.5960, abs=1e-3)
    assert upper_bound(0, 0) == upper_bound(7, 7) == 1


def test_few_refusals_are_no_death() -> None:
    def counted(num_first: int) -> Measured:
        return Measured(
            drafter="model",
            num_prompts=1,
            num_tokens=num_first,
            num_rounds=num_first,
            num_drafted=num_first,
            num_accepted=0,
            num_first=num_first,
            num_first_kept=0,
        )

    assert not counted(20).dead
    assert counted(100).dead
    assert upper_bound(0, 100) < DEAD < upper_bound(0, 20)
    assert counted(0).text.endswith("drafted nothing")


def test_prompts_of_a_measurement_come_from_several_domains() -> None:
    assert len(set(some_prompts(7))) == 7
