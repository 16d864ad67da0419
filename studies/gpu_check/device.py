"""The device itself: what it is, how fast it reads, how few of its parts read as fast."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from gpu_check.models import kernels_of, small_config
from gpu_check.setting import Setting, seconds_of

from outrider.kernels.operators import tried
from outrider.plugins.measure.turns import provenance


def environment(setting: Setting, record: dict[str, Any]) -> None:
    """Where this ran: device, versions, kernels and what refused."""
    record |= provenance()
    record["torch_cuda"] = torch.version.cuda
    record["triton"] = _triton_version()
    kernels = kernels_of(setting)
    record["kernels"] = {choice.op: choice.name for choice in kernels.choices}
    record["exact"] = tried(kernels, small_config()).exact
    record["refusals"] = sorted({r for choice in kernels.choices for r in choice.refusals})
    if setting.on_cuda:
        found = torch.cuda.get_device_properties(setting.device)
        free, total = torch.cuda.mem_get_info(setting.device)
        record["device"] = {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "l2_bytes": found.L2_cache_size,
            "memory_bytes": total,
            "free_bytes": free,
        }


def _triton_version() -> str | None:
    try:
        # Imported here: Triton comes with PyTorch for CUDA alone.
        import triton
    except ImportError:
        return None
    return triton.__version__


def bandwidth(setting: Setting, record: dict[str, Any]) -> None:
    """The ceiling: how fast memory is copied and read when nothing else is done.

    A pass reads its weights and writes next to nothing, so its ceiling is the read rate; the copy
    rate, which counts bytes read and written, is what others publish.
    """
    record |= bandwidths(setting)


def bandwidths(setting: Setting) -> dict[str, float]:
    """Bytes a second, by kind; on buffers far beyond any cache."""
    size = 1 << 22 if setting.quick else 1 << 31
    source = torch.ones(size // 4, dtype=torch.int32, device=setting.device)
    target = torch.empty_like(source)
    halves = source.view(torch.bfloat16).view(-1, 4096)
    row = torch.ones(4096, dtype=torch.bfloat16, device=setting.device)
    copy = seconds_of(lambda: target.copy_(source), setting)
    read = seconds_of(source.sum, setting)
    product = seconds_of(lambda: torch.mv(halves, row), setting)
    return {
        "copy_bytes_per_second": 2 * size / copy,
        "read_bytes_per_second": size / read,
        "matrix_vector_bytes_per_second": size / product,
    }


SHARES = (1.0, 0.75, 0.5, 0.25)
# Green contexts take multiprocessors in groups of so many.
GROUP = 8


def partition(setting: Setting, record: dict[str, Any]) -> None:
    """How many multiprocessors decoding needs: the rest could read prompts.

    Decoding reads weights, so the question is how few multiprocessors still read at full speed.
    Green contexts give work a share of the device, where this PyTorch and driver have them: then
    products of a matrix with one vector, which is what decoding is made of, run on each share
    alone, and beside a product of large matrices, which is what reading a prompt is made of, on the
    rest. A reading kernel with a fixed number of programs is the other way, which always works.
    """
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
