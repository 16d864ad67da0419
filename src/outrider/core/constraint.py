"""Token constraints: the interface between a logits processor and its mask or grammar.

A round requests the masks of all nodes of a draft at once. A constraint may therefore walk the
draft as a tree, forward and back, and remember its position in the text from round to round.

Shapes:  N = nodes, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import ConfigError

# Given the text written so far (ids after the prompt): which ids may come next, as booleans of
# shape V; None allows all. It is called for drafted text too, so it must not depend on earlier
# calls.
AllowedTokens = Callable[[Sequence[int]], Tensor | None]


class TokenConstraint(Protocol):
    """The allowed next tokens after each text of one request. Answers depend on the text alone, not
    on earlier calls; between two calls the text grows by the committed tokens, and never shrinks.
    `knows_forced` says that `forced` costs next to nothing, so that it is called every round."""

    @property
    def knows_forced(self) -> bool: ...

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        """Masks after `text` and then each suffix: booleans of shape NV, None allows all. A row
        without a true value says that the text is at its end."""
        ...

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        """Up to `most` tokens that surely or almost surely follow `text`. They are a draft only:
        the masks after them may allow others."""
        ...

    def is_idle(self, text: Sequence[int]) -> bool:
        """True if all tokens are surely allowed in the round after `text`."""
        ...


class CallbackConstraint:
    """A TokenConstraint that calls a callback for each node."""

    knows_forced = False

    def __init__(self, allowed: AllowedTokens) -> None:
        self._allowed = allowed

    def masks(
        self, text: Sequence[int], suffixes: Sequence[Sequence[int]], vocab_size: int
    ) -> Tensor | None:
        """Raises ConfigError if the callback returns no mask."""
        found = [_checked(self._allowed([*text, *suffix]), vocab_size) for suffix in suffixes]
        first = next((mask_V for mask_V in found if mask_V is not None), None)
        if first is None:
            return None
        all_V = torch.ones_like(first)
        return torch.stack([all_V if mask is None else mask.to(first.device) for mask in found])

    def forced(self, text: Sequence[int], most: int) -> Sequence[int]:
        """The following tokens while exactly one is allowed. Each costs a call of the mask."""
        found: list[int] = []
        while len(found) < most:
            mask_V = self._allowed([*text, *found])
            if mask_V is None or int(mask_V.sum()) != 1:
                break
            found.append(int(mask_V.nonzero()[0, 0]))
        return found

    def is_idle(self, text: Sequence[int]) -> bool:
        del text
        return False


def _checked(given: object, vocab_size: int) -> Tensor | None:
    """Check the result of a callback, which may be third-party code."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or (tuple(given.shape), given.dtype) != (
        (vocab_size,),
        torch.bool,
    ):
        raise ConfigError(
            f"an allowed-token mask must be a tensor of {vocab_size} booleans, got "
            f"{_described(given)}."
        )
    if given.is_meta or given.layout is not torch.strided:
        raise ConfigError("an allowed-token mask must hold its booleans: no meta, no sparse.")
    return given


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"
