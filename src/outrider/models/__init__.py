"""Models: load Hugging Face checkpoints and run packed forward passes over the KV cache.

Open llama.py first, then decoder.py, which runs the passes of every family; gpt2.py and
qwen_hybrid.py are the other decoders. family_table.py has a row for each family. checkpoint.py is a
model's source, a folder or a GGUF file (gguf/), and weights.py, hf_config.py, families.py and
rope_config.py read one; loading.py loads a model by name. heads.py recognises folders of draft
heads, and share.py splits a model among ranks. plugins/transformers/ runs decoders without a family
here.
"""
