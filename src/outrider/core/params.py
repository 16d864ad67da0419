"""How a request wants its tokens drawn, and when it ends. No tensors."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.fields import check_fields, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated on construction; raises ConfigError naming the field.

    Filters apply in this order: temperature, top_k, top_p, min_p.
    """

    max_tokens: int = setting(128, "Emit at most this many tokens.", minimum=1)
    temperature: float = setting(0.0, "0 is greedy; higher is more random.", minimum=0, maximum=100)
    top_k: int = setting(0, "Keep the k likeliest tokens; 0 keeps all.", minimum=0)
    top_p: float = setting(
        1.0, "Keep the likeliest tokens that together reach this mass.", minimum=0, maximum=1
    )
    min_p: float = setting(
        0.0, "Drop tokens below this share of the likeliest one's mass.", minimum=0, maximum=1
    )
    seed: int = setting(0, "Seed of the request's random numbers.", minimum=0, maximum=2**63 - 1)
    stop: tuple[str, ...] = setting((), "End before any of these strings.")
    ignore_eos: bool = setting(False, "Go on after the model's end-of-text token.")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
