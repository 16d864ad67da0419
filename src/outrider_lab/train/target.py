"""The target while a drafter learns from it: frozen, read window by window, never trained.

It is a module (llama_module.py, hybrid_module.py) and not the engine's decoder: what a recipe wants
are the states and distributions of every token of whole windows, which is one causal pass without
memory.

What a drafter in training would gain is measured on text that it does not learn from (`Exam`).

Shapes:  B = windows, T = tokens, D = hidden size, V = vocabulary, K = layers, W = some ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.clock import host_ints
from outrider.models.configs import HybridConfig, LlamaConfig, Mechanism
from outrider.models.families import read_native_config
from outrider_lab.train.hybrid_module import HybridDecoder, check_dense, read_hybrid
from outrider_lab.train.llama_module import Llama, read_llama, read_llama_config
from outrider_lab.train.losses import TopProbs, top_distributions


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What the target makes of a batch: the residual after its last layer, before the norm, and
    those after the layers asked for (0 is the embedding), as drafters get them from its arena."""

    last_BTD: Tensor
    hidden_BTKD: Tensor


class FrozenTarget:
    """A target on `device`; `bfloat16` says that products of such numbers pay there.

    `max_tokens` is the longest window that it will read. Raises CheckpointError for a family that
    cannot teach.
    """

    def __init__(
        self, folder: Path, *, device: torch.device, max_tokens: int, bfloat16: bool = False
    ) -> None:
        net = _read(folder, max_tokens).to(device).eval().requires_grad_(requires_grad=False)
        self.folder, self.device = folder, device
        self._net, self._bfloat16 = net, bfloat16
        # The ids that were asked for last, and their rows: gathering them is a copy of both.
        self._ids_W: Tensor | None = None
        self._head_WD = net.head

    @property
    def config(self) -> LlamaConfig | HybridConfig:
        return self._net.config

    @property
    def embedding(self) -> Tensor:
        """Of shape [V, D]."""
        return self._net.model.embed_tokens.weight

    @property
    def norm(self) -> Tensor:
        """What the last norm multiplies by, of shape [D]; its epsilon is `config.rms_norm_eps`."""
        return self._net.norm_scale

    @property
    def head(self) -> Tensor:
        """Of shape [V, D]."""
        return self._net.head

    def head_of(self, ids_W: Tensor | None) -> Tensor:
        """The head's rows of some ids, of shape [W, D]; None is all ids."""
        if ids_W is not self._ids_W:
            self._ids_W = ids_W
            self._head_WD = self.head if ids_W is None else self.head[ids_W.to(self.device)]
        return self._head_WD

    @property
    def net(self) -> Llama | HybridDecoder:
        return self._net

    def read(self, ids_BT: Tensor, hidden_layers: Sequence[int] = ()) -> TargetOutput:
        """States of a batch, without gradients."""
        with torch.no_grad(), self._products():
            last_BTD, hidden_BTKD = self._net.model(ids_BT.to(self.device), hidden_layers)
        return TargetOutput(last_BTD, hidden_BTKD)

    def logits(self, last_BTD: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits of last residuals, of any leading shape, without gradients: of some ids, or of
        all."""
        with torch.no_grad(), self._products():
            return functional.linear(self._net.model.norm(last_BTD), self.head_of(ids_W))

    def normed(self, last_BTD: Tensor) -> Tensor:
        """What the output head reads of last residuals, without gradients."""
        with torch.no_grad():
            return self._net.model.norm(last_BTD)

    def distributions(self, ids_BT: Tensor, num_kept: int) -> TopProbs:
        """The top of what it says after every token of a batch."""
        logits_BTV = self.logits(self.read(ids_BT).last_BTD)
        return top_distributions(logits_BTV.flatten(0, 1), num_kept)

    def _products(self) -> torch.autocast:
        """Weights and residuals stay float32, and so do positions, which bfloat16 cannot count."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16)


def read_decoder_config(folder: Path) -> LlamaConfig | HybridConfig:
    """Raises CheckpointError for a family that cannot teach."""
    config = read_native_config(folder)
    if not isinstance(config, HybridConfig) or config.mechanism is not Mechanism.DELTA:
        return read_llama_config(folder)
    check_dense(folder, config)
    return config


def _read(folder: Path, max_tokens: int) -> Llama | HybridDecoder:
    config = read_decoder_config(folder)
    if isinstance(config, HybridConfig):
        return read_hybrid(folder, config, max_tokens)
    return read_llama(folder, max_tokens)


# Given ids_T and K, for every position p how many of K drafts would be accepted in a round whose
# pending token is at p: accepted_T, whole numbers up to K.
Accepted: TypeAlias = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A prompt and the target's own greedy text after it, as ids."""

    ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Exam:
    """How many tokens a round would emit.

    The target writes greedily after held-out prompts, once. On such a text the engine's greedy
    rounds need no engine: a draft is accepted as far as it is the text. So whoever knows, for every
    position, how many of K drafts made there would be accepted, knows all rounds: the round whose
    pending token is at p emits accepted[p] + 1 tokens, and the next one begins there. Drafts past
    the end of the text count for nothing, as a request that ends clamps them.
    """

    texts: tuple[HeldOut, ...]
    device: torch.device
    k: int = 4

    def tokens_per_round(self, accepted: Accepted) -> float:
        """Emitted over rounds, over all texts; 1 means that no draft is ever accepted."""
        num_emitted = num_rounds = 0
        for text in self.texts:
            ids_T = torch.tensor(text.ids, device=self.device)
            kept = host_ints(accepted(ids_T, self.k))
            emitted = rounds(kept, text.num_prompt, len(text.ids))
            num_emitted, num_rounds = num_emitted + sum(emitted), num_rounds + len(emitted)
        return num_emitted / num_rounds if num_rounds else 1.0


def rounds(accepted: Sequence[int], num_prompt: int, num_tokens: int) -> list[int]:
    """What each round emits, from the last token of the prompt to the end of the text."""
    emitted: list[int] = []
    pending = num_prompt - 1
    while pending < num_tokens - 1:
        emitted.append(min(accepted[pending] + 1, num_tokens - 1 - pending))
        pending += emitted[-1]
    return emitted


def accepted_drafts(ids_T: Tensor, turns: Iterable[Tensor]) -> Tensor:
    """Of the drafts of a round whose pending token is at p, how many are the text's: accepted_T.

    `turns` are the ids that each turn of a drafter chooses after every token; a draft model's are
    all alike. Draft number s is turn s at p + s, since what it follows were accepted drafts, which
    are the text."""
    accepted_T, going_T = torch.zeros_like(ids_T), torch.ones_like(ids_T)
    for turn, chosen_T in enumerate(turns):
        right_T = torch.zeros_like(ids_T)
        right_T[: max(len(ids_T) - 1 - turn, 0)] = chosen_T[turn:-1] == ids_T[turn + 1 :]
        going_T = going_T * right_T
        accepted_T += going_T
    return accepted_T
