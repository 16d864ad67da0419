"""Tensor parallelism: one model whose weights and KV cache several ranks share.

Open sharded.py first: it is the `CausalLM` that rank 0 sees. models/llama_weights.py splits a model
among ranks, comm.py sums over ranks, meeting.py connects them, messages.py has the messages that
rank 0 sends for everything but native passes, and ranks.py runs their processes.
"""
