"""The frozen target, in either type of products."""

from __future__ import annotations

from pathlib import Path

import torch

from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider_lab.train.target import FrozenTarget

CPU = torch.device("cpu")


def test_narrow_products_stay_near_and_nothing_is_trained(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant("llama2"))
    ids_BT = torch.arange(24).view(2, 12)
    wide, narrow = (
        FrozenTarget(folder, device=CPU, max_tokens=12, bfloat16=bfloat16)
        for bfloat16 in (False, True)
    )
    first, second = wide.read(ids_BT, (0, 2)), narrow.read(ids_BT, (0, 2))
    assert first.hidden_BTKD.shape == (2, 12, 2, 64)
    assert torch.equal(first.hidden_BTKD[:, :, 1], first.last_BTD)
    assert second.last_BTD.dtype == torch.float32
    torch.testing.assert_close(first.last_BTD, second.last_BTD, atol=0.1, rtol=0.05)
    logits_BTV = wide.logits(first.last_BTD)
    near = (narrow.logits(second.last_BTD).float() - logits_BTV).abs().max()
    assert float(near) < 0.05 * float(logits_BTV.abs().max()) + 0.05
    assert not logits_BTV.requires_grad
    assert not any(weight.requires_grad for weight in wide.net.parameters())
