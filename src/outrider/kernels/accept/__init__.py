"""Greedy acceptance of chains on tensors, as an operator of its own; torch.py defines it."""
