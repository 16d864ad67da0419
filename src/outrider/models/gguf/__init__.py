"""GGUF: files of llama.cpp as checkpoints, under the names of Hugging Face.

Open checkpoint.py first: it lists the documents and tensors that such a file stands for. reader.py
reads the header and the table of tensors, architectures.py has a row for each architecture, which
config.py and vocabulary.py read for config.json and tokenizer.json; blocks.py has a row for each
type of tensor and decodes blocks, and splits.py has the rules that cut a text.
"""
