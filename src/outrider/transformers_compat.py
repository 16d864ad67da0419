"""`generate` for scripts written for transformers: same arguments, same shapes back.

    from outrider.transformers_compat import generate
    output_ids = generate("folder", **tokenizer(texts, return_tensors="pt", padding=True))

The code is in outrider/plugins/compat/generate.py.
"""

from outrider.plugins.compat.generate import GenerateOutput, close_all, generate

__all__ = ["GenerateOutput", "close_all", "generate"]
