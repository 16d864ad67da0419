"""Plan of a pair before loading: the resolved drafter, a check of its models, the size of memory.

All of it is known before weights are read, from configurations and tokenizers: the source of drafts
(a model, heads, or neither), the context window, the size of the KV cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.api.chat_template import template_source
from outrider.api.found import (
    OWN_BLOCK,
    FoundDraft,
    FoundDrafts,
    found_drafts,
    is_searched,
    joining_block,
    why_none,
)
from outrider.api.tokenizer import TextTranslator, Tokenizer, first_differences, num_common_ids
from outrider.cache.pages import arena_slots
from outrider.core.config import MOST_BATCH, EngineConfig
from outrider.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    VocabularyError,
)
from outrider.core.plugins import AUTO, COPY, KINDS, MODEL, drafter_named
from outrider.core.resolve import Measured, ResolvedConfig, resolve
from outrider.core.spec import DecoderConfig
from outrider.core.tree import MAX_WIDTH
from outrider.drafters.common.draft_model import SelfDraftSpec, own_copy
from outrider.engine.build import (
    DRAFT_CONTEXT,
    model_capacity,
    most_staged,
    resolve_window,
    states_of,
    whole_pages,
)
from outrider.kernels.operators import pick_device
from outrider.models.configs import LlamaConfig
from outrider.models.families import FAMILIES, read_config
from outrider.models.gguf.vocabulary import TURN_ENDS
from outrider.models.heads import (
    HeadsToLoad,
    hidden_layers_of,
    kind_of,
    layers_of_all,
    mask_token_of,
    verifier_of,
    worth_of,
)
from outrider.models.loading import resolve as find_model
from outrider.models.loading import spec_of_config
from outrider.models.names import ALIASES
from outrider.models.weights import stored_in
from outrider.pairs.catalog import draft_of
from outrider.sched.jobs import OPEN_TOKENS

# Windows that the arena holds if the number of concurrent requests is automatic.
_WHOLE_WINDOWS = 8


def resolve_pair(
    target: Path, draft: str | None, config: EngineConfig, found: Sequence[FoundDraft] = ()
) -> tuple[ResolvedConfig, Mapping[str, Path]]:
    """Resolve `config` with --draft `draft`. Returns it and the folders of the draft model and
    heads, by the kind of drafter.

    `draft` is not searched for if the drafter has no use for it. A target may have heads within its
    own files. `found` draft without being named. Raises ConfigError for heads of a target that
    processes share, and for two drafts of one kind."""
    if found and draft is None:
        first, *rest = [one.kind for one in found]
        folders = {one.kind: one.folder for one in found if one.kind != COPY}
        return resolve(config, first, found=True, more=rest), folders
    named = None if config.drafter == AUTO else drafter_named(config.drafter)
    sources: list[tuple[str, Path]] = []
    if config.most_k > 0 and (named is None or named.reads_draft):
        if draft is not None:
            sources = [(kind, folder) for kind, folder, _ in named_drafts(draft, target)]
        elif named is not None and named.in_target:
            sources = [(named.name, target)]
    sources += [(one.kind, one.folder) for one in found]
    folders = dict(sources)
    given, *more = [kind for kind, _ in sources] or [None]
    worth = None if given is None or more else worth_of(folders[given], given)
    known = None if worth is None else Measured(worth.best_k, worth.pays)
    resolved = resolve(config, given, known, more=[kind for kind in more if kind])
    if resolved.has_heads and config.tensor_parallel > 1:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}: draft heads share tables with a target "
            "that is in one process.",
            hint="leave --tensor-parallel at 1, or use a draft model",
        )
    return resolved, folders


def named_drafts(draft: str, target: Path) -> list[tuple[str, Path, str]]:
    """The sources of drafts that --draft names, with commas between several: the kind of drafter,
    the folder and the name of each. The name of a drafter means the `target` in fewer bits, or the
    heads in its own files. Raises CheckpointError for a missing folder, ConfigError for one named
    twice."""
    several = "," in draft and not Path(draft).exists()
    found: list[tuple[str, Path, str]] = []
    # Words that are there twice are refused below; `fields.split` would drop one.
    words = filter(None, map(str.strip, draft.split(","))) if several else (draft,)
    for name in words:
        if several and name in KINDS and (KINDS[name].fewer_bits or KINDS[name].in_target):
            found.append((name, target, name))
            continue
        folder = find_model(name)
        found.append((kind_of(folder), folder, name))
    if len({(kind, folder.resolve()) for kind, folder, _ in found}) < len(found):
        raise ConfigError(f"--draft {draft} names a source twice.", hint="name each source once")
    return found


def _num_layers(target: DecoderConfig) -> int:
    return target.spec("", bytes_per_weight=1, bytes_per_kv=1).num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Everything that is known of a pair before its weights are read.

    `folder` and `target` are the target's; `folders` have the model and the heads that draft, by
    the kind of drafter. The model is called `draft_name`, and `found` are the drafts that were
    found without being named. `translator` is set if the draft has a vocabulary of its own; else
    its first `num_common` ids may be drafted, all if 0. `own` is set if the target drafts for
    itself. `window` is the most tokens of a sequence, for `window_reason`, and `num_slots` the
    arena's size in tokens; `notes` say if memory made them smaller. With `auto_batch` the number of
    concurrent requests is automatic."""

    resolved: ResolvedConfig
    folder: Path
    target: DecoderConfig
    tokenizer: Tokenizer
    folders: Mapping[str, Path]
    draft_name: str
    translator: TextTranslator | None
    num_common: int
    own: SelfDraftSpec | None
    window: int
    window_reason: str
    draft_window: int | None
    num_slots: int
    notes: tuple[str, ...] = ()
    found: tuple[FoundDraft, ...] = ()
    auto_batch: bool = False

    @property
    def settings(self) -> EngineConfig:
        return self.resolved.settings

    @property
    def mask_token(self) -> int | None:
        """The id of a mask with which the draft model drafts all tokens in one pass; None if it
        drafts one a pass, as it does apart from the target and ahead of verdicts."""
        folder = self.model_folder
        is_apart = self.settings.drafter_home == "process" or self.resolved.ahead
        if folder is None or is_apart or self.translator is not None:
            return None
        return mask_token_of(folder)

    @property
    def model_folder(self) -> Path | None:
        """The draft model's folder, if a model drafts."""
        return self.folders.get(MODEL)

    @property
    def heads_folders(self) -> Mapping[str, Path]:
        """The folders of the heads that draft, by their kind."""
        heads = (kind for kind in self.folders if KINDS[kind].source == "heads")
        return {kind: self.folders[kind] for kind in heads}

    @property
    def named(self) -> tuple[str, ...]:
        """The kinds of drafts that were named, not found."""
        found = {one.kind for one in self.found}
        return tuple(one.name for one in self.resolved.sources if one.name not in found)

    def with_settings(self, settings: EngineConfig) -> LoadPlan:
        return replace(self, resolved=self.resolved.with_settings(settings))

    @property
    def holds_all(self) -> bool:
        """True if the arena holds a text of usual length for each concurrent request."""
        return self.num_slots >= self.settings.most_batch * min(self.window, OPEN_TOKENS)

    @property
    def at_once(self) -> str:
        """The number of concurrent requests, and its reason, in words."""
        number, slots = self.settings.most_batch, f"{self.num_slots:,} tokens of KV cache"
        if not self.auto_batch:
            return f"{number} requests at once, {slots}"
        why = "hold them" if number == MOST_BATCH else "hold no more"
        return f"up to {number} requests at once: {slots} {why}; fewer where more gain nothing"

    def with_batch(self, batch_size: int) -> LoadPlan:
        """The plan with the arena of so many requests. Raises CapacityError if memory is short."""
        other = self.with_settings(replace(self.settings, batch_size=batch_size))
        wanted = other.settings.arena_tokens or _default_slots(other)
        return replace(other, num_slots=whole_pages(wanted, other.settings.page_size))

    def heads(self, num_slots: int) -> tuple[HeadsToLoad, ...]:
        """The heads, with capacity for texts of `num_slots` tokens in all, and for the tree nodes
        that they read. Raises CheckpointError if the target lacks a layer that they read."""
        settings, resolved = self.settings, self.resolved
        size = resolved.k if resolved.left_to_us else resolved.draft_size
        nodes = whole_pages(settings.most_k * min(size, MAX_WIDTH) + 1, settings.page_size)
        rows = settings.most_batch * (size + 1)
        capacity = model_capacity(
            settings,
            num_slots + settings.most_batch * nodes,
            max_rows=max(settings.most_chunk, rows),
            max_logits=rows,
            window=self.window,
        )
        num_layers, found = _num_layers(self.target), list[HeadsToLoad]()
        for kind, folder in self.heads_folders.items():
            layers = hidden_layers_of(folder, kind, num_layers)
            found.append(HeadsToLoad(folder, kind, replace(capacity, hidden_layers=layers)))
        return tuple(found)

    def hidden_layers(self, heads: Sequence[HeadsToLoad]) -> tuple[int, ...]:
        """Layers whose hidden states the target stores for the drafter."""
        if heads:
            return layers_of_all(heads)
        last = "last layer" in self.resolved.drafter.reads
        return (_num_layers(self.target),) if last else ()


def plan_pair(
    model: str, draft: str | None, config: EngineConfig, *, without: Collection[str] = ()
) -> LoadPlan:
    """Plan a pair. Drafter auto takes drafts that were not named, except those of the kinds in
    `without`. A `model` may be heads that name their target: then that is the target, and they
    draft.
    Raises ConfigError, CheckpointError, VocabularyError or CapacityError."""
    folder = find_model(model)
    if not draft and model in ALIASES:
        draft = draft_of(model, config.drafter)
    # A file is no folder of heads.
    verifier = verifier_of(folder) if folder.is_dir() else None
    if verifier is not None:
        draft, folder = draft or str(folder), _target_of(folder, verifier)
    if config.drafter_device != AUTO:
        config = replace(config, device=pick_device(config.device).type)
    target = read_config(folder).stretched(config.rope).for_context(config.context)
    searches, found = draft is None and config.drafter == AUTO, FoundDrafts()
    if searches:
        found = found_drafts(folder, target, config, without=without)
    elif draft is not None and is_searched(config) and OWN_BLOCK not in without:
        found = joining_block(folder, [kind for kind, *_ in named_drafts(draft, folder)], config)
    if found.drafts:
        # They stop drafting where that does not pay, since the user did not request it.
        config = replace(config, controller="goodput")
    resolved, folders = resolve_pair(folder, draft, config, found.drafts)
    resolved = resolved.sized(branches=isinstance(target, LlamaConfig), window=target.max_tokens)
    tokenizer = _tokenizer_of(folder, target, config.tokenizer)
    tokenizer, template_notes = _with_template(tokenizer, config.chat_template)
    _check_claim(folder, target)
    draft_folder = folders.get(MODEL)
    draft_config, translator = _fitted(resolved, draft_folder, tokenizer, target)
    own = None if resolved.copy is None else own_copy(config, resolved.copy, folder, target)
    has_draft, num_common = draft_config is not None, 0
    if draft_config is not None and draft_config.vocab_size != target.vocab_size:
        num_common = num_common_ids(tokenizer, target.vocab_size, draft_config.vocab_size)
    window = resolve_window(config, target.max_tokens, has_draft=has_draft, k=resolved.k)
    context = str(config.context or (DRAFT_CONTEXT if has_draft else "auto"))
    plan = LoadPlan(
        resolved=resolved,
        folder=folder,
        target=target,
        tokenizer=tokenizer,
        folders=folders,
        draft_name=_draft_name(draft, folder, folders),
        translator=translator,
        num_common=num_common,
        own=own,
        window=window,
        window_reason=f"target {target.max_tokens}, context {context}",
        draft_window=draft_config.for_context(window).max_tokens if draft_config else None,
        num_slots=0,
        notes=(
            *(_auto_notes(folder, resolved, found, without=without) if searches else ()),
            *(_joining_notes(resolved, found) if not searches else ()),
            *(
                []
                if verifier is None
                else [f"the target is {verifier}, which the draft heads name"]
            ),
            *template_notes,
        ),
        found=found.drafts,
        auto_batch=config.batch_size is None,
    )
    return _with_most(plan) if plan.auto_batch else plan.with_batch(config.most_batch)


def _draft_name(draft: str | None, target: Path, folders: Mapping[str, Path]) -> str:
    """The name of the draft model, as it was named; of heads, where no model drafts."""
    if draft is None or "," not in draft:
        found = folders.get(MODEL, next(iter(folders.values()), ""))
        return draft or str(found)
    return {kind: name for kind, _, name in named_drafts(draft, target)}.get(MODEL, draft)


def _with_most(plan: LoadPlan) -> LoadPlan:
    """The plan for as many requests as the arena holds usual texts, with recurrent states."""
    batch_size = MOST_BATCH
    while batch_size > 1:
        with suppress(CapacityError):
            found = plan.with_batch(batch_size)
            if found.holds_all:
                return found
        batch_size //= 2
    return plan.with_batch(1)


def _target_of(heads: Path, verifier: str) -> Path:
    """The target that heads name. Raises CheckpointError if it is not available."""
    try:
        return find_model(verifier)
    except CheckpointError as error:
        raise CheckpointError(
            f"{heads} has draft heads for {verifier!r}, which is not here: {error}",
            hint=f"name the location of their target: --target MODEL --draft {heads}",
        ) from error


def _auto_notes(
    folder: Path, resolved: ResolvedConfig, found: FoundDrafts, *, without: Collection[str]
) -> Iterator[str]:
    """Notes on the choice of drafter auto: what drafts, and on the second line what does not, and
    why."""
    stops = "; stops by itself where it does not pay" if resolved.left_to_us else ""
    if found.drafts:
        leave = "it" if len(found.drafts) == 1 else "them"
        passed = f". Left out: {'; '.join(found.passed)}" if found.passed else ""
        yield (
            f"speculation: {found.short}{stops}\n"
            f"drafter auto: {found.words}, together with look-ups in the text; in each round "
            f"whichever gained most by what was measured, or nothing where no draft pays; "
            f"--drafter suffix leaves {leave} out{passed}"
        )
    elif resolved.drafter.drafts and resolved.drafter.looks_up:
        passed = "" if without else f"; {why_none(folder, resolved.settings)}"
        passed += "".join(f", and {one}" for one in found.passed)
        name = resolved.drafter.name
        yield (
            f"speculation: look-ups in the text{stops}\n"
            f"drafter auto: look-ups in the text ({name}){passed}"
        )


def _joining_notes(resolved: ResolvedConfig, found: FoundDrafts) -> Iterator[str]:
    """The note on what drafter auto adds to the draft that was named."""
    if found.drafts and resolved.given is not None:
        alone = f"--drafter {resolved.given.name} leaves it out"
        yield f"drafter auto: {found.words} joins what --draft names, and look-ups do; {alone}"


def _tokenizer_of(folder: Path, target: DecoderConfig, other: str) -> Tokenizer:
    """The target's own tokenizer, or that of `other`. Raises VocabularyError for unknown ids."""
    if not other:
        return Tokenizer.load(folder)
    found = Tokenizer.load(find_model(other))
    if found.vocab_size > target.vocab_size:
        raise VocabularyError(
            f"the tokenizer of {other} has ids up to {found.vocab_size - 1}, and the target has "
            f"{target.vocab_size}.",
            hint="name the model that the target was made from with --tokenizer",
        )
    return found


def _with_template(tokenizer: Tokenizer, given: str) -> tuple[Tokenizer, list[str]]:
    """The tokenizer with the chat template `given`, if there is one, and notes. A template that
    cannot be rendered is an error before weights are read."""
    if not given:
        return tokenizer, []
    source = template_source(given)
    found = tokenizer.with_template(source)
    found.chat([{"role": "user", "content": "hello"}])
    known = set(found.vocabulary.values())
    lacking = [text for text in TURN_ENDS if text in source and text not in known]
    return found, [
        f"chat_template: the vocabulary has no token {text}, so replies may not end by themselves"
        for text in lacking
    ]


def _fitted(
    resolved: ResolvedConfig, folder: Path | None, tokenizer: Tokenizer, target: DecoderConfig
) -> tuple[DecoderConfig | None, TextTranslator | None]:
    """The draft model's configuration, if a model drafts, and a translator, if the drafter uses
    one. Raises VocabularyError if it does not and the vocabularies differ."""
    if folder is None:
        return None, None
    words = Tokenizer.load(folder)
    translates = "translator" in resolved.drafter.reads
    if not translates:
        _check_vocabulary(tokenizer, words, folder.name)
    draft = read_config(folder)
    _check_claim(folder, draft)
    if not translates:
        return draft, None
    sizes = {"target_size": target.vocab_size, "draft_size": draft.vocab_size}
    return draft, TextTranslator(tokenizer, words, **sizes)


def _check_claim(folder: Path, config: DecoderConfig) -> None:
    """Raise CheckpointError if the config has more weights than the files can hold. transformers'
    own models are exempt, as they are not counted exactly."""
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
        "(`outrider models pairs`), or draft without a model: --drafter ngram",
    )


def _default_slots(plan: LoadPlan) -> int:
    """Whole windows for a chosen batch size, else a few windows, or a usual text for each."""
    config, staged = plan.settings, most_staged(plan.resolved)
    # The dtype is not known before the weights are read: assume the widest.
    dtype = "float32" if config.dtype == AUTO else config.dtype
    spec = spec_of_config(plan.target, dtype, config.kv_dtype)
    captures = pick_device(config.device).type != "cpu"
    longest = plan.window + plan.resolved.rows_past_end(captures=captures)
    longest = whole_pages(longest, config.page_size)
    num_slots = config.most_batch * longest
    if plan.auto_batch:
        usual = min(longest, whole_pages(2 * OPEN_TOKENS, config.page_size))
        num_slots = min(num_slots, max(_WHOLE_WINDOWS * longest, config.most_batch * usual))
    capacity = model_capacity(config, num_slots, max_rows=1, max_logits=1, num_staged=staged)
    return arena_slots(
        spec,
        num_slots=num_slots,
        num_local_slots=capacity.num_local_slots(spec),
        device=pick_device(config.device),
        states=states_of(config),
        share=config.memory_share,
    )
