"""What loading hands to an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core.protocols import CausalLM
from outrider.core.sampling import PLAIN, Sampling
from outrider.drafters.bridge import Translator
from outrider.drafters.process.options import ChildOptions
from outrider.drafters.self_draft import Cheaper
from outrider.engine.lanes.build import Machine
from outrider.models.heads import Heads


@dataclass(frozen=True, slots=True)
class Parts:
    """Models and their operators. `argmax` is the greedy choice: the first maximum wins.
    `translator` is for a draft model with a vocabulary of its own. `sampling` makes laws and judges
    by them; what draws from them comes with each sequence. Without a `machine` lanes take turns.
    With `child` a process of its own loads the draft model. `heads` are loaded when the drafter is
    built, for they share tables with the target; so is `own`, with which the target drafts for
    itself. `corpus` has texts, as tokens, for the suffix drafter. `exact` says
    that a row of the target's logits does not depend on what it is computed beside."""

    target: CausalLM
    draft: CausalLM | None
    argmax: Callable[[Tensor], list[int]]
    translator: Translator | None = None
    sampling: Sampling = PLAIN
    machine: Machine | None = None
    child: ChildOptions | None = None
    heads: Heads | None = None
    own: Cheaper | None = None
    corpus: Sequence[Sequence[int]] = ()
    exact: bool = True

    @property
    def has_draft(self) -> bool:
        return self.draft is not None or self.child is not None

    @property
    def draft_window(self) -> int | None:
        """Positions that the draft model has; None if there is none, or if it counts tokens of a
        vocabulary of its own."""
        if self.translator is not None:
            return None
        if self.draft is not None:
            return self.draft.spec.max_tokens
        return None if self.child is None else self.child.max_tokens

    @property
    def laws_device(self) -> str:
        """Where the target's laws are."""
        return "cpu" if self.machine is None else str(self.machine.device)
