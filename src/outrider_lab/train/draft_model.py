"""A draft model distilled from its target: the recipe of `outrider train draft`.

The student learns the target's whole distribution at every place of the text (losses.py), not the
one token that the text goes on with: what a draft has to guess is what the target would say. On a
share of the steps the text is the student's own: it goes on from the first half of each window, and
learns what the target would have said there.

Most of a small draft is its embedding, which is its output head as well. So it begins as the
target's, projected on the principal directions; all else begins at random.

Shapes:  B = windows of a batch, T = tokens, V = vocabulary, P = places (B x T), D = hidden size of
         the target, E = of the draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from outrider.models.configs import HybridConfig, LlamaConfig
from outrider_lab.train.llama_module import Llama, as_dtype, fresh_llama, read_llama
from outrider_lab.train.loop import Batch, Export
from outrider_lab.train.losses import DistributionCache, distillation, next_token
from outrider_lab.train.recipe import DrafterRecipe
from outrider_lab.train.shapes import config_json
from outrider_lab.train.target import accepted_drafts

# Above the usual 0.02: a smaller start learns more slowly, one of 0.1 no faster.
_BEGIN_RMS = 0.05

# Held-out windows that are read at once.
_TOGETHER = 4
M = TypeVar("M", bound=nn.Module)
C = TypeVar("C", LlamaConfig, HybridConfig)

# (export of the student, half windows of ids, how many tokens to write, a seed) -> whole windows
Writer = Callable[[Export, Tensor, int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecipe(DrafterRecipe[Llama]):
    """A Llama. `reverse` of the loss is the reverse divergence. `on_policy` is the share of steps
    on the student's own text, which `writer` writes; without one there is none. `num_kept` ids are
    kept of every distribution. `start` is a folder to begin from instead of random weights; `raw`
    then is its config.json. `copied` are files of the tokenizer."""

    name: str = field(default="draft", init=False)
    config: LlamaConfig
    cache: DistributionCache
    reverse: float = 0.0
    on_policy: float = 0.0
    num_kept: int = 16
    start: Path | None = None
    raw: Mapping[str, object] = field(default_factory=dict[str, object])
    copied: tuple[Path, ...] = ()
    writer: Writer | None = None

    @property
    def choices(self) -> Mapping[str, object]:
        return {
            "sizes": sizes_of(self.config),
            "reverse": self.reverse,
            "on_policy": self.on_policy,
            "kept": self.num_kept,
            "start": str(self.start or "the target's embeddings"),
        }

    def build(self, generator: torch.Generator) -> Llama:
        if self.start is not None:
            return read_llama(self.start, self.longest)
        net = fresh_llama(self.config, self.longest, generator)
        with torch.no_grad():
            begin_like(net.model.embed_tokens.weight, self.target.embedding)
        return net

    def loss(self, module: Llama, batch: Batch) -> Tensor:
        teach = partial(self.target.distributions, num_kept=self.num_kept)
        if self.writer is not None and writes_itself(batch.step, self.on_policy):
            ids_BT = _own_text(self, self.writer, module, batch)
            distributions = teach(ids_BT)
        else:
            ids_BT = batch.ids_BT
            distributions = self.cache.distributions(ids_BT, batch.windows, teach)
        return distillation(module(ids_BT).flatten(0, 1), distributions, reverse=self.reverse)

    def accepted(self, module: Llama, ids_T: Tensor, k: int) -> Tensor:
        return accepted_drafts(ids_T, [module(ids_T[None])[0].argmax(-1)] * k)

    def values(self, module: Llama) -> Mapping[str, object]:
        raw = dict(self.raw) or config_json(self.config, self.dtype)
        return raw | {"tie_word_embeddings": module.config.tie_word_embeddings}

    def export(self, module: Llama) -> Export:
        return replace(DrafterRecipe[Llama].export(self, module), copied=self.copied)


def _own_text(recipe: DraftRecipe, writer: Writer, module: Llama, batch: Batch) -> Tensor:
    num_given = batch.ids_BT.shape[1] // 2
    num_written = batch.ids_BT.shape[1] - num_given
    return writer(recipe.export(module), batch.ids_BT[:, :num_given], num_written, batch.step)


def begin_like(weight_VE: Tensor, embedding_VD: Tensor) -> None:
    """Overwrite the first columns of `weight_VE` with the principal components of the target's
    embeddings, at a size of _BEGIN_RMS; columns beyond D stay as they are."""
    centred_VD = embedding_VD.to("cpu", torch.float32)
    centred_VD = centred_VD - centred_VD.mean(0)
    size = min(weight_VE.shape[1], centred_VD.shape[1])
    # Eigenvectors come with their eigenvalues rising.
    linalg = cast("Any", torch.linalg)
    directions_DD: Tensor = linalg.eigh(centred_VD.T @ centred_VD).eigenvectors
    found_VE = centred_VD @ directions_DD[:, -size:]
    weight_VE[:, :size] = found_VE * (_BEGIN_RMS / found_VE.pow(2).mean().sqrt())


def writes_itself(step: int, share: float) -> bool:
    """Whether the text of `step` is the student's own: the share of such steps so far never strays
    from `share` by more than one step."""
    return int((step + 1) * share) > int(step * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretraining(ABC, Generic[M, C]):
    """A `TrainRecipe` of a language model from nothing but text. `held_out_BT` are windows that
    nobody learns from; may be none. `copied` are files of the tokenizer."""

    config: C
    held_out_BT: Tensor
    window: int
    dtype: torch.dtype = torch.bfloat16
    copied: tuple[Path, ...] = ()
    name: str = field(default="pretrain", init=False)

    @property
    def facts(self) -> Mapping[str, object]:
        return {"sizes": sizes_of(self.config)}

    @abstractmethod
    def build(self, generator: torch.Generator) -> M: ...

    @abstractmethod
    def loss(self, module: M, batch: Batch) -> Tensor: ...

    @abstractmethod
    def figures(self, module: M, ids_BT: Tensor) -> Mapping[str, Tensor]:
        """By name, of some held-out windows."""
        ...

    def measure(self, module: M) -> Mapping[str, float]:
        """The means of the figures."""
        if not len(self.held_out_BT):
            return {}
        found = [
            self.figures(module, ids_BT) for ids_BT in torch.split(self.held_out_BT, _TOGETHER)
        ]
        return {name: sum(float(one[name]) for one in found) / len(found) for name in found[0]}

    def export(self, module: M) -> Export:
        tensors = as_dtype(module.state_dict(), self.dtype)
        return Export(tensors, config_json(self.config, self.dtype), self.copied)


class PretrainRecipe(Pretraining[Llama, LlamaConfig]):
    """The loss is the cross entropy with the token that comes next."""

    __slots__ = ()

    def build(self, generator: torch.Generator) -> Llama:
        return fresh_llama(self.config, self.window, generator)

    def loss(self, module: Llama, batch: Batch) -> Tensor:
        return next_token(module(batch.ids_BT), batch.ids_BT)

    def figures(self, module: Llama, ids_BT: Tensor) -> Mapping[str, Tensor]:
        return {"held_out_loss": next_token(module(ids_BT), ids_BT)}


def sizes_of(config: LlamaConfig | HybridConfig) -> list[int]:
    """As facts have them."""
    return [config.vocab_size, config.hidden_size, config.ffn_size, config.num_layers]
