"""Blocks of quantised types as numbers, bit for bit those of the package `gguf`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from conformance.counts import Suite

from outrider.models.gguf.blocks import TYPES, decode

_NUM_BLOCKS = 4096


def suites(gguf: Any) -> Iterator[Suite]:
    """Random blocks: every pattern of bits that may be stored, with infinite scales left out."""
    suite = Suite(f"quantised types, {_NUM_BLOCKS} random blocks each")
    for kind in gguf.GGMLQuantizationType:
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(int(kind)).integers(0, 256, (_NUM_BLOCKS, num_bytes), np.uint8)
        known = TYPES.get(int(kind))
        if size == 1:
            continue
        if known is None or not known.supported:
            suite.refuse(kind.name, "not read, refused by name")
            continue
        with np.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(raw, kind).astype("<f4").reshape(_NUM_BLOCKS, size)
        ours = decode(raw.reshape(-1), known).reshape(_NUM_BLOCKS, size)
        # Numbers that are none have many forms.
        finite = np.isfinite(theirs).all(axis=1)
        for right in (ours.view(np.uint32) == theirs.view(np.uint32)).all(axis=1)[finite]:
            suite.count(kind.name, bool(right), "a block")
    yield suite
