"""Load a target and its drafter's model, check that they fit, and size their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from outrider.api.corpus import Texts, read_corpus
from outrider.api.sources import (
    hidden_layers,
    idle_settings,
    room_of,
    source_of,
    states_of,
    whole_pages,
)
from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.api.translate import TextTranslator
from outrider.core.config import EngineConfig
from outrider.core.errors import VocabularyError
from outrider.drafters.process.options import ChildOptions
from outrider.engine.build import draft_size, resolve_window
from outrider.engine.compaction import keep_of
from outrider.engine.drafters import ahead_choices, ahead_room
from outrider.engine.history import history_note
from outrider.engine.lanes.build import LaneTarget, Machine
from outrider.engine.own_drafter import own_copy
from outrider.models.cheaper import Cheaper
from outrider.models.decoder import Decoder, Room
from outrider.models.heads import Heads
from outrider.models.hf_config import DecoderConfig, read_config
from outrider.models.loading import (
    DTYPES,
    LoadOptions,
    load_model,
    pick_device,
    prepare_torch,
    resolve,
)
from outrider.pairs.catalog import draft_of
from outrider.sched.table import resolve_schedule
from outrider.state.capacity import arena_slots
from outrider.verify.table import rule_for


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """Models in memory and the limits found while loading them.

    `window` is the most tokens a sequence may hold, for the reason given; `k` is 0 when nothing is
    drafted; `num_slots` is the arena's size in tokens. `translator` is there when the draft has a
    vocabulary of its own, `child` when a process of its own loads the draft model, `end` when other
    processes have a share of the target: it ends them, for good. `heads`, and `own`, a cheaper
    copy of the target, are loaded with the drafter. `corpus` has texts for the suffix drafter.
    """

    target: Decoder
    draft: Decoder | None
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    window: int
    window_reason: str
    k: int
    num_slots: int
    notes: tuple[str, ...]
    translator: TextTranslator | None = None
    child: ChildOptions | None = None
    end: Callable[[], object] | None = None
    heads: Heads | None = None
    own: Cheaper | None = None
    corpus: Texts = ()


def load_pair(model: str, draft: str | None, config: EngineConfig) -> LoadedPair:
    """Everything is checked before weights are read: names, window, vocabulary."""
    prepare_torch(deterministic=config.deterministic, threads=config.threads)
    rule_for(config.sampler, config.leniency)
    keep_of(config)
    folder = resolve(model)
    draft = draft or draft_of(model, config.drafter)
    source = source_of(folder, draft, config)
    drafter, draft_folder = source.drafter, source.model
    tokenizer = Tokenizer.load(folder)
    translator = None
    if draft_folder is not None and drafter == "bridge":
        translator = _translator(folder, draft_folder)
    elif draft_folder is not None:
        _check_vocabulary(tokenizer, Tokenizer.load(draft_folder), draft_folder.name)
    target_config = read_config(folder)
    draft_config = read_config(draft_folder) if draft_folder else None
    if draft_config is not None and translator is None:
        _check_sizes(target_config.vocab_size, draft_config.vocab_size)
    target_tokens = target_config.max_tokens
    draft_tokens = draft_config.max_tokens if draft_config else None
    own = own_copy(config, drafter, folder, target_config)
    k = 0 if drafter == "none" else config.k
    window = resolve_window(config, target_tokens, draft_tokens, k=k)
    # Whole pages: that is what the arena allocates and what a sequence is charged for. Siblings of
    # a tree lie past the window.
    longest = window + max(draft_size(config, drafter) - k, 0)
    wanted = config.arena_tokens or _default_slots(target_config, config, longest)
    num_slots = whole_pages(wanted, config.page_size)
    heads = source.sized(config, target_config, num_slots)
    rows = config.batch_size * (draft_size(config, drafter) + 1)
    most = max(config.prefill_chunk + rows, config.kv_window if config.kv_budget else 0)
    room = room_of(config, num_slots, max_rows=most, max_logits=rows)
    room = replace(room, hidden_layers=hidden_layers(heads, drafter, target_config))
    options = replace(_options(config, room), quantise=config.quantise)
    target, end = _load_target(folder, options, config.tensor_parallel, name=model)
    draft_model = child = None
    if draft_folder is not None:
        options = _draft_options(config, num_slots)
        if config.drafter_home == "process":
            child = _child(draft_folder, draft or "", config, options, target_config.vocab_size)
        else:
            draft_model = load_model(draft_folder, options, name=draft or "")
    return LoadedPair(
        target=target,
        draft=draft_model,
        tokenizer=tokenizer,
        stop_ids=frozenset(
            token_id
            for token_id in (*target.spec.stop_ids, *tokenizer.stop_ids)
            if token_id < target_config.vocab_size
        ),
        window=window,
        window_reason=f"target {target_tokens}, draft {draft_tokens or 'none'}, "
        f"context {config.context or 'auto'}",
        k=k,
        num_slots=num_slots,
        notes=(
            *_notes(target, config),
            *idle_settings(config, drafter),
            *_cut(config, drafter, target),
            *(heads.notes(window) if heads else ()),
        ),
        translator=translator,
        child=child,
        end=end,
        heads=heads,
        own=own,
        corpus=_corpus(config, drafter, tokenizer, target_config.vocab_size),
    )


def _corpus(config: EngineConfig, drafter: str, tokenizer: Tokenizer, vocab_size: int) -> Texts:
    """What the suffix drafter reads first, for those that it is among."""
    if drafter not in ("suffix", "lookup", "portfolio"):
        return ()

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special=False)
        return [token for token in ids if token < vocab_size]

    return read_corpus(config.suffix_corpus, encode, num_tokens=config.suffix_tokens)


def _draft_options(config: EngineConfig, num_slots: int) -> LoadOptions:
    """With room for the foreseen verdicts of a draft model that drafts ahead."""
    more = ahead_room(config, ahead=resolve_schedule(config, has_draft=True) == "ssd")
    num_slots += config.batch_size * whole_pages(more.num_slots, config.page_size)
    room = room_of(
        config,
        num_slots,
        max_rows=max(config.prefill_chunk, 2 * config.batch_size, more.num_rows),
        max_logits=max(config.batch_size, more.num_logits),
    )
    # A model that drafts ahead stages all its branches.
    history = max(room.states.history, more.num_slots)
    room = replace(room, states=replace(room.states, history=history))
    options = _options(config, room)
    home = config.drafter_device
    return options if home == "auto" else replace(options, device=home)


def _child(
    folder: Path, name: str, config: EngineConfig, options: LoadOptions, vocab_size: int
) -> ChildOptions:
    ahead = resolve_schedule(config, has_draft=True) == "ssd"
    return ChildOptions(
        folder=str(folder),
        vocab_size=vocab_size,
        num_laws=config.batch_size * config.k,
        num_slots=options.room.num_slots,
        page_size=config.page_size,
        max_rows=options.room.max_rows,
        max_logits=options.room.max_logits,
        chunk=config.prefill_chunk,
        states=asdict(options.room.states),
        name=name,
        dtype=config.dtype,
        device=options.device,
        draw="race" if config.sampler == "coupled" else "own",
        force_reference=config.force_reference,
        deterministic=config.deterministic,
        threads=config.lane_threads or 1,
        ahead=ahead_choices(config) if ahead else None,
    )


def _load_target(
    folder: Path, options: LoadOptions, size: int, *, name: str
) -> tuple[Decoder, Callable[[], object] | None]:
    """The target, and what ends the other processes that it is shared with, if there are any."""
    if size == 1:
        return load_model(folder, options, name=name), None
    # Imported here: few use it, and it brings PyTorch's communication along.
    from outrider.models.parallel.sharded import load_sharded

    target = load_sharded(folder, options, size=size, name=name)
    return target, target.close


def _translator(folder: Path, draft_folder: Path) -> TextTranslator:
    return TextTranslator(
        Tokenizer.load(folder),
        Tokenizer.load(draft_folder),
        target_size=read_config(folder).vocab_size,
        draft_size=read_config(draft_folder).vocab_size,
    )


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


def _options(config: EngineConfig, room: Room) -> LoadOptions:
    return LoadOptions(
        room=room,
        dtype=config.dtype,
        device=config.device,
        force_reference=config.force_reference,
        threads=config.threads,
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


def _notes(target: Decoder, config: EngineConfig) -> tuple[str, ...]:
    """What checkpoint and settings limit, and fallbacks that were not asked for."""
    notes = list(target.config.notes)
    if config.kv_budget:
        most = config.kv_budget + 1
        notes.append(f"prompts of over {most} tokens lose keys: another model's text")
    if config.force_reference:
        return tuple(notes)
    refused = [f"kernels: {reason}" for c in target.kernels.choices for reason in c.refusals]
    return (*notes, *refused[:1])


def _cut(config: EngineConfig, drafter: str, target: Decoder) -> tuple[str, ...]:
    """What a recurrent memory does not hold of the drafts that were asked for."""
    note = None if drafter == "none" else history_note(config, target)
    return () if note is None else (note,)


def machine_of(target: Decoder, device: torch.device) -> Machine:
    """What lanes of `target` may use on this machine."""

    def twin() -> LaneTarget | None:
        other = target.twin()
        if other is None:
            return None
        return LaneTarget(other, other.kernels.argmax, other.kernels.sampling)

    threads = target.kernels.threads
    return Machine(
        device=device,
        twin=twin,
        join_lane=target.kernels.join_lane,
        num_threads=int(threads.name) if threads else 1,
    )
