"""Context from which drafters are built, and bases of drafters without a model.

The context has the settings, the loaded models and their operators. An offer is a draft with the
acceptance probability of each token.

The module of a drafter has its KIND, whose `build` takes the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from outrider.core.config import EngineConfig
from outrider.core.draft import Budget, Draft
from outrider.core.errors import ConfigError, given
from outrider.core.plugins import (
    AUTO,
    COPY,
    KINDS,
    MODEL,
    WITH_FOUND,
    DrafterKind,
    installed,
)
from outrider.core.protocols import CausalLM, Drafter, DraftNeeds, DraftRow, HiddenStates
from outrider.core.resolve import ResolvedConfig, resolve
from outrider.estimate.cost import LEAST_IN_TREE, LEAST_KEPT

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from outrider.core.sampling import Sampling
    from outrider.drafters.common.draft_model import SelfDraftSpec
    from outrider.drafters.common.growth import DraftSampler
    from outrider.kernels.native.rounds import NativeLookups
    from outrider.models.heads import HeadsToLoad
    from outrider.plugins.lanes.process.options import ChildOptions


# A drafter as a function: ids of prompt and text, and how many of the next ones to guess at most.
DraftFunction: TypeAlias = Callable[[list[int], int], Iterable[int] | None]


class Translation(Protocol):
    """One sequence in both vocabularies. Only ids pass through this interface, no text."""

    def to_draft(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the text of all target `tokens` in draft ids; valid until the next call.

        Later calls get longer `tokens`. A returned sequence never changes afterwards, except for
        its last id: the draft model may have committed the rest. Empty if there is no text.
        """
        ...

    def to_target(self, drafted: Sequence[int]) -> Sequence[int]:
        """Return target ids that continue the last `to_draft` tokens by `drafted`."""
        ...


class Translator(Protocol):
    """A translator between two vocabularies; api/tokenizer.py has the one that ships."""

    def open(self) -> Translation: ...


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


def _plain() -> Sampling:
    from outrider.core.sampling import PLAIN

    return PLAIN


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Models and their operators.

    `argmax` is the greedy choice: the first maximum wins. `translator` is for a draft model with a
    vocabulary of its own; of one that shares the target's, the first `num_common` ids may be
    drafted, all if 0. `sampling` makes distributions and judges by them; the operator of draws
    comes with each sequence. Without a `machine` lanes take turns. With `child` a process of its
    own loads the draft model. `heads`, one of a kind, are loaded when the drafter is built, for
    they share tables with the target; so is `own`, with which the target drafts for itself. Drafts
    of the kinds `named` must load, others are left out if they cannot. A draft model with a
    `mask_token` drafts all tokens in one pass. `corpus` has texts, as tokens, for the suffix
    drafter. `exact` says that a row of the target's logits does not depend on the other rows.
    `lookups`, if given, are native. With `auto_batch` as many requests run as pay, up to
    `batch_size`."""

    target: CausalLM
    draft: CausalLM | None
    argmax: Callable[[Tensor], list[int]]
    translator: Translator | None = None
    num_common: int = 0
    sampling: Sampling = field(default_factory=_plain)
    machine: Machine | None = None
    child: ChildOptions | None = None
    heads: Sequence[HeadsToLoad] = ()
    named: Sequence[str] = ()
    own: SelfDraftSpec | None = None
    mask_token: int | None = None
    corpus: Sequence[Sequence[int]] = ()
    exact: bool = True
    lookups: NativeLookups | None = None
    auto_batch: bool = False

    def resolve(self, config: EngineConfig) -> ResolvedConfig:
        """Return the meaning of `config` with these models."""
        kinds = [one.kind for one in self.heads]
        if self.own is not None and config.drafter in (AUTO, WITH_FOUND):
            kinds.append(COPY)
        if self.draft is not None or self.child is not None:
            kinds.append(MODEL)
        given, *more = kinds or [None]
        joins = config.drafter in (AUTO, WITH_FOUND)
        return resolve(config, given, more=[kind for kind in more if kind] if joins else ())

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
    def ahead(self) -> bool:
        """True if a draft model prepares for verdicts."""
        return self.resolved.ahead and self.kind is self.resolved.drafter

    @property
    def draft(self) -> CausalLM:
        return given(self.models.draft, "draft model")

    @property
    def heads(self) -> HeadsToLoad:
        own = (one for one in self.models.heads if one.kind == self.kind.name)
        return given(next(own, None), "heads")

    def sampler(self, model_name: str, *, branches: bool = False) -> DraftSampler:
        """Return the sampler that chooses draft tokens by the logits of `model_name`."""
        from outrider.core.rng import draw_for
        from outrider.drafters.common.growth import DraftSampler

        models, draw = self.models, draw_for(self.config.sampler)
        return DraftSampler(models.argmax, model_name, draw, models.sampling, branches=branches)

    def build(self) -> Drafter:
        """Return the drafter. Raises ConfigError if the code of another package fails, or makes a
        drafter of another name."""
        drafter: Drafter = KINDS.build(self.kind, self)
        name = self.kind.name
        if name not in KINDS and drafter.name != name:
            raise ConfigError(
                f"drafter {name!r} was built, and calls itself {drafter.name!r}.",
                hint=f"the `name` that its `build` gives must be {name!r}",
            )
        return drafter

    def member(self, kind: DrafterKind) -> Drafter:
        """Build a model, heads or a copy by itself, as a part of another drafter. If the size of
        drafts was not chosen it drafts chains, and only look-ups branch."""
        from outrider.models.heads import layers_of_all

        resolved = self.resolved
        if resolved.left_to_us:
            resolved = resolved.with_settings(replace(resolved.settings, tree_nodes=0))
        drafter = replace(self, resolved=resolved, kind=kind).build()
        reads, stored = drafter.needs.hidden_layers, layers_of_all(self.models.heads)
        return LayersDrafter(drafter, stored) if reads and reads != stored else drafter


class LayersDrafter:
    """A `drafter` that reads some of the `layers` whose states the target stores for several ones:
    in a view where its own follow each other, and else in a copy."""

    def __init__(self, drafter: Drafter, layers: tuple[int, ...]) -> None:
        own = [layers.index(layer) for layer in drafter.needs.hidden_layers]
        part = slice(own[0], own[0] + len(own))
        self._columns = part if own == [*range(part.start, part.stop)] else own
        self._drafter, self.name = drafter, drafter.name
        self.needs = replace(drafter.needs, hidden_layers=layers)
        self.open, self.close = drafter.open, drafter.close

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return self._drafter.propose([self._with_own(row) for row in rows])

    def _with_own(self, row: DraftRow) -> DraftRow:
        hidden, columns = row.hidden, self._columns
        if hidden is None:
            return row
        read = hidden.read
        own = HiddenStates(hidden.length, lambda start, stop: read(start, stop)[:, columns])
        return replace(row, hidden=own)


class Stateless:
    """A base of drafters without state of a sequence."""

    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...

    def close(self, seq_id: int) -> None: ...


class FunctionDrafter(Stateless):
    """A drafter of chains by a function of the text's ids and of the most tokens to draft, which
    returns a guess of the next ids; a longer one is cut. Where it raises, its request goes on
    without drafts."""

    needs = DraftNeeds()

    def __init__(self, name: str, function: DraftFunction) -> None:
        self.name, self._function = name, function

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [Draft.chain(self._guess(row.tokens, row.budget.depth)) for row in rows]

    def _guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        # A copy: the function may change its list.
        found = self._function(list(tokens), most) if most else None
        return () if found is None else tuple(map(index, islice(found, most)))


def drafter_named_after(function: DraftFunction) -> str:
    """Make a drafter of a function; return the name under which settings and requests find it: the
    function's own, or "function" if that is no word or another drafter's. A function of the same
    name replaces it for LLMs that are made later."""
    name = getattr(function, "__name__", type(function).__name__)
    taken = {*KINDS.built_in, *installed("outrider.drafters")}
    name = name if name.isidentifier() and name not in taken else "function"
    KINDS.add(DrafterKind(name=name, build=lambda _: FunctionDrafter(name, function)))
    return name


class ScoredDraft(NamedTuple):
    """A draft with scores: `kept` has for each token the probability that it and its ancestors are
    accepted. Without `parents` it is a chain. Of several offers one becomes a draft."""

    tokens: tuple[int, ...] = ()
    kept: tuple[float, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def num_expected(self) -> float:
        """The expected number of accepted draft tokens."""
        return sum(self.kept)

    @property
    def draft(self) -> Draft:
        return self.made_by("")

    def made_by(self, name: str) -> Draft:
        """Return the draft as that of `name`, one of several drafters."""
        if not self.tokens:
            return Draft.empty()
        if self.parents is None:
            return Draft.chain(self.tokens, by=name, accept_probs=self.kept)
        return Draft(self.tokens, self.parents, by=name, accept_probs=self.kept)


def least_kept(budget: Budget) -> float:
    """Return the probability of acceptance below which no token is drafted."""
    return LEAST_IN_TREE if budget.size > budget.depth else LEAST_KEPT


NO_OFFER = ScoredDraft()


# Tokens, acceptance probabilities and parents, as in a ScoredDraft.
Found: TypeAlias = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...] | None]


class Texts(Protocol):
    """Texts of requests and their continuations from what each contains: the definition in Python,
    or native code (kernels/native/rounds.py) with the same results."""

    def open(self, seq_id: int, prompt_length: int) -> None: ...
    def offer(self, seq_id: int, tokens: Sequence[int], budget: Budget) -> Found | None:
        """Catch up with the grown text; return None if no draft is worth it."""
        ...

    def close(self, seq_id: int) -> None: ...


class TextDrafter:
    """A ScoredDrafter over `texts`: deterministic, and without a model."""

    needs = DraftNeeds()

    def __init__(self, name: str, texts: Texts) -> None:
        self.name, self._texts = name, texts

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._texts.open(seq_id, len(prompt))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [offer.draft for offer in self.offers(rows)]

    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]:
        """Return drafts with the acceptance probability of each token."""
        offer = self._texts.offer
        offers: list[ScoredDraft] = []
        for row in rows:
            found = offer(row.seq_id, row.tokens, row.budget)
            offers.append(NO_OFFER if found is None else ScoredDraft._make(found))
        return offers

    def close(self, seq_id: int) -> None:
        self._texts.close(seq_id)


class ScoredDrafter(Protocol):
    """A drafter that scores its drafts. It learns of the text from the rows that it gets."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> DraftNeeds: ...
    def open(self, seq_id: int, prompt: Sequence[int]) -> None: ...
    def offers(self, rows: Sequence[DraftRow]) -> list[ScoredDraft]: ...
    def close(self, seq_id: int) -> None: ...
