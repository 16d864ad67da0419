"""What measured.py times: a linear of each kind on weights from memory and on weights in a cache.

Large weights are many copies of one matrix, together larger than the last cache, and each turn
takes the next copy; small ones are one matrix that stays in a cache, where the start of a team of
threads counts. Both with the rows of plain decoding and of a draft's verification. Values do not
matter for time.

A process keeps one team of threads for all its models, so their number is decided once, on
bfloat16 weights, for every precision. Kinds of linear are tried where they have the same bits, on
integers, and with the physical cores, whatever number of threads a user wants.

Shapes:  N = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import env
from outrider.core.errors import ConfigError, ContractError
from outrider.kernels import huge_pages
from outrider.kernels.cpu import num_physical_cores
from outrider.kernels.kinds import ENDINGS, VECTORS, kind_by_rule, refused_kinds
from outrider.kernels.linear.quantised_native import NativeQuantised
from outrider.kernels.measured import Answer, decide
from outrider.kernels.native import NativeOps
from outrider.kernels.packed import PackedLinear
from outrider.kernels.topology import hardware_threads, last_cache_bytes

ROWS = (1, 9)
LARGE_OI, SMALL_OI = (4096, 1024), (1024, 256)
# Enough to be no cache's, and little enough to be allocated in passing.
MAX_LARGE_BYTES = 128 << 20
SMALL_CALLS = 32


class Packs(Protocol):
    """One kind of linear: `NativeOps` or `NativeQuantised`."""

    def pack(self, weight_OI: Tensor) -> PackedLinear: ...
    def linear(self, x_NI: Tensor, packed: PackedLinear, out_NO: Tensor) -> None: ...


def library_key(library: ctypes.CDLL) -> str:
    """What build.py named the library after: sources, compiler, flags and CPU."""
    return Path(library._name).stem  # pyright: ignore[reportPrivateUsage] - documented as public


def about_machine(library: ctypes.CDLL) -> dict[str, str]:
    """What every measured answer depends on."""
    cpus = ",".join(map(str, hardware_threads()))
    return {"library": library_key(library), "hardware_threads": cpus}


def thread_answer(library: ctypes.CDLL, folder: Path | None) -> Answer:
    """The number of threads as a candidate's name: the physical cores, or all hardware threads."""
    candidates = {str(n): n for n in (num_physical_cores(), len(hardware_threads()))}
    if len(candidates) == 1:
        return Answer(str(num_physical_cores()))
    question = about_machine(library) | {
        "choice": "threads",
        "candidates": ",".join(candidates),
    }

    def contest() -> dict[str, Mapping[str, Callable[[], object]]]:
        kinds = {name: NativeOps(library, torch.bfloat16, n) for name, n in candidates.items()}
        return {name: linear_works(ops) for name, ops in kinds.items()}

    return decide(question, contest, folder=folder)


def kind_answer(
    library: ctypes.CDLL, dtype: torch.dtype, scheme: str, folder: Path | None
) -> Answer:
    """The kind of linears of `dtype`, by a rule, or of a scheme of quantisation, by measuring; the
    one that the environment names goes first. Those that `refused_kinds` names are never taken.

    Raises ConfigError where the environment names no kind."""
    refused = refused_kinds(library, dtype, scheme)
    candidates = [kind for kind in ENDINGS if kind not in refused]
    if (wanted := env.linears()) is not None:
        if wanted not in ENDINGS:
            raise ConfigError(
                f"OUTRIDER_LINEARS: {wanted!r} is no kind of linear.",
                hint=f"unset it, or set it to one of: {', '.join(ENDINGS)}",
            )
        return Answer(wanted if wanted in candidates else VECTORS)
    if scheme == "none":
        return Answer(kind_by_rule(library, refused))
    if candidates == [VECTORS]:
        return Answer(VECTORS)
    question = about_machine(library) | {
        "choice": "linear",
        "scheme": scheme,
        "candidates": ",".join(candidates),
    }
    threads = num_physical_cores()

    def contest() -> dict[str, Mapping[str, Callable[[], object]]]:
        kinds = {one: NativeQuantised(library, scheme, threads, kind=one) for one in candidates}
        return {one: linear_works(linear) for one, linear in kinds.items()}

    return decide(question, contest, folder=folder)


def linear_works(kind: Packs) -> dict[str, Callable[[], object]]:
    """A turn at each work, by name; weights are made of bfloat16."""
    rng = torch.Generator().manual_seed(0)
    large = kind.pack(torch.randn(LARGE_OI, generator=rng).bfloat16())
    room = min(2 * last_cache_bytes(), MAX_LARGE_BYTES)
    copies = cycle([large, *(copied(large) for _ in range(room // large.nbytes))])
    small = kind.pack(torch.randn(SMALL_OI, generator=rng).bfloat16())
    works: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        told = f"{rows} row{'s' if rows > 1 else ''}"
        works[f"{told}, large"] = _turn(kind, copies, rows, 1)
        works[f"{told}, small"] = _turn(kind, cycle([small]), rows, SMALL_CALLS)
    return works


def copied(packed: PackedLinear) -> PackedLinear:
    """The same weights in memory of their own, of the kind that weights are in."""
    data = huge_pages.empty(*packed.data.shape, dtype=packed.data.dtype).copy_(packed.data)
    if packed.descriptor is None:
        raise ContractError("there is no descriptor")
    descriptor: Any = type(packed.descriptor).from_buffer_copy(packed.descriptor)
    if descriptor.packed != packed.data.data_ptr():
        raise ContractError("the packed weight was moved")
    descriptor.packed = data.data_ptr()
    return replace(packed, data=data, pointer=ctypes.addressof(descriptor), descriptor=descriptor)


def _turn(
    kind: Packs, weights: Iterator[PackedLinear], rows: int, num_calls: int
) -> Callable[[], None]:
    num_out, num_in = LARGE_OI if num_calls == 1 else SMALL_OI
    x_NI, out_NO = torch.ones(rows, num_in), torch.empty(rows, num_out)

    def turn() -> None:
        for _ in range(num_calls):
            kind.linear(x_NI, next(weights), out_NO)

    return turn
