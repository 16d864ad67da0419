"""Gemma 4: layers of two sizes, some of which share keys and values, and its assistants.

Open model.py first. config.py reads configs of the rows in families.py, architectures.py has GGUF
files, and assistant.py the drafter that reads the target's own keys and values.
"""
