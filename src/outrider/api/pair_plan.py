"""What the names of a pair mean, whether its models fit, and how large their memory is.

All of it is known before weights are read: from configurations and tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.api.sources import Source, source_of, states_of, whole_pages
from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.api.translate import TextTranslator
from outrider.cache.capacity import arena_slots
from outrider.core.config import EngineConfig
from outrider.core.errors import VocabularyError
from outrider.drafters.self_draft import Cheaper
from outrider.engine.build import DRAFT_CONTEXT, resolve_window, rows_past_end
from outrider.engine.drafter_builders import own_copy
from outrider.models.hf_config import FAMILIES, DecoderConfig, read_config
from outrider.models.loading import DTYPES, pick_device, resolve
from outrider.models.weights import stored_in
from outrider.pairs.catalog import draft_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """`folder` and `target` are the target's, `source` is what drafts, called `draft_name`.
    `translator` is there when the draft has a vocabulary of its own, `own` when the target drafts
    for itself. `k`, `window` and `num_slots` are those of the loaded pair, `notes` say where memory
    made them smaller."""

    folder: Path
    target: DecoderConfig
    tokenizer: Tokenizer
    source: Source
    draft_name: str
    translator: TextTranslator | None
    own: Cheaper | None
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
    k = 0 if source.drafter == "none" else config.k
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
    translates = source.drafter == "bridge"
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
