"""Prefill beside decoding: both on streams of their own, against one after the other.

Decoding is bound by memory and prefill by arithmetic, so together they may take less than the sum.
The decode rounds have scratch of their own; prefill gets operators with a room of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_check import models
from gpu_check.clock import seconds_of
from gpu_check.rounds import Bench, text
from gpu_check.setting import Setting

from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.kernels.registry import choose

CHUNK, STEPS = 512, 4


def run(setting: Setting, record: dict[str, Any]) -> None:
    setting.need_cuda("streams")
    record["cells"] = []
    for name, shape in setting.shapes.items():
        room = models.room_for(6, 2048, rows=CHUNK, logits=8)
        model = models.random_model(shape, setting, room, vocab_size=32_768)
        bench = Bench(setting, model, None, k=0, batch=4)
        prompts = [text(256, model.spec.vocab_size, seed=seed) for seed in range(4)]
        rounds = bench.launches(prompts, SamplingParams(max_tokens=32))
        rounds.stand_still()
        model.kernels = choose(device=setting.device, dtype=setting.dtype)
        model.state.open(99, ())
        row = StepRow.chain(99, text(CHUNK, model.spec.vocab_size), logits_from=CHUNK)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def prefill(row: StepRow = row, model: Any = model) -> None:
            model.step([row], DraftNeeds())
            model.state.commit({99: ()})

        def decode(rounds: Any = rounds) -> None:
            for _ in range(STEPS):
                rounds.launch()

        def both(streams: Any = streams, prefill: Any = prefill, decode: Any = decode) -> None:
            here = torch.cuda.current_stream()
            for stream, work in zip(streams, (decode, prefill), strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    work()
            for stream in streams:
                here.wait_stream(stream)

        alone = seconds_of(decode, setting), seconds_of(prefill, setting)
        together = seconds_of(both, setting)
        record["cells"].append(
            {
                "shape": name,
                "decode_steps": STEPS,
                "prefill_tokens": CHUNK,
                "decode_ms": 1e3 * alone[0],
                "prefill_ms": 1e3 * alone[1],
                "together_ms": 1e3 * together,
                "against_one_after_the_other": together / sum(alone),
            }
        )
        rounds.close()
        model.state.close(99)
        del model, bench, rounds
        models.let_go()
