"""Models: load Hugging Face checkpoints and run packed forward passes over the KV cache.

Open llama.py first, then decoder.py, which runs the passes of every family. family_table.py has
rows of families, to which plugins (families/, hybrids/) add theirs. checkpoint.py is a model's
source, a folder or a GGUF file (gguf/), and weights.py, families.py and rope_config.py read one;
loading.py loads a model by name. heads.py recognises folders of draft heads, and llama_weights.py
reads layers, or a rank's share of them. plugins/transformers/ runs decoders without a family here.
"""
