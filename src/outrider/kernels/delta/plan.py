"""Where the recurrences of one pass start and what they leave behind: the plan beside PackedPlan.

A recurrence reads its sequence token by token, so a plan cuts a pass into runs: packed tokens that
follow one another. A run starts from a cell, which holds the state after some token, and may leave
the state after any of its tokens in other cells. Where a whole state is too much to keep for a
token, its inputs are kept instead: a token changes the state by a product of two vectors, so a run
may first replay the inputs of tokens that came before.

Shapes:  L = recurrent layers, W = rows that the convolution remembers, C = its channels, G = key
         heads, H = value heads, K = key size, V = value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StateCell:
    """All recurrent layers' states after one token, float32. `conv_LWC` are the last W inputs of
    the convolution, the oldest first."""

    conv_LWC: Tensor
    state_LHKV: Tensor


@dataclass(frozen=True, slots=True)
class InputCell:
    """What one token does to all recurrent states, float32: S becomes decay S + key change^T, and
    `conv_LC` is what the convolution remembers of it."""

    conv_LC: Tensor
    key_LGK: Tensor
    change_LHV: Tensor
    decay_LH: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """Sizes of a model's recurrent state, all layers together."""

    num_layers: int
    num_taps: int
    num_channels: int
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_bytes(self) -> int:
        """Of one cell."""
        window = (self.num_taps - 1) * self.num_channels
        return _FLOAT_BYTES * self.num_layers * (window + self._state_size)

    @property
    def input_bytes(self) -> int:
        """Of one token's inputs."""
        vectors = self.num_key_heads * self.key_dim + self.num_heads * (self.value_dim + 1)
        return _FLOAT_BYTES * self.num_layers * (self.num_channels + vectors)

    @property
    def _state_size(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim

    def state_cell(self, device: torch.device) -> StateCell:
        window = (self.num_layers, self.num_taps - 1, self.num_channels)
        state = (self.num_layers, self.num_heads, self.key_dim, self.value_dim)
        # Cells outlive the pass that first needs them.
        with torch.inference_mode(False):
            return StateCell(torch.zeros(window, device=device), torch.zeros(state, device=device))

    def input_cell(self, device: torch.device) -> InputCell:
        layers, heads = self.num_layers, self.num_heads
        with torch.inference_mode(False):
            return InputCell(
                torch.zeros(layers, self.num_channels, device=device),
                torch.zeros(layers, self.num_key_heads, self.key_dim, device=device),
                torch.zeros(layers, heads, self.value_dim, device=device),
                torch.zeros(layers, heads, device=device),
            )


@dataclass(frozen=True, slots=True)
class Run:
    """Packed tokens from `first` on, each the parent of the next.

    The state before them is that of cell `source` (None: nothing was read yet) after `replayed`
    inputs, which then goes to the cell `fold`. Entry i of `states` and of `inputs` is the cell that
    keeps the state after token i, or what it did; None keeps nothing.
    """

    first: int
    states: tuple[int | None, ...]
    inputs: tuple[int | None, ...]
    source: int | None = None
    replayed: tuple[int, ...] = ()
    fold: int | None = None

    @property
    def stop(self) -> int:
        return self.first + len(self.states)
