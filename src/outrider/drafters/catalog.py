"""Context from which drafters are built; each drafter is a line of core/drafter_kinds.py.

A drafter's file has a function `build(context)` that its line names, and takes from the context
what it needs: the settings, the loaded models and their operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import AUTO, COPY, MODEL, DrafterKind
from outrider.core.errors import given
from outrider.core.protocols import CausalLM, Drafter
from outrider.core.resolve import ResolvedConfig, resolve
from outrider.core.sampling import PLAIN, Sampling
from outrider.drafters.self_draft import SelfDraftSpec
from outrider.kernels.native.lookups import NativeLookups
from outrider.models.heads import HeadsToLoad

if TYPE_CHECKING:
    from outrider.drafters.bridge import Translator
    from outrider.plugins.lanes.process.options import ChildOptions


@dataclass(frozen=True, slots=True)
class LaneTarget:
    """The target with buffers of its own, and its operators."""

    target: CausalLM
    argmax: Callable[[Tensor], list[int]]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and threads of lanes. `twin` makes a target for one more lane, None if there can
    be none; `join_lane(number, threads)` gives the calling thread native threads of its own."""

    device: torch.device
    twin: Callable[[], LaneTarget | None]
    join_lane: Callable[[int, int], None] | None = None
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Models and their operators.

    `argmax` is the greedy choice: the first maximum wins. `translator` is for a draft model with a
    vocabulary of its own; of one that shares the target's, the first `num_common` ids may be
    drafted, all if 0. `sampling` makes distributions and judges by them; the operator of draws
    comes with each sequence. Without a `machine` lanes take turns. With `child` a process of its
    own loads the draft model. `heads` are loaded when the drafter is built, for they share tables
    with the target; so is `own`, with which the target drafts for itself. `corpus` has texts, as
    tokens, for the suffix drafter. `exact` says that a row of the target's logits does not depend
    on the other rows. `lookups`, if given, are native. With `auto_batch` as many requests run as
    pay, up to `batch_size`."""

    target: CausalLM
    draft: CausalLM | None
    argmax: Callable[[Tensor], list[int]]
    translator: Translator | None = None
    num_common: int = 0
    sampling: Sampling = PLAIN
    machine: Machine | None = None
    child: ChildOptions | None = None
    heads: HeadsToLoad | None = None
    own: SelfDraftSpec | None = None
    corpus: Sequence[Sequence[int]] = ()
    exact: bool = True
    lookups: NativeLookups | None = None
    auto_batch: bool = False

    def resolve(self, config: EngineConfig) -> ResolvedConfig:
        """Return the meaning of `config` with these models."""
        if self.heads is not None:
            return resolve(config, self.heads.kind)
        if self.own is not None and config.drafter == AUTO:
            return resolve(config, COPY)
        return resolve(config, None if self.draft is None and self.child is None else MODEL)

    @property
    def draft_window(self) -> int | None:
        """Positions of the draft model; None if there is none, or if it counts tokens of a
        vocabulary of its own."""
        if self.translator is not None:
            return None
        if self.draft is not None:
            return self.draft.spec.max_tokens
        return None if self.child is None else self.child.max_tokens

    @property
    def device(self) -> str:
        """The device of the target's distributions."""
        return "cpu" if self.machine is None else str(self.machine.device)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Context of the drafter `kind`: the one that `resolved` means, or a member of it."""

    resolved: ResolvedConfig
    models: LoadedModels
    kind: DrafterKind

    @property
    def config(self) -> EngineConfig:
        return self.resolved.settings

    @property
    def drafter(self) -> str:
        return self.kind.name

    @property
    def ahead(self) -> bool:
        """True if a draft model prepares for verdicts."""
        return self.resolved.ahead and self.kind is self.resolved.drafter

    @property
    def draft(self) -> CausalLM:
        return given(self.models.draft, "draft model")

    @property
    def heads(self) -> HeadsToLoad:
        return given(self.models.heads, "heads")

    def build(self) -> Drafter:
        drafter: Drafter = self.kind.build(self)
        return drafter

    def member(self) -> Drafter:
        """Build the model or heads by themselves, as a part of another drafter. If the size of
        drafts was not chosen they draft chains, and only look-ups branch."""
        resolved = self.resolved
        if resolved.left_to_us:
            resolved = resolved.with_settings(replace(resolved.settings, tree_nodes=0))
        return replace(self, resolved=resolved, kind=given(resolved.given, "draft model")).build()
