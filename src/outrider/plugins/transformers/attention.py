"""Attention of transformers models: the model runs, the paged KV cache answers.

transformers looks attention up by name. The function registered under our name forwards the call
to the object that is `attending` in this context: `ArenaCache` during a step, a survey while a
model is examined. `ArenaCache` is also the model's cache: `update` writes new rows into the slots
that the plan names and returns views, and attention reads the keys through the plan, in place.

Shapes:  N = packed tokens, O = packed query heads, H = query heads, G = KV heads, D = head size,
         S = slots, E = packed query, key and value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.errors import CheckpointError, ContractError, given
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import PackedPlan
from outrider.plugins.transformers.row_modules import unseen

Options = Mapping[str, Any]
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Attending(Protocol):
    def attend(
        self, query_1HND: Tensor, key_1GSD: Tensor, value_1GSD: Tensor, options: Options
    ) -> Tensor:
        """Mixed values of shape [1, N, H, D]."""
        ...

    def mask(self, mask: MaskFunction, local: int | None) -> Tensor | None:
        """Make the mask that `mask` describes, which reaches `local` tokens back (None: all). The
        layers that use it pass the result to `attend`."""
        ...


_attending: ContextVar[Attending] = ContextVar("attending")


@contextmanager
def attending(who: Attending) -> Generator[None]:
    token = _attending.set(who)
    try:
        yield
    finally:
        _attending.reset(token)


def answer_attention(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend on behalf of a model, in place of transformers' own attention."""
    del module
    options["attention_mask"] = attention_mask
    return _attending.get().attend(query, key, value, options), None


def answer_mask(
    *, mask_function: MaskFunction, local_size: int | None = None, **_: object
) -> Tensor | None:
    """Make a mask on behalf of a model."""
    return _attending.get().mask(mask_function, local_size)


class ArenaCache:
    """The `past_key_values` of a transformers model. Reads and writes the arena of `kv` in place.

    `begin` sets the plan of the next pass. `update` returns keys and values as views of all slots.
    The model passes them to `attend` and must not change them.
    """

    is_compileable = False

    def __init__(self, kv: PagedKV, kernels: Kernels, *, num_heads: int, max_rows: int) -> None:
        self._layers, self.attention = kv.layers, kernels.attention
        self._views = [(k_GSD[None], v_GSD[None]) for k_GSD, v_GSD in kv.layers]
        self._layer_at = {k_GSD.data_ptr(): i for i, (k_GSD, _) in enumerate(kv.layers)}
        num_kv_heads, _, head_dim = kv.layers[0][0].shape
        row_size = (num_heads + 2 * num_kv_heads) * head_dim
        # The kernel takes rows of q, k and v; it reads only the q of a row.
        self._qkv_NE = torch.zeros(max_rows, row_size, device=kv.arena.device)
        self._plan: PackedPlan | None = None
        self._slots_N = torch.empty(0, dtype=torch.int64)

    def begin(self, plan: PackedPlan) -> None:
        self._plan, self._slots_N = plan, plan.slots_N.long()

    def update(
        self, key_1GND: Tensor, value_1GND: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Append in place. The views have every slot, also those of other sequences."""
        k_GSD, v_GSD = self._layers[layer_idx]
        with unseen():
            k_GSD.index_copy_(1, self._slots_N, key_1GND[0].to(k_GSD.dtype))
            v_GSD.index_copy_(1, self._slots_N, value_1GND[0].to(v_GSD.dtype))
        return self._views[layer_idx]

    def attend(
        self, query_1HND: Tensor, key_1GSD: Tensor, value_1GSD: Tensor, options: Options
    ) -> Tensor:
        with unseen():
            return self._attend(query_1HND, key_1GSD, value_1GSD, options)

    def _attend(
        self, query_1HND: Tensor, key_1GSD: Tensor, value_1GSD: Tensor, options: Options
    ) -> Tensor:
        k_GSD, v_GSD = self._arena_of(key_1GSD, value_1GSD)
        _, num_heads, num_rows, head_dim = query_1HND.shape
        plan = given(self._plan, "plan")
        if num_rows != plan.num_tokens:
            raise ContractError("the plan is of another number of tokens")
        qkv_NE = self._qkv_NE[:num_rows]
        q_NHD = qkv_NE[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim)
        q_NHD.copy_(query_1HND[0].transpose(0, 1))
        out_NO = torch.empty(num_rows, num_heads * head_dim, device=qkv_NE.device)
        scale = options.get("scaling") or head_dim**-0.5
        self.attention(qkv_NE, k_GSD, v_GSD, plan, float(scale), out_NO)
        return out_NO.view(1, num_rows, num_heads, head_dim).to(query_1HND.dtype)

    def mask(self, mask: MaskFunction, local: int | None) -> None:
        """Make no mask: the plan says which keys each token sees, and the survey has checked that
        the model's masks are causal within its window."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a length far past any window, so that a model that relies on it fails its trial.

        There is no single length: a pass holds many sequences and gives each token's position.
        """
        del layer_idx
        return 1 << 16

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: only masks read it, and no mask is made."""
        del layer_idx
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (query length, offset 0): only masks read them, and no mask is made."""
        del layer_idx
        return query_length, 0

    def _arena_of(self, key_1GSD: Tensor, value_1GSD: Tensor) -> tuple[Tensor, Tensor]:
        """The arena's tensors behind two views. Raises CheckpointError for other tensors."""
        layer = self._layer_at.get(key_1GSD.data_ptr())
        if layer is not None:
            k_view, v_view = self._views[layer]
            same = key_1GSD.shape == k_view.shape and value_1GSD.shape == v_view.shape
            if same and value_1GSD.data_ptr() == v_view.data_ptr():
                return self._layers[layer]
        raise CheckpointError(
            "this model changes keys or values between its cache and its attention, so it cannot "
            "attend to the arena in place."
        )
