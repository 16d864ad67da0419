"""GGUF: files of llama.cpp as checkpoints, under the names of Hugging Face.

Open checkpoint.py first: it lists the documents and tensors that such a file stands for. reader.py
reads the header and the table of tensors, blocks.py decodes quantised blocks, tensors.py maps names
and layouts, config.py and vocabulary.py make config.json and tokenizer.json from the metadata, and
splits.py has the rules that cut a text.
"""
