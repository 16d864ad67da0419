"""Tables of a pass's recurrences for the Triton delta kernels: rows and addresses.

The convolution of a token reads rows of this pass and rows stored in cells, so each token has a
line for each tap. A run may continue from the state of an earlier run of the pass, whose programs
may not have ended yet. Its lines then refer to the rows themselves, and both runs form one group,
which one program processes in order. Different groups run at once.

Shapes:  N = packed tokens, T = taps, W = T - 1, R = runs, U = groups, I = replayed inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.reference.delta import Cells, TokenRun

# An address and the number of floats of a layer there; for a row of this pass, 0 and its number.
LINE_FIELDS = 2
# Addresses to store at: the windows after the token and before it; then its row, key, decay, state
# and change.
TOKEN_FIELDS = 7
# First token, stop, source state, state to fold into, first replayed input and stop.
RUN_FIELDS = 6
# Key, change and decay.
REPLAY_FIELDS = 3

_NOWHERE = 0
# Instead of a row's number: a row of zeros, before the first token of a text.
_ZEROS = -1

# An address and a number, as LINE_FIELDS says.
_Line = tuple[int, int]
_Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class DeltaTables:
    """Tables of a pass, all int64 and on the device. `lines_NT2`, `tokens_N7`, `runs_R6` and
    `replayed_I3` have the fields named above; group g has runs `groups_U1[g]` up to
    `groups_U1[g + 1]`."""

    lines_NT2: Tensor
    tokens_N7: Tensor
    runs_R6: Tensor
    replayed_I3: Tensor
    groups_U1: Tensor

    @property
    def num_groups(self) -> int:
        return self.groups_U1.shape[0] - 1


def delta_tables(
    runs: Sequence[TokenRun], cells: Cells, taps: int, device: torch.device
) -> DeltaTables:
    """The tables of `runs`, which have all packed tokens, sent in one copy to the device."""
    group_R = _groups(runs)
    order = sorted(range(len(runs)), key=lambda index: (group_R[index], index))
    ends = [sum(group <= number for group in group_R) for number in range(max(group_R) + 1)]
    replayed = [cell for index in order for cell in runs[index].replayed]
    arrays = (
        _lines(runs, cells, taps),
        _tokens(runs, cells),
        _runs([runs[index] for index in order], cells),
        np.array([_replay_row(cells, cell) for cell in replayed], dtype=np.int64).reshape(
            -1, REPLAY_FIELDS
        ),
        np.array([0, *ends], dtype=np.int64),
    )
    return DeltaTables(*_on_device(arrays, device))


def _groups(runs: Sequence[TokenRun]) -> list[int]:
    """The group of each run, from 0 on; runs that read from each other share one."""
    group_R: list[int] = []
    writer: dict[tuple[str, int], int] = {}
    for index, run in enumerate(runs):
        reads = [("input", cell) for cell in run.replayed]
        if run.source is not None:
            reads.append(("state", run.source))
        met = sorted({group_R[writer[cell]] for cell in reads if cell in writer})
        own = met[0] if met else index
        group_R = [own if group in met else group for group in group_R]
        group_R.append(own)
        states = (*run.states, run.fold)
        writer |= {("state", cell): index for cell in states if cell is not None}
        writer |= {("input", cell): index for cell in run.inputs if cell is not None}
    numbers = {group: number for number, group in enumerate(sorted(set(group_R)))}
    return [numbers[group] for group in group_R]


def _lines(runs: Sequence[TokenRun], cells: Cells, taps: int) -> _Table:
    """lines_NT2: token n's convolution reads line t by tap t, its own row by the last."""
    num_tokens, window = runs[-1].stop, taps - 1
    lines_NT2 = np.zeros((num_tokens, taps, LINE_FIELDS), dtype=np.int64)
    lines_NT2[:, :, 1] = np.arange(num_tokens)[:, None] + np.arange(-window, 1)
    windows: dict[int, list[_Line]] = {}
    rows: dict[int, _Line] = {}
    for run in runs:
        before = _before(run, cells, (windows, rows), window)
        for index in range(min(window, run.stop - run.first)):
            lines_NT2[run.first + index, : window - index] = before[index:]
        if run.fold is not None:
            windows[run.fold] = before
        for token, (state, kept) in enumerate(zip(run.states, run.inputs, strict=True), run.first):
            if state is not None:
                after: list[list[int]] = lines_NT2[token, 1:].tolist()
                windows[state] = [(address, number) for address, number in after]
            if kept is not None:
                rows[kept] = (_NOWHERE, token)
    return lines_NT2


def _before(
    run: TokenRun,
    cells: Cells,
    of_this_pass: tuple[dict[int, list[_Line]], dict[int, _Line]],
    window: int,
) -> list[_Line]:
    """The `window` rows before a run, the oldest first; `of_this_pass` has the windows of states
    and the rows of inputs that earlier runs write."""
    windows, rows = of_this_pass
    if run.source is None:
        lines: list[_Line] = [(_NOWHERE, _ZEROS)] * window
    elif run.source in windows:
        lines = windows[run.source]
    else:
        conv_LWC = cells.states[run.source].conv_LWC
        channels, layer = conv_LWC.shape[2], conv_LWC.stride(0)
        start, step = conv_LWC.data_ptr(), channels * conv_LWC.itemsize
        lines = [(start + row * step, layer) for row in range(window)]
    replayed: list[_Line] = []
    for cell in run.replayed:
        conv_LC = cells.inputs[cell].conv_LC
        replayed.append(rows.get(cell, (conv_LC.data_ptr(), conv_LC.stride(0))))
    return [*lines, *replayed][len(replayed) :]


def _tokens(runs: Sequence[TokenRun], cells: Cells) -> _Table:
    tokens_N7 = np.zeros((runs[-1].stop, TOKEN_FIELDS), dtype=np.int64)
    for run in runs:
        if run.fold is not None:
            tokens_N7[run.first, 1] = cells.states[run.fold].conv_LWC.data_ptr()
        for token, (state, kept) in enumerate(zip(run.states, run.inputs, strict=True), run.first):
            if state is not None:
                cell = cells.states[state]
                tokens_N7[token, 0] = cell.conv_LWC.data_ptr()
                tokens_N7[token, 5] = cell.state_LHKV.data_ptr()
            if kept is not None:
                noted = cells.inputs[kept]
                kinds = (noted.conv_LC, noted.key_LGK, noted.decay_LH)
                tokens_N7[token, 2:5] = [tensor.data_ptr() for tensor in kinds]
                tokens_N7[token, 6] = noted.change_LHV.data_ptr()
    return tokens_N7


def _runs(runs: Sequence[TokenRun], cells: Cells) -> _Table:
    rows: list[tuple[int, ...]] = []
    end = 0
    for run in runs:
        start, end = end, end + len(run.replayed)
        source, fold = _state(cells, run.source), _state(cells, run.fold)
        rows.append((run.first, run.stop, source, fold, start, end))
    return np.array(rows, dtype=np.int64)


def _state(cells: Cells, cell: int | None) -> int:
    return _NOWHERE if cell is None else cells.states[cell].state_LHKV.data_ptr()


def _replay_row(cells: Cells, number: int) -> tuple[int, ...]:
    cell = cells.inputs[number]
    return tuple(t.data_ptr() for t in (cell.key_LGK, cell.change_LHV, cell.decay_LH))


def _on_device(arrays: Sequence[_Table], device: torch.device) -> list[Tensor]:
    """The arrays on `device`, as parts of one tensor. Each starts at a multiple of 16 bytes, so a
    kernel's binary does not depend on the number of rows before it."""
    sizes = [array.size + array.size % 2 for array in arrays]
    flat = np.zeros(sum(sizes), dtype=np.int64)
    starts = np.cumsum([0, *sizes])
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + array.size] = array.ravel()
    whole: Tensor = torch.from_numpy(flat)  # pyright: ignore[reportUnknownMemberType]
    whole = whole.to(device)
    return [
        whole[start : start + array.size].view(array.shape)
        for start, array in zip(starts.tolist(), arrays, strict=False)
    ]
