"""Triton kernels for CUDA, imported where a device is at hand; operators fit a CUDA graph.

Open ops.py first: the operators of a decoder; launchers.py has those of sampling and acceptance,
eager.py the same for an engine that waits for results. The kernels are linear.py, attention.py,
pointwise.py, sampling.py, accept.py and delta.py. tiles.py has launches, packed weights and sizes
of tiles, scratch.py scratch memory, and trial.py tests on the device whether rows are computed
alike.
"""
