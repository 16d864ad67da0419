"""What all recipes of drafters share: a frozen target, an exam, a number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from outrider.core.spec import ModelSpec
from outrider.kernels.operators import DTYPES
from outrider_lab.train.llama_module import as_dtype
from outrider_lab.train.loop import Batch, Export
from outrider_lab.train.session import Session
from outrider_lab.train.target import Exam, FrozenTarget

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRecipe(ABC, Generic[M]):
    """A `TrainRecipe` of what drafts for `target`, from windows of `window` tokens."""

    target: FrozenTarget
    exam: Exam
    window: int = 0
    dtype: torch.dtype = torch.bfloat16
    name: str = field(default="", init=False)

    @property
    def facts(self) -> Mapping[str, object]:
        return {"target": str(self.target.folder), **self.choices}

    @property
    @abstractmethod
    def choices(self) -> Mapping[str, object]:
        """The facts besides the target."""
        ...

    @abstractmethod
    def build(self, generator: torch.Generator) -> M: ...

    @abstractmethod
    def loss(self, module: M, batch: Batch) -> Tensor: ...

    @abstractmethod
    def accepted(self, module: M, ids_T: Tensor, k: int) -> Tensor:
        """accepted_T, as `Exam` wants it."""
        ...

    @abstractmethod
    def values(self, module: M) -> Mapping[str, object]:
        """What config.json says of the finished net."""
        ...

    def measure(self, module: M) -> Mapping[str, float]:
        accepted = partial(self.accepted, module)
        return {"tokens_per_round": self.exam.tokens_per_round(accepted)}

    def export(self, module: M) -> Export:
        dtype = {"dtype": str(self.dtype).removeprefix("torch.")}
        return Export(as_dtype(module.state_dict(), self.dtype), {**self.values(module), **dtype})

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is read."""
        return max([self.window, *(len(text.ids) for text in self.exam.texts)])

    @property
    def spec(self) -> ModelSpec:
        """The target's."""
        return self.target.config.spec("", bytes_per_weight=4, bytes_per_kv=4)


def of_session(session: Session, dtype: str) -> dict[str, Any]:
    """The fields of a DrafterRecipe that a session decides."""
    return {
        "target": session.target,
        "exam": session.exam,
        "window": session.text.wish.window,
        "dtype": DTYPES[dtype],
    }
