"""Tokenizers of one letter a token."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from outrider.api.tokenizer import Tokenizer


@cache
def letters(some: str, *, byte_fallback: bool = False) -> Tokenizer:
    """An id for each letter, in order, and then one that ends a text. Byte-level; with
    `byte_fallback` as SentencePiece's are, with pieces for the two bytes of an é."""
    words = [*some.replace(" ", "▁" if byte_fallback else "Ġ"), "<end>"]
    words += ["<0xC3>", "<0xA9>"] if byte_fallback else []
    ids = {word: i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=ids, merges=[], byte_fallback=byte_fallback))
    if byte_fallback:
        backend.normalizer = cast("Any", normalizers.Replace(" ", "▁"))
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = cast("Any", decoders.Sequence(parts))
    else:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = cast("Any", cut)
        backend.decoder = cast("Any", decoders.ByteLevel())
    cast("Any", backend).add_special_tokens(["<end>"])
    return Tokenizer(backend, {}, [len(some)])
