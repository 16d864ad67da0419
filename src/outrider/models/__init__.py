"""Models: load Hugging Face checkpoints and run packed forward passes over the KV cache.

Open llama_layers.py first, then decoder.py, which runs the passes of every family, and llama.py;
gpt2.py and qwen_hybrid.py are the others. family_table.py has a row for each family. loading.py
goes from a name to a model; hub.py, weights.py, hf_config.py, families.py and rope.py read what a
checkpoint says. heads.py tells folders of draft heads apart, gguf/ reads GGUF files as if they were
folders, and share.py says which part of a shared model a rank holds. plugins/transformers/ runs
decoders without a family here.
"""
