"""Triton kernels for CUDA, imported only if there is a device; operators fit a CUDA graph.

Open ops.py first: it has the operators of a decoder; launchers.py has those of sampling and
acceptance, eager.py the same for an engine that waits for results. The kernels are in linear.py,
attention.py, pointwise.py, sampling.py, filters.py, accept.py, trees.py and delta.py. tiles.py has
launches, packed weights and sizes of tiles, scratch.py scratch memory, and trial.py tests on the
device whether rows are invariant.
"""
