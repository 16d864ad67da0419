"""The accept step alone: judging 16 chains of 8 over a vocabulary of 128k, as a captured call."""

from __future__ import annotations

from typing import Any

import torch
from gpu_check.clock import seconds_of
from gpu_check.setting import Setting, check

from outrider.engine.cuda_graph.build import torch_laws, triton_laws
from outrider.engine.cuda_graph.program import launcher_for
from outrider.engine.cuda_graph.sampling import Keys, RoundLaws, Rows

K, MOST_SECONDS = 8, 30e-6


def run(setting: Setting, record: dict[str, Any]) -> None:
    device, size = setting.device, setting.vocabulary
    batch = 2 if setting.quick else 16
    generator = torch.Generator(device).manual_seed(1)
    logits_BWV = 3 * torch.randn(batch, K + 1, size, device=device, generator=generator)
    q_BKV = logits_BWV[:, :K] + torch.randn(batch, K, size, device=device, generator=generator)
    tokens_BK = q_BKV.argmax(-1)
    record |= {"batch": batch, "k": K, "vocabulary": size, "cells": []}
    sides: dict[str, RoundLaws] = {}
    for temperature in (0.0, 0.8):
        laws_BKV = torch.zeros_like(q_BKV) if temperature else None
        sides["torch"] = torch_laws("block", K, laws_BKV)
        if setting.on_cuda:
            room_BKV = torch.zeros_like(q_BKV) if temperature else None
            sides["triton"] = triton_laws(device, "block")(room_BKV)
        for side, laws in sides.items():
            seconds = _step(setting, laws, (logits_BWV, q_BKV, tokens_BK), temperature)
            cell = {"side": side, "temperature": temperature, "us": 1e6 * seconds}
            record["cells"].append(cell)
            if side == "triton":
                check(
                    record,
                    f"accept at temperature {temperature} takes at most 30 microseconds",
                    passed=seconds <= MOST_SECONDS,
                    detail=f"{1e6 * seconds:.1f}",
                )


def _step(
    setting: Setting,
    laws: RoundLaws,
    chain: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    temperature: float,
) -> float:
    logits_BWV, q_BKV, tokens_BK = chain
    batch, device = logits_BWV.shape[0], setting.device
    numbers_B = torch.arange(batch, device=device)
    rows = Rows(
        torch.full((batch,), temperature, device=device),
        torch.full((batch,), K, dtype=torch.int64, device=device),
        Keys(numbers_B, torch.zeros_like(numbers_B), numbers_B + 100),
    )
    laws.begin(rows)
    for node in range(K):
        laws.draft(q_BKV[:, node].contiguous(), rows, node)

    def program() -> None:
        laws.judge(logits_BWV, tokens_BK, rows)

    return seconds_of(launcher_for(device).make(program, lambda: None), setting, calls=8)
