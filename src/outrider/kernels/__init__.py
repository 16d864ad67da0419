"""Arithmetic: one interface of operators (`Kernels`), three implementations.

Open registry.py first: it chooses every operator once, when an engine is built. reference/ defines
the operators in PyTorch, native/ has them in C++ for CPUs, and plugins/gpu has those of Triton for
CUDA. plan.py describes where each packed token reads and writes in the KV cache.
"""
