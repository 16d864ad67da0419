"""Plain decoding, one captured round a token: milliseconds, and the share of the copy ceiling.

Bytes are those of all weights that a pass reads, at the width in which they are held.
"""

from __future__ import annotations

from typing import Any

from gpu_check import bandwidth, models
from gpu_check.clock import seconds_of
from gpu_check.rounds import Bench, text
from gpu_check.setting import Setting, check

from outrider.core.params import SamplingParams

CONTEXT = 256
# Shares of the copy ceiling that a shape must reach in bfloat16.
FLOORS = {"1b": 0.75, "8b": 0.85}


def run(setting: Setting, record: dict[str, Any]) -> None:
    ceiling = bandwidth.measured(setting)["copy_bytes_per_second"]
    record["copy_bytes_per_second"], record["cells"] = ceiling, []
    for name, shape in setting.shapes.items():
        full = None
        for scheme in setting.schemes:
            room = models.room_for(1, 512, rows=128, logits=8)
            model = models.random_model(
                shape, setting, room, vocab_size=setting.vocabulary, quantise=scheme
            )
            bench = Bench(setting, model, None, k=0, batch=1)
            prompt = text(CONTEXT, model.spec.vocab_size)
            rounds = bench.launches([prompt], SamplingParams(max_tokens=32))
            rounds.stand_still()
            seconds = seconds_of(rounds.launch, setting, calls=setting.rounds)
            num_bytes = sum(tensor.nbytes for tensor in model.streamed)
            share = num_bytes / seconds / ceiling
            full = full or seconds
            record["cells"].append(
                {
                    "shape": name,
                    "quantise": scheme,
                    "ms": 1e3 * seconds,
                    "tokens_per_second": 1 / seconds,
                    "weight_bytes": num_bytes,
                    "share_of_copy_ceiling": share,
                    "against_bfloat16": seconds / full,
                }
            )
            if setting.on_cuda and scheme == "none":
                floor = FLOORS[name]
                check(
                    record,
                    f"{name} reaches {floor} of the copy ceiling",
                    passed=share >= floor,
                    detail=f"{share:.3f}",
                )
            rounds.close()
            del model, bench, rounds
            models.let_go()
