"""Memory of a pair part by part, computed before any allocation, and a check that it fits.

The sizes come from configurations, files and settings; models/decoder.py allocates by them. The
parts are compared with every limit of the machine (cache/pages.py). A KV cache without a requested
size shrinks until all fits; a pair that does not fit is refused, with the parts and the settings
under which it would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from outrider.api.plan import LoadPlan
from outrider.cache.pages import ARENA_SHARE, MemoryLimit, limits, total_bytes
from outrider.core.config import EngineConfig
from outrider.core.errors import CapacityError
from outrider.core.fields import size
from outrider.core.resolve import ResolvedConfig
from outrider.core.spec import HEAD_BYTES, QUANTISED_BYTES, DecoderConfig, ModelSpec
from outrider.drafters.common.draft_model import LEAST_SHARE
from outrider.engine.build import draft_capacity, model_capacity, most_staged, whole_pages
from outrider.engine.stages import SCORED_ROWS
from outrider.kernels.operators import DTYPES, pick_device
from outrider.kernels.registry import is_native
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import ModelCapacity
from outrider.models.families import FAMILIES, read_config
from outrider.models.heads import HeadsToLoad
from outrider.models.loading import spec_of_config
from outrider.models.weights import StoredWeights, stored_in

# Bytes that Python holds for a page, and for tokens in it once a text is remembered.
_PAGE_BYTES = 256
# Prefix of the names of parts that are weights.
WEIGHTS = "weights of the "
# Temporary tensors and libraries; for limits of addresses also stacks and pools of threads.
_WORKING_BYTES, _WORKING_ADDRESSES = 64 << 20, 192 << 20
# Weights that are quantised at once, and the temporary bytes of each (kernels/reference/linear.py).
_QUANTISED_AT_ONCE, _QUANTISING_BYTES = 1 << 23, 20
# Temporary bytes of a weight in int4: a matrix becomes codes and blocks before it is packed.
_BLOCK_BYTES = 3

When = Literal["held", "loading", "addresses"]


@dataclass(frozen=True, slots=True)
class Part:
    """`num_bytes` on `device`: weights and other memory "held" for good, temporary memory while
    "loading", and "addresses", which count only against limits of addresses."""

    name: str
    num_bytes: int
    device: str
    when: When = "held"
    is_weights: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """The checkpoints' contents; `draft` is None if none is loaded. `heads` have the heads to load,
    with memory for no tokens, and their files."""

    target: StoredWeights
    draft: StoredWeights | None = None
    draft_config: DecoderConfig | None = None
    heads: tuple[tuple[HeadsToLoad, StoredWeights], ...] = ()


@dataclass(frozen=True, slots=True)
class _Model:
    """One model of a pair: its files, its capacity, and the number of lanes with buffers for it.
    `shares_table` says that a tied output head of int4 is the table of tokens too."""

    role: str
    spec: ModelSpec
    stored: StoredWeights
    capacity: ModelCapacity
    device: str
    in_float32: bool
    num_lanes: int
    shares_table: bool = False


def files_of(plan: LoadPlan) -> Files:
    """The plan's checkpoints. Raises CheckpointError for missing weights."""
    files, model = Files(stored_in(plan.folder)), plan.model_folder
    if model is not None:
        files = replace(files, draft=stored_in(model), draft_config=read_config(model))
    return replace(files, heads=tuple((one, stored_in(one.folder)) for one in plan.heads(0)))


def target_room(plan: LoadPlan, heads: Sequence[HeadsToLoad]) -> ModelCapacity:
    config = plan.settings
    rows = plan.resolved.pass_rows
    most = max(config.most_chunk + rows, config.kv_window if config.kv_budget else 0)
    capacity = model_capacity(
        config,
        plan.num_slots,
        max_rows=most,
        max_logits=max(rows, SCORED_ROWS),
        window=plan.window,
        num_staged=most_staged(plan.resolved),
    )
    return replace(capacity, hidden_layers=plan.hidden_layers(heads))


def draft_room(
    resolved: ResolvedConfig, num_slots: int, window: int = 0, *, masks: bool = False
) -> ModelCapacity:
    """Capacity of a draft model for a target with so many slots, including the predicted verdicts
    of a draft model that drafts ahead, and the rows of one that `masks` tokens not yet drafted."""
    config, more = resolved.settings, draft_capacity(resolved)
    # A process of its own gets no such memory.
    apart = config.drafter_home != "process"
    masked = config.most_batch * resolved.k if masks else 0
    capacity = model_capacity(
        config,
        num_slots + config.most_batch * whole_pages(more.num_slots, config.page_size),
        max_rows=max(config.most_chunk, 2 * config.most_batch + masked, more.num_rows),
        max_logits=max(config.most_batch, more.num_logits, masked),
        window=window,
        num_staged=apart * (most_staged(resolved) + LEAST_SHARE + more.num_slots),
    )
    # A model that drafts ahead stages all its branches.
    history = max(capacity.states.history, more.num_slots)
    return replace(capacity, states=replace(capacity.states, history=history))


def memory_parts(plan: LoadPlan, files: Files, *, has_weights: bool = False) -> tuple[Part, ...]:
    """Memory of the pair with `plan.num_slots` positions; nothing is read or allocated. With
    `has_weights` another engine already holds the target's weights."""
    config = plan.settings
    device = pick_device(config.device).type
    lanes = {"single": 1, "pd": 2}.get(config.schedule, 3)
    heads = [_for_slots(one, plan.num_slots) for one, _ in files.heads]
    in_float32 = _in_float32(plan.target, config, device)
    target = _Model(
        "target",
        replace(
            spec_of_config(plan.target, config.dtype, config.kv_dtype),
            quantise=config.quantise,
            stored_bytes=_stored_bytes(files.target, config, config.quantise, in_float32, device),
        ),
        files.target,
        target_room(plan, heads),
        device,
        in_float32=in_float32,
        num_lanes=lanes,
        # Heads that draft need the table as numbers.
        shares_table=device == "cpu" and isinstance(plan.target, LlamaConfig) and not heads,
    )
    parts, captured = [*_model_parts(target)], _captured_bytes(target, config, plan.resolved.k + 1)
    if has_weights:
        parts = [part for part in parts if not part.is_weights and part.when != "loading"]
    if files.draft is not None and files.draft_config is not None:
        home = device if config.drafter_device == "auto" else config.drafter_device
        in_float32 = _in_float32(files.draft_config, config, home)
        kept = _stored_bytes(files.draft, config, "none", in_float32, home)
        draft = _Model(
            "draft",
            replace(spec_of_config(files.draft_config, config.dtype), stored_bytes=kept),
            files.draft,
            draft_room(
                plan.resolved, plan.num_slots, plan.window, masks=plan.mask_token is not None
            ),
            home,
            in_float32=in_float32,
            num_lanes=1,
        )
        parts += _model_parts(draft)
        captured += _captured_bytes(draft, config, 2)
        distributions = config.most_batch * config.most_k * plan.target.vocab_size * 4
        parts.append(Part("distributions of drafts", distributions, device))
    if device == "cuda" and config.fused_round:
        parts.append(Part("captured rounds", captured, device))
    for one, (_, stored) in zip(heads, files.heads, strict=True):
        parts += _heads_parts(plan, one, target, stored)
    if plan.own is not None and plan.own.quantise != "none":
        copy = replace(target, spec=replace(target.spec, quantise=plan.own.quantise))
        taken = _matrices_bytes(copy)
        parts.append(Part(f"{WEIGHTS}copy that drafts", taken, device, is_weights=True))
    extra = _WORKING_ADDRESSES if device == "cpu" else 0
    return (
        *parts,
        *([] if plan.own is None else _copy_parts(target, plan.own.quantise)),
        Part("temporary memory", _WORKING_BYTES, device),
        Part("threads", extra, device, "addresses"),
    )


def _for_slots(heads: HeadsToLoad, num_slots: int) -> HeadsToLoad:
    """Heads that have memory for no tokens, with that for texts of `num_slots`."""
    capacity = heads.capacity
    return replace(heads, capacity=replace(capacity, num_slots=capacity.num_slots + num_slots))


def _in_float32(model: DecoderConfig, config: EngineConfig, device: str) -> bool:
    """True if the matrices are held as float32, as the reference kernels of CPUs hold all."""
    dtype = DTYPES.get(model.dtype if config.dtype == "auto" else config.dtype, torch.float32)
    return device == "cpu" and not is_native(torch.device(device), dtype, config.force_reference)


def _stored_bytes(
    stored: StoredWeights, config: EngineConfig, quantise: str, in_float32: bool, device: str
) -> int:
    """Bytes of blocks that stay in their stored form; 0 if they become floats."""
    stays = device == "cpu" and not in_float32 and stored.stays(config.dtype, quantise)
    return stored.held_bytes if stays else 0


def _model_parts(model: _Model) -> Iterator[Part]:
    spec, capacity, device = model.spec, model.capacity, model.device
    of = f"of the {model.role}"
    yield Part(WEIGHTS + model.role, _weights_bytes(model), device, is_weights=True)
    yield Part(f"loading {of}", _loading_bytes(model), device, "loading")
    if device == "cpu":
        # Files are mapped while they are read, and every matrix begins in a page of 2 MB.
        mapped = model.stored.num_bytes + model.stored.largest_file
        pages = 4 * spec.num_layers * (4 << 20)
        pages = min(pages, spec.weight_bytes) + (32 << 20)
        yield Part(f"mapped files {of}", mapped + pages, device, "addresses")
    arena = spec.arena_bytes(
        capacity.num_slots, capacity.num_local_slots(spec) or capacity.num_slots
    )
    yield Part(f"KV arena {of}, {capacity.num_slots} tokens", arena, device)
    kept = capacity.num_slots * len(capacity.hidden_layers) * spec.hidden_size * spec.bytes_per_kv
    yield Part(f"hidden states {of}", kept, device)
    yield Part(f"recurrent states {of}", capacity.states.num_bytes(spec), device)
    yield Part(f"positions and pages {of}", tables_bytes(spec, capacity), device)
    yield Part(f"scratch {of}", model.num_lanes * _scratch_bytes(spec, capacity), device)
    # Logits, and the distributions that sampling makes of them.
    logits = 2 * model.num_lanes * capacity.max_logits * spec.vocab_size * 4
    yield Part(f"logits {of}", logits, device)
    if device.startswith("cuda"):
        # Imported here: the plugin of a device that most machines lack.
        from outrider.plugins.gpu.kernels.scratch import PART, attention_scratch, workspace_bytes

        num_parts = -(-capacity.num_positions(spec.max_tokens, reach=spec.reach) // PART)
        scratch = attention_scratch(capacity.max_rows, spec.num_heads, spec.head_dim, num_parts)
        yield Part(f"attention {of}", model.num_lanes * workspace_bytes(scratch), device)


def _copy_parts(target: _Model, quantise: str) -> Iterator[Part]:
    """Memory of a copy of the target without its matrices; tables are the target's."""
    spec, capacity = target.spec, target.capacity
    if quantise != "none":
        copy = replace(target, spec=replace(spec, quantise=quantise))
        yield Part("loading of the copy", _loading_bytes(copy), target.device, "loading")
    taken = _scratch_bytes(spec, capacity) + capacity.max_logits * spec.vocab_size * 4
    yield Part("scratch and logits of the copy", taken, target.device)


def _heads_parts(
    plan: LoadPlan, heads: HeadsToLoad, target: _Model, stored: StoredWeights
) -> Iterator[Part]:
    # Their own keys and values are of the weights' precision.
    spec, of = replace(target.spec, kv_dtype="auto"), f"of the {heads.kind} heads"
    capacity = heads.capacity
    weights = stored.num_bytes * spec.bytes_per_weight // 2
    if heads.folder == plan.folder:
        weights = spec.num_parameters * spec.bytes_per_weight // spec.num_layers
    yield Part(f"{WEIGHTS}{heads.kind} heads", weights, target.device, is_weights=True)
    num_layers = spec.num_layers if spec.num_kv_layers is None else spec.num_kv_layers
    if heads.format.arena:
        arena = (
            capacity.num_slots * spec.kv_bytes_per_token // max(1, num_layers) * heads.num_layers
        )
        tables = tables_bytes(spec, capacity)
        yield Part(f"KV arena {of}, {capacity.num_slots} tokens", arena, target.device)
        yield Part(f"positions and pages {of}", tables, target.device)
    taken = _scratch_bytes(spec, capacity) + capacity.max_logits * spec.vocab_size * 4
    yield Part(f"scratch and logits {of}", taken, target.device)


def _weights_bytes(model: _Model) -> int:
    """Bytes of the weights as held: a tied output head is a separate copy of the table in another
    form, except in int4, where it is the table too."""
    spec = model.spec
    table = spec.vocab_size * spec.hidden_size * spec.bytes_per_weight
    if spec.stored_bytes and spec.quantise == "none":
        # GGUF files have the table in blocks, which the head shares; folders have it in floats.
        copied = not model.stored.checkpoint.is_gguf and not model.stored.has_head
        return spec.stored_bytes + copied * table
    is_head = spec.quantise == "int4" and model.shares_table and not model.stored.has_head
    return _matrices_bytes(model) + (0 if is_head else table)


def _matrices_bytes(model: _Model) -> int:
    """Bytes of all weights but the table of tokens."""
    spec = model.spec
    head = spec.vocab_size * spec.hidden_size
    matrices, looked_up = max(0, spec.num_multiplied - head), spec.looked_up * spec.bytes_per_weight
    if model.stored.has_head:
        matrices -= head
    elif model.device != "cpu" and spec.quantise == "none":
        head = 0
    if spec.quantise == "none":
        width = 4 if model.in_float32 else spec.bytes_per_weight
        return (matrices + head) * width + looked_up
    width, of_head = QUANTISED_BYTES[spec.quantise], HEAD_BYTES[spec.quantise]
    if model.in_float32:
        # The reference holds a byte per code, and the scales in float32.
        width, of_head = (1.25, 1.125) if spec.quantise == "int4" else (1.0, 1.0)
    return int(matrices * width + head * of_head) + looked_up


def _loading_bytes(model: _Model) -> int:
    """Temporary bytes for one matrix at a time: as stored, as converted, and for quantising."""
    spec = model.spec
    attended = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    widest = max(spec.vocab_size, attended, 2 * spec.ffn_size)
    weights = min(widest * spec.hidden_size, spec.num_parameters)
    most = 2 * weights * max(4 if model.in_float32 else 0, spec.bytes_per_weight)
    if model.stored.checkpoint.is_gguf and not spec.stored_bytes:
        # Blocks become float32 first.
        most += 4 * weights
    if spec.quantise == "int4":
        most += weights * _BLOCK_BYTES
    elif spec.quantise == "int8":
        most += min(weights, _QUANTISED_AT_ONCE) * _QUANTISING_BYTES
    return most


def tables_bytes(spec: ModelSpec, capacity: ModelCapacity) -> int:
    """Bytes of cosines and sines in float32, and of the lists of pages."""
    positions = capacity.num_positions(spec.max_tokens, reach=spec.reach)
    return (
        positions * sum(spec.head_dims) * 4 + capacity.num_slots * _PAGE_BYTES // capacity.page_size
    )


def _scratch_bytes(spec: ModelSpec, capacity: ModelCapacity) -> int:
    """Bytes of the buffers of one step (models/decoder.py), float32. A mixture copies every row to
    each of its experts and keeps their outputs; latent attention has queries and values of heads,
    together smaller than what heads attend to."""
    attended = spec.num_heads * spec.head_dim
    wide = 3 * spec.hidden_size + 2 * attended + 2 * spec.num_kv_heads * spec.head_dim
    wide += attended * spec.values_in_keys
    if spec.num_experts:
        wide += (2 * spec.num_active_experts + 1) * spec.hidden_size
    return capacity.max_rows * 4 * (wide + 3 * spec.ffn_size)


def _captured_bytes(model: _Model, config: EngineConfig, width: int) -> int:
    """Bytes of rounds in a CUDA graph, of `width` rows per text: buffers, logits, slots, pages."""
    spec, num_rows = model.spec, config.most_batch * width
    positions = model.capacity.num_positions(spec.max_tokens, reach=spec.reach)
    rows = _scratch_bytes(spec, replace(model.capacity, max_rows=num_rows))
    return rows + 4 * num_rows * spec.vocab_size + 8 * config.most_batch * positions


def needed(parts: Sequence[Part], *, of_addresses: bool) -> int:
    """The peak of all parts. Memory held in addition to weights is written when all are loaded;
    its addresses are reserved before."""
    weights = sum(part.num_bytes for part in parts if part.is_weights)
    rest = sum(part.num_bytes for part in parts if part.when == "held" and not part.is_weights)
    loading = max((part.num_bytes for part in parts if part.when == "loading"), default=0)
    if not of_addresses:
        return weights + max(rest, loading)
    return weights + rest + loading + sum(p.num_bytes for p in parts if p.when == "addresses")


# Largest share of an arena's memory, if its size is automatic, for tables of positions and lists of
# pages. Models of any size stay far below it; windows that no model has do not.
_TABLES_SHARE = 1 / 32
# A shrunk arena leaves a tenth of the free memory to others; advised settings leave more, as they
# must fit when they are tried.
_HEADROOM, _ADVISED = 0.9, 0.8
# The smallest useful arena: a short prompt and its answer.
_LEAST_TOKENS = 256


def fitted(plan: LoadPlan, *, has_weights: bool = False) -> tuple[LoadPlan, tuple[Part, ...]]:
    """`plan`, with a smaller arena if that alone makes it fit and its size is automatic, and with
    fewer requests at once if their number is automatic; and its parts. With `has_weights` another
    engine holds the target's. Raises CapacityError if it does not fit, CheckpointError if files are
    missing."""
    files = files_of(plan)
    bounds = _bounds(plan)
    parts_of = partial(memory_parts, files=files, has_weights=has_weights)

    def fits(tried: LoadPlan, share: float) -> bool:
        return not _lacking(parts_of(tried), bounds, share)

    def refuse(tried: LoadPlan) -> CapacityError:
        parts = parts_of(tried)
        ways = _ways(tried, lambda other: fits(other, _ADVISED))
        return _refusal(parts, _lacking(parts, bounds, 1.0)[0], next(ways, None))

    if plan.auto_batch:
        plan = _as_many_as_fit(plan, fits)
    if plan.settings.arena_tokens:
        if not fits(plan, 1.0):
            raise refuse(plan)
        return plan, parts_of(plan)
    least = replace(plan, num_slots=_least_slots(plan))
    if not fits(least, 1.0):
        raise refuse(least)
    plan = _with_small_tables(plan)
    if not fits(plan, 1.0):
        whole = plan.num_slots
        plan = _largest_arena(plan, lambda other: fits(other, _HEADROOM)) or least
        note = f"memory is short: the arena holds {plan.num_slots} tokens, not {whole}"
        plan = replace(plan, notes=(*plan.notes, note))
    return plan, parts_of(plan)


def _as_many_as_fit(plan: LoadPlan, fits: Callable[[LoadPlan, float], bool]) -> LoadPlan:
    """Halve the requests at once until the arena that fits holds a usual text for each."""
    while plan.settings.most_batch > 1:
        small = plan if plan.settings.arena_tokens else _with_small_tables(plan)
        if not fits(small, 1.0):
            small = _largest_arena(plan, lambda other: fits(other, _HEADROOM))
        if small is not None and small.holds_all:
            break
        plan = plan.with_batch(plan.settings.most_batch // 2)
    return plan


def _bounds(plan: LoadPlan) -> dict[str, tuple[MemoryLimit, ...]]:
    config = plan.settings
    home = config.device if config.drafter_device == "auto" else config.drafter_device
    names = {config.device, home if plan.model_folder is not None else config.device}
    devices = [pick_device(name) for name in names]
    return {str(device): limits(device, config.memory_share) for device in devices}


def _lacking(
    parts: Sequence[Part], bounds: Mapping[str, tuple[MemoryLimit, ...]], share: float
) -> list[tuple[int, MemoryLimit]]:
    """(bytes needed, limit) of limits with less than `share` left, the most exceeded ones first."""
    found: list[tuple[int, MemoryLimit]] = []
    for device, all_limits in bounds.items():
        own = [part for part in parts if part.device == device]
        for limit in all_limits:
            total = needed(own, of_addresses=limit.of_addresses)
            if total > limit.free * share:
                found.append((total, limit))
    return sorted(found, key=lambda one: one[1].free - one[0])


def _least_slots(plan: LoadPlan) -> int:
    """Slots that must fit: a requested context, or else a short text."""
    config = plan.settings
    least = plan.window if config.context else min(plan.window, _LEAST_TOKENS, plan.num_slots)
    return whole_pages(least, config.page_size)


def _largest_arena(plan: LoadPlan, fits: Callable[[LoadPlan], bool]) -> LoadPlan | None:
    """The largest arena of at most `plan.num_slots`, None if the smallest does not fit either."""
    size = plan.settings.page_size
    high = plan.num_slots // size
    low = min(_least_slots(plan) // size, high)
    if not fits(replace(plan, num_slots=low * size)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(plan, num_slots=middle * size)):
            low = middle
        else:
            high = middle - 1
    return replace(plan, num_slots=low * size)


def _with_small_tables(plan: LoadPlan) -> LoadPlan:
    """Shrink the arena until its tables are small: unlike it, they are written whole at once."""
    config = plan.settings
    if config.context:
        return plan
    spec = spec_of_config(plan.target, config.dtype)
    whole = total_bytes(pick_device(config.device)) * config.memory_share
    most = whole * ARENA_SHARE * _TABLES_SHARE

    def fits(tried: LoadPlan) -> bool:
        return tables_bytes(spec, target_room(tried, ())) <= most

    return plan if fits(plan) else _largest_arena(plan, fits) or plan


def _ways(plan: LoadPlan, fits: Callable[[LoadPlan], bool]) -> Iterator[str]:
    """Flags under which it fits, the smallest changes first."""
    config = plan.settings
    if config.arena_tokens:
        found = _largest_arena(plan, fits)
        if found is not None:
            yield f"--arena-tokens {found.num_slots}"
    elif config.context:
        found = _largest_arena(plan.with_settings(replace(config, context=0)), fits)
        if found is not None and found.num_slots > config.most_k + 2:
            yield f"--context {min(found.num_slots, plan.window)}"
    steps = list(_steps(plan))
    for name, value in steps:
        if fits(plan.with_settings(replace(config, **{name: value}))):
            yield _flag(name, value)
    # No single flag is enough: combine the last of each, one after another.
    together: dict[str, Any] = {}
    for name, value in dict(steps).items():
        together[name] = value
        small = plan.with_settings(replace(config, **together))
        if not config.arena_tokens:
            small = replace(small, num_slots=_least_slots(small))
        if fits(small):
            yield " ".join(_flag(*one) for one in together.items())


def _steps(plan: LoadPlan) -> Iterator[tuple[str, Any]]:
    """Settings that take less memory, and values of each, the smallest changes first."""
    config = plan.settings
    yield from (("batch_size", batch) for batch in _halves(config.most_batch, 1))
    yield from (("prefill_chunk", chunk) for chunk in _halves(config.most_chunk, 32))
    if plan.target.family in FAMILIES and config.tensor_parallel == 1:
        order = ("none", "int8", "int4")
        yield from (("quantise", kind) for kind in order[order.index(config.quantise) + 1 :])


def _flag(setting: str, value: object) -> str:
    return f"--{setting.replace('_', '-')} {value}"


def _halves(count: int, least: int) -> Iterator[int]:
    while count // 2 >= least:
        count //= 2
        yield count


def table_of(parts: Sequence[Part]) -> str:
    """A line for each part that takes a megabyte or more."""
    shown = [part for part in parts if part.num_bytes >= 1_000_000 and part.when != "addresses"]
    width = max((len(part.name) for part in shown), default=0)
    return "\n".join(f"  {part.name:{width}}  {size(part.num_bytes):>9}" for part in shown)


def _refusal(
    parts: Sequence[Part], lacking: tuple[int, MemoryLimit], way: str | None
) -> CapacityError:
    total, limit = lacking
    other = "higher limit" if limit.of_addresses else "machine with more memory"
    loading = [part for part in parts if part.when != "loading"]
    return CapacityError(
        f"the models and their memory need {size(total)}, and {size(limit.free)} are left "
        f"({limit.name}):\n{table_of(loading)}",
        hint=way or f"a smaller model, or a {other}",
    )
