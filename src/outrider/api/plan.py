"""Plan of a pair before loading: what its names mean, whether its models fit, how large memory is.

All of it is known before weights are read, from configurations and tokenizers: the source of drafts
(a model, heads, or neither), the context window, room in the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.api.translate import TextTranslator
from outrider.cache.capacity import arena_slots
from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import AUTO, KINDS, MODEL, DrafterKind
from outrider.core.errors import ConfigError, VocabularyError
from outrider.core.fields import is_changed
from outrider.core.spec import RecurrentCapacity
from outrider.drafters.self_draft import SelfDraftSpec
from outrider.engine.build import DRAFT_CONTEXT, draft_size, resolve_window, rows_past_end
from outrider.engine.drafter_builders import own_copy
from outrider.engine.drafters import branches, resolve_drafter
from outrider.models.decoder import Room
from outrider.models.heads import (
    MAX_WIDTH,
    DraftKind,
    Heads,
    hidden_layers_of,
    kind_of,
)
from outrider.models.hf_config import FAMILIES, DecoderConfig, read_config
from outrider.models.loading import DTYPES, pick_device, resolve
from outrider.models.weights import stored_in
from outrider.pairs.catalog import draft_of
from outrider.sched.schedules import resolve_schedule


@dataclass(frozen=True, slots=True)
class Source:
    """What `drafter` reads: the folder of a draft `model`, or of `heads` of a kind, or neither."""

    drafter: str
    model: Path | None = None
    heads: Path | None = None
    kind: DraftKind = MODEL

    def sized(
        self, config: EngineConfig, target: DecoderConfig, num_slots: int, window: int = 0
    ) -> Heads | None:
        """The heads, with room for texts of `num_slots` tokens in all, of `window` tokens each, and
        the nodes of trees that are looked at. Raises CheckpointError if the target lacks a layer
        that they read."""
        if self.heads is None:
            return None
        size = draft_size(config, self.drafter)
        nodes = whole_pages(config.k * min(size, MAX_WIDTH) + 1, config.page_size)
        rows = config.batch_size * (size + 1)
        room = room_of(
            config,
            num_slots + config.batch_size * nodes,
            max_rows=max(config.prefill_chunk, rows),
            max_logits=rows,
            window=window,
        )
        layers = hidden_layers_of(self.heads, self.kind, _num_layers(target))
        return Heads(self.heads, self.kind, replace(room, hidden_layers=layers))


def source_of(target: Path, draft: str | None, config: EngineConfig) -> Source:
    """What `draft` names, which is not looked for if the drafter has no use for it. A target may
    have an MTP block within its own files."""
    named = None if config.drafter == AUTO else KINDS[config.drafter]
    if named is not None and named.without_draft:
        return _of_portfolio(target, draft, config)
    reads = config.k > 0 and (named is None or named.folder is not None)
    if reads and named is not None and named.in_target and draft is None:
        return Source(named.name, heads=target, kind=named.name)
    folder = resolve(draft) if reads and draft is not None else None
    kind = MODEL if folder is None else kind_of(folder)
    drafter = resolve_drafter(config, has_draft=draft is not None, kind=kind)
    if kind == MODEL:
        return Source(drafter, model=folder if KINDS[drafter].folder == MODEL else None)
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}: draft heads share tables with a target "
            "that is in one process.",
            hint="leave --tensor-parallel at 1, or use a draft model",
        )
    return Source(drafter, heads=folder, kind=kind)


def _of_portfolio(target: Path, draft: str | None, config: EngineConfig) -> Source:
    """Its model is what would draft by itself."""
    source = source_of(target, draft, replace(config, drafter="auto"))
    found = source.model is not None or source.heads is not None
    name = resolve_drafter(config, has_draft=found, kind=source.kind)
    return replace(source, drafter=name)


def hidden_layers(heads: Heads | None, drafter: str, target: DecoderConfig) -> tuple[int, ...]:
    """Those that the target keeps for what drafts."""
    if heads is not None:
        return heads.room.hidden_layers
    return (_num_layers(target),) if "last layer" in KINDS[drafter].reads else ()


def idle_settings(config: EngineConfig, drafter: str) -> tuple[str, ...]:
    """Settings that were asked for and have no effect here."""
    schedule, kind = resolve_schedule(config, drafter), KINDS[drafter]
    notes: list[str] = []
    if schedule == "ssd" and not kind.drafts_ahead:
        notes.append(f"ssd drafts ahead with a draft model only; drafter {drafter} drafts in turns")
    notes += [
        f"{setting} has no effect on drafter {drafter}"
        for setting in dict.fromkeys(name for other in KINDS.values() for name in other.settings)
        if is_changed(config, setting) and setting not in kind.settings
    ]
    if schedule != "ssd" and (config.saguaro < 1 or config.force_hits >= 0):
        notes.append("saguaro and force_hits have an effect with --schedule ssd only")
    return (*notes, *_idle_nodes(config, kind, schedule))


def _idle_nodes(config: EngineConfig, kind: DrafterKind, schedule: str) -> tuple[str, ...]:
    """Why trees were asked for and chains are drafted."""
    if not config.tree_nodes or not kind.drafts:
        return ()
    if not branches(config):
        return (f"tree_nodes={config.tree_nodes} is not above k={config.k}: drafts are chains",)
    if not kind.branches:
        return (f"tree_nodes has no effect on drafter {kind.name}, which drafts chains",)
    if kind.drafts_ahead and schedule == "ssd":
        return ("tree_nodes has no effect with schedule ssd: what is drafted ahead are chains",)
    if kind.has_process and config.drafter_home == "process":
        return ("tree_nodes has no effect on a draft model in a process, which drafts chains",)
    return ()


def room_of(
    config: EngineConfig, num_slots: int, *, max_rows: int, max_logits: int, window: int = 0
) -> Room:
    return Room(
        num_slots=num_slots,
        page_size=config.page_size,
        max_rows=max_rows,
        max_logits=max_logits,
        states=states_of(config),
        window=window,
    )


def states_of(config: EngineConfig) -> RecurrentCapacity:
    """For the recurrent states of a hybrid, if the model is one."""
    return RecurrentCapacity(
        rollback=config.state_rollback,
        history=config.state_history or max(1, config.k, config.tree_nodes),
        num_sequences=config.batch_size,
        num_checkpoints=config.state_checkpoints,
    )


def whole_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size) * page_size


def _num_layers(target: DecoderConfig) -> int:
    return target.spec("", bytes_per_weight=1, bytes_per_kv=1).num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """`folder` and `target` are the target's, `source` is what drafts, called `draft_name`.
    `translator` is there when the draft has a vocabulary of its own, `own` when the target drafts
    for itself. `schedule` is resolved. `k`, `window` and `num_slots` are those of the loaded pair,
    `notes` say where memory made them smaller."""

    folder: Path
    target: DecoderConfig
    tokenizer: Tokenizer
    source: Source
    draft_name: str
    translator: TextTranslator | None
    own: SelfDraftSpec | None
    schedule: str
    k: int
    window: int
    window_reason: str
    draft_window: int | None
    num_slots: int
    notes: tuple[str, ...] = ()


def plan_pair(model: str, draft: str | None, config: EngineConfig) -> PairPlan:
    """Raises ConfigError, CheckpointError, VocabularyError or CapacityError."""
    folder = resolve(model)
    draft = draft or draft_of(model, config.drafter)
    source = source_of(folder, draft, config)
    tokenizer, target = Tokenizer.load(folder), read_config(folder)
    _check_claim(folder, target)
    draft_config, translator = _fitted(source, tokenizer, target)
    own = own_copy(config, source.drafter, folder, target)
    k = config.k if KINDS[source.drafter].drafts else 0
    has_draft = draft_config is not None
    window = resolve_window(config, target.max_tokens, has_draft=has_draft, k=k)
    captures = pick_device(config.device).type != "cpu"
    longest = window + rows_past_end(config, source.drafter, captures=captures)
    context = str(config.context or (DRAFT_CONTEXT if has_draft else "auto"))
    # Whole pages: that is what the arena allocates and what a sequence is charged for.
    wanted = config.arena_tokens or _default_slots(target, config, longest)
    return PairPlan(
        folder=folder,
        target=target,
        tokenizer=tokenizer,
        source=source,
        draft_name=draft or "",
        translator=translator,
        own=own,
        schedule=resolve_schedule(config, source.drafter),
        k=k,
        window=window,
        window_reason=f"target {target.max_tokens}, context {context}",
        draft_window=draft_config.max_tokens if draft_config else None,
        num_slots=whole_pages(wanted, config.page_size),
    )


def _fitted(
    source: Source, tokenizer: Tokenizer, target: DecoderConfig
) -> tuple[DecoderConfig | None, TextTranslator | None]:
    """The draft model's configuration, if a model drafts, and a translator, if the drafter is one
    that translates. Raises VocabularyError if it is not and the vocabularies differ."""
    if source.model is None:
        return None, None
    words = Tokenizer.load(source.model)
    translates = "translator" in KINDS[source.drafter].reads
    if not translates:
        _check_vocabulary(tokenizer, words, source.model.name)
    draft = read_config(source.model)
    _check_claim(source.model, draft)
    if not translates:
        _check_sizes(target.vocab_size, draft.vocab_size)
        return draft, None
    sizes = {"target_size": target.vocab_size, "draft_size": draft.vocab_size}
    return draft, TextTranslator(tokenizer, words, **sizes)


def _check_claim(folder: Path, config: DecoderConfig) -> None:
    """Raise CheckpointError for more weights than the files can hold; transformers' own models are
    not counted exactly, so they are not held to it."""
    if config.family in FAMILIES:
        spec = config.spec("", bytes_per_weight=1, bytes_per_kv=1)
        stored_in(folder).check_claim(spec.num_parameters)


def _check_vocabulary(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise VocabularyError unless every id means the same token to both."""
    found = first_differences(target, draft)
    if not found:
        return
    listed = "; ".join(f"{d.token_id}: {d.first!r} and {d.second!r}" for d in found)
    raise VocabularyError(
        f"target and draft {name} do not share a vocabulary. The first ids that differ: {listed}.",
        hint="translate with --drafter bridge, choose a draft of the target's own family "
        "(`outrider pairs`), or draft without a model: --drafter ngram",
    )


def _check_sizes(target: int, draft: int) -> None:
    """Raise VocabularyError unless both models' laws are over equally many ids."""
    if target != draft:
        raise VocabularyError(
            f"the target's law is over {target} ids and the draft's over {draft}, although their "
            "tokenizers agree: one has a padded embedding.",
            hint="choose a draft with the target's vocab_size, --drafter bridge or --drafter ngram",
        )


def _default_slots(model: DecoderConfig, config: EngineConfig, window: int) -> int:
    size = DTYPES.get(config.dtype, torch.float32).itemsize
    spec = model.spec("", bytes_per_weight=size, bytes_per_kv=size)
    room = whole_pages(window, config.page_size)
    return arena_slots(
        spec,
        sequences=config.batch_size,
        window=room,
        device=pick_device(config.device),
        states=states_of(config),
    )
