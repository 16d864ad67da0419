"""One model by itself: feed ids, get logits, fork, cut and reuse the KV cache.

The wrapper is the interface that scripts and notebooks know from other libraries, over the paged KV
cache of the engine. A `Cache` names one of its sequences. `forward` and `truncate_cache` fork the
cache that they get, which shares whole pages and copies a part of one page; they never change it.
The memory of a cache is freed with the last reference to it.

Shapes:  N = tokens fed, V = vocabulary, L = layers, G = KV heads, T = tokens held, D = head size.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, cast

import torch
from torch import Tensor

from outrider.api.tokenizer import Tokenizer
from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import arena_slots
from outrider.core.clock import host_ints
from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.spec import RecurrentCapacity
from outrider.kernels.operators import DTYPES, pick_device
from outrider.kernels.plan import floats
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import read_config
from outrider.models.loading import load_model, resolve, spec_of_config

_NEEDS = DraftNeeds()
# Unlike in the engine, logits of a whole prompt are stored; this limits the rows of one pass.
_MAX_ROWS = 64
_PAGE_SIZE = 32
_MAX_CONTEXT = 4096
_QUANTISED = ("int8", "int4")
# Memory for a cache of full length and one that was cut from it.
_NUM_CACHES = 2


class PagedModel(CausalLM, Protocol):
    """A CausalLM whose KV cache is an arena."""

    @property
    def state(self) -> PagedKV: ...


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Cache:
    """The first `length` tokens of a text, as read by a wrapper's model."""

    seq_id: int
    length: int


class ModelWrapper:
    """A model, its tokenizer and the caches made with it.

    The wrapper must be the only user of its model's memory. Not for several threads at once.
    A pass feeds `max_rows` tokens at most, all with logits; the model must have buffers for them.
    Raises ConfigError if `device` is given and is not the model's device.
    """

    def __init__(
        self,
        model: PagedModel,
        tokenizer: Tokenizer,
        device: str | torch.device | None = None,
        *,
        max_rows: int = _MAX_ROWS,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._max_rows = max_rows
        self._seq_ids = count()
        self._open: dict[int, weakref.finalize[..., Cache]] = {}
        # A collector may run at any moment, so it only notes the caches to close.
        self._dropped: deque[int] = deque()
        if device is not None and torch.device(device).type != self.device.type:
            raise ConfigError(
                f"the model is on {self.device.type}, not on {device}.",
                hint="name the device when the model is loaded",
            )

    @property
    def device(self) -> torch.device:
        return self.model.state.arena.device

    @property
    def vocab_size(self) -> int:
        return self.model.spec.vocab_size

    @property
    def param_count(self) -> int:
        return self.model.spec.num_parameters

    @property
    def memory_footprint_mb(self) -> float:
        """Size of the weights in MB of 10^6 bytes, without the arena."""
        return self.model.spec.weight_bytes / 1e6

    @property
    def eos_token_id(self) -> int | None:
        """The first id that ends a text, if the checkpoint names any."""
        return next(iter(self.model.spec.stop_ids or self.tokenizer.stop_ids), None)

    @property
    def free_tokens(self) -> int:
        """Arena tokens that no cache holds."""
        self._sweep()
        return self.model.state.num_free_tokens

    def __repr__(self) -> str:
        self._sweep()
        spec, dtype = self.model.spec, str(self.model.state.arena.dtype).removeprefix("torch.")
        return (
            f"ModelWrapper({spec.name!r}, {spec.num_parameters / 1e6:.1f} M parameters, {dtype} on "
            f"{self.device}, {len(self._open)} caches)"
        )

    def forward(
        self,
        ids: Sequence[int] | Tensor,
        past_key_values: Cache | None = None,
        use_cache: bool = True,
    ) -> tuple[Tensor, Cache | None]:
        """Read `ids` after the tokens of `past_key_values`. Returns logits [1, N, V] in float32,
        and a cache of all read tokens (None without `use_cache`).

        `ids` is a list, or a tensor of shape [N] or [1, N]. Raises ConfigError for ids that cannot
        be read or do not fit the window, CapacityError if the arena is full.
        """
        tokens = self._checked(ids, self.get_cache_length(past_key_values))
        seq_id = self._begin(past_key_values)
        try:
            logits_1NV = self._read(seq_id, tokens)[None]
        except BaseException:
            self.model.state.close(seq_id)
            raise
        if not use_cache:
            self.model.state.close(seq_id)
            return logits_1NV, None
        return logits_1NV, self._handle(seq_id)

    def greedy(self, ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """The greedy continuation of `ids`: the first largest logit each time, until the model ends
        the text (its stop token is then the last id) or the limit."""
        written, unread, past = list[int](), list(ids), None
        while len(written) < max_new_tokens and not self._ends(written):
            logits_1NV, past = self.forward(unread, past)
            unread = [int(logits_1NV[0, -1].argmax())]
            written += unread
        return written

    def _ends(self, written: Sequence[int]) -> bool:
        ends = (*self.model.spec.stop_ids, *self.tokenizer.stop_ids)
        return bool(written) and written[-1] in ends

    def get_cache_length(self, cache: Cache | None) -> int:
        """Number of held tokens; 0 for None."""
        return 0 if cache is None else cache.length

    def truncate_cache(self, cache: Cache, keep_length: int) -> Cache:
        """A cache of the first `keep_length` tokens; `cache` stays as it is."""
        if not 0 <= keep_length <= cache.length:
            raise ConfigError(f"keep_length must be between 0 and {cache.length}: {keep_length}.")
        return self._handle(self._begin(cache, keep_length))

    def key_values(self, cache: Cache) -> list[tuple[Tensor, Tensor]]:
        """Copies of each layer's keys and values, of shape [1, G, T, D]."""
        rows = self.model.state.read(self._alive(cache))
        rows_L2GTD = floats(rows) if rows.dtype == torch.int8 else rows
        return [(layer[0][None], layer[1][None]) for layer in rows_L2GTD]

    def kv_shapes(self, cache: Cache) -> list[tuple[int, int, int, int]]:
        """Each layer's [batch, KV heads, tokens, head size], the same for keys and values."""
        num_layers, _, num_heads, _, _ = self.model.state.arena.shape
        return [(1, num_heads, cache.length, self.model.spec.head_dim)] * num_layers

    def close(self, cache: Cache) -> None:
        """Free the memory of `cache` now; its forks live on."""
        seq_id = self._alive(cache)
        self._open.pop(seq_id).detach()
        self.model.state.close(seq_id)

    def reset_cache(self) -> None:
        """Free every cache; caches that are still referenced cannot be used any more."""
        self._sweep()
        for seq_id, finalizer in self._open.items():
            finalizer.detach()
            self.model.state.close(seq_id)
        self._open.clear()

    def _checked(self, ids: Sequence[int] | Tensor, length: int) -> list[int]:
        tokens = listed(ids)
        if not tokens:
            raise ConfigError("no ids to read.", hint="feed at least one")
        foreign = [i for i in tokens if not 0 <= i < self.vocab_size]
        if foreign:
            raise ConfigError(f"ids outside the vocabulary of {self.vocab_size}: {foreign[:5]}.")
        window = self.model.spec.max_tokens
        if length + len(tokens) > window:
            raise ConfigError(
                f"{length} tokens held and {len(tokens)} more do not fit a window of {window}."
            )
        return tokens

    def _begin(self, source: Cache | None, length: int | None = None) -> int:
        """A new sequence, empty or forked from the beginning of `source`."""
        self._sweep()
        seq_id = next(self._seq_ids)
        if source is None:
            self.model.state.open(seq_id, ())
        else:
            self.model.state.fork(self._alive(source), seq_id, length)
        return seq_id

    def _read(self, seq_id: int, tokens: Sequence[int]) -> Tensor:
        pieces: list[Tensor] = []
        for start in range(0, len(tokens), self._max_rows):
            part = tokens[start : start + self._max_rows]
            out = self.model.step([StepRow.chain(seq_id, part)], _NEEDS)
            pieces.append(out.logits_MV.clone())
            self.model.state.commit({seq_id: range(len(part))})
        return torch.cat(pieces)

    def _handle(self, seq_id: int) -> Cache:
        cache = Cache(seq_id, self.model.state.length(seq_id))
        finalizer = weakref.finalize(cache, self._dropped.append, seq_id)
        finalizer.atexit = False
        self._open[seq_id] = finalizer
        return cache

    def _alive(self, cache: Cache) -> int:
        finalizer = self._open.get(cache.seq_id)
        found = finalizer and finalizer.peek()
        if not found or found[0] is not cache:
            raise ConfigError(
                "this cache is not one of the wrapper's, or it was freed.",
                hint="forward without past_key_values starts a new one",
            )
        return cache.seq_id

    def _sweep(self) -> None:
        """Close the caches that the collector found unused."""
        while self._dropped:
            seq_id = self._dropped.popleft()
            if self._open.pop(seq_id, None) is not None:
                self.model.state.close(seq_id)


def listed(ids: Sequence[int] | Tensor) -> list[int]:
    """Ids as a list. Raises ConfigError for a tensor of several sequences."""
    if not isinstance(ids, Tensor):
        return list(ids)
    if ids.dim() > 1 and ids.shape[0] != 1:
        raise ConfigError("one sequence at a time.", hint="call it for each row")
    return host_ints(ids.flatten())


def load_wrapper(
    model_id: str,
    dtype: str = "auto",
    device: str = "auto",
    *,
    quantise: str = "none",
    kv_dtype: str = "auto",
) -> tuple[ModelWrapper, Tokenizer]:
    """Load a model by alias, folder or hub id, ready for `forward`. Returns it and its tokenizer.

    `dtype` is auto (the checkpoint's own), float32, bfloat16 or float16; `quantise` is none, int8
    or int4, for its matrices, which a `dtype` of int8 or int4 means as well; `kv_dtype` is auto or
    int8, for keys and values. The arena holds two full windows, of 4096 tokens at most. Raises
    ConfigError, CheckpointError or MachineError.
    """
    if dtype in _QUANTISED:
        if quantise not in ("none", dtype):
            raise ConfigError(
                f"dtype {dtype} and quantise {quantise} are two formats for the same matrices.",
                hint="leave one of the two out",
            )
        dtype, quantise = "auto", dtype
    if dtype not in ("auto", *DTYPES):
        known = did_you_mean(dtype, ("auto", *DTYPES, *_QUANTISED))
        raise ConfigError(f"dtype: unknown value {dtype!r}.", hint=known)
    folder = resolve(model_id)
    tokenizer = Tokenizer.load(folder)
    config = read_config(folder)
    own = config.dtype if dtype == "auto" else dtype
    num_slots = arena_slots(
        spec_of_config(config, own, kv_dtype),
        num_slots=_NUM_CACHES * min(config.max_tokens, _MAX_CONTEXT),
        device=pick_device(device),
        states=RecurrentCapacity(),
    )
    capacity = ModelCapacity(
        num_slots=num_slots, page_size=_PAGE_SIZE, max_rows=_MAX_ROWS, max_logits=_MAX_ROWS
    )
    options = LoadOptions(
        capacity=capacity, dtype=dtype, device=device, quantise=quantise, kv_dtype=kv_dtype
    )
    # Decoders of every family keep their KV in an arena.
    model = cast("PagedModel", load_model(folder, options, name=model_id))
    return ModelWrapper(model, tokenizer), tokenizer
