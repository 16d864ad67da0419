"""Assistants of Gemma 4: a few layers that read the target's keys and values, and have none.

    x = W_pre [s embedding of the token, h]          embedding and h of the target
    x = layers(x)                                    queries over keys of the target's text
    logits = head(norm(x));   h = W_post norm(x)     for the next token of the draft

h begins as the target's state of the last token that it has read, after the target's last norm.
Every token of a draft has the position of the pending one and sees the same keys: those that the
last layer of its kind in the target stores. So a draft stores nothing. Tokens may be in groups
(`masked_embedding`), each with a vector: then only those of the best groups get logits.

Shapes:  B = texts, M = tokens of a level, D = hidden size of the target, H = that of the assistant,
         V = vocabulary, G = groups, T = tokens of a group or of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow
from outrider.drafters.common.context import BuildContext, Stateless
from outrider.drafters.common.growth import NOT_DRAFTED, DraftSampler, draft_some, grown, last_state
from outrider.kernels.native.forward import LayerWeights
from outrider.kernels.operators import Kernels, normed, own_kernels, rows_of
from outrider.kernels.plan import AttentionKind, PackedLinear, PackedTable
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.decoder import Scratch
from outrider.models.families import parse_text, text_model
from outrider.models.heads import HeadsToLoad, check_numbers
from outrider.models.json_object import MAX_LAYERS, JsonObject, contradictory
from outrider.models.llama import layer_turns
from outrider.models.llama_weights import Tables, read_tables
from outrider.models.weights import Placement, WeightReader, Weights
from outrider.plugins.gemma4.config import GemmaConfig, assistant_config
from outrider.plugins.gemma4.model import GemmaModel, GemmaOperators, read_gemma_layer

_GROUPS = "masked_embedding."


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """Groups of tokens: the vectors of groups, their tokens, and the number of groups whose tokens
    get logits."""

    vectors: PackedLinear
    tokens_GT: Tensor
    num_best: int

    @classmethod
    def read(
        cls, raw: JsonObject, config: GemmaConfig, weights: Weights, reader: WeightReader
    ) -> TokenGroups | None:
        """Read them; None if the file has none. Raises CheckpointError for groups that do not fit
        the vocabulary."""
        if not raw.flag("use_ordered_embeddings", default=False):
            return None
        count, best = raw.integer("num_centroids"), raw.integer("centroid_intermediate_top_k")
        size, rest = divmod(config.vocab_size, count)
        tokens_V = weights.take_integers(f"{_GROUPS}token_ordering", config.vocab_size)
        is_order = torch.equal(tokens_V.sort().values, torch.arange(len(tokens_V)))
        if rest or best > count or not is_order:
            raise contradictory(
                raw.where,
                f"{count} groups (num_centroids), of which {best} are chosen, do not "
                f"hold each of {config.vocab_size} tokens once",
            )
        vectors = reader.linear({f"{_GROUPS}centroids": count}, config.hidden_size)
        return cls(vectors, tokens_V.view(count, size).to(vectors.data.device), best)

    def logits(self, kernels: Kernels, table_VH: Tensor, last_MH: Tensor) -> Tensor:
        """Logits, row by row, so that none depends on the others."""
        scores_MG = rows_of(kernels, last_MH, self.vectors)
        out_MV = last_MH.new_full((len(last_MH), len(table_VH)), NOT_DRAFTED)
        for scores_G, last_H, out_V in zip(scores_MG, last_MH, out_MV, strict=True):
            tokens_T = self.tokens_GT[scores_G.topk(self.num_best).indices].flatten()
            out_V[tokens_T] = table_VH.index_select(0, tokens_T).float() @ last_H
        return out_MV


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
    groups: TokenGroups | None

    @classmethod
    def read(cls, heads: HeadsToLoad, target: GemmaModel) -> Assistant:
        """Read a folder. Raises CheckpointError for tensors that are missing, misshapen or no
        numbers, and for the assistant of another target."""
        raw = open_checkpoint(heads.folder).document(CONFIG)
        config, table = _config(raw, target), target.tables.embedding
        placement = Placement("assistant", table.dtype, target.state.arena.device)
        kernels = own_kernels(target.kernels)
        hidden, size = config.hidden_size, target.spec.hidden_size
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
                groups=TokenGroups.read(raw, config, weights, reader),
            )
            weights.check_all_taken(unread=() if found.groups else (_GROUPS,))
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
        if one.groups is not None:
            return one.groups.logits(kernels, one.tables.embeddings, last_MH)
        return rows_of(kernels, last_MH, one.tables.head)


class AssistantDrafter(Stateless):
    """A drafter with an assistant. It drafts nothing before the target has read a text up to its
    pending token."""

    def __init__(
        self, name: str, assistant: Assistant, target: GemmaModel, sampler: DraftSampler
    ) -> None:
        self.name, self._assistant = name, assistant
        self._target, self._sampler = target, sampler
        self.needs = DraftNeeds(hidden_layers=(target.spec.num_layers,))

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return draft_some(rows, [_depth(row) for row in rows], self._drafts)

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        target, kernels = self._target, self._assistant.kernels
        states_BD = torch.stack([last_state(row) for row in rows]).float()
        eps = target.config.rms_norm_eps
        states_BD = normed(kernels, states_BD, target.tables.norm_D, eps)
        return grown(self._sampler, rows, AssistantPath(self._assistant, target, rows, states_BD))


def _depth(row: DraftRow) -> int:
    has_read = row.hidden is not None and 0 < row.hidden.length == len(row.tokens) - 1
    return row.budget.depth if has_read else 0


def _embedded(target: GemmaModel, tokens_M: Tensor) -> Tensor:
    """The target's scaled embeddings, in new memory."""
    table = target.tables.embedding
    if isinstance(table, PackedTable):
        rows_MD = torch.empty(len(tokens_M), table.shape[1])
        table.read(tokens_M, rows_MD)
    else:
        rows_MD = table.index_select(0, tokens_M).float()
    return rows_MD.mul_(target.config.traits.embedding_scale)


def _config(raw: JsonObject, target: GemmaModel) -> GemmaConfig:
    """The config. Raises CheckpointError for an assistant of another target."""
    config, spec = parse_assistant(raw), target.spec
    sizes = {
        "backbone_hidden_size": (raw.integer("backbone_hidden_size"), spec.hidden_size),
        "vocab_size": (config.vocab_size, spec.vocab_size),
    }
    for name, (own, other) in sizes.items():
        if own != other:
            raise _other_target(raw.where, f"{name} {own}", str(other))
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


def _other_target(where: str, what: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the assistant has {what}, the target {other}.",
        hint="choose the assistant that was trained for this very target",
    )


def _gemma_target(target: CausalLM) -> GemmaModel:
    if not isinstance(target, GemmaModel):
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


def parse_assistant(raw: JsonObject) -> GemmaConfig:
    """Parse the config of an assistant, whose layers read keys and values of its target. Raises
    CheckpointError, naming file and key, for a bad or unknown value."""
    outer = JsonObject(raw.where, {**raw.values, "model_type": "gemma4"})
    text, family = text_model(outer)
    shared = {"num_kv_shared_layers": text.integer("num_hidden_layers", most=MAX_LAYERS)}
    text = JsonObject(text.where, {**text.values, **shared})
    found = parse_text(outer, text, replace(family, config=assistant_config), None)
    return cast("GemmaConfig", found)
