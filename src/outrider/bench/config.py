"""What decides one benchmark cell, and the short name under which its samples are filed.

Two samples may be put side by side only if everything but K is equal, so the configuration is
frozen, written into every row of results, and hashed: a sample that is there need not be measured
again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from outrider.bench.store import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """One cell: a pair, a domain of prompts, a K, and how tokens are drawn.

    `prompt_set` is the fingerprint of the domain's prompts. `others` are the settings that
    somebody decided besides those that have a field here, as (name, value) in order of names.
    """

    model_pair_name: str
    prompt_domain: str
    k: int
    temperature: float
    max_tokens: int
    seed: int
    drafter: str = "none"
    sampler: str = "block"
    dtype: str = "auto"
    device: str = "auto"
    batch_size: int = 1
    prompt_set: str = ""
    others: tuple[tuple[str, Plain], ...] = ()

    @property
    def label(self) -> str:
        """AR for plain decoding, SD-K4 for drafts of four tokens."""
        return f"SD-K{self.k}" if self.is_speculative else "AR"

    @property
    def is_speculative(self) -> bool:
        return self.k > 0

    def plain(self) -> dict[str, Plain]:
        """The fields but `others`, which are settings too."""
        return {name: value for name, value in asdict(self).items() if name != "others"}

    def to_dict(self) -> dict[str, object]:
        return {**self.plain(), "others": dict(self.others)}

    def config_hash(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of the sorted JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def from_dict(cls, record: dict[str, object]) -> BenchmarkConfig:
        """Inverse of `to_dict`. Raises TypeError for fields that do not belong."""
        others = record.get("others", {})
        if not isinstance(others, dict):
            raise TypeError(f"others must be a mapping, got {others!r}.")
        return cls(**{**record, "others": tuple(sorted(others.items()))})  # pyright: ignore
