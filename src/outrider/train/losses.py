"""How far a student's laws are from a teacher's, where of the teacher's only the top is kept.

A teacher's law is kept as its n likeliest ids with their probabilities; all other ids are one more
outcome, the rest. Both laws are compared over these n + 1 outcomes. Merging outcomes never raises a
divergence, so each is a lower bound of the one over all ids, and zero where that is zero:

    forward  sum p log(p / q)   covers all that the teacher may say
    reverse  sum q log(q / p)   says nothing that the teacher would not

(Hinton et al., 2015; Gu et al., 2024, "MiniLLM"). What the exact rule accepts of a sampled draft is
1 - (1/2) sum |p - q|, which either divergence bounds (Pinsker).

Shapes:  P = places of a batch, V = vocabulary, C = ids that are kept of a law.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Floor of a probability in a logarithm, well below what float16 rounding of the kept ones hides.
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class TopLaws:
    """The likeliest ids of each law, int64, and their log-probabilities, float32."""

    ids_PC: Tensor
    logprobs_PC: Tensor


def top_laws(logits_PV: Tensor, num_kept: int) -> TopLaws:
    """The top of softmax(logits)."""
    logits_PV = logits_PV.float()
    found = torch.topk(logits_PV, min(num_kept, logits_PV.shape[-1]), dim=-1)
    total_P1 = torch.logsumexp(logits_PV, dim=-1, keepdim=True)
    return TopLaws(found.indices, found.values - total_P1)


def distillation(logits_PV: Tensor, laws: TopLaws, *, reverse: float = 0.0) -> Tensor:
    """Mean divergence in nats a place: `reverse` of it the reverse one, the rest forward."""
    top_PC = student_top(logits_PV, laws.ids_PC)
    p_PC = laws.logprobs_PC.exp()
    p_rest_P, q_rest_P = _rest(p_PC), _rest(top_PC.exp())
    forward = reversed_ = logits_PV.new_zeros(())
    if reverse < 1:
        kept_P = (p_PC * (laws.logprobs_PC - top_PC)).sum(-1)
        forward = (kept_P + p_rest_P * (p_rest_P.log() - q_rest_P.log())).mean()
    if reverse > 0:
        kept_P = (top_PC.exp() * (top_PC - laws.logprobs_PC)).sum(-1)
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


def _rest(p_PC: Tensor) -> Tensor:
    """What the kept outcomes leave, at least _LEAST."""
    return (1 - p_PC.sum(-1)).clamp_min(_LEAST)
