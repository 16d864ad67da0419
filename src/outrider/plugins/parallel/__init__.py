"""Tensor parallelism: one model whose weights and KV cache several ranks share.

Open sharded.py first: the `CausalLM` that rank 0 sees. models/share.py says which part each rank
holds, comm.py sums over ranks, meeting.py says where they meet, messages.py is what rank 0 sends to
the others besides passes that are one native call, ranks.py has their processes.
"""
