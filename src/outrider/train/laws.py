"""The teacher's laws of whole windows, computed once and kept in a mapped file.

The target never changes while a draft learns from it, and reading a window is the dearest part of a
step. So the top of every law is kept under its window's number: from the second epoch on the target
is not asked. The file has room for all windows, but takes space only for those that were read.

A window's mark is written after its laws. A process that is killed between loses that window's
laws, which are computed again.

Shapes:  B = windows of a batch, T = tokens, P = places (B x T), C = ids kept of a law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.train.losses import TopLaws
from outrider.train.tokens import tensor_of

# ids_BT -> laws of all its places, in order.
Teach = Callable[[Tensor], TopLaws]


class LawCache:
    """Laws of `num_windows` windows of `window` tokens, the `num_kept` likeliest ids of each.

    `name` says which text and teacher they belong to: files of another name are left alone.
    """

    def __init__(
        self, folder: Path, name: str, *, num_windows: int, window: int, num_kept: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shape = (num_windows, window, num_kept)
        # Mapped in full, on disk as far as it is written.
        self._ids = _mapped(folder / f"laws-{name}.ids", np.dtype(np.int32), shape)
        self._logprobs = _mapped(folder / f"laws-{name}.logprobs", np.dtype(np.float16), shape)
        self._known = _mapped(folder / f"laws-{name}.known", np.dtype(np.uint8), (num_windows,))

    def laws(self, ids_BT: Tensor, windows: Sequence[int], teach: Teach) -> TopLaws:
        """Of all places of the batch, in order; the teacher reads windows that are not known."""
        numbers = list(windows)
        new = [row for row, number in enumerate(numbers) if not self._known[number]]
        if new:
            self._keep([numbers[row] for row in new], teach(ids_BT[new]), len(new))
        ids_BTC = tensor_of(self._ids[numbers], np.dtype(np.int64))
        logprobs_BTC = tensor_of(self._logprobs[numbers], np.dtype(np.float32))
        device = ids_BT.device
        return TopLaws(ids_BTC.flatten(0, 1).to(device), logprobs_BTC.flatten(0, 1).to(device))

    def _keep(self, numbers: Sequence[int], laws: TopLaws, num_rows: int) -> None:
        ids_BTC = _rows(laws.ids_PC, num_rows)
        logprobs_BTC = _rows(laws.logprobs_PC, num_rows)
        for row, number in enumerate(numbers):
            self._ids[number] = ids_BTC[row]
            self._logprobs[number] = logprobs_BTC[row]
            self._known[number] = 1


def _rows(values_PC: Tensor, num_rows: int) -> NDArray[Any]:
    return values_PC.view(num_rows, -1, values_PC.shape[-1]).cpu().numpy()


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A mapped file of zeros, or what is in it already if it has that size."""
    size = int(np.prod(shape)) * kind.itemsize
    if not path.is_file() or path.stat().st_size != size:
        with path.open("wb") as stream:
            stream.truncate(size)
    return np.memmap(path, dtype=kind, mode="r+", shape=shape)
