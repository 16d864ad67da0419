"""`transformers_compat.generate` against `GenerationMixin.generate` of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.models.loading import resolve
from outrider.transformers_compat import GenerateOutput, close_all, generate

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.weights

IDS = torch.tensor([[0, 0, 5, 9, 11, 9], [7, 3, 5, 9, 2, 8]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def ids_of(found: Tensor | GenerateOutput) -> Tensor:
    assert isinstance(found, Tensor)
    return found


def rows(ids_RT: Tensor) -> list[list[int]]:
    return cast("list[list[int]]", cast("Any", ids_RT).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded target as a folder of float32, in which greedy choices do not tie."""
    folder = tmp_path_factory.mktemp("embedded") / "target"
    shutil.copytree(resolve("outrider/embedded"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"})
    )
    yield folder
    close_all()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# transformers warns of its own default length.
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 12},
        {},
        {"max_length": 15},
        {"max_new_tokens": 12, "repetition_penalty": 1.4},
        {"max_new_tokens": 12, "sequence_bias": [[[9], 3.0]]},
        {"max_new_tokens": 12, "eos_token_id": [9, 4], "pad_token_id": 1},
        {"max_new_tokens": 12, "min_new_tokens": 3, "num_beams": 1, "use_cache": True},
        {"max_new_tokens": 8, "prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_greedy_ids_and_shapes_are_those_of_transformers(
    options: dict[str, Any], folder: Path, model: Any
) -> None:
    own = {"pad_token_id": 0} | options
    alone = "prompt_lookup_num_tokens" in options
    inputs = {"input_ids": IDS[1:] if alone else IDS, "attention_mask": MASK[1:] if alone else MASK}
    theirs = model.generate(**inputs, do_sample=False, **own)
    assert rows(ids_of(generate(folder, inputs, **own))) == rows(theirs)


def test_several_sequences_of_each_prompt_follow_one_another(folder: Path) -> None:
    # The generator that scripts for transformers seed.
    generator = torch.default_generator
    asked: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5}
    generator.manual_seed(4)
    first = ids_of(generate(folder, IDS, attention_mask=MASK, **asked))
    generator.manual_seed(4)
    again = generate(folder, IDS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert isinstance(again, GenerateOutput)
    assert first.shape == (6, 11)
    assert torch.equal(first[:, :6], IDS.repeat_interleave(3, 0))
    assert torch.equal(first, again.sequences)
    other = ids_of(generate(folder, IDS, attention_mask=MASK, **asked))
    assert not torch.equal(first, other)


def test_a_streamer_gets_the_prompt_and_then_every_token(folder: Path) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.ids += rows(value.flatten()[None])[0]

        def end(self) -> None:
            self.ended = True

    streamer = Streamer()
    found = generate(folder, IDS[1:], max_new_tokens=9, streamer=streamer)
    assert [streamer.ids] == rows(ids_of(found))
    assert streamer.ended


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"output_scores": True}, "output_scores"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"max_length": 3}, "max_new_tokens"),
        ({"attention_mask": MASK.flip(1)}, "attention_mask"),
        ({"inputs": torch.ones(4)}, "shape"),
        ({"inputs": None}, "shape"),
        ({"inputs": "hello"}, "shape"),
        ({"inputs": [[1, 2], [3]]}, "shape"),
        ({"assistant_model": 3}, "assistant_model"),
        ({"sequence_bias": {(1, 2): 1.0}}, "sequence_bias"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    given: dict[str, Any], named: str, folder: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        generate(folder, **{"inputs": IDS} | given)
    assert named in f"{raised.value} {raised.value.hint}"


def test_a_loaded_model_is_refused_with_the_way_out(model: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        generate(model, IDS)
    assert "save_pretrained" in str(raised.value.hint)
