"""Reference kernels: the definition of every operator in PyTorch, on any device.

linear.py (float, 8 and 4 bits), attention.py (paged), pointwise.py (norms, activations, rotary
positions), delta.py (gated delta rule), accept.py (greedy acceptance). The other implementations
are tested against these.
"""
