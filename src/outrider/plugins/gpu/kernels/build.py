"""The Triton side of the kernel registry: whether it runs on a device, and its operators."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from outrider.kernels.operators import OPS, Choice, Kernels, decoder_ops

# A GPU of a lower compute capability has no matrix units for bfloat16.
LEAST_CAPABILITY = 8


def why_not_triton(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a CUDA device, or None where they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    if torch.version.hip is not None:
        return "on ROCm some of its kernels need more shared memory than there is"
    major, minor = torch.cuda.get_device_capability(device)
    if major < LEAST_CAPABILITY:
        return f"it needs compute capability {LEAST_CAPABILITY}.0, not {major}.{minor}"
    # Imported here: most machines lack Triton.
    from outrider.plugins.gpu.kernels.tiles import why_not

    return why_not()


def triton_kernels(
    device: torch.device,
    dtype: torch.dtype,
    quantise: str,
    refusals: tuple[str, ...],
    exact: bool | None = None,
) -> Kernels:
    """Return Triton's operators for weights of `dtype`, quantised as `quantise` names.

    `exact` says whether rows have the same bits in every pass; with None a trial on the device
    decides, before the first pass of a model.
    """
    # Imported here: Triton asks for devices, and most machines have neither.
    from outrider.plugins.gpu.kernels.delta_ops import TritonDelta
    from outrider.plugins.gpu.kernels.eager import EagerProbs
    from outrider.plugins.gpu.kernels.ops import TritonOps
    from outrider.plugins.gpu.kernels.scratch import Workspace
    from outrider.plugins.gpu.kernels.trial import compile_ahead, rows_alike

    workspace = Workspace(device)
    ops, delta = TritonOps(workspace, quantise), TritonDelta(workspace)
    probs = EagerProbs(workspace, device)
    linear, *others = (Choice(op, "triton", refusals) for op in OPS)
    if quantise != "none":
        linear = replace(linear, name=f"triton {quantise}")
    return Kernels(
        **decoder_ops(ops),
        pack_head=ops.pack_head,
        delta=delta,
        argmax=probs.argmax,
        sampling=probs.sampling,
        choices=(linear, *others),
        exact=bool(exact),
        twin=lambda: triton_kernels(device, dtype, quantise, refusals, bool(exact)),
        trial=partial(rows_alike, ops, delta, device, dtype) if exact is None else None,
        compile_ahead=partial(compile_ahead, device, probs),
    )
