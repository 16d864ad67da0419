"""Heads: small nets that read the target's hidden states and draft; drafters/ has their kinds.

Open eagle.py first, then hidden.py: the net and the loop of EAGLE and MTP. medusa.py and paths.py
have heads for several positions, masked.py and blocks.py (block_heads.py, block_drafts.py) drafts
of one pass; those of Gemma 4 are in plugins/gemma4/assistant.py. target.py says what the target
shares, and passes.py and native_*.py call native code.
"""
