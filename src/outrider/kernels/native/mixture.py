"""A mixture of experts as one native call: csrc/mixture.cpp.

models/ffn.py is the definition.

Shapes:  N = tokens, D = hidden size, F = an FFN's size, X = scores of a router.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from outrider.kernels.native.ops import LinearStruct, function, pointer, struct_fields
from outrider.kernels.plan import PackedLinear

# Names of gates, in the order of `Gating` in csrc/linears.h.
_GATINGS = ("silu", "gelu", "clamped", "squared")


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """One feed-forward net with a gate."""

    gate_up: PackedLinear
    down: PackedLinear
    gate_up_bias_2F: Tensor | None = None
    down_bias_D: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """Weights of a mixture. `router` scores all experts, and the shared one, if it is gated, in its
    last output. `choice_bias_X` is added to shares where experts are chosen, and to nothing else.
    The shares of chosen experts are multiplied by `expert_scale_X`.
    `native`, if any, runs the mixture in one call."""

    router: PackedLinear
    experts: Sequence[DenseWeights]
    shared: DenseWeights | None = None
    router_bias_X: Tensor | None = None
    choice_bias_X: Tensor | None = None
    expert_scale_X: Tensor | None = None
    latent_in: PackedLinear | None = None
    latent_out: PackedLinear | None = None
    native: NativeMixture | None = None

    @property
    def always_read(self) -> tuple[PackedLinear, ...]:
        """The matrices that every token reads."""
        shared = () if self.shared is None else (self.shared.gate_up, self.shared.down)
        return (self.router, *shared)


class MixtureSizes(Protocol):
    """Sizes of a mixture; see `Experts` in models/expert_kinds.py."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_chosen(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def shared_ffn_size(self) -> int: ...
    @property
    def normalise(self) -> bool: ...
    @property
    def gate(self) -> Enum: ...
    @property
    def alpha(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def scale(self) -> float: ...
    @property
    def has_sigmoids(self) -> bool: ...
    @property
    def gates_shared(self) -> bool: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...
    @property
    def group_best(self) -> int: ...


class _Net(Structure):
    _fields_ = struct_fields((LinearStruct, "gate_up down"))


class _Mixture(Structure):
    _fields_ = struct_fields(
        (c_void_p, "team"),
        (LinearStruct, "router"),
        (c_void_p, "experts"),
        (_Net, "shared"),
        (c_void_p, "choice_bias"),
        (c_float, "alpha limit scale"),
        (c_int32, "hidden_size num_experts num_chosen ffn_size shared_ffn_size normalise gating"),
        (c_int32, "num_scores has_sigmoids gates_shared num_groups top_groups group_best"),
    )


class NativeMixture:
    """Runs rows through the experts that their router chooses. Owns what native code reads."""

    def __init__(
        self, library: ctypes.CDLL, team: int, sizes: MixtureSizes, weights: MixtureWeights
    ) -> None:
        self._weights = weights
        experts = (_Net * len(weights.experts))(*map(_net, weights.experts))
        self._experts = experts
        self._mixture = _Mixture(
            team,
            LinearStruct.of(weights.router, weights.router_bias_X),
            ctypes.addressof(experts),
            _Net() if weights.shared is None else _net(weights.shared),
            pointer(weights.choice_bias_X),
            sizes.alpha,
            sizes.limit,
            sizes.scale,
            weights.router.num_in,
            sizes.num_experts,
            sizes.num_chosen,
            sizes.ffn_size,
            sizes.shared_ffn_size,
            sizes.normalise,
            _GATINGS.index(sizes.gate.value),
            weights.router.num_out,
            sizes.has_sigmoids,
            sizes.gates_shared,
            sizes.num_groups,
            sizes.top_groups,
            sizes.group_best,
        )
        self.address = ctypes.addressof(self._mixture)
        self._run = function(library, "mixture")

    def __call__(self, x_ND: Tensor, out_ND: Tensor) -> None:
        """Run the mixture. Tensors are contiguous float32 on the CPU."""
        self._run(self.address, x_ND.data_ptr(), out_ND.data_ptr(), len(x_ND))


def _net(net: DenseWeights) -> _Net:
    return _Net(
        LinearStruct.of(net.gate_up, net.gate_up_bias_2F),
        LinearStruct.of(net.down, net.down_bias_D),
    )
