"""Command line: one module per verb; nothing here imports tensors before a verb runs.

Open main.py first: it answers help at once, runs a verb and reports errors.
"""
