"""How far a student's distributions are from a teacher's, where of the teacher's only the top is
kept.

A teacher's distribution is kept as its n likeliest ids with their probabilities; all other ids are
one more outcome, the rest. Both distributions are compared over these n + 1 outcomes. Merging
outcomes never raises a divergence, so each is a lower bound of the one over all ids, and zero where
that is zero:

    forward  sum p log(p / q)   covers all that the teacher may say
    reverse  sum q log(q / p)   says nothing that the teacher would not

(Hinton et al., 2015; Gu et al., 2024, "MiniLLM"). What the exact rule accepts of a sampled draft is
1 - (1/2) sum |p - q|, which either divergence bounds (Pinsker).

Shapes:  P = places of a batch, B = windows, T = tokens, V = vocabulary, D = hidden size,
         C = ids that are kept of a distribution, S = places of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from outrider_lab.train.tokens import tensor_of

# Floor of a probability in a logarithm, well below what float16 rounding of the kept ones hides.
_LEAST = 1e-6
_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class TopProbs:
    """The likeliest ids of each distribution, int64, and their log-probabilities, float32."""

    ids_PC: Tensor
    logprobs_PC: Tensor

    def at(self, num_windows: int, places: slice) -> TopProbs:
        """Those of some places of every window, where P is so many windows."""
        parts = (
            part.view(num_windows, -1, part.shape[-1]) for part in (self.ids_PC, self.logprobs_PC)
        )
        return TopProbs(*(part_BTC[:, places].flatten(0, 1) for part_BTC in parts))


def top_distributions(logits_PV: Tensor, num_kept: int) -> TopProbs:
    """The top of softmax(logits)."""
    logits_PV = logits_PV.float()
    found = torch.topk(logits_PV, min(num_kept, logits_PV.shape[-1]), dim=-1)
    total_P1 = torch.logsumexp(logits_PV, dim=-1, keepdim=True)
    return TopProbs(found.indices, found.values - total_P1)


def distillation(logits_PV: Tensor, distributions: TopProbs, *, reverse: float = 0.0) -> Tensor:
    """Mean divergence in nats a place: `reverse` of it the reverse one, the rest forward."""
    top_PC = student_top(logits_PV, distributions.ids_PC)
    p_PC = distributions.logprobs_PC.exp()
    p_rest_P, q_rest_P = _rest(p_PC), _rest(top_PC.exp())
    forward = reversed_ = logits_PV.new_zeros(())
    if reverse < 1:
        kept_P = (p_PC * (distributions.logprobs_PC - top_PC)).sum(-1)
        forward = (kept_P + p_rest_P * (p_rest_P.log() - q_rest_P.log())).mean()
    if reverse > 0:
        kept_P = (top_PC.exp() * (top_PC - distributions.logprobs_PC)).sum(-1)
        reversed_ = (kept_P + q_rest_P * (q_rest_P.log() - p_rest_P.log())).mean()
    return (1 - reverse) * forward + reverse * reversed_


def student_top(logits_PV: Tensor, ids_PC: Tensor) -> Tensor:
    """Log-probabilities of `ids_PC` under softmax(logits)."""
    logits_PV = logits_PV.float()
    total_P1 = torch.logsumexp(logits_PV, dim=-1, keepdim=True)
    return torch.gather(logits_PV, -1, ids_PC) - total_P1


def next_token(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Mean cross entropy with the token that comes next, in nats."""
    return functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten()
    )


def faded_mean(losses: Iterable[Tensor]) -> Tensor:
    """The mean of the losses of a round's drafts, in order, in which draft s weighs 0.8 ** s: a
    later draft counts only where earlier ones were right."""
    parts = torch.stack(list(losses))
    weights = _DECAY ** torch.arange(len(parts), device=parts.device)
    return (parts * weights).sum() / weights.sum()


def _rest(p_PC: Tensor) -> Tensor:
    """What the kept outcomes leave, at least _LEAST."""
    return (1 - p_PC.sum(-1)).clamp_min(_LEAST)


# Logits of a slice are 2 MB at a vocabulary of 8,192.
_SLICE = 64


def head_loss(
    x_PD: Tensor, head_VD: Tensor, distributions: TopProbs, *, num_own: int = 0
) -> tuple[Tensor, TopProbs]:
    """The mean divergence from `distributions` of what a head says of `x_PD`, and the `num_own`
    likeliest ids of what it says, without gradients.

    Logits of a batch are the largest tensors of a small model's training: to write them, their
    exponentials and their gradients costs more than the products. So each slice of places goes all
    the way, from logits to gradients, before the next.
    """
    function = cast("Any", _HeadLoss)
    loss, ids_PC, logprobs_PC = function.apply(
        x_PD, head_VD, distributions.ids_PC, distributions.logprobs_PC, num_own
    )
    return loss, TopProbs(ids_PC, logprobs_PC)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PD: Tensor, head_VD: Tensor, ids_PC: Tensor, logprobs_PC: Tensor, num_own: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_places, learns_head = len(x_PD), ctx.needs_input_grad[1]
        total, dx_PD = x_PD.new_zeros((), dtype=torch.float32), torch.empty_like(x_PD)
        dhead_VD = torch.zeros_like(head_VD) if learns_head else None
        own: list[TopProbs] = []
        for first in range(0, num_places, _SLICE):
            places = slice(first, first + _SLICE)
            x_SD, distributions = x_PD[places], TopProbs(ids_PC[places], logprobs_PC[places])
            logits_SV = functional.linear(x_SD, head_VD)
            own.append(top_distributions(logits_SV, num_own))
            with torch.enable_grad():
                logits_SV.requires_grad_()
                loss = distillation(logits_SV, distributions) * (len(x_SD) / num_places)
            (dlogits_SV,) = torch.autograd.grad(loss, logits_SV)
            total += loss.detach()
            dx_PD[places] = dlogits_SV @ head_VD
            if dhead_VD is not None:
                dhead_VD += dlogits_SV.T @ x_SD
        ctx.save_for_backward(dx_PD, dhead_VD)
        found_PC, said_PC = (
            torch.cat(parts)
            for parts in zip(*((one.ids_PC, one.logprobs_PC) for one in own), strict=True)
        )
        ctx.mark_non_differentiable(found_PC, said_PC)
        return total, found_PC, said_PC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx_PD, dhead_VD = ctx.saved_tensors
        own_head = None if dhead_VD is None else dhead_VD * grads[0]
        return dx_PD * grads[0], own_head, None, None, None


# ids_BT -> distributions of all its places, in order.
Teach = Callable[[Tensor], TopProbs]


class DistributionCache:
    """Distributions of `num_windows` windows of `window` tokens, the `num_kept` likeliest ids of
    each.

    The target never changes while a draft learns from it, and reading a window is the dearest part
    of a step: from the second epoch on it is not asked. A window's mark is written after its
    distributions, so those that a process was killed in are computed again. `name` says which text
    and teacher they belong to: files of another name are left alone.
    """

    def __init__(
        self, folder: Path, name: str, *, num_windows: int, window: int, num_kept: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shape = (num_windows, window, num_kept)
        # Mapped in full, on disk as far as it is written.
        self._ids = _mapped(folder / f"distributions-{name}.ids", np.dtype(np.int32), shape)
        self._logprobs = _mapped(
            folder / f"distributions-{name}.logprobs", np.dtype(np.float16), shape
        )
        self._known = _mapped(
            folder / f"distributions-{name}.known", np.dtype(np.uint8), (num_windows,)
        )

    def distributions(self, ids_BT: Tensor, windows: Sequence[int], teach: Teach) -> TopProbs:
        """Of all places of the batch, in order; the teacher reads windows that are not known."""
        numbers = list(windows)
        new = [row for row, number in enumerate(numbers) if not self._known[number]]
        if new:
            self._keep([numbers[row] for row in new], teach(ids_BT[new]), len(new))
        ids_BTC = tensor_of(self._ids[numbers], np.dtype(np.int64))
        logprobs_BTC = tensor_of(self._logprobs[numbers], np.dtype(np.float32))
        device = ids_BT.device
        return TopProbs(ids_BTC.flatten(0, 1).to(device), logprobs_BTC.flatten(0, 1).to(device))

    def _keep(self, numbers: Sequence[int], distributions: TopProbs, num_rows: int) -> None:
        ids_BTC = _rows(distributions.ids_PC, num_rows)
        logprobs_BTC = _rows(distributions.logprobs_PC, num_rows)
        for row, number in enumerate(numbers):
            self._ids[number] = ids_BTC[row]
            self._logprobs[number] = logprobs_BTC[row]
            self._known[number] = 1


def _rows(values_PC: Tensor, num_rows: int) -> NDArray[Any]:
    return values_PC.view(num_rows, -1, values_PC.shape[-1]).cpu().numpy()


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """A mapped file of zeros, or what is in it already if it has that size."""
    size = int(np.prod(shape)) * kind.itemsize
    if not path.is_file() or path.stat().st_size != size:
        with path.open("wb") as stream:
            stream.truncate(size)
    return np.memmap(path, dtype=kind, mode="r+", shape=shape)
