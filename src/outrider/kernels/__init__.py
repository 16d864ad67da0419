"""Arithmetic: one interface of operators (`Kernels`), three implementations.

Open registry.py first: it chooses every operator once, when an engine is built. reference/ defines
the operators in PyTorch, native/ has them in C++ for CPUs, triton/ for CUDA. plan.py says where
each packed token reads and writes; accept/ is greedy acceptance on tensors; bandwidth.py measures
how fast memory can be read.
"""
