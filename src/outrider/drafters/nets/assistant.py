"""Assistants of Gemma 4: a few layers that read the target's keys and values, and have none.

    x = W_pre [s embedding of the token, h]          embedding and h of the target
    x = layers(x)                                    queries over keys of the target's text
    logits = head(norm(x));   h = W_post norm(x)     for the next token of the draft

h begins as the target's state of the last token that it has read, after the target's last norm.
Every token of a draft has the position of the pending one and sees the same keys: those that the
last layer of its kind in the target stores. So a draft stores nothing. Files may have groups of
tokens (`masked_embedding`), which save a part of the head's product; the head is multiplied whole.

Shapes:  B = texts, M = tokens of a level, D = hidden size of the target, H = that of the assistant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.cache.paged_kv import PagedKV
from outrider.core.draft import Draft
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.protocols import CausalLM, DraftRow
from outrider.drafters.common.context import BuildContext
from outrider.drafters.common.growth import DraftSampler
from outrider.drafters.nets.block_heads import rows_of
from outrider.drafters.nets.blocks import grown
from outrider.drafters.nets.eagle import check_numbers
from outrider.drafters.nets.hidden import normed
from outrider.drafters.nets.medusa import last_state
from outrider.drafters.nets.paths import PathDrafter
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.operators import Kernels
from outrider.kernels.plan import AttentionKind, PackedLinear, PackedTable
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.decoder import Scratch
from outrider.models.families import parse_assistant
from outrider.models.gemma4 import GemmaModel, GemmaOperators, read_gemma_layer
from outrider.models.gemma_kinds import GemmaConfig
from outrider.models.heads import HeadsToLoad, own_kernels
from outrider.models.llama import layer_turns
from outrider.models.llama_weights import Tables, read_tables
from outrider.models.weights import Placement, WeightReader, Weights

# Drafts are as long as their budget: an assistant reads its own output.
_MOST_TOKENS = 64
# Groups of tokens, which are not read.
_UNREAD = ("masked_embedding.",)


@dataclass(frozen=True, slots=True)
class Assistant:
    """The weights, and the layer of the target whose keys each layer reads."""

    config: GemmaConfig
    kernels: Kernels
    placement: Placement
    tables: Tables
    before: PackedLinear
    after: PackedLinear
    layers: tuple[tuple[GemmaOperators, LayerWeights, int], ...]

    num_heads = _MOST_TOKENS

    @classmethod
    def read(cls, heads: HeadsToLoad, target: GemmaModel) -> Assistant:
        """Read a folder. Raises CheckpointError for tensors that are missing, misshapen or no
        numbers, and for the assistant of another target."""
        config, table = _config(heads.folder, target), target.tables.embedding
        placement = Placement("assistant", table.dtype, target.state.arena.device)
        kernels, hidden, size = own_kernels(target), config.hidden_size, target.spec.hidden_size
        turns = layer_turns(
            replace(config, max_tokens=target.spec.max_tokens), heads.capacity, placement.device
        )
        with Weights.at(heads.folder) as weights:
            check_numbers(weights)
            reader = WeightReader(weights, kernels, placement)
            found = cls(
                config=config,
                kernels=kernels,
                placement=placement,
                tables=read_tables(reader, config),
                before=reader.linear({"pre_projection": hidden}, 2 * size),
                after=reader.linear({"post_projection": size}, hidden),
                layers=tuple(
                    (
                        GemmaOperators(config.at(index), turns[index]),
                        _without_own_key(config, index, read_gemma_layer(reader, config, index)),
                        _source(config, target, index),
                    )
                    for index in range(config.num_layers)
                ),
            )
            weights.check_all_taken(unread=_UNREAD)
        return found


class AssistantPath:
    """A DraftPath of texts that the target has read up to their pending tokens."""

    def __init__(
        self, assistant: Assistant, target: GemmaModel, rows: Sequence[DraftRow], states_BD: Tensor
    ) -> None:
        self._assistant, self._target = assistant, target
        self._states_MD, self._texts = states_BD, [row.seq_id for row in rows]
        self._pending = [row.tokens[-1] for row in rows]

    def first(self) -> Tensor:
        return self.logits(self._pending)

    def next(self, above: Sequence[int], tokens: Sequence[int], depth: int) -> Tensor:
        del depth
        self._states_MD = self._states_MD[torch.tensor(above, device=self._states_MD.device)]
        self._texts = [self._texts[index] for index in above]
        return self.logits(tokens)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        one, target = self._assistant, self._target
        kernels, config, memory = one.kernels, one.config, target.state
        plan = memory.plan_after(self._texts, tokens)
        plans = memory.by_layer(plan)
        spec = one.placement.spec(config)
        scratch = Scratch.buffers(spec, 2 * config.ffn_size, one.placement, len(tokens))
        embedded_MD = _embedded(target, plan.tokens_N)
        scratch.x_ND.copy_(
            rows_of(kernels, torch.cat([embedded_MD, self._states_MD], dim=1), one.before)
        )
        for operators, layer, source in one.layers:
            operators.run(kernels, layer, plans[source], scratch, memory.layers[source])
            scratch.x_ND.mul_(layer.scale)
        last_MH = normed(kernels, scratch.x_ND, one.tables.norm_D, config.rms_norm_eps)
        self._states_MD = rows_of(kernels, last_MH, one.after)
        return rows_of(kernels, last_MH, one.tables.head)


class AssistantDrafter(PathDrafter):
    """A drafter with an assistant. It drafts nothing before the target has read a text up to its
    pending token."""

    def __init__(
        self, name: str, assistant: Assistant, target: GemmaModel, sampler: DraftSampler
    ) -> None:
        super().__init__(name, assistant, target, sampler)
        self._assistant, self._memory = assistant, target

    def _depth(self, row: DraftRow) -> int:
        has_read = self._memory.state.length(row.seq_id) == len(row.tokens) - 1
        return super()._depth(row) if has_read else 0

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        target = self._memory
        states_BD = torch.stack([last_state(row) for row in rows]).float()
        eps = target.config.rms_norm_eps
        states_BD = normed(self._kernels, states_BD, target.tables.norm_D, eps)
        return grown(self._sampler, rows, AssistantPath(self._assistant, target, rows, states_BD))


def _embedded(target: GemmaModel, tokens_M: Tensor) -> Tensor:
    """The target's scaled embeddings, in new memory."""
    table = target.tables.embedding
    if isinstance(table, PackedTable):
        rows_MD = torch.empty(len(tokens_M), table.shape[1])
        table.read(tokens_M, rows_MD)
    else:
        rows_MD = table.index_select(0, tokens_M).float()
    return rows_MD.mul_(target.config.traits.embedding_scale)


def _config(folder: Path, target: GemmaModel) -> GemmaConfig:
    """The config. Raises CheckpointError for an assistant of another target."""
    raw = open_checkpoint(folder).document(CONFIG)
    config, spec = parse_assistant(raw), target.spec
    sizes = {
        "backbone_hidden_size": (raw.integer("backbone_hidden_size"), spec.hidden_size),
        "vocab_size": (config.vocab_size, spec.vocab_size),
    }
    for name, (own, other) in sizes.items():
        if own != other:
            raise _other_target(folder, f"{name} {own}", str(other))
    return config


def _source(config: GemmaConfig, target: GemmaModel, index: int) -> int:
    """The layer of the target whose keys layer `index` reads: the last one of its kind."""
    kind, theirs = config.layer_kind(index), target.config
    depths = [
        depth
        for depth in range(theirs.num_layers)
        if (theirs.layer_kind(depth).window > 0) == (kind.window > 0)
    ]
    if not depths:
        raise _other_target(target.spec.name, "layers with a window", "none")
    own, found = config.keys[index], theirs.keys[depths[-1]]
    shape = (own.num_heads, own.head_dim, kind.window)
    other = (found.num_heads, found.head_dim, theirs.layer_kind(depths[-1]).window)
    if shape != other:
        raise _other_target(
            target.spec.name, f"key heads, their size and window {shape}", str(other)
        )
    return depths[-1]


def _without_own_key(config: GemmaConfig, index: int, layer: LayerWeights) -> LayerWeights:
    """The layer, whose token is in no key: a window that counts it has one key less."""
    window = config.layer_kind(index).window
    if not window:
        return layer
    return replace(layer, attention=AttentionKind(config.scale, max(1, window - 1)))


def _other_target(where: Path | str, what: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the assistant has {what}, the target {other}.",
        hint="choose the assistant that was trained for this very target",
    )


def _gemma_target(target: CausalLM) -> GemmaModel:
    if not isinstance(target, GemmaModel) or not isinstance(target.state, PagedKV):
        raise ConfigError(
            f"the target {target.spec.name} ({target.spec.family}) is no Gemma 4, whose keys and "
            "values an assistant reads.",
            hint="draft without it: --drafter ngram, or name a draft model with --draft",
        )
    return target


def assistant(context: BuildContext) -> AssistantDrafter:
    """Load an assistant. Raises CheckpointError as `Assistant.read` does, ConfigError for a target
    of another family."""
    target = _gemma_target(context.models.target)
    sampler = context.sampler("the assistant", branches=context.resolved.wants_trees)
    found = Assistant.read(context.heads, target)
    return AssistantDrafter(context.kind.name, found, target, sampler)
