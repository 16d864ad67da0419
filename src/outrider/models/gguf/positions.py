"""Rotary positions of a GGUF file: its keys and tensors as a `rope_scaling` of config.json.

Old keys are read as llama.cpp reads them: a factor without a type is linear, and
`rope.scale_linear` is such a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from outrider.core.errors import CheckpointError
from outrider.models.gguf.reader import Entry, Header, map_file
from outrider.models.json_object import CONTRADICTION, OTHER_CHECKPOINT, JsonObject
from outrider.models.rope import frequencies
from outrider.models.rope_config import Rope

_MAX_FACTORS = 4096


def shortest(number: float) -> float:
    return float(str(np.float32(number)))


@dataclass(frozen=True)
class Positions:
    """Rotary settings of heads that rotate in `turning` dimensions. Raises CheckpointError."""

    header: Header
    arch: str
    turning: int
    window: int
    theta: float

    @cached_property
    def raw(self) -> JsonObject:
        return JsonObject(str(self.header.path), self.header.metadata)

    @cached_property
    def kind(self) -> str:
        found = self.raw.text(f"{self.arch}.rope.scaling.type", "linear")
        if found not in ("none", "linear", "yarn", "longrope"):
            raise self._unsupported(found)
        return found

    @cached_property
    def factor(self) -> float:
        """The divisor of positions; 1 leaves them unchanged."""
        key = f"{self.arch}.rope.scaling.factor"
        if not self.raw.has(key):
            key = f"{self.arch}.rope.scale_linear"
        found = shortest(self.raw.number(key)) if self.raw.values.get(key) else 1.0
        if self.kind != "none" or found == 1.0:
            return found
        if self.arch in ("gemma2", "gpt-oss"):
            # llama.cpp then stretches the positions of sliding layers, and of no others.
            raise self._unsupported("none with a factor")
        return 1.0

    @cached_property
    def strength(self) -> float:
        """The factor of the tables of cos and sin."""
        return self._number("attn_factor", 1.0)

    def scaling(self) -> dict[str, Any]:
        entries = self.header.entries
        if (entry := entries.get("rope_freqs.weight")) is not None:
            return self._by_factors(self._factors(entry))
        if (entry := entries.get("rope_factors_short.weight")) is not None:
            return self._long(entry)
        if self.kind == "longrope":
            raise self._unsupported("longrope without its factors")
        if self.kind == "yarn" and self.factor != 1.0:
            return self._yarn()
        if self.strength != 1.0 or (self.arch == "phi3" and self.factor != 1.0):
            return self._everywhere([self.factor] * (self.turning // 2))
        if self.factor == 1.0:
            # gpt-oss has a scaling where its settings say none.
            return {"rope_type": "default"} if self.arch == "gpt-oss" else {}
        return {"rope_type": "linear", "factor": self.factor}

    def local_scaling(self) -> dict[str, Any]:
        """The scaling of sliding layers, whose frequencies are not stretched."""
        if self.strength == 1.0:
            return {"rope_type": "default"}
        return self._everywhere([1.0] * (self.turning // 2))

    def _number(self, name: str, default: float) -> float:
        return shortest(self.raw.number(f"{self.arch}.rope.scaling.{name}", default))

    def _original(self) -> int:
        key = f"{self.arch}.rope.scaling.original_context_length"
        return self.raw.integer(key, self.window)

    def _unsupported(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.raw.where}: {self.arch}.rope.scaling.type {what!r} is not supported.",
            hint=OTHER_CHECKPOINT,
        )

    def _yarn(self) -> dict[str, Any]:
        if self.arch == "phi3":
            raise self._unsupported("yarn")
        found: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self._original(),
        }
        for name in ("beta_fast", "beta_slow"):
            if self.raw.has(f"{self.arch}.rope.scaling.yarn_{name}"):
                found[name] = self._number(f"yarn_{name}", 1.0)
        own = self.raw.has(f"{self.arch}.rope.scaling.yarn_attn_factor")
        if own or self.strength != 1.0:
            usual = 0.1 * math.log(max(1.0, self.factor)) + 1.0
            found["attention_factor"] = self._number("yarn_attn_factor", usual) * self.strength
        return found | ({"truncate": False} if self.arch == "gpt-oss" else {})

    def _long(self, short: Entry) -> dict[str, Any]:
        """Longrope: factors for short texts, and for long ones if the file has them."""
        long = self.header.entries.get("rope_factors_long.weight")
        self._refuse_both(short)
        return {
            "rope_type": "longrope",
            "short_factor": self._times(self._factors(short)),
            "long_factor": None if long is None else self._times(self._factors(long)),
            "original_max_position_embeddings": self._original(),
            "attention_factor": self.strength,
        }

    def _by_factors(self, factors: list[float]) -> dict[str, Any]:
        """A scaling that divides each frequency by its factor. If Llama 3's formula gives the same
        frequencies, that is used, for the bits of its checkpoints."""
        self._refuse_both(self.header.entries["rope_freqs.weight"])
        found = None if self.factor * self.strength != 1.0 else self._llama3(factors)
        return found or self._everywhere(self._times(factors))

    def _llama3(self, factors: Sequence[float]) -> dict[str, Any] | None:
        dim = 2 * len(factors)
        divided = frequencies(Rope(theta=self.theta), dim) / torch.tensor(factors)
        for original in (1 << exponent for exponent in range(4, 21)):
            stretched = Rope(
                kind="llama3",
                theta=self.theta,
                factor=max(factors),
                original_tokens=original,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            )
            if torch.allclose(frequencies(stretched, dim), divided, rtol=1e-5, atol=0.0):
                return {
                    "rope_type": "llama3",
                    "factor": max(factors),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
        return None

    def _everywhere(self, factors: Sequence[float]) -> dict[str, Any]:
        """Short factors that hold in the whole window."""
        return {
            "rope_type": "longrope",
            "short_factor": list(factors),
            "original_max_position_embeddings": self.window,
            "attention_factor": self.strength,
        }

    def _times(self, factors: Sequence[float]) -> list[float]:
        return [shortest(factor * self.factor) for factor in factors]

    def _refuse_both(self, entry: Entry) -> None:
        if self.kind == "yarn" and self.factor != 1.0:
            raise self._unsupported(f"yarn with {entry.name}")

    def _factors(self, entry: Entry) -> list[float]:
        if len(entry.shape) != 1 or entry.num_values > _MAX_FACTORS or entry.kind.name != "F32":
            raise CheckpointError(
                f"{self.header.path}: {entry.name} is no short list of float32.",
                hint=CONTRADICTION,
            )
        with map_file(entry.path) as memory:
            raw = memory[entry.offset : entry.offset + entry.num_bytes]
        found: list[float] = np.frombuffer(raw, "<f4").tolist()
        if not all(0 < factor < 1e9 for factor in found):
            raise CheckpointError(
                f"{self.header.path}: {entry.name} has a factor that is not above 0.",
                hint=CONTRADICTION,
            )
        return found
