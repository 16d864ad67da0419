"""How many recurrent states a model's memory may hold, in numbers that a user decides.

Without tensors: the command line says what a model takes before it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# States of a sequence beside those of its round: what is committed, and where pages end.
_RING_EXTRA = 3
# The same, and one that replayed inputs go to, and that before a round's first input.
_REPLAY_STATES = 5


class StateSizes(Protocol):
    """Bytes of one recurrent state, and of what one token does to it; 0 of a model without."""

    @property
    def state_bytes(self) -> int: ...
    @property
    def input_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRoom:
    """For `num_sequences` at a time, each of which can return to `history` nodes of its round
    besides the pending token; `num_checkpoints` states are kept for texts that begin alike."""

    rollback: str = "replay"
    history: int = 16
    num_sequences: int = 16
    num_checkpoints: int = 8

    @property
    def num_states(self) -> int:
        each = _REPLAY_STATES if self.rollback == "replay" else self.history + 1 + _RING_EXTRA
        return self.num_sequences * each + self.num_checkpoints

    @property
    def num_staged(self) -> int:
        """Of those of a sequence, the states of nodes that are not committed."""
        return _REPLAY_STATES - 2 if self.rollback == "replay" else self.history + _RING_EXTRA

    @property
    def num_inputs(self) -> int:
        """Those of a round, and those of the round before that are still to be replayed."""
        if self.rollback == "ring":
            return 0
        return 2 * self.num_sequences * (self.history + 1)

    def num_bytes(self, sizes: StateSizes) -> int:
        """What the states of such a model take when all cells are in use, beside its arena."""
        return self.num_states * sizes.state_bytes + self.num_inputs * sizes.input_bytes
