"""Published quantised folders: safetensors whose `quantization_config` says how numbers are made.

Open scheme.py first: which methods are read, and which are refused by name. layouts.py unpacks what
a method stores into codes.py's record, of which numbers are made; tensors.py finds the matrices
among a folder's tensors.
"""
