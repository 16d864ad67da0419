"""Operators in Triton's interpreter, on the CPU, and their references.

The interpreter takes milliseconds a program, so shapes are small.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.kernels.operators import Kernels
from outrider.kernels.registry import choose
from outrider.plugins.gpu.kernels import ops as ops_module
from outrider.plugins.gpu.kernels.launchers import TritonProbs
from outrider.plugins.gpu.kernels.ops import TritonOps
from outrider.plugins.gpu.kernels.scratch import Workspace
from outrider.plugins.gpu.kernels.tiles import AttentionShape, attention_shape

CPU = torch.device("cpu")


@functools.cache
def triton_ops(scheme: str = "none") -> TritonOps:
    return TritonOps(Workspace(CPU), scheme)


@functools.cache
def triton_distributions() -> TritonProbs:
    return TritonProbs(Workspace(CPU))


@functools.cache
def reference(dtype: torch.dtype, scheme: str = "none") -> Kernels:
    return choose(device=CPU, dtype=dtype, force_reference=True, quantise=scheme)


def linear(kernels: Kernels | TritonOps, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """What is added to a matrix of sevens."""
    out_NO = torch.full((x_NI.shape[0], weight_OI.shape[0]), 7.0)
    kernels.linear(x_NI, kernels.pack(weight_OI), out_NO, accumulate=True)
    return out_NO


def head(kernels: Kernels | TritonOps, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same by an output head."""
    pack, out_NO = kernels.pack_head, torch.full((x_NI.shape[0], weight_OI.shape[0]), 7.0)
    assert pack is not None
    kernels.linear(x_NI, pack(weight_OI), out_NO, accumulate=True)
    return out_NO


def cut_attention_small(monkeypatch: pytest.MonkeyPatch, *, part: int, keys: int) -> None:
    """Parts of a few steps, so that a short context has several of them."""

    def small(
        *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> AttentionShape:
        shape = attention_shape(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
        return replace(shape, part=part, keys=keys, merged=2)

    monkeypatch.setattr(ops_module, "attention_shape", small)
