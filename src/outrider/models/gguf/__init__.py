"""GGUF: files of llama.cpp as if each were the folder of a Hugging Face checkpoint.

Open folder.py first: which documents and tensors such a file stands for. reader.py reads header and
table of tensors, blocks.py makes numbers of quantised blocks, names.py maps tensors, config.py and
vocabulary.py write config.json and tokenizer.json from the metadata, splits.py tells how a text
is cut.
"""
