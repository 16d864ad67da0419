"""Graph launches and waits of an engine's rounds, counted by the profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from gpu_check import models
from gpu_check.rounds import Bench, text
from gpu_check.setting import Setting, check
from torch.profiler import ProfilerActivity, profile

from outrider.core.params import SamplingParams
from outrider.core.sequence import LiveSequence

ROUNDS = 20
COUNTED = (
    "cudaGraphLaunch",
    "cudaLaunchKernel",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "cudaMalloc",
)


def run(setting: Setting, record: dict[str, Any]) -> None:
    setting.need_cuda("calls into the driver, to be counted,")
    room = models.room_for(4, 1024, rows=192, logits=64)
    target = models.embedded(models.TARGET, setting, room)
    draft = models.embedded(models.DRAFT, setting, room)
    bench = Bench(setting, target, draft, k=4, batch=4)
    engine = bench.engine()
    params = SamplingParams(max_tokens=600)
    for seq_id in range(4):
        prompt = text(32, target.spec.vocab_size, seed=seq_id)
        engine.submit(LiveSequence(seq_id, prompt, len(prompt), params, 600))
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(ROUNDS):
            engine.step()
    calls = Counter[str]()
    for event in found.key_averages():
        calls[event.key] += event.count
    record["per_round"] = {name: calls[name] / ROUNDS for name in COUNTED}
    record["note"] = "the profiler itself waits for the device once, when it stops"
    launches = record["per_round"]["cudaGraphLaunch"]
    waits = (calls["cudaStreamSynchronize"] + max(calls["cudaDeviceSynchronize"] - 1, 0)) / ROUNDS
    check(record, "one graph launch a round", passed=launches == 1, detail=str(launches))
    check(record, "no wait for the stream", passed=waits == 0, detail=str(waits))
    for seq_id in range(4):
        engine.cancel(seq_id)
