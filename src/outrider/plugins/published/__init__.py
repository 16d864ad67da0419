"""Published quantised folders: safetensors that are decoded by their `quantization_config`.

Open methods.py first: it lists the methods that are read and those that are refused by name.
tensors.py finds the matrices among a folder's tensors and unpacks them into `Codes`, which make the
numbers.
"""
