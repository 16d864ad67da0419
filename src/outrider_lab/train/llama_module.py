"""The Llama family as torch.nn modules, to be trained or to teach; tensors are named as on the hub.

A layer is  x += out(attention(rope(qkv(norm(x)))))  and then  x += down(silu(gate(y)) * up(y))  for
y = norm(x): the arithmetic of models/llama.py for its plain families, whose decoder reads
what is exported from here. Whole windows are read at once, causally, and there is no KV.

Shapes:  B = windows, T = tokens, D = hidden size, V = vocabulary, G = heads, H = head size,
         R = half of what turns of a head, K = kept layers, W = ids of a distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core.errors import CheckpointError
from outrider.core.spec import DecoderConfig
from outrider.models.configs import LlamaConfig
from outrider.models.families import LLAMA_FAMILIES, read_native_config
from outrider.models.rope import rope_tables
from outrider.models.weights import HEAD, TextNames, Weights
from outrider_lab.train.losses import distillation, faded_mean, top_distributions

# As Llama's own checkpoints began.
_INITIAL_STD = 0.02


class RotaryTables(nn.Module):
    """Rotary tables of positions, outside the state: config.json determines them."""

    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        super().__init__()
        cos_TH, sin_TH = rope_tables(
            config.rope, head_dim=config.head_dim, num_positions=num_positions
        )
        half = config.rope.rotary_dim(config.head_dim) // 2
        self.cos_TR: Tensor
        self.sin_TR: Tensor
        self.register_buffer("cos_TR", cos_TH[:, :half].clone(), persistent=False)
        self.register_buffer("sin_TR", sin_TH[:, :half].clone(), persistent=False)

    def forward(self, x_BGTH: Tensor, positions_T: Tensor | None = None) -> Tensor:
        """Turn pairs (i, i + R) of every head, at these positions or 0 to T - 1."""
        half = self.cos_TR.shape[1]
        at = slice(x_BGTH.shape[-2]) if positions_T is None else positions_T
        cos_TR, sin_TR = self.cos_TR[at], self.sin_TR[at]
        first, second, still = torch.split(
            x_BGTH, [half, half, x_BGTH.shape[-1] - 2 * half], dim=-1
        )
        turned = (first * cos_TR - second * sin_TR, second * cos_TR + first * sin_TR)
        return torch.cat((*turned, still), dim=-1)


class Attention(nn.Module):
    """`num_in` is the size of what q, k and v read, by default the hidden size."""

    def __init__(self, config: LlamaConfig, num_in: int | None = None) -> None:
        super().__init__()
        self._config = config
        width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        num_in = num_in or config.hidden_size
        self.q_proj = nn.Linear(num_in, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(num_in, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(num_in, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, x_BTD: Tensor, turns: RotaryTables, kept: list[Heads] | None = None
    ) -> Tensor:
        """Causal; `kept` has keys and values of a block's turns so far (`attend`)."""
        q_BGTH = self._heads(self.q_proj(x_BTD))
        k_BGTH, v_BGTH = self._heads(self.k_proj(x_BTD)), self._heads(self.v_proj(x_BTD))
        if self._config.qk_norm:
            q_BGTH, k_BGTH = self.q_norm(q_BGTH), self.k_norm(k_BGTH)
        found_BTE = attend(turns(q_BGTH), turns(k_BGTH), v_BGTH, [] if kept is None else kept)
        return self.o_proj(found_BTE)

    def across(self, x_BTD: Tensor, read_BSD: Tensor) -> Tensor:
        """Every token sees all that is read, without positions."""
        q_BGTH = self._heads(self.q_proj(x_BTD))
        k_BGSH, v_BGSH = self._heads(self.k_proj(read_BSD)), self._heads(self.v_proj(read_BSD))
        found_BGTH = functional.scaled_dot_product_attention(q_BGTH, k_BGSH, v_BGSH)
        return self.o_proj(found_BGTH.transpose(1, 2).flatten(2))

    def over(
        self,
        x_BMD: Tensor,
        context_BTD: Tensor,
        turns: RotaryTables,
        positions_M: Tensor,
        seen_MX: Tensor,
    ) -> Tensor:
        """Rows at `positions_M` see some of the context, at positions 0 to T - 1, and of each
        other: X counts the context and then the rows."""
        rows = (self._heads(part(x_BMD)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q_BGMH, k_BGMH, v_BGMH = rows
        k_BGTH, v_BGTH = (self._heads(part(context_BTD)) for part in (self.k_proj, self.v_proj))
        if self._config.qk_norm:
            q_BGMH, k_BGMH, k_BGTH = (self.q_norm(q_BGMH), self.k_norm(k_BGMH), self.k_norm(k_BGTH))
        k_BGXH = torch.cat([turns(k_BGTH), turns(k_BGMH, positions_M)], dim=2)
        found_BGMH = functional.scaled_dot_product_attention(
            turns(q_BGMH, positions_M),
            k_BGXH,
            torch.cat([v_BGTH, v_BGMH], dim=2),
            attn_mask=seen_MX,
            enable_gqa=True,
        )
        return self.o_proj(found_BGMH.transpose(1, 2).flatten(2))

    def _heads(self, x_BTE: Tensor) -> Tensor:
        head_dim = self._config.head_dim
        return x_BTE.view(*x_BTE.shape[:2], -1, head_dim).transpose(1, 2)


class FFN(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, config.ffn_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class TrainedLlamaLayer(nn.Module):
    """`num_in` is that of `Attention`."""

    def __init__(self, config: LlamaConfig, num_in: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, num_in)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FFN(config)

    def forward(
        self, x_BTD: Tensor, turns: RotaryTables, kept: list[Heads] | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), turns, kept)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Trunk(nn.Module):
    """All but the output head. `layers` take the residual and `turns`."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        norm: nn.Module,
        turns: RotaryTables,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.turns = turns

    def forward(self, ids_BT: Tensor, kept: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """(x_BTD, kept_BTKD): the last residual before its norm, and those after `kept` layers."""
        x_BTD = self.embed_tokens(ids_BT)
        found = {0: x_BTD}
        for depth, layer in enumerate(self.layers, start=1):
            x_BTD = layer(x_BTD, self.turns)
            if depth in kept:
                found[depth] = x_BTD
        states = [found[depth] for depth in kept]
        return x_BTD, torch.stack(states, dim=2) if states else x_BTD[:, :, None, :0]


class TrainedDecoder(nn.Module):
    """A trunk and its output head. Its state has the names and shapes of a checkpoint on the
    hub."""

    def __init__(self, config: DecoderConfig, trunk: Trunk) -> None:
        super().__init__()
        self.model, self._tied = trunk, config.tie_word_embeddings
        if not self._tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        """The output head's weight, of shape [V, D]."""
        if self._tied:
            return self.model.embed_tokens.weight
        return self.lm_head.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """logits_BTV."""
        return self.logits(self.model(ids_BT)[0])

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Logits of last residuals, of any number of leading dimensions."""
        return functional.linear(self.model.norm(x_BTD), self.head)


class Llama(TrainedDecoder):
    def __init__(self, config: LlamaConfig, num_positions: int) -> None:
        layers = (TrainedLlamaLayer(config) for _ in range(config.num_layers))
        norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        super().__init__(config, Trunk(config, layers, norm, RotaryTables(config, num_positions)))
        self.config = config

    @property
    def norm_scale(self) -> Tensor:
        """What the last norm multiplies by, of shape [D]."""
        return cast("nn.RMSNorm", self.model.norm).weight


def fresh_llama(config: LlamaConfig, num_positions: int, generator: torch.Generator) -> Llama:
    """A net as training begins: normal weights, those that end a residual branch smaller."""
    net = Llama(config, num_positions)
    initialise(net, generator, num_layers=config.num_layers)
    return net


def initialise(net: nn.Module, generator: torch.Generator, *, num_layers: int) -> None:
    """Draw all matrices of `net` anew; norms stay 1, biases become 0."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.ndim > 1:
                ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = _INITIAL_STD * ((2 * num_layers) ** -0.5 if ends else 1)
                parameter.normal_(0.0, std, generator=generator)


def read_llama(folder: Path, num_positions: int) -> Llama:
    """The checkpoint in `folder` as a module, in float32 on the host. Raises CheckpointError."""
    config = read_llama_config(folder)
    with Weights.at(folder) as weights:
        if config.tie_word_embeddings and HEAD in weights:
            config = replace(config, tie_word_embeddings=False)
        net = Llama(config, num_positions)
        take_all(net, weights)
        weights.check_all_taken()
    return net


@torch.no_grad()
def take_all(net: nn.Module, weights: Weights) -> None:
    """Set all parameters to what the files have under their names. Raises CheckpointError."""
    names = TextNames.of(weights)
    for name, parameter in net.named_parameters():
        parameter.copy_(weights.take(names.stored(name), *parameter.shape))


def read_llama_config(folder: Path) -> LlamaConfig:
    """Raises CheckpointError for a family that these modules do not have."""
    config = read_native_config(folder)
    if not isinstance(config, LlamaConfig) or config.fused_tensors or config.extras:
        raise CheckpointError(
            f"{folder}: a {config.family} model cannot be trained here, nor teach.",
            hint=f"choose one of: {', '.join(f for f in LLAMA_FAMILIES if f != 'phi3')}",
        )
    return config


def as_dtype(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a state, on the host, as they are exported."""
    return {name: value.detach().to("cpu", dtype).contiguous() for name, value in state.items()}


# Ids that are kept of a target's distribution.
_NUM_KEPT = 32
# Keys and values of one turn.
Heads = tuple[Tensor, Tensor]


def attend(q_BGTH: Tensor, k_BGTH: Tensor, v_BGTH: Tensor, kept: list[Heads]) -> Tensor:
    """What a block attends to in its next turn, whose keys and values are added to `kept`.

    In the engine a block reads text with the target's states, and below it what it drafts with its
    own. In training every place is a place where a round may begin. So a window is read in turns:
    in the first one every place has the target's state of the token before; in turn r + 1 it has
    what the block made of that token in turn r. A query of turn r sees the keys of the first turn
    up to r places before its own, and then one key of each later turn, its own included. EAGLE-3
    calls this training-time test (Li et al. 2025, arXiv 2503.01840, 3.2).
    """
    kept.append((k_BGTH, v_BGTH))
    if len(kept) == 1:
        out_BGTH = functional.scaled_dot_product_attention(
            q_BGTH, k_BGTH, v_BGTH, is_causal=True, enable_gqa=True
        )
        return out_BGTH.transpose(1, 2).flatten(2)
    groups = q_BGTH.shape[1] // k_BGTH.shape[1]
    known = [(k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)) for k, v in kept]
    num_tokens, late = q_BGTH.shape[2], len(kept) - 1
    places_T = torch.arange(num_tokens, device=q_BGTH.device)
    unseen_TT = places_T[None] > places_T[:, None] - late
    scores = [(q_BGTH @ known[0][0].mT).masked_fill(unseen_TT, -torch.inf)]
    drafted = [
        (later(k, late - turn), later(v, late - turn))
        for turn, (k, v) in enumerate(known[1:], start=1)
    ]
    for turn, (k, _) in enumerate(drafted, start=1):
        score_BGT1 = (q_BGTH * k).sum(-1, keepdim=True)
        unread_T1 = (places_T < late - turn)[:, None]
        scores.append(score_BGT1.masked_fill(unread_T1, -torch.inf))
    shares = (torch.cat(scores, dim=-1) * q_BGTH.shape[-1] ** -0.5).softmax(-1)
    out_BGTH = shares[..., :num_tokens] @ known[0][1]
    for number, (_, v) in enumerate(drafted, start=num_tokens):
        out_BGTH = out_BGTH + shares[..., number, None] * v
    return out_BGTH.transpose(1, 2).flatten(2)


def later(x: Tensor, places: int) -> Tensor:
    """`x`, of shape [..., T, D], moved to later places; zeros come first."""
    if not places:
        return x
    return functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


def divergence(turns: Iterable[Tensor], wanted_BTW: Tensor) -> Tensor:
    """How far the distributions of all turns, logits_BTW each, are from those of the target's
    logits, in nats a place: a weighted mean. The first places of later turns have no state before
    them."""
    num_windows = len(wanted_BTW)
    distributions = top_distributions(wanted_BTW.flatten(0, 1), _NUM_KEPT)
    return faded_mean(
        distillation(
            logits_BTW[:, turn:].flatten(0, 1), distributions.at(num_windows, slice(turn, None))
        )
        for turn, logits_BTW in enumerate(turns)
    )
