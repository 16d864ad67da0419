"""Weights as the Triton kernels read them.

    plain   [O, I], as it is
    int8    [O, I'] of int8 and a float32 scale an output: the reference's own form, the inputs
            padded to whole steps
    int4    [I' / 64][O][32] bytes and a bfloat16 scale [G'][O]: the low halves of 32 bytes hold
            one group, the high halves the next, each value plus 8. Padding has scale 0.

A step of all outputs lies together for int4, since 32 bytes of one output alone would be half of
what memory moves at a time.

Shapes:  O = outputs, I = inputs, G = groups, C = inputs of a group, J = pairs of groups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.linear.quantised import GROUP, SCHEMES, in_parts
from outrider.kernels.packed import PackedLinear

# Inputs of one step of the kernels; they are padded to a multiple.
STEP = 256


def padded_inputs(num_in: int) -> int:
    return -(-num_in // STEP) * STEP


def pack(weight_OI: Tensor, scheme: str) -> PackedLinear:
    """At load, on the weight's device."""
    num_out, num_in = weight_OI.shape
    if scheme not in SCHEMES:
        return PackedLinear(num_out, num_in, weight_OI.detach().contiguous())
    parts = list(in_parts(weight_OI, scheme, 1))
    values_OI = torch.cat([values_OI for _, values_OI, _ in parts])
    scales = torch.cat([scales for _, _, scales in parts])
    values_OI = functional.pad(values_OI, (0, padded_inputs(num_in) - values_OI.shape[1]))
    if scheme == "int8":
        return PackedLinear(num_out, num_in, values_OI.contiguous(), scales=scales)
    scale_GO = functional.pad(scales, (0, values_OI.shape[1] // GROUP - scales.shape[1])).T
    data_JOC = _in_pairs(values_OI)
    return PackedLinear(num_out, num_in, data_JOC, scales=scale_GO.to(torch.bfloat16).contiguous())


def _in_pairs(values_OI: Tensor) -> Tensor:
    values_OJ2C = (values_OI + 8).to(torch.uint8).view(values_OI.shape[0], -1, 2, GROUP)
    low_OJC, high_OJC = values_OJ2C.unbind(2)
    return (low_OJC | high_OJC << 4).transpose(0, 1).contiguous()
