"""Sampling and acceptance by Triton against the definition, token for token.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_check.setting import Setting
from torch import Tensor

from outrider.engine.cuda_graph.build import torch_laws, triton_laws
from outrider.engine.cuda_graph.sampling import Judged, Keys, RoundLaws, Rows

K = 3


def cases(setting: Setting) -> Iterator[tuple[str, Callable[[], bool]]]:
    for sampler in ("token", "block"):
        for temperature in (0.0, 0.8):
            name = f"drafts and verdicts of the {sampler} rule at temperature {temperature}"
            yield name, lambda s=sampler, t=temperature: _same(setting, s, t)


def _same(setting: Setting, sampler: str, temperature: float) -> bool:
    """All rows, or all but one in a hundred where laws are sums in another order."""
    batch, size = (3, 32) if setting.quick else (256, 4096)
    generator = torch.Generator(setting.device).manual_seed(3)
    logits_BWV = 2 * torch.randn(batch, K + 1, size, device=setting.device, generator=generator)
    noise_BKV = torch.randn(batch, K, size, device=setting.device, generator=generator)
    q_BKV = logits_BWV[:, :K] + 0.5 * noise_BKV
    numbers_B = torch.arange(batch, device=setting.device)
    rows = Rows(
        torch.full((batch,), temperature, device=setting.device),
        numbers_B % (K + 1),
        Keys(numbers_B * 7 + 1, numbers_B % 2, numbers_B + 40),
    )
    room_BKV = torch.zeros_like(q_BKV) if temperature else None
    other_BKV = torch.zeros_like(q_BKV) if temperature else None
    ours = _judged(triton_laws(setting.device, sampler)(other_BKV), logits_BWV, q_BKV, rows)
    wanted = _judged(torch_laws(sampler, K, room_BKV), logits_BWV, q_BKV, rows)
    same_B = (ours[0] == wanted[0]).all(-1)
    same_B &= (ours[1].kept_B == wanted[1].kept_B) & (ours[1].next_B == wanted[1].next_B)
    return float(same_B.double().mean()) >= (0.99 if temperature else 1.0)


def _judged(
    laws: RoundLaws, logits_BWV: Tensor, q_BKV: Tensor, rows: Rows
) -> tuple[Tensor, Judged]:
    laws.begin(rows)
    tokens = [laws.draft(q_BKV[:, node].contiguous(), rows, node)[0] for node in range(K)]
    tokens_BK = torch.stack(tokens, dim=1)
    return tokens_BK, laws.judge(logits_BWV, tokens_BK, rows)
