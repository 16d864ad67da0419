"""Adapter: decoders of transformers over the paged KV cache.

Open model.py first: the `CausalLM` and the trial that it must pass. attention.py is its cache and
its attention, config.py what memory it needs, transformers.py all calls into the library.
"""
