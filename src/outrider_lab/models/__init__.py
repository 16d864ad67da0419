"""Models for studies: a real model's cost without its text, or text without weights.

scripted.py is a model without weights, synthetic.py decides acceptance by script over any model,
gemm.py is matrix products alone, inflate.py a small model at the cost of a bigger one. gguf.py and
gguf_export.py write models for llama.cpp. bare_engine.py is an engine over models in memory,
without text.
"""
