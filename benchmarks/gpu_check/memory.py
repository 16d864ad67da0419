"""Memory: what a model takes against what it claims, and what a round allocates."""

from __future__ import annotations

from typing import Any

import torch
from gpu_check import models
from gpu_check.rounds import Bench, text
from gpu_check.setting import Setting, check

from outrider.core.params import SamplingParams

ROUNDS = 50


def run(setting: Setting, record: dict[str, Any]) -> None:
    setting.need_cuda("allocator statistics")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    name, shape = next(iter(setting.shapes.items()))
    room = models.room_for(4, 1024, rows=128, logits=32)
    model = models.random_model(shape, setting, room, vocab_size=setting.vocabulary)
    held = torch.cuda.memory_allocated() - before
    claimed = model.spec.weight_bytes + model.state.arena.nbytes
    record |= {
        "shape": name,
        "claimed_bytes": claimed,
        "held_bytes": held,
        "peak_bytes_while_loading": torch.cuda.max_memory_allocated() - before,
    }
    bench = Bench(setting, model, None, k=0, batch=4)
    prompts = [text(64, model.spec.vocab_size, seed=seed) for seed in range(4)]
    rounds = bench.launches(prompts, SamplingParams(max_tokens=900))
    for _ in range(3):
        rounds.launch()
    torch.cuda.synchronize()
    counted = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(ROUNDS):
        rounds.launch()
    torch.cuda.synchronize()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - counted
    record["reserved_bytes"] = torch.cuda.memory_reserved()
    record["allocations_per_round"] = made / ROUNDS
    check(record, "a round allocates nothing", passed=made == 0, detail=str(made))
    check(
        record,
        "a model takes at most 1.15 of what it claims",
        passed=held <= 1.15 * claimed,
        detail=f"{held / claimed:.3f}",
    )
    rounds.close()
