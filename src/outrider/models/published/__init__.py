"""Published quantised folders: safetensors that are decoded by their `quantization_config`.

Open scheme.py first: it lists the methods that are read and those that are refused by name.
layouts.py unpacks the tensors of a method into the `Codes` of codes.py, which make the numbers;
tensors.py finds the matrices among a folder's tensors.
"""
