"""GGUF: files of llama.cpp as if each were the folder of a Hugging Face checkpoint.

Open folder.py first: it lists the documents and tensors that such a file stands for. reader.py
reads the header and the table of tensors, blocks.py decodes quantised blocks, names.py maps tensor
names, config.py and vocabulary.py make config.json and tokenizer.json from the metadata, and
splits.py has the rules that cut a text.
"""
