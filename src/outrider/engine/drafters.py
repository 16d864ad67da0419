"""Which drafter a configuration means, and building it."""

from __future__ import annotations

from typing import cast

from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import AUTO, KINDS, MODEL, OFF, WITHOUT_DRAFT, DrafterKind
from outrider.core.errors import ConfigError
from outrider.core.protocols import Drafter
from outrider.drafters.ahead.choices import AheadCapacity, AheadChoices, room_needed
from outrider.drafters.ahead.forecast import Kind, Policy
from outrider.drafters.catalog import BuildContext, LoadedModels
from outrider.models.heads import MAX_WIDTH, DraftKind


def resolve_drafter(config: EngineConfig, *, has_draft: bool, kind: DraftKind = MODEL) -> str:
    """The drafter that `config` means, where a draft is a model or heads of this `kind`.

    Raises ConfigError if it needs a draft model or heads of another kind, or cannot live in a
    process."""
    if config.k == 0:
        return OFF
    if config.drafter == AUTO:
        return kind if has_draft else WITHOUT_DRAFT
    wanted = KINDS[config.drafter]
    if wanted.without_draft and not has_draft:
        return wanted.without_draft
    if wanted.folder is not None and not (has_draft and wanted.folder == kind):
        raise _no_source(wanted, KINDS[kind] if has_draft else None)
    if wanted.not_in_process and config.drafter_home == "process":
        raise ConfigError(
            f"{wanted.not_in_process} cannot live in a process of its own.",
            hint="leave --drafter-home at thread",
        )
    return wanted.name


def drafter_for(config: EngineConfig, models: LoadedModels) -> str:
    """The drafter that `config` means with these models."""
    if models.heads is not None:
        return resolve_drafter(config, has_draft=True, kind=models.heads.kind)
    return resolve_drafter(config, has_draft=models.has_draft)


def _no_source(drafter: DrafterKind, given: DrafterKind | None) -> ConfigError:
    """What a drafter reads is missing, or --draft names something else."""
    needed = drafter.needs_words
    if given is None:
        made = "draft" if drafter.folder == MODEL else drafter.name
        return ConfigError(
            f"drafter {drafter.name!r} needs {needed}, and none was given.",
            hint="name a folder with --draft; `outrider draft suggest TARGET` says what there is, "
            f"`outrider train {made}` makes one, --drafter ngram needs none",
        )
    words = given.needs_words if given.folder == MODEL or given.in_target else given.name
    return ConfigError(
        f"drafter {drafter.name!r} needs {needed}, and --draft names {words}.",
        hint="leave --drafter at auto, which follows --draft, or name another folder",
    )


def ahead_room(config: EngineConfig, *, ahead: bool) -> AheadCapacity:
    """What the draft model's memory needs besides, for drafting `ahead` or for trees."""
    if not ahead and branches(config):
        rows = config.batch_size * MAX_WIDTH
        return AheadCapacity(rows, rows, config.k * MAX_WIDTH)
    if not ahead:
        return AheadCapacity(0, 0, 0)
    return room_needed(config.k, config.fan_out, config.batch_size)


def branches(config: EngineConfig) -> bool:
    """Whether drafts are trees, where the drafter can branch."""
    return config.tree_nodes > config.k


def never_branches(config: EngineConfig, drafter: Drafter) -> bool:
    """Whether `drafter` never branches, whatever the budget. Drafts made ahead of a verdict or in a
    process are chains."""
    kind = KINDS[drafter.name]
    if not branches(config) or (kind.drafts and not kind.branches):
        return True
    in_process = kind.has_process and config.drafter_home == "process"
    return in_process or (kind.drafts_ahead and config.schedule == "ssd")


def ahead_choices(config: EngineConfig) -> AheadChoices:
    """What the settings decide about drafting ahead."""
    return AheadChoices(
        k=config.k,
        fan_out=config.fan_out,
        policy=cast("Policy", config.fan_policy),
        fallback=cast("Kind", config.fallback),
        saguaro=config.saguaro,
        force_hits=config.force_hits,
        always=config.hybrid_threshold == 0,
        max_ngram=config.max_ngram,
        min_ngram=config.min_ngram,
    )


def build_drafter(config: EngineConfig, models: LoadedModels, *, ahead: bool) -> Drafter:
    """With `ahead` a draft model prepares for verdicts; other drafters have no use for that."""
    return BuildContext(config, models, drafter_for(config, models), ahead).build()
