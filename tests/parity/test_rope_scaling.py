"""`--rope-scaling`: logits are those of transformers for the same values in config.json, the window
is longer, and drafts change no token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from doubles.hf_checkpoints import VOCAB, write_hf
from doubles.tiny_families import add_words
from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.spec import RopeScaling
from outrider.models.configs import LayeredConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_config, read_native_config
from outrider.models.loading import load_model
from parity.feeding import feed
from parity.oracle import Oracle

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]

WINDOW, FACTOR = 16, 4.0
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]
OPTIONS = LoadOptions(
    capacity=ModelCapacity(num_slots=512, page_size=16), dtype="float32", device="cpu"
)
every_kind = pytest.mark.parametrize("kind", ["linear", "yarn"])


def written(folder: Path, family: str, **changes: object) -> Path:
    folder.mkdir()
    write_hf(folder, family, {"max_position_embeddings": WINDOW, **changes}, seed=3)
    return folder


def with_positions(folder: Path, values: dict[str, object]) -> None:
    """Write rotary positions of these values in config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {**config["rope_parameters"], **values}
    file.write_text(json.dumps(config))


@every_kind
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_logits_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "own", family)
    model = load_model(folder, replace(OPTIONS, rope=RopeScaling(kind, FACTOR)))
    found_NV = feed(model, TEXT, [len(TEXT)])
    values: dict[str, object] = {"rope_type": kind, "factor": FACTOR}
    if kind == "yarn":
        values["original_max_position_embeddings"] = WINDOW
    with_positions(folder, values)
    wanted_NV, _ = Oracle(folder).run(TEXT)
    assert (found_NV - wanted_NV).abs().max() < 1e-4
    assert model.config.max_tokens == WINDOW * FACTOR


def test_the_window_before_it_may_be_stated(tmp_path: Path) -> None:
    config = read_config(written(tmp_path / "own", "llama"))
    assert config.stretched(RopeScaling("yarn", 4.0, 32)).max_tokens == 128
    assert config.stretched(RopeScaling()) is config


def test_layers_with_a_window_stay_as_they_are(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "own", "gemma3_text", head_dim=12, sliding_window=8, num_hidden_layers=6
    )
    config = read_native_config(folder)
    assert isinstance(config, LayeredConfig)
    scaled = config.stretched(RopeScaling("linear", 4.0))
    for old, new in zip(config.layers, scaled.layers, strict=True):
        assert new.rope is not None
        assert (new.rope.kind == "linear") == (old.window == 0)
        assert new == old or old.window == 0


@pytest.mark.parametrize(
    ("family", "positions"),
    [
        ("gpt2", {}),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        ),
    ],
)
def test_positions_that_cannot_be_stretched_are_refused(
    family: str, positions: dict[str, object], tmp_path: Path
) -> None:
    folder = written(tmp_path / "own", family)
    if positions:
        with_positions(folder, positions)
    with pytest.raises(ConfigError, match="rope_scaling=yarn: ") as error:
        read_config(folder).stretched(RopeScaling("yarn", 4.0))
    assert "--rope-scaling at auto" in str(error.value.hint)


@pytest.mark.parametrize("given", [{"rope_scale": 2.0}, {"rope_scaling": "yarn"}])
def test_way_and_scale_need_each_other(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="each needs the other"):
        EngineConfig(**given)  # pyright: ignore[reportArgumentType]


def test_a_window_without_a_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="yarn_orig_ctx=64 has no effect"):
        EngineConfig(yarn_orig_ctx=64)


@every_kind
def test_texts_pass_the_old_window_and_drafts_change_no_token(kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "own", "llama", eos_token_id=None)
    add_words(folder)
    config = EngineConfig(
        device="cpu", dtype="float32", rope_scaling=kind, rope_scale=FACTOR, k=3, drafter="none"
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    texts: list[list[int]] = []
    for drafter in ("none", "ngram", "quantised-self"):
        with LLM(str(folder), config=replace(config, drafter=drafter)) as llm:
            assert llm.spec.max_tokens == WINDOW * FACTOR
            (result,) = llm.generate(["w5 w6 w5 w6 w5 w6"], params)
            texts.append(list(result.token_ids))
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 40
