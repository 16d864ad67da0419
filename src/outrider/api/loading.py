"""Loads a target, its draft model or heads, and a corpus, after their plan (plan.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from outrider.api.memory import Part, draft_room, fitted, table_of, target_room
from outrider.api.plan import LoadPlan, plan_pair
from outrider.api.tokenizer import Tokenizer
from outrider.cache.pool import Keep
from outrider.core.config import EngineConfig
from outrider.core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ContractError,
    within_memory,
)
from outrider.core.fields import is_changed, shown
from outrider.core.files import open_regular
from outrider.core.plugins import AUTO, KINDS, MODEL
from outrider.core.process import give_back, uncollected
from outrider.core.protocols import CausalLM
from outrider.core.resolve import ResolvedConfig
from outrider.drafters.common.context import LaneTarget, LoadedModels, Machine
from outrider.drafters.portfolio import unusable
from outrider.engine.build import history_note
from outrider.kernels.operators import Kernels, pick_device
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity, SharedWeights
from outrider.models.heads import HeadsToLoad
from outrider.models.loading import load_model, prepare_torch
from outrider.verify.rules import rule_for

if TYPE_CHECKING:
    from outrider.plugins.lanes.process.options import ChildOptions
    from outrider.plugins.prompt_store.files import StoreFolder

# Most bytes of text per token; the rest of a file is not even read.
_BYTES_PER_TOKEN = 16

Texts = tuple[tuple[int, ...], ...]


def read_corpus(path: str, encode: Callable[[str], Sequence[int]], *, num_tokens: int) -> Texts:
    """The first `num_tokens` tokens of a text file, or of a folder's files in the order of their
    names, one text per file. Files that are not UTF-8 text are left out. Empty for an empty `path`.
    Raises ConfigError if there is no text."""
    if not path:
        return ()
    texts: list[tuple[int, ...]] = []
    left = num_tokens
    given = Path(path)
    files = (file for file in given.rglob("*") if file.is_file())
    for file in [given] if given.is_file() else sorted(files):
        text = _read(file, left * _BYTES_PER_TOKEN)
        tokens = tuple(encode(text)[:left]) if text else ()
        if tokens:
            texts.append(tokens)
            left -= len(tokens)
        if not left:
            break
    if not texts:
        raise ConfigError(
            f"suffix_corpus: {path} has no text.",
            hint="--suffix-corpus takes a text file or a folder of text files",
        )
    return tuple(texts)


def _read(file: Path, num_bytes: int) -> str:
    """The beginning of a file; empty if it is no text."""
    try:
        with open_regular(file) as stream:
            data = stream.read(num_bytes)
    except OSError:
        return ""
    if b"\0" in data:
        return ""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character may be cut in two at the end.
        return data[: error.start].decode("utf-8") if error.start >= len(data) - 3 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPair(LoadedModels):
    """A loaded pair: the models in the engine's form, and the `plan` of their loading. If other
    processes hold parts of the target, `end` ends them for good. `memory` is the planned memory,
    `flush` waits for the writes of the prompt store, if there is one."""

    target: Decoder
    draft: Decoder | None
    plan: LoadPlan
    stop_ids: frozenset[int]
    notes: tuple[str, ...]
    end: Callable[[], object] | None = None
    memory: tuple[Part, ...] = ()
    flush: Callable[[], object] | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.plan.tokenizer

    def sharer_for(self, plan: LoadPlan) -> SharedWeights | None:
        """The target, if `plan` has the same one and its weights can be shared."""
        names = (
            *("dtype", "kv_dtype", "device", "quantise"),
            *("force_reference", "threads", "tensor_parallel"),
        )
        own, other = self.plan.settings, plan.settings
        alike = all(getattr(own, name) == getattr(other, name) for name in names)
        # Its config has the rotary positions that settings stretch.
        same = plan.folder == self.plan.folder and plan.target == self.plan.target
        if not (same and alike):
            return None
        return self.target if isinstance(self.target, SharedWeights) else None


def check_names(**named: object) -> None:
    """Raises ConfigError for a model that is neither a name nor a folder."""
    for name, given in named.items():
        if not isinstance(given, str | Path | None):
            raise ConfigError(
                f"{name} must be a name or a folder, got {shown(given)}.",
                hint='LLM("outrider/embedded"), or the path of a folder',
            )


@uncollected()
def load_pair(
    model: str, draft: str | None, config: EngineConfig, *, weights_of: LoadedPair | None = None
) -> LoadedPair:
    """Load a pair. Everything is checked before weights are read: names, window, vocabulary. The
    weights of the target in `weights_of` are shared if it is the same one. Raises ConfigError,
    CheckpointError, VocabularyError or CapacityError."""
    prepare_torch(deterministic=config.deterministic, threads=config.threads)
    rule_for(config.sampler, config.leniency)
    if config.kv_budget:
        Keep(config.kv_budget, config.kv_window)
    store = _store_of(config)
    plan = plan_pair(model, draft, config)
    there = None if weights_of is None else weights_of.sharer_for(plan)
    plan, parts = _fitted(
        plan,
        lambda sources: plan_pair(model, draft, config, without=sources),
        has_weights=there is not None,
    )
    heads = plan.heads(plan.num_slots)
    # Reading a tokenizer allocates much that is freed again, and so does reading weights.
    give_back()
    with within_memory("loading", parts=table_of(parts)):
        target, end = _load_target(plan, heads, name=model, there=there)
        draft_model, child, without_draft = _load_draft(plan)
    give_back()
    stop_ids = (*target.spec.stop_ids, *plan.tokenizer.stop_ids)
    pair = LoadedPair(
        target=target,
        draft=draft_model,
        argmax=target.kernels.argmax,
        translator=plan.translator,
        num_common=plan.num_common,
        sampling=target.kernels.sampling,
        machine=machine_of(target.kernels, pick_device(config.device), partial(_twin_of, target)),
        child=child,
        heads=heads,
        named=plan.named,
        own=plan.own,
        mask_token=plan.mask_token,
        corpus=_corpus(plan),
        exact=target.kernels.exact,
        lookups=target.kernels.lookups,
        auto_batch=plan.auto_batch,
        plan=plan,
        # Those that the target can emit.
        stop_ids=frozenset(i for i in stop_ids if i < plan.target.vocab_size),
        notes=(*_notes(plan, target, heads), *without_draft),
        end=end,
        memory=parts,
    )
    return pair if store is None else _with_store(pair, store)


def _store_of(config: EngineConfig) -> StoreFolder | None:
    """The folder of the prompt store, if one is requested. Raises ConfigError."""
    if not config.prompt_store:
        return None
    from outrider.plugins.prompt_store.files import StoreFolder

    return StoreFolder.opened(config.prompt_store)


def _with_store(pair: LoadedPair, folder: StoreFolder) -> LoadedPair:
    """`pair`, whose models keep their pages in the folder; or with a note why it does not."""
    from outrider.plugins.prompt_store.identity import attach

    stores = attach(pair.target, pair.draft, pair.plan, pair.heads, folder)
    if isinstance(stores, str):
        return replace(pair, notes=(*pair.notes, f"prompt_store has no effect: {stores}"))
    return replace(pair, flush=lambda: [store.flush() for store in stores])


def _fitted(
    plan: LoadPlan, without: Callable[[set[str]], LoadPlan], *, has_weights: bool
) -> tuple[LoadPlan, tuple[Part, ...]]:
    """`plan` as it fits. Automatic drafts are no reason to fail, and a copy of the target or more
    than one kind of heads none to hold less text: as many of them draft as fit, the first rather
    than the last. `without` plans without drafts of some kinds."""
    sources = {one.kind: one for one in plan.found}
    why: str | Exception | None = None
    for num_kept in range(len(sources), -1, -1):
        for kept in combinations(sources, num_kept):
            left_out = set(sources) - set(kept)
            try:
                tried = without(left_out) if left_out else plan
                found, parts = fitted(tried, has_weights=has_weights)
            except (CapacityError, CheckpointError) as error:
                if not kept:
                    raise
                why = why or error
                continue
            more = tried.own is not None or len(tried.heads_folders) > 1
            if tried.found and more and _shortens(tried, found):
                why = why or "it would leave memory for less text."
                continue
            if why is None:
                return found, parts
            words = " and ".join(one.words for kind, one in sources.items() if kind in left_out)
            return replace(found, notes=(*found.notes, unusable(words, why))), parts
    raise ContractError("a plan without automatic drafts fits or raises")


def _shortens(plan: LoadPlan, fitted: LoadPlan) -> bool:
    """True if `plan` holds less text as it is fitted."""
    batch = fitted.settings.most_batch
    return fitted.num_slots != (plan.with_batch(batch) if plan.auto_batch else plan).num_slots


def _corpus(plan: LoadPlan) -> Texts:
    """The texts that the drafter reads before the first request, if it reads a corpus."""
    if "corpus" not in plan.resolved.drafter.reads:
        return ()

    def encode(text: str) -> list[int]:
        ids = plan.tokenizer.encode(text, add_special=False)
        return [token for token in ids if token < plan.target.vocab_size]

    settings = plan.settings
    return read_corpus(settings.suffix_corpus, encode, num_tokens=settings.suffix_tokens)


def _load_target(
    plan: LoadPlan, heads: Sequence[HeadsToLoad], *, name: str, there: SharedWeights | None
) -> tuple[Decoder, Callable[[], object] | None]:
    """The target, and a function that ends the other processes that hold parts of it, if there are
    any. Its weights are shared with `there` if possible."""
    config, capacity = plan.settings, target_room(plan, heads)
    other = None if there is None else there.with_capacity(capacity)
    if other is not None:
        return other, None
    options = replace(
        options_for(config, capacity),
        quantise=config.quantise,
        kv_dtype=config.kv_dtype,
        rope=config.rope,
    )
    if config.tensor_parallel == 1:
        return load_model(plan.folder, options, name=name), None
    # Imported here: few need it, and it imports PyTorch's communication.
    from outrider.plugins.parallel.sharded import load_sharded

    target = load_sharded(plan.folder, options, size=config.tensor_parallel, name=name)
    return target, target.close


def _load_draft(
    plan: LoadPlan,
) -> tuple[Decoder | None, ChildOptions | None, tuple[str, ...]]:
    """The draft model, or the options with which its own process loads it; None without one. A
    model that was found and cannot be loaded is left out, with a note."""
    config, folder = plan.settings, plan.model_folder
    if folder is None:
        return None, None, ()
    masks = plan.mask_token is not None
    capacity = draft_room(plan.resolved, plan.num_slots, plan.window, masks=masks)
    options = options_for(config, capacity)
    if config.drafter_device != "auto":
        options = replace(options, device=config.drafter_device)
    if config.drafter_home == "process":
        return None, _child(plan, folder, options), ()
    if options.device != config.device:
        name = plan.resolved.drafter.name
        why = f"drafter_device: drafter {name} computes in one process with the target."
        raise ConfigError(why, hint="leave --drafter-device at auto")
    try:
        return load_model(folder, options, name=plan.draft_name), None, ()
    except (CheckpointError, ConfigError) as error:
        if not plan.found:
            raise
        return None, None, (unusable(MODEL, error),)


def _child(plan: LoadPlan, folder: Path, options: LoadOptions) -> ChildOptions:
    # Imported here: the plugin of a drafter in a process of its own.
    from outrider.plugins.lanes.ahead.choices import AheadChoices
    from outrider.plugins.lanes.process.options import ChildOptions

    config = plan.settings
    return ChildOptions(
        folder=str(folder),
        vocab_size=plan.target.vocab_size,
        num_common=plan.num_common,
        num_distributions=config.most_batch * config.most_k,
        num_slots=options.capacity.num_slots,
        page_size=config.page_size,
        max_rows=options.capacity.max_rows,
        max_logits=options.capacity.max_logits,
        chunk=config.most_chunk,
        batch_size=config.most_batch,
        states=asdict(options.capacity.states),
        max_tokens=plan.draft_window,
        name=plan.draft_name,
        dtype=config.dtype,
        device=options.device,
        sampler=config.sampler,
        force_reference=config.force_reference,
        deterministic=config.deterministic,
        threads=config.lane_threads or 1,
        ahead=AheadChoices.of(config) if plan.resolved.ahead else None,
    )


def options_for(config: EngineConfig, capacity: ModelCapacity) -> LoadOptions:
    """Options that apply to a draft model too: its weights are not quantised."""
    return LoadOptions(
        capacity=capacity,
        dtype=config.dtype,
        device=config.device,
        force_reference=config.force_reference,
        threads=config.threads,
    )


def _notes(plan: LoadPlan, target: Decoder, heads: Sequence[HeadsToLoad]) -> tuple[str, ...]:
    """Notes on limits of checkpoint and settings, and on fallbacks that were not requested."""
    config = plan.settings
    # Part of the drafts that the recurrent memory cannot hold.
    cut = history_note(config, target) if plan.resolved.drafter.drafts else None
    return (
        *target.config.notes,
        *plan.tokenizer.notes,
        *plan.notes,
        *_fallbacks(target, config),
        *idle_settings(plan.resolved),
        *(() if cut is None else (cut,)),
        *dict.fromkeys(note for one in heads for note in one.notes(plan.window)),
    )


def idle_settings(resolved: ResolvedConfig) -> tuple[str, ...]:
    """Notes on changed settings that have no effect here."""
    settings, kind = resolved.settings, resolved.drafter
    notes: list[str] = []
    if resolved.ahead and not kind.drafts_ahead:
        notes.append(
            f"ssd drafts ahead with a draft model only; drafter {kind.name} drafts in turns"
        )
    notes += [
        f"{setting} has no effect on drafter {kind.name}"
        for setting in dict.fromkeys(name for other in KINDS.values() for name in other.settings)
        if is_changed(settings, setting) and setting not in kind.settings
    ]
    if not kind.drafts and settings.controller not in (AUTO, "fixed"):
        notes.append(f"controller {settings.controller} has no effect on drafter {kind.name}")
    if not resolved.ahead and (settings.saguaro < 1 or settings.force_hits >= 0):
        notes.append("saguaro and force_hits have an effect with --schedule ssd only")
    if settings.tree_nodes and kind.drafts and resolved.why_chains:
        notes.append(f"tree_nodes{resolved.why_chains}")
    return tuple(notes)


def _fallbacks(target: Decoder, config: EngineConfig) -> Iterator[str]:
    if config.kv_budget:
        most = config.kv_budget + 1
        yield f"prompts of over {most} tokens lose keys, which changes the text"
    if not config.force_reference:
        refused = [reason for choice in target.kernels.choices for reason in choice.refusals]
        yield from (f"kernels: {reason}" for reason in refused[:1])


def machine_of(
    kernels: Kernels, device: torch.device, twin: Callable[[], tuple[CausalLM, Kernels] | None]
) -> Machine:
    """Resources of lanes on this machine; `twin` makes a target for another lane."""

    def lane_target() -> LaneTarget | None:
        found = twin()
        return None if found is None else LaneTarget(found[0], found[1].argmax, found[1].sampling)

    threads = kernels.threads
    return Machine(
        device=device,
        twin=lane_target,
        join_lane=kernels.join_lane,
        num_threads=int(threads.name) if threads else 1,
    )


def _twin_of(target: Decoder) -> tuple[CausalLM, Kernels] | None:
    other = target.twin()
    return None if other is None else (other, other.kernels)
