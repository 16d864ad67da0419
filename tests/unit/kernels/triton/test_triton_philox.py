# A kernel's arguments have no types.
# pyright: basic, reportCallIssue=false
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.philox import philox_uniforms
from outrider.core.rng import Role
from outrider.plugins.gpu.kernels.sampling import uniform

words = st.integers(0, 2**32 - 1)


@triton.jit
def uniforms_kernel(seed_ptr, start_ptr, sample_ptr, out_ptr, ROLE: tl.constexpr):
    node = tl.program_id(0) * 8 + tl.arange(0, 8)
    seed, start, sample = tl.load(seed_ptr), tl.load(start_ptr), tl.load(sample_ptr)
    tl.store(out_ptr + node, uniform(seed, node, start, sample, ROLE))


@settings(max_examples=20)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    start=words,
    sample=words,
    role=st.sampled_from(Role),
)
def test_numbers_have_the_bits_of_the_host(seed: int, start: int, sample: int, role: Role) -> None:
    """For seeds of 64 bits and counters of 32, a whole block of nodes at once."""
    out_N = torch.zeros(16, dtype=torch.float64)
    key = [torch.tensor([word]) for word in (seed, start, sample)]
    uniforms_kernel[(2,)](*key, out_N, ROLE=int(role))
    node_N = np.arange(16, dtype=np.uint64)
    expected_N = philox_uniforms(seed % 2**64, (node_N, start, sample, int(role)))
    assert np.array_equal(out_N.numpy(), expected_N)
