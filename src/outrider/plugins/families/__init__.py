"""Further families of decoders: rows of their configs and of their GGUF files.

Open families.py first. centred.py has families with layer norms, latent.py those with latent
attention, kinds.py what only layers of these families have, and architectures.py GGUF files.
"""
