"""Captured rounds: a whole speculative round as one CUDA graph.

Open program.py first: the round as a straight line of tensor operators. round.py launches rounds
and reads them one round late, memory.py holds the tensors on the device, sampling.py draws and
verdicts.py judges (triton.py with fused kernels), and build.py decides whether rounds can be
captured.
"""
