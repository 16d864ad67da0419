"""MTP (multi-token prediction) blocks of DeepSeek-V3, Qwen3-Next and Qwen3.5 as draft heads.

Open net.py first: the block and its formulas. weights.py reads published blocks.
"""
