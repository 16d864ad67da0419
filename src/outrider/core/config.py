"""What a user may decide about an engine: one frozen tree, validated when built.

What is found while loading (window, arena size, kernels) is a separate value, `LoadedPair` in
`api/loading.py`; nothing here changes after construction.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.fields import check_fields, setting

DRAFTERS = ("auto", "none", "model", "ngram")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda", "mps")
SAMPLERS = ("exact", "match")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ConfigError, naming the field, when a value cannot work."""

    drafter: str = setting(
        "auto",
        "What proposes tokens; auto takes the draft model if there is one, else ngram.",
        choices=DRAFTERS,
    )
    k: int = setting(4, "Draft at most this many tokens a round.", minimum=0, maximum=64)
    sampler: str = setting(
        "exact",
        "Acceptance rule: exact accepts most; match ties text to the seed.",
        choices=SAMPLERS,
    )
    dtype: str = setting(
        "auto", "Precision of weights and KV; auto is the checkpoint's own.", choices=DTYPES
    )
    device: str = setting(
        "auto", "Where the models run; auto is cuda, then mps, then cpu.", choices=DEVICES
    )
    batch_size: int = setting(8, "Run at most this many requests at once.", minimum=1, maximum=1024)
    prefill_chunk: int = setting(
        256, "Feed at most this many prompt tokens in one target pass.", minimum=1, maximum=65536
    )
    context: int = setting(
        0,
        "Most tokens a sequence may hold; 0 is the models' window (4096 at most with a draft).",
        minimum=0,
    )
    page_size: int = setting(32, "Token positions in one KV page.", minimum=1, maximum=4096)
    arena_tokens: int = setting(
        0, "KV positions to allocate; 0 fits batch_size sequences of the window.", minimum=0
    )
    max_ngram: int = setting(3, "Longest tail the ngram drafter looks up.", minimum=1, maximum=64)
    min_ngram: int = setting(2, "Shortest tail the ngram drafter looks up.", minimum=1, maximum=64)
    threads: int = setting(0, "CPU threads; 0 takes the physical cores.", minimum=0, maximum=1024)
    batched_verify: bool = setting(
        True, "Verify a whole draft in one target pass; off feeds it token by token."
    )
    force_reference: bool = setting(False, "Use the plain PyTorch kernels only.")
    deterministic: bool = setting(False, "Ask PyTorch for deterministic algorithms as well.")
    profile: bool = setting(False, "Record every round's trace in the result.")

    def __post_init__(self) -> None:
        check_fields(self)
