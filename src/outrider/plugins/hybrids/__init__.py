"""Hybrids: models with recurrent states, such as Qwen3.5, LFM2, Granite 4 and Falcon H1.

Open model.py first: the layers. families.py reads their configs and architectures.py their GGUF
files; memory.py keeps states next to the KV cache, and states.py says which state a text returns
to after a rejection.
"""
