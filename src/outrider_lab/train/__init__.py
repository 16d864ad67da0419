"""Training of draft models, Medusa heads and block nets, EAGLE heads and MTP blocks.

docs/train.md says how to train one; text comes through api/, never from the engine.
"""
