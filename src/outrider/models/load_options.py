"""Options under which a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.decoder import ModelCapacity


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """`auto` is the checkpoint's own dtype, and the first device of cuda, mps and cpu. `quantise`
    is none, int8 or int4, for the matrices that are multiplied by; other weights keep their dtype.
    `kv_dtype` is that of keys and values: auto, which is `dtype`, or int8."""

    capacity: ModelCapacity
    dtype: str = "auto"
    device: str = "auto"
    force_reference: bool = False
    threads: int = 0
    quantise: str = "none"
    kv_dtype: str = "auto"
