"""Ours against stored results of transformers (scripts/goldens.py), with every set of kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from doubles.tiny_checkpoints import VARIANTS, checksum, random_tensors, variant, write_checkpoint
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from parity.feeding import feed, greedy

pytestmark = pytest.mark.golden

GOLDENS = Path(__file__).resolve().parent.parent / "golden" / "models"
EMBEDDED = {"embedded": "outrider/embedded", "embedded_draft": "outrider/embedded-draft"}
NAMES = [
    *(item.name for item in VARIANTS),
    *(pytest.param(name, marks=pytest.mark.weights) for name in EMBEDDED),
]
TOLERANCE = 1e-4
# Of every greedy choice that is stored, over the next logit (scripts/goldens.py stores no less).
LEAST_LEAD = 20 * TOLERANCE


@dataclass(frozen=True, slots=True)
class Golden:
    model: Decoder
    tokens: list[int]
    logits_NV: Tensor
    hidden_KD: Tensor
    greedy: list[int]
    stride: int
    lead: float


@pytest.fixture(scope="module", params=[True, False], ids=["reference", "chosen"])
def force_reference(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module", params=NAMES)
def golden(
    request: pytest.FixtureRequest, force_reference: bool, tmp_path_factory: pytest.TempPathFactory
) -> Golden:
    name: str = request.param
    opener: Any = safe_open
    with opener(GOLDENS / f"{name}.safetensors", framework="pt") as stored:
        metadata: dict[str, str] = stored.metadata()
        tensors: dict[str, Tensor] = {key: stored.get_tensor(key) for key in list(stored.keys())}
    folder = _folder(name, metadata, tmp_path_factory.mktemp("golden"))
    capacity = ModelCapacity(num_slots=256, page_size=16, max_rows=64, max_logits=64)
    options = LoadOptions(
        capacity=capacity, dtype="float32", device="cpu", force_reference=force_reference
    )
    return Golden(
        model=load_model(folder, options),
        tokens=[int(token) for token in tensors["tokens_N"]],
        logits_NV=tensors["logits_NV"],
        hidden_KD=tensors["hidden_KD"],
        greedy=[int(token) for token in tensors["greedy"]],
        stride=int(metadata["stride"]),
        lead=float(metadata["smallest_lead"]),
    )


def _folder(name: str, metadata: dict[str, str], tmp_path: Path) -> Path:
    if name in EMBEDDED:
        return resolve(EMBEDDED[name])
    item, seed = variant(name), int(metadata["seed"])
    assert checksum(random_tensors(item.config, seed=seed)) == metadata["weights"]
    return write_checkpoint(tmp_path, item, seed=seed)


def test_logits_however_the_text_is_cut(golden: Golden) -> None:
    for sizes in ([len(golden.tokens)], [1, 7, 2, len(golden.tokens) - 10]):
        logits_NV = feed(golden.model, golden.tokens, sizes)
        _close(logits_NV[:, :: golden.stride], golden.logits_NV)


def test_hidden_states(golden: Golden) -> None:
    layers = tuple(range(golden.model.spec.num_layers))
    golden.model.state.open(1, ())
    row = StepRow.chain(1, golden.tokens, logits_from=len(golden.tokens))
    hidden_NKD = golden.model.step([row], DraftNeeds(hidden_layers=layers)).hidden_NKD
    golden.model.state.close(1)
    assert hidden_NKD is not None
    _close(hidden_NKD[-1], golden.hidden_KD)


# The logits of each are compared above, however the text is cut.
@pytest.mark.sample(6)
def test_greedy_text_one_token_at_a_time(golden: Golden) -> None:
    """Logits within the tolerance cannot turn a choice with such a lead, whatever the CPU."""
    assert golden.lead >= LEAST_LEAD
    assert greedy(golden.model, golden.tokens, len(golden.greedy)) == golden.greedy


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
