"""What one request does wrong is that request's error, and no other request notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from doubles.tiny_checkpoints import save_tensors, variant, write_checkpoint
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError, NumericsError
from outrider.core.rng import KeyedRng
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model

CONFIG = EngineConfig(k=3, batch_size=4)
PARAMS = SamplingParams(max_tokens=24)
GOOD = "def f(x):"


class BrokenError(Exception):
    pass


def breaks_later(text: Sequence[int]) -> Tensor | None:
    if len(text) > 4:
        raise BrokenError
    return None


def not_a_mask(text: Sequence[int]) -> Tensor | None:
    return torch.ones(3 if len(text) > 4 else 8192, dtype=torch.bool)


@pytest.fixture(scope="module", params=["model", "ngram"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(config=replace(CONFIG, drafter=request.param))


# Both masks, greedy and sampled. Other combinations are `deep`.
@pytest.mark.covering(1)
@pytest.mark.weights
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("allowed", "kind"), [(breaks_later, BrokenError), (not_a_mask, ConfigError)]
)
def test_a_broken_mask_ends_its_own_request_alone(
    llm: LLM, allowed: object, kind: type[Exception], temperature: float
) -> None:
    params = replace(PARAMS, temperature=temperature, seed=3)
    (wanted,) = llm.generate(GOOD, params)
    free = llm.free_tokens
    running = llm.stream(GOOD, params)
    text = next(running).text
    broken = llm.stream("Hello", params, allowed=allowed)  # pyright: ignore[reportArgumentType]
    next(broken)  # a request is live from here on
    # Others drive the engine over the cliff, and feel nothing.
    assert llm.generate(GOOD, params)[0].token_ids == wanted.token_ids
    with pytest.raises(kind):
        list(broken)
    assert llm.generate(GOOD, params)[0].token_ids == wanted.token_ids
    assert text + "".join(event.text for event in running) == wanted.text
    assert llm.free_tokens == free


@pytest.mark.weights
def test_generate_raises_what_one_of_its_own_did(llm: LLM) -> None:
    free = llm.free_tokens
    with pytest.raises(BrokenError):
        llm.generate([GOOD, "Hello"], PARAMS, allowed=breaks_later)
    assert llm.free_tokens == free
    assert llm.generate(GOOD, PARAMS)[0].num_tokens > 0


@pytest.fixture(scope="module")
def nan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, one of whose weights is not a number, with the embedded tokenizer's files."""
    import shutil

    from outrider.models.loading import resolve

    folder = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(resolve("outrider/embedded-draft"), folder)
    reader: Any = safe_open
    tensors: dict[str, Tensor]
    with reader(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in list(file.keys())}
    tensors["model.norm.weight"][3] = torch.nan
    save_tensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.covering(1)
@pytest.mark.weights
@pytest.mark.parametrize("force_reference", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sampler", ["block", "token", "match", "coupled", "typical"])
def test_logits_that_are_no_numbers_are_an_error(
    nan_folder: Path, sampler: str, temperature: float, force_reference: bool
) -> None:
    config = replace(CONFIG, drafter="ngram", sampler=sampler, force_reference=force_reference)
    llm = LLM(nan_folder, config=config)
    with pytest.raises(NumericsError, match="not numbers") as caught:
        llm.generate(GOOD, replace(PARAMS, temperature=temperature))
    assert "float32" in str(caught.value.hint)


@pytest.mark.weights
def test_a_draft_model_without_numbers_is_named_and_does_without(nan_folder: Path) -> None:
    plain, llm = LLM(config=replace(CONFIG, drafter="none")), LLM(draft=nan_folder, config=CONFIG)
    wanted = plain.generate(GOOD, PARAMS)
    for result, expected in zip(llm.generate(GOOD, PARAMS), wanted, strict=True):
        assert result.token_ids == expected.token_ids
        assert any("the draft model gave logits that are not numbers" in n for n in result.notes)
    drawn = llm.generate(GOOD, replace(PARAMS, temperature=0.8))
    assert all("speculation was turned off" in result.notes[-1] for result in drawn)
    assert all(result.drafter_failed for result in drawn)
    assert not any(result.drafter_failed for result in wanted)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
def test_no_distribution_draws_nothing(weights: list[float]) -> None:
    rng = KeyedRng(0, 0, 0)
    for draw in (rng.pick_at, rng.race_at):
        with pytest.raises(NumericsError):
            draw(torch.tensor(weights), 0)


def test_a_row_with_a_nan_has_no_largest(tmp_path: Path) -> None:
    for forced in (False, True):
        folder = write_checkpoint(tmp_path / str(forced), variant("llama2"))
        options = LoadOptions(
            capacity=ModelCapacity(num_slots=64), device="cpu", force_reference=forced
        )
        argmax = load_model(folder, options).kernels.argmax
        for size in (1, 7, 64, 1025, 5000):
            for place in {0, size // 2, size - 1}:
                logits_MV = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
                logits_MV[1, place] = torch.nan
                best = argmax(logits_MV)
                assert best[1] == -1
                assert [best[0], best[2]] == [int(logits_MV[i].argmax()) for i in (0, 2)]
