"""How fast this machine reads a model's weights, if it does nothing else with them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p

from torch import Tensor

from outrider.core import env
from outrider.core.errors import MachineError
from outrider.kernels.build import built_kernels
from outrider.kernels.cpu import num_physical_cores
from outrider.kernels.native import team


class Reader:
    """Reads tensors by the threads that multiply by them. Raises MachineError without a compiler.

    `threads` 0 are the physical cores.
    """

    def __init__(self, threads: int = 0) -> None:
        built = built_kernels(env.compiler(), env.cache_folder())
        if built.library is None:
            raise MachineError(
                f"memory cannot be read at full speed: {built.refusal}.", hint="outrider doctor"
            )
        self._team = team(built.library, threads or num_physical_cores())
        self._stream = built.library.outrider_stream
        self._stream.argtypes = (c_void_p, c_void_p, c_int64)
        self._stream.restype = c_uint64

    def read(self, tensors: Sequence[Tensor]) -> int:
        """All bytes of contiguous CPU tensors, once; their exclusive or, of 8 bytes."""
        found = 0
        for tensor in tensors:
            found ^= self._stream(self._team, tensor.data_ptr(), tensor.nbytes)
        return found
