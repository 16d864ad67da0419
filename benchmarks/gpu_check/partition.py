"""How many multiprocessors decoding needs: the rest could read prompts.

Green contexts give a stream a share of the device, where this PyTorch and driver have them. A
reading kernel with a fixed number of programs is the other way: it shows how few of them fill the
memory's bandwidth.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from gpu_check import models
from gpu_check.clock import seconds_of
from gpu_check.rounds import captured_pass, read, text
from gpu_check.setting import Setting

_log = logging.getLogger(__name__)
SHARES = (1.0, 0.75, 0.5, 0.25)


def run(setting: Setting, record: dict[str, Any]) -> None:
    setting.need_cuda("multiprocessors, to be divided,")
    count = torch.cuda.get_device_properties(setting.device).multi_processor_count
    record["multiprocessors"] = count
    record["reading"] = _reading(setting, count)
    try:
        record["decoding"] = _decoding(setting, count)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        _log.exception("green contexts")
        record["refused"] = f"green contexts are not to be had: {error}"


def _reading(setting: Setting, count: int) -> list[dict[str, float]]:
    # Imported here: the file defines a Triton kernel.
    from gpu_check import reading_kernel

    source = torch.ones(1 << 28, dtype=torch.int32, device=setting.device)
    cells: list[dict[str, float]] = []
    for programs in (count // 8, count // 4, count // 2, count, 2 * count):
        seconds = seconds_of(lambda n=programs: reading_kernel.read(source, n), setting)
        cells.append({"programs": programs, "bytes_per_second": source.nbytes / seconds})
    return cells


def _decoding(setting: Setting, count: int) -> list[dict[str, float]]:
    from torch.cuda.green_contexts import GreenContext

    name, shape = next(iter(setting.shapes.items()))
    room = models.room_for(1, 512, rows=128, logits=8)
    model = models.random_model(shape, setting, room, vocab_size=32_768)
    cells: list[dict[str, float]] = []
    for share in SHARES:
        context = GreenContext.create(num_sms=max(8, int(count * share) // 8 * 8), device_id=0)
        context.set_context()
        try:
            read(model, 0, text(256, model.spec.vocab_size))
            work = captured_pass(model, setting, rows=1, context=256)
            seconds = seconds_of(work, setting, calls=8)
            cells.append({"shape": name, "share": share, "ms": 1e3 * seconds})
            model.state.close(0)
        finally:
            context.pop_context()
    return cells
