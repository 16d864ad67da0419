"""A draft model distilled from its target: the recipe of `outrider train draft`.

The student learns the target's whole law at every place of the text (losses.py), not the one token
that the text goes on with: what a draft has to guess is what the target would say. On a share of
the steps the text is the student's own: it goes on from the first half of each window, and learns
what the target would have said there.

Most of a small draft is its embedding, which is its output head as well. So it begins as the
target's, projected on the principal directions; all else begins at random.

Shapes:  B = windows of a batch, T = tokens, V = vocabulary, P = places (B x T), D = hidden size of
         the target, E = of the draft.

A language model from nothing but text: the recipe of `outrider train pretrain`.

The loss is the cross entropy with the token that comes next, and so is the figure on held-out text.
The embedded target was made this way, from Python source and worked problems in words.

Shapes:  B = windows of a batch, T = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.models.families import LlamaConfig
from outrider.train.exam import Exam, accepted_of_choices
from outrider.train.llama_module import Llama, as_dtype, config_json, fresh_llama, read_llama
from outrider.train.loop import Batch, Export
from outrider.train.losses import LawCache, TopProbs, distillation, next_token, top_laws
from outrider.train.target import FrozenTarget

# Above the usual 0.02: a smaller start learns more slowly, one of 0.1 no faster.
_BEGIN_RMS = 0.05

# (export of the student, half windows of ids, how many tokens to write, a seed) -> whole windows
Writer = Callable[[Export, Tensor, int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoices:
    """`reverse` of the loss is the reverse divergence. `on_policy` is the share of steps on the
    student's own text. `num_kept` ids are kept of every law. `start` is a folder to begin from
    instead of random weights; `raw` then is its config.json. `copied` are files of the tokenizer.
    """

    reverse: float = 0.0
    on_policy: float = 0.0
    num_kept: int = 16
    start: Path | None = None
    raw: Mapping[str, object] = field(default_factory=dict[str, object])
    dtype: torch.dtype = torch.bfloat16
    copied: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecipe:
    """A `Recipe` of a Llama. `writer` writes the student's own text; without one there is none."""

    target: FrozenTarget
    config: LlamaConfig
    choices: DraftChoices
    exam: Exam
    cache: LawCache
    window: int
    writer: Writer | None = None

    @property
    def name(self) -> str:
        return "draft"

    @property
    def facts(self) -> Mapping[str, object]:
        config, choices = self.config, self.choices
        return {
            "target": str(self.target.folder),
            "sizes": [config.vocab_size, config.hidden_size, config.ffn_size, config.num_layers],
            "reverse": choices.reverse,
            "on_policy": choices.on_policy,
            "kept": choices.num_kept,
            "start": str(choices.start or "the target's embeddings"),
        }

    def build(self, generator: torch.Generator) -> Llama:
        longest = max([self.window, *(len(text.ids) for text in self.exam.texts)])
        if self.choices.start is not None:
            return read_llama(self.choices.start, longest)
        net = fresh_llama(self.config, longest, generator)
        with torch.no_grad():
            begin_like(net.model.embed_tokens.weight, self.target.embedding)
        return net

    def loss(self, module: Llama, batch: Batch) -> Tensor:
        if self.writer is not None and writes_itself(batch.step, self.choices.on_policy):
            ids_BT = self._own_text(module, batch)
            laws = self._teach(ids_BT)
        else:
            ids_BT = batch.ids_BT
            laws = self.cache.laws(ids_BT, batch.windows, self._teach)
        return distillation(module(ids_BT).flatten(0, 1), laws, reverse=self.choices.reverse)

    def measure(self, module: Llama) -> Mapping[str, float]:
        def accepted(ids_T: Tensor, k: int) -> Tensor:
            return accepted_of_choices(module(ids_T[None])[0].argmax(-1), ids_T, k)

        return {"tokens_per_round": self.exam.tokens_per_round(accepted)}

    def export(self, module: Llama) -> Export:
        choices, state = self.choices, module.state_dict()
        raw = dict(choices.raw) or config_json(self.config, choices.dtype)
        raw["dtype"] = str(choices.dtype).removeprefix("torch.")
        raw["tie_word_embeddings"] = module.config.tie_word_embeddings
        return Export(as_dtype(state, choices.dtype), raw, choices.copied)

    def _teach(self, ids_BT: Tensor) -> TopProbs:
        logits_BTV = self.target.logits(self.target.read(ids_BT).last_BTD)
        return top_laws(logits_BTV.flatten(0, 1), self.choices.num_kept)

    def _own_text(self, module: Llama, batch: Batch) -> Tensor:
        if self.writer is None:
            raise ContractError("nothing writes here")
        num_given = batch.ids_BT.shape[1] // 2
        num_written = batch.ids_BT.shape[1] - num_given
        given_BT = batch.ids_BT[:, :num_given]
        return self.writer(self.export(module), given_BT, num_written, batch.step)


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


# Held-out windows that are read at once.
_TOGETHER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainRecipe:
    """A `Recipe` of a Llama. `held_out_BT` are windows that nobody learns from; may be none."""

    config: LlamaConfig
    held_out_BT: Tensor
    window: int
    dtype: torch.dtype = torch.bfloat16
    copied: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return "pretrain"

    @property
    def facts(self) -> Mapping[str, object]:
        config = self.config
        sizes = [config.vocab_size, config.hidden_size, config.ffn_size, config.num_layers]
        return {"sizes": sizes}

    def build(self, generator: torch.Generator) -> Llama:
        return fresh_llama(self.config, self.window, generator)

    def loss(self, module: Llama, batch: Batch) -> Tensor:
        return next_token(module(batch.ids_BT), batch.ids_BT)

    def measure(self, module: Llama) -> Mapping[str, float]:
        if not len(self.held_out_BT):
            return {}
        losses = [
            float(next_token(module(ids_BT), ids_BT)) for ids_BT in torch.split(self.held_out_BT, 4)
        ]
        return {"held_out_loss": sum(losses) / len(losses)}

    def export(self, module: Llama) -> Export:
        config = config_json(self.config, self.dtype)
        return Export(as_dtype(module.state_dict(), self.dtype), config, self.copied)
