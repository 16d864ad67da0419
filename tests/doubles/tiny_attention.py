"""A two-layer attention model in float64 that reads the real arena by the real plan.

It gathers, for every packed token, exactly the keys that the plan names, so a slot that the plan
should not show (or a row that was not copied) changes the logits. Positions enter the input, so a
wrong position does too. Logits are a view of a buffer that the next step fills with NaN, as the
contract allows. A step computes in NumPy, on the arena's own memory: its arrays are small, and a
call of NumPy takes a fraction of one of PyTorch.

Shapes:  N = packed tokens, T = keys, V = vocabulary, D = width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.cache.pages import ArenaSize
from outrider.core.clock import host_ints
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.spec import ModelSpec
from outrider.kernels.plan import PackedPlan

Array = NDArray[np.float64]
# An array of places, or of whether there is one.
Places = NDArray[np.int32]
Flags = NDArray[np.bool_]


def live_slots(store: PagedKV) -> list[int]:
    """Slots that hold committed rows of open sequences.

    The rest is dead space, but for free pages whose beginning `open` may still find.
    """
    open_now = store._sequences  # pyright: ignore[reportPrivateUsage]
    return sorted({slot for seq_id in open_now for slot in host_ints(store.slots(seq_id))})


def poison_dead_space(store: PagedKV) -> None:
    """Overwrite every slot that holds no committed row; nothing may be staged."""
    dead = torch.ones(store.arena.shape[3], dtype=torch.bool)
    dead[live_slots(store)] = False
    store.arena[:, :, :, dead] = torch.nan


WIDTH = 4
NUM_LAYERS = 2


def toy_spec(name: str, vocab_size: int, stop_ids: tuple[int, ...] = ()) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="toy",
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        num_layers=NUM_LAYERS,
        num_heads=1,
        num_kv_heads=1,
        head_dim=WIDTH,
        ffn_size=WIDTH,
        max_tokens=4096,
        num_parameters=1,
        bytes_per_weight=8,
        bytes_per_kv=8,
        stop_ids=stop_ids,
    )


class TinyAttentionLM:
    """`seed` makes the weights. The arena starts as NaN: nothing unwritten may be read."""

    def __init__(
        self, *, vocab_size: int = 11, seed: int = 0, page_size: int = 4, num_slots: int = 256
    ) -> None:
        rng = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        self.spec = toy_spec("tiny-attention", vocab_size)
        self.state = PagedKV(
            self.spec,
            dtype=torch.float64,
            device=torch.device("cpu"),
            size=ArenaSize(num_slots, page_size),
        )
        self.state.arena.fill_(torch.nan)
        self._embed_VD = weights(vocab_size, WIDTH)
        self._qkv_LDE = weights(NUM_LAYERS, WIDTH, 3 * WIDTH)
        self._head_DV = 2 * weights(WIDTH, vocab_size)
        self._logits_MV = torch.empty(0)
        self._staged: dict[int, set[int]] = {}

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        del needs
        plan = self.state.plan(rows)
        for row, slots in zip(rows, _by_row(plan, len(rows)), strict=True):
            self._staged.setdefault(row.seq_id, set()).update(slots)
        embed_VD: Array = self._embed_VD.numpy()
        hidden_ND = embed_VD[plan.tokens_N.numpy()] + _position_code(plan.positions_N.numpy())
        keys = _keys(plan)
        # The memory may be another model's.
        for qkv_DE, (k_GSD, v_GSD) in zip(self._qkv_LDE.numpy(), self.state.layers, strict=True):
            layer = qkv_DE, k_GSD[0].numpy(), v_GSD[0].numpy()
            hidden_ND = hidden_ND + _attended(layer, hidden_ND, plan, keys)
        self._logits_MV.fill_(torch.nan)
        self._logits_MV = torch.as_tensor((hidden_ND @ self._head_DV.numpy())[_wanted(rows)])
        return StepOutput(self._logits_MV[:])

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Logits after every token of a text, without memory, plan or pages: the definition."""
        hidden_ND = self._embed_VD[list(tokens)] + torch.as_tensor(
            _position_code(np.arange(len(tokens)))
        )
        future_NN = torch.ones(len(tokens), len(tokens)).triu(1).bool()
        for layer in range(NUM_LAYERS):
            q_ND, k_ND, v_ND = (hidden_ND @ self._qkv_LDE[layer]).chunk(3, dim=-1)
            shares_NN = (q_ND @ k_ND.T).masked_fill(future_NN, float("-inf")).softmax(-1)
            hidden_ND = hidden_ND + torch.tanh(shares_NN @ v_ND)
        return hidden_ND @ self._head_DV

    def poison_rejected(self, seq_id: int) -> None:
        """Overwrite, after a commit, what the sequence had staged and did not keep."""
        dead = self._staged.pop(seq_id, set()) - set(live_slots(self.state))
        self.state.arena[:, :, :, sorted(dead)] = torch.nan

    def poison_dead_space(self) -> None:
        """Overwrite every slot that holds no committed row; nothing may be staged."""
        poison_dead_space(self.state)


def _attended(
    layer: tuple[Array, Array, Array],
    hidden_ND: Array,
    plan: PackedPlan,
    keys: tuple[Places, Flags],
) -> Array:
    qkv_DE, k_SD, v_SD = layer
    q_ND, k_ND, v_ND = np.split(hidden_ND @ qkv_DE, 3, axis=-1)
    own_N = plan.slots_N.numpy()
    k_SD[own_N], v_SD[own_N] = k_ND, v_ND
    slots_NT, hidden_NT = keys
    scores_NT = np.where(hidden_NT, -np.inf, (k_SD[slots_NT] * q_ND[:, None]).sum(-1))
    shares_NT = np.exp(scores_NT - scores_NT.max(-1, keepdims=True))
    shares_NT /= shares_NT.sum(-1, keepdims=True)
    return np.tanh((shares_NT[..., None] * v_SD[slots_NT]).sum(1))


def _by_row(plan: PackedPlan, num_rows: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(num_rows)]
    for index, slot in zip(host_ints(plan.seq_N), host_ints(plan.slots_N), strict=True):
        found[index].append(slot)
    return found


def _keys(plan: PackedPlan) -> tuple[Places, Flags]:
    """Each token's key slots in logical order, and which entries are filling.

    Filling repeats the token's own slot, which was just written: no slot is read beyond the plan.
    """
    positions_N1: Places = plan.positions_N.numpy()[:, None]
    visible_N1: Places = plan.visible_N.numpy()[:, None]
    own_N1: Places = plan.slots_N.numpy()[:, None]
    pages_BP: Places = plan.pages_BP.numpy()
    columns_T = np.arange(positions_N1.max() + 1, dtype=np.int32)
    inside_NT = columns_T < visible_N1
    paged_NT = np.where(inside_NT, columns_T, 0)
    pages_NT = pages_BP[plan.seq_N.numpy()[:, None], paged_NT // plan.page_size]
    slots_NT = np.where(inside_NT, pages_NT * plan.page_size + paged_NT % plan.page_size, own_N1)
    if plan.extra_offsets_N1 is None or plan.extra_slots_E is None:
        assert np.array_equal(visible_N1, positions_N1 + 1)
    else:
        offsets, extra = host_ints(plan.extra_offsets_N1), host_ints(plan.extra_slots_E)
        for node, visible in enumerate(host_ints(plan.visible_N)):
            more = extra[offsets[node] : offsets[node + 1]]
            assert visible + len(more) == int(positions_N1[node, 0]) + 1
            slots_NT[node, visible : visible + len(more)] = more
    return slots_NT, columns_T > positions_N1


_RATES_D = np.array([1.0, 0.37, 0.11, 0.03])


def _position_code(positions_N: NDArray[np.integer]) -> Array:
    return np.sin(positions_N[:, None] * _RATES_D)


def _wanted(rows: Sequence[StepRow]) -> list[int]:
    """Packed places whose logits the rows ask for."""
    places: list[int] = []
    start = 0
    for row in rows:
        places += range(start + row.logits_from, start + len(row.tokens))
        start += len(row.tokens)
    return places
