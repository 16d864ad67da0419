"""How many multiprocessors decoding needs: the rest could read prompts.

Decoding reads weights, so the question is how few multiprocessors still read at full speed. Green
contexts give work a share of the device, where this PyTorch and driver have them: then products of
a matrix with one vector, which is what decoding is made of, run on each share alone, and beside a
product of large matrices, which is what reading a prompt is made of, on the rest. A reading kernel
with a fixed number of programs is the other way, which always works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from gpu_check.clock import seconds_of
from gpu_check.setting import Setting

SHARES = (1.0, 0.75, 0.5, 0.25)
# Green contexts take multiprocessors in groups of so many.
GROUP = 8


def run(setting: Setting, record: dict[str, Any]) -> None:
    setting.need_cuda("multiprocessors, to be divided,")
    count = torch.cuda.get_device_properties(setting.device).multi_processor_count
    record["multiprocessors"] = count
    record["reading"] = _reading(setting, count)
    try:
        record["cells"] = [_on_share(setting, count, share) for share in SHARES]
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        logging.exception("green contexts")
        record["refused"] = f"green contexts are not to be had: {error}"


def _reading(setting: Setting, count: int) -> list[dict[str, float]]:
    # Imported here: the file defines a Triton kernel.
    from gpu_check import reading_kernel

    source = torch.ones(1 << 28, dtype=torch.int32, device=setting.device)
    cells: list[dict[str, float]] = []
    for programs in (count // 8, count // 4, count // 2, count, 2 * count):

        def read(programs: int = programs) -> None:
            reading_kernel.read(source, programs)

        seconds = seconds_of(read, setting)
        cells.append({"programs": programs, "bytes_per_second": source.nbytes / seconds})
    return cells


def _on_share(setting: Setting, count: int, share: float) -> dict[str, Any]:
    size = int(count * share) // GROUP * GROUP
    weights = torch.ones(1 << 18, 4096, dtype=torch.bfloat16, device=setting.device)
    row = torch.ones(4096, dtype=torch.bfloat16, device=setting.device)
    square = torch.ones(8192, 8192, dtype=torch.bfloat16, device=setting.device)

    def decode() -> None:
        torch.mv(weights, row)

    def prefill() -> None:
        torch.mm(square, square)

    with _green(size):
        alone = seconds_of(decode, setting)
    cell: dict[str, Any] = {
        "multiprocessors": size,
        "share": share,
        "decode_bytes_per_second": weights.nbytes / alone,
    }
    rest = (count - size) // GROUP * GROUP
    if rest >= GROUP:
        cell["rest_multiprocessors"] = rest
        cell |= _beside(setting, (size, decode), (rest, prefill))
    return cell


def _beside(
    setting: Setting,
    decoding: tuple[int, Callable[[], None]],
    reading: tuple[int, Callable[[], None]],
) -> dict[str, float]:
    """Milliseconds of prefill alone on the rest, and of both at once, asked for one after the
    other and then awaited."""
    with _green(reading[0]):
        alone = seconds_of(reading[1], setting)

    def both() -> None:
        for size, work in (reading, decoding):
            with _green(size):
                work()
        torch.cuda.synchronize()

    return {"prefill_ms": 1e3 * alone, "together_ms": 1e3 * seconds_of(both, setting)}


@contextmanager
def _green(size: int) -> Any:
    # Imported here: older versions of PyTorch lack it.
    from torch.cuda.green_contexts import GreenContext

    context = _CONTEXTS.get(size)
    if context is None:
        context = _CONTEXTS[size] = GreenContext.create(num_sms=size, device_id=0)
    context.set_context()
    try:
        yield
    finally:
        context.pop_context()


_CONTEXTS: dict[int, Any] = {}
