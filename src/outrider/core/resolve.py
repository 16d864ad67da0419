"""Meaning of a configuration for the models that are there: resolved once, then only read.

Three settings may leave their choice to the program: the drafter, the schedule and the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.config import EXACT_SAMPLERS, MORE_GPUS, UNTIED_SAMPLERS, EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import RequestSpeculation, SamplingParams
from outrider.core.plugins import (
    AUTO,
    COPY,
    KINDS,
    LOOKUP,
    LOOKUPS,
    MODEL,
    OFF,
    OWN_TEXT,
    WITH_FOUND,
    WITHOUT_DRAFT,
    DrafterKind,
    drafter_named,
    every_drafter,
)
from outrider.core.tree import MAX_WIDTH

# Automatic drafts: trees of up to so many tokens, up to so deep, of which the nodes that pay are
# verified (control/scored.py).
AUTO_K, AUTO_NODES = 12, 24
# Chains, for a target that stores something for every drafted token or verifies trees more slowly.
AUTO_CHAIN = 8
# Draft tokens of a pass with automatic draft lengths: above this, a row of any batch costs more
# than it gains.
MOST_DRAFTED = 48


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of measuring a drafter where it was made: its best k for chains, and whether that is
    faster than plain decoding."""

    k: int
    pays: bool


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration without `auto`. `settings` have the resolved schedule and controller, and
    `drafter` is the resolved drafter. `given` is the drafter that belongs to the model, heads or
    copy of the target that were named or found; None if there are none. If several were named,
    `more` has the drafters of the others. With `keeps_lengths`, sampled texts that depend on
    draft lengths use the lengths of `fixed`, so that a seed repeats them. With `left_to_us` the
    drafter was chosen automatically, and with `free_size` the size of drafts as well."""

    settings: EngineConfig
    drafter: DrafterKind
    given: DrafterKind | None = None
    more: tuple[DrafterKind, ...] = ()
    keeps_lengths: bool = False
    left_to_us: bool = False
    free_size: bool = False

    @property
    def k(self) -> int:
        """Most draft tokens in a row."""
        return self.settings.most_k if self.drafter.drafts else 0

    @property
    def draft_size(self) -> int:
        """Most draft tokens of one sequence and round."""
        return max(self.k, self.settings.tree_nodes) if self.drafter.drafts else 0

    @property
    def ties_seeds(self) -> bool:
        """True if the rule match judges instead of block and token: it accepts as many drafts that
        were not sampled, and a seed has the same text with any drafts."""
        return self.left_to_us and self.drafter.looks_up

    @property
    def most_drafted(self) -> int | None:
        """Most draft tokens of all sequences of a pass, or None: long drafts of one request and
        short ones of many then take the same memory."""
        if not self.left_to_us or self.settings.schedule != "single":
            return None
        return max(MOST_DRAFTED, self.settings.most_batch)

    @property
    def pass_rows(self) -> int:
        """Most rows that a pass verifies."""
        batch = self.settings.most_batch
        most = batch * self.draft_size
        return batch + (most if self.most_drafted is None else min(most, self.most_drafted))

    @property
    def has_heads(self) -> bool:
        """True if heads draft, alone or as a member of the drafter."""
        return any(kind.source == "heads" for kind in self.sources)

    @property
    def sources(self) -> tuple[DrafterKind, ...]:
        """The drafters of all models, heads and copies that were named or found."""
        return () if self.given is None else (self.given, *self.more)

    @property
    def copy(self) -> DrafterKind | None:
        """The copy of the target that drafts, alone or as a member of the drafter."""
        parts = self.sources if self.drafter.source == "draft" else ()
        return next((kind for kind in (self.drafter, *parts) if kind.source == "copy"), None)

    @property
    def ahead(self) -> bool:
        """True if drafts are made ahead of verdicts, by drafters that can."""
        return self.settings.schedule == "ssd"

    @property
    def wants_trees(self) -> bool:
        """True if drafts are trees, from drafters that can branch."""
        return self.settings.tree_nodes > self.settings.most_k

    @property
    def why_chains(self) -> str:
        """Reason for which drafts never branch, to end a sentence on `tree_nodes`, or ""."""
        settings, kind = self.settings, self.drafter
        if not self.wants_trees:
            return f"={settings.tree_nodes} is not above k={settings.most_k}: drafts are chains"
        if not kind.branches:
            return f" has no effect on drafter {kind.name}, which drafts chains"
        if kind.drafts_ahead and self.ahead:
            return " has no effect with schedule ssd: drafts made ahead are chains"
        if kind.has_process and settings.drafter_home == "process":
            return " has no effect on a draft model in a process, which drafts chains"
        return ""

    @property
    def num_nodes(self) -> int:
        """Most nodes of a tree; 0 if drafts never branch."""
        return 0 if self.why_chains else self.settings.tree_nodes

    @property
    def staged_rows(self) -> int:
        """Rows of the target's KV cache that a round may stage below a text: the draft, or all rows
        that a copy with the same cache reads for a tree."""
        return max(self.draft_size, self._rows_of_levels)

    @property
    def _rows_of_levels(self) -> int:
        """Most nodes that a copy of the target reads for a tree: none of its last level."""
        if self.copy is None:
            return 0
        return (self.k - 1) * min(self.num_nodes, MAX_WIDTH)

    def rows_past_end(self, *, captures: bool) -> int:
        """KV rows that a round may write past the longest text. A chain ends where the text does,
        but a tree has siblings; captured rounds draft and stage k tokens even if fewer count."""
        if not self.drafter.drafts:
            return 0
        return max(self.settings.tree_nodes, self._rows_of_levels, self.k if captures else 0)

    def sized(self, *, branches: bool, window: int | None = None) -> ResolvedConfig:
        """The same configuration with the longest drafts that may pay, if their size is automatic
        and one lane verifies them. `window` is the most tokens of the target's texts, and
        `branches` says that it verifies trees as cheaply as chains."""
        settings = self.settings
        if not self.free_size or settings.schedule != "single":
            return self
        k = AUTO_K if branches else AUTO_CHAIN
        if window is not None and k + 2 >= window:
            k, branches = max(window - 3, 1), False
        sizes = replace(settings, k=k, tree_nodes=AUTO_NODES if branches else 0)
        return self.with_settings(sizes)

    def of_request(self, params: SamplingParams) -> RequestSpeculation:
        """The request's own choices of speculation in `params`. Raises ConfigError if this engine
        cannot follow them."""
        wants_none = params.speculative is False or params.drafter == OFF or params.k == 0
        if params.speculative and (wants_none or not self.draft_size):
            why = "this engine drafts nothing" if not self.draft_size else "drafter is none"
            raise ConfigError(
                f"speculative is true, and {'k is 0' if params.k == 0 else why}.",
                hint="leave speculative out, or load the engine with a drafter and a k above 0",
            )
        sampler = self._sampler_of(params)
        if wants_none:
            return RequestSpeculation(OFF, sampler, 0)
        members = tuple(params.drafters)
        drafter = self._home_of(members) if members else self._drafter_of(params.drafter or "")
        kind = drafter_named(drafter) if drafter else self.drafter
        is_guided = bool(params.prediction) and kind.drafts and "prediction" not in kind.reads
        return RequestSpeculation(drafter, sampler, params.k, is_guided and not members, members)

    def _home_of(self, members: tuple[str, ...]) -> str:
        """The drafter that has all these members; "" for the engine's own. Raises ConfigError for a
        member that no drafter here has."""
        own, wanted = {*self.members}, {*members}
        if wanted <= own:
            return ""
        if len(wanted) == 1 and members[0] in self.choosable and members[0] != OFF:
            return self._drafter_of(members[0])
        if wanted <= {*LOOKUPS} and self.draft_size:
            return LOOKUP
        known = dict.fromkeys((*self.members, *LOOKUPS) if self.draft_size else ())
        strange = [repr(name) for name in members if name not in known]
        named = strange[0] if strange else f"{', '.join(members)} together"
        raise ConfigError(
            f"drafters: {named} cannot draft here.",
            hint=f"this engine has {', '.join(known) or 'none'}; a model or heads join with "
            f"--draft and --drafter {WITH_FOUND}",
        )

    @property
    def members(self) -> tuple[str, ...]:
        """Drafters that make the drafts of the engine's own, by name."""
        if not self.draft_size:
            return ()
        models = self.sources if self.drafter.source == "draft" else ()
        if self.drafter.source == "draft" or self.drafter.name == LOOKUP:
            return *LOOKUPS, *(kind.name for kind in models)
        return (self.drafter.name,)

    def _drafter_of(self, wanted: str) -> str:
        """The drafter called `wanted`, if it may be chosen; "" for the engine's own."""
        if wanted in ("", self.drafter.name, self.settings.drafter):
            return ""
        if not self.draft_size:
            raise ConfigError(
                f"drafter {wanted!r}: this engine drafts nothing, so it has no memory for drafts.",
                hint="load the engine with a drafter and a k above 0, or leave drafter out",
            )
        if wanted not in self._parts and not drafter_named(wanted).looks_up:
            raise ConfigError(
                f"drafter {wanted!r} cannot be chosen by a request here: it needs a model or "
                "heads, and this engine has none for it.",
                hint=f"one of {', '.join(self.choosable)}; load the engine with --drafter {wanted}",
            )
        return wanted

    @property
    def choosable(self) -> tuple[str, ...]:
        """Drafters that a request may choose: the engine's own, its parts, and those that need no
        model. An engine that drafts nothing has no memory for drafts."""
        if not self.draft_size:
            return (OFF,)
        others = [kind.name for kind in every_drafter() if kind.looks_up]
        return tuple(dict.fromkeys((*self._parts, *others)))

    @property
    def _parts(self) -> tuple[str, ...]:
        """The engine's own drafter, and the models and heads that are members of it."""
        members = self.sources if self.drafter.source == "draft" else ()
        return self.drafter.name, *(kind.name for kind in members)

    def _sampler_of(self, params: SamplingParams) -> str:
        """The rule that `params` choose; "" if the engine's own gives the same result."""
        own = self.settings.sampler
        if self.ties_seeds and not params.greedy and (params.sampler or own) in UNTIED_SAMPLERS:
            return "match"
        alike = params.sampler in (None, own) or (params.greedy and own in EXACT_SAMPLERS)
        return "" if alike else str(params.sampler)

    def with_settings(self, settings: EngineConfig) -> ResolvedConfig:
        """The same drafter under other settings, or none if these leave nothing to draft."""
        return replace(
            self, settings=settings, drafter=self.drafter if settings.most_k else KINDS[OFF]
        )


def resolve(
    config: EngineConfig,
    given: str | None,
    known: Measured | None = None,
    *,
    found: bool = False,
    more: Sequence[str] = (),
) -> ResolvedConfig:
    """Resolve `config`. `given` is the kind of drafter that the draft model, heads or copy of the
    target make, or None without them, and `more` are those of further ones. `known` is the
    measurement of that drafter, and `found` says that they were found without being named: then the
    first one drafts alone where they cannot join.

    Raises ConfigError if the drafter needs a draft model or heads of another kind, or only one of
    them, or cannot live in a process.
    """
    homed = replace(config, drafter_home=_home(config))
    more = () if found and not can_join(homed) else more
    drafter = _drafter(homed, given, joins=bool(more) or (found and can_join(homed)))
    if more:
        _check_several(homed, drafter, (given or "", *more))
    config = homed if drafter.has_process else config
    controller = config.resolved_controller
    schedule = _schedule(config, drafter)
    left_to_us = _is_left_to_us(config, drafter)
    keeps_lengths = controller == "fixed" and not left_to_us and _may_stop(config, drafter, known)
    settings = replace(
        config,
        k=_k(config, drafter, known),
        schedule=schedule,
        controller="goodput" if keeps_lengths or left_to_us else controller,
    )
    source, others = KINDS[given] if given else None, tuple(KINDS[name] for name in more)
    free_size = left_to_us and config.k is None and not config.tree_nodes
    resolved = ResolvedConfig(
        settings, drafter, source, others, keeps_lengths, left_to_us, free_size
    )
    return resolved.sized(branches=True)


def _check_several(config: EngineConfig, drafter: DrafterKind, given: Sequence[str]) -> None:
    """Raise ConfigError unless `drafter` has several members, and can have these together."""
    names = ", ".join(given)
    if drafter.source != "draft":
        raise ConfigError(
            f"drafter {drafter.name!r} has one source of drafts, and --draft names {names}.",
            hint=f"leave --drafter at auto, or --drafter {WITH_FOUND}: it drafts with all of them",
        )
    if len({*given}) < len(given):
        raise ConfigError(
            f"--draft names {names}: several drafts must be of different kinds.",
            hint="name one draft model, one folder of each kind of heads, and quantised-self",
        )
    if not can_join(config):
        raise ConfigError(
            f"--draft names {names}: several drafts need one lane and one process.",
            hint="leave --schedule, --drafter-home and --drafter-device at auto",
        )


def _is_left_to_us(config: EngineConfig, drafter: DrafterKind) -> bool:
    """True if the drafter is automatic, and the controller automatic or one that acts alike."""
    is_ours = config.drafter == AUTO and drafter.name in (WITHOUT_DRAFT, WITH_FOUND)
    return is_ours and config.controller in (AUTO, "goodput") and config.sampler in EXACT_SAMPLERS


def _may_stop(config: EngineConfig, drafter: DrafterKind, known: Measured | None) -> bool:
    """True for drafts that stop where they do not pay: heads that are not known to pay, and any
    drafter that is known not to."""
    if config.controller != AUTO or drafter.folder is None or config.k is not None:
        return False
    return drafter.source == "heads" if known is None else not known.pays


def _k(config: EngineConfig, drafter: DrafterKind, known: Measured | None) -> int:
    """The measured best k for chains of fixed length that pay and were measured; else the set k."""
    is_chain = drafter.folder is not None and not config.tree_nodes
    is_left = config.k is None and config.resolved_controller == "fixed"
    return known.k if known is not None and known.pays and is_chain and is_left else config.most_k


def can_join(config: EngineConfig) -> bool:
    """True if a draft model or heads may join look-ups: on one lane, in one process."""
    return config.schedule in ("single", AUTO) and _home(config) == "thread"


def _home(config: EngineConfig) -> str:
    """The home of the drafter: a drafter and a rule that draw numbers can use those of their own
    device only."""
    return "process" if _is_apart(config) else config.drafter_home


def _drafter(config: EngineConfig, given: str | None, *, joins: bool) -> DrafterKind:
    if config.most_k == 0:
        return KINDS[OFF]
    if config.drafter == AUTO and given is None and config.sampler not in EXACT_SAMPLERS:
        # The text of a lossy rule depends on drafts, which must not depend on other requests then.
        return KINDS[OWN_TEXT]
    if config.drafter == AUTO:
        return KINDS[WITH_FOUND if joins or given == COPY else given or WITHOUT_DRAFT]
    wanted = drafter_named(config.drafter)
    if wanted.without_draft and given is None:
        return KINDS[wanted.without_draft]
    if wanted.folder not in (None, given) and not joins:
        raise _no_source(wanted, KINDS[given] if given else None)
    if wanted.not_in_process and config.drafter_home == "process":
        raise ConfigError(
            f"{wanted.not_in_process} cannot live in a process of its own.",
            hint="leave --drafter-home at thread and --drafter-device at auto",
        )
    return wanted


def _is_apart(config: EngineConfig) -> bool:
    """True if the draft model has another device than the target, as far as settings say."""
    named = config.device != AUTO or config.drafter_device in MORE_GPUS
    return named and config.drafter_device not in (AUTO, config.device)


def _schedule(config: EngineConfig, drafter: DrafterKind) -> str:
    """The resolved schedule. Lanes on one memory share its bandwidth, and one packed pass already
    uses that, so `auto` keeps one lane, also for a draft model in a process of its own. If the
    draft model has its own memory, `ssd` finds out by trials whether drafting ahead pays."""
    if config.schedule != AUTO:
        return config.schedule
    return "ssd" if _is_apart(config) and drafter.drafts_ahead else "single"


def _no_source(drafter: DrafterKind, given: DrafterKind | None) -> ConfigError:
    """Error for a drafter whose source is missing, or whose --draft names something else."""
    needed = drafter.needs_words or "a draft model"
    if given is None:
        made = "draft" if drafter.folder == MODEL else drafter.name
        return ConfigError(
            f"drafter {drafter.name!r} needs {needed}, and none was given.",
            hint="name a folder with --draft; `outrider draft suggest TARGET` lists what there is, "
            f"`outrider train {made}` makes one, --drafter ngram needs none",
        )
    words = given.needs_words if given.folder == MODEL or given.in_target else given.name
    return ConfigError(
        f"drafter {drafter.name!r} needs {needed}, and --draft names {words}.",
        hint="leave --drafter at auto, which follows --draft, or name another folder",
    )
