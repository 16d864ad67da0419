"""Qwen3.5's dense family as torch.nn modules, and its MTP block, named as on the hub.

A layer is that of plugins/hybrids/model.py, whose decoder reads what is exported from here; whole
windows are read at once, the recurrence in chunks. The block is that of plugins/heads/mtp.py: it
reads what the model's last norm gives, and goes on from what its own last norm gives, in turns
(`attend`).

Shapes:  B = windows, T = tokens, D = hidden size, V = vocabulary (value size, of a recurrence),
         G = heads, H = head size (value heads, of a recurrence), K = key size, J = taps,
         C = channels of the convolution, E = all heads.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import CheckpointError
from outrider.kernels.reference.delta import NORM_EPS
from outrider.models.configs import HybridConfig
from outrider.models.weights import Weights
from outrider.plugins.hybrids.model import UNREAD_PREFIXES
from outrider_lab.train.llama_module import (
    FFN,
    Heads,
    RotaryTables,
    TrainedDecoder,
    Trunk,
    attend,
    initialise,
    later,
    take_all,
)
from outrider_lab.train.shapes import attending_sizes

# Longer chunks take more products of tokens with tokens, shorter ones more turns of the loop.
_CHUNK = 32


def chunked_delta(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTV: Tensor,
    rate_BHT: Tensor,
    fade_BHT: Tensor,
    chunk: int = _CHUNK,
) -> Tensor:
    """The gated delta rule over whole windows, a chunk at a time: o_BHTV from a state of zeros.
    `rate_BHT` is b, `fade_BHT` is log a, at most 0.

    Token by token (kernels/reference/delta.py) the state S of a value head goes

        S <- a S;   d = b (v - S^T k);   S <- S + k d^T;   o = S^T q.

    With S0 the state before a chunk and g_t the sum of log a up to its token t, a chunk's changes
    are the solution of one triangular system (Yang et al. 2024, arXiv 2406.06484, 3.2, and "Gated
    Delta Networks", arXiv 2412.06464, 3.3):

        (I + L) D = B (V - e^g K S0),         L_ti = b_t e^(g_t - g_i) k_t . k_i   for i < t
        O = e^g Q S0 + M D,                   M_ti = e^(g_t - g_i) q_t . k_i       for i <= t
        S1 = e^(g_c) S0 + (e^(g_c - g) K)^T D

    Systems of all chunks are solved together; only S goes from chunk to chunk.

    Shapes:  K = key size, V = value size, N = chunks, C = tokens of a chunk, W = V + K.
    """
    num_tokens = q_BHTK.shape[2]
    # Tokens of zeros change nothing: d = 0 and a = 1.
    missing = -num_tokens % chunk
    q, k, v = (_chunks(part, missing, chunk) for part in (q_BHTK, k_BHTK, v_BHTV))
    rate, fade = (_chunks(part[..., None], missing, chunk) for part in (rate_BHT, fade_BHT))
    so_far_BHNC1 = fade.cumsum(-2)
    places_C = torch.arange(chunk, device=q.device)
    later_CC = places_C[None] > places_C[:, None]
    between_BHNCC = (so_far_BHNC1 - so_far_BHNC1.mT).masked_fill(later_CC, -torch.inf).exp()
    grown_BHNC1 = so_far_BHNC1.exp()
    # The diagonal is taken as ones and never read.
    system_BHNCC = rate * between_BHNCC * (k @ k.mT)
    given_BHNCW = rate * torch.cat([v, grown_BHNC1 * k], dim=-1)
    linalg = cast("Any", torch.linalg)
    solved_BHNCW: Tensor = linalg.solve_triangular(
        system_BHNCC, given_BHNCW, upper=False, unitriangular=True
    )
    fresh, seen = torch.split(solved_BHNCW, [v.shape[-1], k.shape[-1]], dim=-1)
    seeing_BHNCC = between_BHNCC * (q @ k.mT)
    asking_BHNCK = grown_BHNC1 * q
    ends_BHN11 = so_far_BHNC1[..., -1:, :]
    leaving_BHNKC = ((ends_BHN11 - so_far_BHNC1).exp() * k).mT
    state_BHKV = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    found: list[Tensor] = []
    for number in range(q.shape[2]):
        change_BHCV = fresh[:, :, number] - seen[:, :, number] @ state_BHKV
        found.append(
            asking_BHNCK[:, :, number] @ state_BHKV + seeing_BHNCC[:, :, number] @ change_BHCV
        )
        kept_BHKV = ends_BHN11[:, :, number].exp() * state_BHKV
        state_BHKV = kept_BHKV + leaving_BHNKC[:, :, number] @ change_BHCV
    return torch.cat(found, dim=2)[:, :, :num_tokens]


def _chunks(x_BHTF: Tensor, missing: int, chunk: int) -> Tensor:
    """x_BHNCF, with `missing` tokens of zeros behind the last."""
    padded_BHTF = functional.pad(x_BHTF, (0, 0, 0, missing))
    return padded_BHTF.reshape(*x_BHTF.shape[:2], -1, chunk, x_BHTF.shape[-1])


# A head forgets at a rate of A softplus(a + dt_bias) a token: at first A is within _RATES and the
# softplus within _STEPS, so that some heads remember a few tokens and some a window (Gu and Dao,
# 2023, arXiv 2312.00752, 3.6).
_RATES, _STEPS = (1.0, 16.0), (1e-3, 0.1)


class OffsetNorm(nn.Module):
    """Scales by 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self._eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.rms_norm(x_BTD, x_BTD.shape[-1:], 1 + self.weight, self._eps)


class GatedAttention(nn.Module):
    """Of each head, `q_proj` has the query and then the gate of what the head finds."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self._config = config
        hidden, head, width = (
            config.hidden_size,
            config.head_dim,
            config.num_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(hidden, 2 * width, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm = OffsetNorm(head, config.rms_norm_eps)
        self.k_norm = OffsetNorm(head, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, turns: RotaryTables, kept: list[Heads]) -> Tensor:
        """Causal; after a first turn as `attend` says. Keys and values are added to `kept`."""
        head = self._config.head_dim
        q_BTGH, gate_BTGH = self.q_proj(x_BTD).unflatten(-1, (-1, 2, head)).unbind(-2)
        k_BTGH = self.k_norm(self.k_proj(x_BTD).unflatten(-1, (-1, head)))
        v_BTGH = self.v_proj(x_BTD).unflatten(-1, (-1, head))
        found_BTE = attend(
            turns(self.q_norm(q_BTGH).transpose(1, 2)),
            turns(k_BTGH.transpose(1, 2)),
            v_BTGH.transpose(1, 2),
            kept,
        )
        return self.o_proj(found_BTE * gate_BTGH.flatten(2).sigmoid())


class Convolution(nn.Module):
    """Causal and depth-wise, then SiLU. Its weight has the shape of torch.nn.Conv1d's."""

    def __init__(self, num_channels: int, num_taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_channels, 1, num_taps))

    def forward(self, x_BTC: Tensor) -> Tensor:
        taps_JC = self.weight[:, 0].T
        rows_BTC = functional.pad(x_BTC, (0, 0, len(taps_JC) - 1, 0))
        found_BTC = rows_BTC[:, : x_BTC.shape[1]] * taps_JC[0]
        for tap, tap_C in enumerate(taps_JC[1:], start=1):
            window_BTC = rows_BTC[:, tap : tap + x_BTC.shape[1]]
            found_BTC = torch.addcmul(found_BTC, window_BTC, tap_C)
        return functional.silu(found_BTC)


class Recurrence(nn.Module):
    """A gated delta rule layer."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        delta, hidden, values = config.delta, config.hidden_size, config.value_size
        self._shape = delta
        self.in_proj_qkv = nn.Linear(hidden, delta.num_channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, delta.num_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, delta.num_heads, bias=False)
        self.conv1d = Convolution(delta.num_channels, delta.num_taps)
        self.A_log = nn.Parameter(torch.zeros(delta.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(delta.num_heads))
        self.norm = nn.RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        shape = self._shape
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim
        mixed_BTC = self.conv1d(self.in_proj_qkv(x_BTD))
        q, k, v = torch.split(mixed_BTC, [keys, keys, values], dim=-1)
        wait_BTH = functional.softplus(self.in_proj_a(x_BTD) + self.dt_bias)
        found_BHTV = chunked_delta(
            self._keys(q) / shape.key_dim**0.5,
            self._keys(k),
            v.view(*v.shape[:2], shape.num_heads, shape.value_dim).transpose(1, 2),
            self.in_proj_b(x_BTD).sigmoid().transpose(1, 2),
            (-self.A_log.exp() * wait_BTH).transpose(1, 2),
        )
        normed_BTE = self.norm(found_BHTV.transpose(1, 2)).flatten(2)
        return self.out_proj(normed_BTE * functional.silu(self.in_proj_z(x_BTD)))

    def _keys(self, x_BTC: Tensor) -> Tensor:
        """Keys or queries of length 1, one for every value head."""
        shape = self._shape
        x_BTGK = x_BTC.view(*x_BTC.shape[:2], shape.num_key_heads, shape.key_dim)
        square_BTG1 = (x_BTGK * x_BTGK).sum(-1, keepdim=True)
        unit_BTGK = x_BTGK * torch.rsqrt(square_BTG1 + NORM_EPS)
        shared = shape.num_heads // shape.num_key_heads
        return unit_BTGK.repeat_interleave(shared, 2).transpose(1, 2)


class TrainedHybridLayer(nn.Module):
    def __init__(self, config: HybridConfig, *, attends: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = OffsetNorm(size, eps)
        if attends:
            self.self_attn = GatedAttention(config)
        else:
            self.linear_attn = Recurrence(config)
        self.attends = attends
        self.post_attention_layernorm = OffsetNorm(size, eps)
        self.mlp = FFN(attending_sizes(config))

    def forward(
        self, x_BTD: Tensor, turns: RotaryTables, kept: list[Heads] | None = None
    ) -> Tensor:
        """`kept` has keys and values of turns before this one: none, of a model's own layers."""
        y_BTD = self.input_layernorm(x_BTD)
        kept = [] if kept is None else kept
        mixed = self.self_attn(y_BTD, turns, kept) if self.attends else self.linear_attn(y_BTD)
        x_BTD = x_BTD + mixed
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class HybridDecoder(TrainedDecoder):
    def __init__(self, config: HybridConfig, num_positions: int) -> None:
        layers = (
            TrainedHybridLayer(config, attends=index in config.attention_layers)
            for index in range(config.num_layers)
        )
        norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        turns = RotaryTables(attending_sizes(config), num_positions)
        super().__init__(config, Trunk(config, layers, norm, turns))
        self.config = config

    @property
    def norm_scale(self) -> Tensor:
        return 1 + cast("OffsetNorm", self.model.norm).weight


class MtpBlock(nn.Module):
    """One attending layer behind the matrix that joins token and state."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = OffsetNorm(size, eps)
        self.pre_fc_norm_hidden = OffsetNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([TrainedHybridLayer(config, attends=True)])
        self.norm = OffsetNorm(size, eps)

    def forward(
        self, embedded_BTD: Tensor, states_BTD: Tensor, turns: RotaryTables, num_turns: int
    ) -> list[Tensor]:
        """What the output head reads in each turn. `states_BTD` are the model's."""
        kept: list[Heads] = []
        found: list[Tensor] = []
        tokens_BTD = self.pre_fc_norm_embedding(embedded_BTD)
        for _ in range(num_turns):
            before_BTD = self.pre_fc_norm_hidden(later(states_BTD, 1))
            x_BTD = self.fc(torch.cat([tokens_BTD, before_BTD], dim=-1))
            states_BTD = self.norm(self.layers[0](x_BTD, turns, kept))
            found.append(states_BTD)
        return found


class Hybrid(HybridDecoder):
    """A model with its block."""

    def __init__(self, config: HybridConfig, num_positions: int) -> None:
        super().__init__(config, num_positions)
        self.mtp = MtpBlock(config)

    def drafts(self, ids_BT: Tensor, states_BTD: Tensor, num_turns: int) -> list[Tensor]:
        """What the output head reads of the block, a turn for each draft. `states_BTD` are last
        residuals after their norm."""
        embedded_BTD = self.model.embed_tokens(ids_BT)
        return self.mtp(embedded_BTD, states_BTD, self.model.turns, num_turns)


def read_hybrid(folder: Path, config: HybridConfig, num_positions: int) -> HybridDecoder:
    """The checkpoint in `folder` without its blocks, in float32 on the host. Raises
    CheckpointError."""
    check_dense(folder, config)
    net = HybridDecoder(config, num_positions)
    with Weights.at(folder) as weights:
        take_all(net, weights)
        weights.check_all_taken(unread=UNREAD_PREFIXES)
    return net


def check_dense(folder: Path, config: HybridConfig) -> None:
    """Raises CheckpointError for a hybrid that these modules do not have."""
    if config.sparse_layers:
        raise CheckpointError(
            f"{folder}: a hybrid with experts cannot be trained here, nor teach.",
            hint="choose a dense one of the family Qwen3.5",
        )


def fresh_hybrid(config: HybridConfig, num_positions: int, generator: torch.Generator) -> Hybrid:
    """A net as training begins."""
    net = Hybrid(config, num_positions)
    initialise(net, generator, num_layers=config.num_layers)
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, Recurrence):
                _begin(layer, config.num_layers, generator)
    return net


def _begin(layer: Recurrence, num_layers: int, generator: torch.Generator) -> None:
    width = layer.conv1d.weight.shape[-1] ** -0.5
    layer.conv1d.weight.uniform_(-width, width, generator=generator)
    layer.out_proj.weight.mul_((2 * num_layers) ** -0.5)
    layer.A_log.uniform_(*_RATES, generator=generator).log_()
    low, high = (math.log(step) for step in _STEPS)
    layer.dt_bias.uniform_(low, high, generator=generator)
    # softplus(x) = e^(what was drawn)
    layer.dt_bias.copy_(layer.dt_bias.exp().expm1().log())
