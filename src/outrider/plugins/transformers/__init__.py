"""Adapter: decoders of transformers over the paged KV cache.

Open model.py first: the `CausalLM` and the trial that it must pass. attention.py has its cache and
its attention, config.py its sizes, transformers.py all calls into the library.
"""
