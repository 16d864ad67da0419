"""A hybrid checkpoint in a user's hands: every drafter and schedule, and the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.gguf_families import write_gguf
from doubles.gguf_mixers import write_mixer_gguf
from doubles.tiny_families import add_words
from doubles.tiny_hybrids import hybrid_config, write_hybrid
from doubles.tiny_mtp import write_hybrid_with_mtp
from outrider.api.llm import LLM
from outrider.cli.main import run
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import kind_of
from outrider.models.loading import load_model, resolve
from outrider.models.weights import Weights
from outrider.plugins.heads.mtp import read_mtp_config
from parity.feeding import feed

pytestmark = [pytest.mark.wide, pytest.mark.slow]
PROMPTS = ["def add(a, b):\n", "The river", "2 + 2 = 2 + 2 = 2 + 2", "def add(a, b):\n    return"]
CPU = EngineConfig(device="cpu", batch_size=3, k=3, context=96, sampler="coupled")


# A model of each kind of recurrence, and one that drafts for it.
OTHERS = {
    "lfm2_moe": "qwen3_5",
    "granite_h": "lfm2_moe",
    "falcon_h1_norm": "granite_h",
    "nemotron_h_moe": "falcon_h1_norm",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A dense hybrid and a mixture beside the embedded tokenizer."""
    written: dict[str, str] = {}
    for name in ("qwen3_5", "qwen3_next", *OTHERS):
        config = hybrid_config(name, vocab_size=8192)
        folder = write_hybrid(tmp_path_factory.mktemp(name), config, seed=5)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(resolve("outrider/embedded") / file, folder)
        written[name] = str(folder)
    return written


def texts(model: str, draft: str | None, config: EngineConfig) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, repetition_penalty=1.4, presence_penalty=0.3),
        SamplingParams(max_tokens=12, temperature=0.7, seed=4),
        SamplingParams(max_tokens=8, logprobs=True),
    ]
    llm = LLM(model, draft=draft, config=config)
    results = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[:1], params[2])]
    return [tuple(result.token_ids) for result in results]


# Both rollbacks meet every drafter in tests/engine/test_hybrid_embedded.py. Other combinations
# are `deep`.
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", *OTHERS])
@pytest.mark.parametrize("rollback", ["ring", "replay"])
def test_any_drafter_leaves_the_text_as_it_is(
    folders: dict[str, str], name: str, rollback: str
) -> None:
    config = replace(CPU, state_rollback=rollback)
    plain = texts(folders[name], None, replace(config, drafter="none"))
    assert plain[4] != ()
    assert texts(folders[name], None, replace(config, drafter="ngram")) == plain
    other = folders[OTHERS.get(name, "qwen3_next" if name == "qwen3_5" else "qwen3_5")]
    assert texts(folders[name], other, config) == plain
    # Itself as its draft: all is accepted, and it is the same text still.
    assert texts(folders[name], folders[name], config) == plain


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["pd", "pdv", "ssd"])
def test_any_schedule_leaves_the_text_as_it_is(folders: dict[str, str], schedule: str) -> None:
    plain = texts(folders["qwen3_5"], None, replace(CPU, drafter="none"))
    config = replace(CPU, schedule=schedule, prefill_chunk=5, fan_out=4)
    assert texts(folders["qwen3_5"], folders["qwen3_next"], config) == plain


def test_checkpoints_off_and_a_short_history(folders: dict[str, str]) -> None:
    plain = texts(folders["qwen3_5"], None, replace(CPU, drafter="none"))
    config = replace(CPU, drafter="ngram", state_checkpoints=0, state_history=1)
    assert texts(folders["qwen3_5"], None, config) == plain
    llm = LLM(folders["qwen3_5"], config=config)
    assert any("drafts are cut from 3 tokens a round to 1" in note for note in llm.notes)


def test_the_command_line(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []
    for drafter in ("none", "ngram"):
        arguments = ["--target", folders["qwen3_5"], "--drafter", drafter, "--max-tokens", "24"]
        assert run(["generate", *arguments, "--context", "96", "--json", "2 + 2 = 2 + 2 ="]) == 0
        printed.append(json.loads(capsys.readouterr().out)["text"])
    assert printed[0] == printed[1] != ""


def test_a_folder_without_the_weights_of_a_layer_is_refused(
    folders: dict[str, str], tmp_path: Path
) -> None:
    for file in Path(folders["qwen3_5"]).iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["linear_num_value_heads"] = 6
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="has shape"):
        LLM(str(tmp_path), config=CPU)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Hybrids with an MTP block as folders, and the GGUF files that llama.cpp's converter makes."""
    found: dict[str, tuple[Path, Path]] = {}
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        folder = tmp_path_factory.mktemp(name)
        # Every layer of a mixture in a file is sparse.
        changes: dict[str, Any] = {"mlp_only_layers": []} if name == "qwen3_next" else {}
        write_hybrid_with_mtp(folder, name, **changes)
        found[name] = (folder, write_gguf(folder, folder.parent / f"{name}.gguf"))
        add_words(folder)
    return found


GGUF_OPTIONS = LoadOptions(
    capacity=ModelCapacity(num_slots=256, page_size=8), dtype="float32", device="cpu"
)
# Files have no biases of the first and the last product, and layers with a mixture or none.
GGUF_MIXERS: list[tuple[str, dict[str, object]]] = [
    ("lfm2", {}),
    ("lfm2_moe", {}),
    ("granite_h", {}),
    ("granite_h_rope", {"mamba_proj_bias": False}),
    ("granite_h_moe", {}),
    ("falcon_h1", {}),
    ("nemotron_h", {}),
    (
        "nemotron_h_moe",
        {
            "use_bias": False,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
    ),
    ("nemotron_h_latent", {}),
]
GGUF = EngineConfig(device="cpu", dtype="float32", batch_size=3, k=3, context=96)
IDS = ([5, 9, 7, 5, 9, 7, 5, 9], [3, 4, 3, 4, 3], [8])


def ids_of(
    path: Path, tokenizer: Path, draft: Path | None = None, **changes: object
) -> list[tuple[int, ...]]:
    config = replace(GGUF, tokenizer=str(tokenizer), **changes)  # type: ignore[arg-type]
    with LLM(path, draft=draft, config=config) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        return [result.token_ids for result in llm.generate(list(IDS), params)]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_a_hybrid_in_a_gguf_file_drafts_with_its_own_block(
    files: dict[str, tuple[Path, Path]], name: str
) -> None:
    """It is the folder's model, and no drafter or rollback changes its text."""
    folder, path = files[name]
    plain = ids_of(path, folder, drafter="none")
    assert plain == ids_of(folder, folder, drafter="none")
    assert ids_of(path, folder, drafter="mtp", state_rollback="ring") == plain
    assert ids_of(path, folder, drafter="mtp", state_rollback="replay", k=1) == plain
    assert ids_of(path, folder, drafter="mtp", tree_nodes=8) == plain
    assert ids_of(path, folder, drafter="ngram", k=5) == plain


def rounds_of(target: Path, folder: Path, drafter: str, draft: Path | None = None) -> int:
    config = replace(GGUF, tokenizer=str(folder), drafter=drafter, k=2)
    with LLM(target, draft=draft, config=config) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        return sum(result.stats.num_rounds for result in llm.generate(list(IDS), params))


def test_an_mtp_block_in_a_gguf_file_is_the_folders(
    files: dict[str, tuple[Path, Path]],
) -> None:
    folder, path = files["qwen3_5"]
    assert rounds_of(path, folder, "mtp") == rounds_of(folder, folder, "mtp")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_an_mtp_block_in_a_file_of_its_own_drafts(
    files: dict[str, tuple[Path, Path]], name: str, tmp_path: Path
) -> None:
    """With and without the tables of the target, of which it needs none."""
    folder, path = files[name]
    last = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    block, plain = f"blk.{last}.", ids_of(path, folder, drafter="none")
    own = rounds_of(path, folder, "mtp")
    room = ModelCapacity(num_slots=16, page_size=4)
    spec = load_model(folder, LoadOptions(capacity=room, device="cpu")).spec
    for outer in ((), ("token_embd", "output")):
        draft = write_gguf(folder, tmp_path / f"{len(outer)}.gguf", only=(block, *outer))
        assert kind_of(draft) == "mtp"
        alone, within = (read_mtp_config(one, spec).block for one in (draft, path))
        assert replace(alone, tie_word_embeddings=within.tie_word_embeddings) == within
        with Weights.at(draft) as found, Weights.at(path) as whole:
            tensors = {name: one for name, one in whole.each() if name.startswith("mtp.")}
            assert len(tensors) > 4
            same = {
                name: torch.equal(one, tensors[name])
                for name, one in found.each()
                if name in tensors
            }
            assert same == dict.fromkeys(tensors, True)
        assert rounds_of(path, folder, "auto", draft) == own
        assert ids_of(path, folder, draft) == plain


@pytest.mark.parametrize(("name", "changes"), GGUF_MIXERS)
def test_a_gguf_file_is_the_folders_model(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    """Its logits are the folder's, and drafts and rollbacks leave its text as it is."""
    folder = write_hybrid(tmp_path / name, hybrid_config(name, **changes))
    path = write_mixer_gguf(folder, tmp_path / f"{name}.gguf")
    rows = [feed(load_model(one, GGUF_OPTIONS), IDS[0], [len(IDS[0])]) for one in (path, folder)]
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)
    if name.startswith("nemotron_h_"):
        behind = write_mixer_gguf(folder, tmp_path / "mtp.gguf", mtp=True)
        assert feed(load_model(behind, GGUF_OPTIONS), IDS[0], [len(IDS[0])]).equal(rows[0])
    add_words(folder)
    plain = ids_of(path, folder, drafter="none")
    assert ids_of(path, folder, drafter="ngram", state_rollback="ring") == plain
    assert ids_of(path, folder, drafter="suffix", state_rollback="replay", k=5) == plain
