"""How long a bare read of a pair's weights takes here: the floor under every round.

The read is done by one thread and by all, and the faster counts (kernels/bandwidth.py); medians of
a few turns. Only weights in this machine's own memory can be read so, by native kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from torch import Tensor

from outrider.api.llm import LLM
from outrider.bench.engines.models import BareReads
from outrider.core.clock import HOST_CLOCK
from outrider.core.errors import MachineError
from outrider.kernels.bandwidth import Reader
from outrider.kernels.native.cpu import hardware_threads
from outrider.models.llama import LlamaModel

_TURNS = 7


def bare_reads(llm: LLM) -> BareReads | str:
    """The times, or a sentence that says why they cannot be taken."""
    if llm.device.type != "cpu":
        return f"bare reads are timed on a CPU, and this runs on {llm.device.type}"
    seconds = {"target": 0.0, "draft": 0.0}
    for role, model in llm.models.items():
        if not isinstance(model, LlamaModel):
            return f"the {role} model is of a family whose weights are not read by themselves"
        try:
            seconds[role] = _seconds(model.streamed)
        except MachineError as error:
            return str(error).rstrip(".")
    return BareReads(seconds["target"], seconds["draft"])


def _seconds(tensors: Sequence[Tensor]) -> float:
    medians: list[float] = []
    for threads in sorted({1, len(hardware_threads())}):
        reader = Reader(threads)
        reader.read(tensors)
        medians.append(statistics.median(_timed(reader, tensors) for _ in range(_TURNS)))
    return min(medians)


def _timed(reader: Reader, tensors: Sequence[Tensor]) -> float:
    began = HOST_CLOCK()
    reader.read(tensors)
    return HOST_CLOCK() - began
