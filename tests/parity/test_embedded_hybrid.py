"""The hybrid that ships computes here what transformers computes of its numbers."""

from __future__ import annotations

import pytest
import torch

from doubles.hf_checkpoints import hushed
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from outrider.pairs.catalog import EMBEDDED_HYBRID
from parity.feeding import feed
from parity.oracle import Oracle

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.weights,
    pytest.mark.filterwarnings("ignore"),
]


def test_logits_are_those_of_transformers() -> None:
    folder = resolve(EMBEDDED_HYBRID)
    text = [(131 * i * i + 17 * i) % 8192 for i in range(100)]
    with hushed():
        theirs_NV, _ = Oracle(folder).run(text)
    capacity = ModelCapacity(num_slots=512, page_size=16, max_rows=128, max_logits=128)
    model = load_model(folder, LoadOptions(capacity=capacity, dtype="float32", device="cpu"))
    torch.testing.assert_close(feed(model, text, [100]), theirs_NV, atol=1e-4, rtol=0)
