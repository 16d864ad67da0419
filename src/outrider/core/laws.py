"""From logits to laws: the one processed distribution that decides, draws and reports.

Temperature, top-k, top-p and min-p turn a node's logits into one law; the same law is the
acceptance ratio's p, the residual's source and what is drawn from. A greedy law is a point mass,
held as a token id, so that greedy decoding never builds a distribution.

Shapes:  N = nodes, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.noise import Noise, Role
from outrider.core.params import SamplingParams
from outrider.core.sampling import PLAIN, Sampling

# A quotient by less would overflow to infinity, and its law would not be numbers.
MIN_TEMPERATURE = 1e-20


@dataclass(frozen=True, slots=True)
class Laws:
    """One law a node: exactly one of `tokens` (point masses) and `probs_NV` is given."""

    tokens: tuple[int, ...] | None = None
    probs_NV: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.probs_NV is None):
            raise ContractError("laws are either tokens or probabilities")

    def law(self, index: int) -> int | Tensor:
        """A token id (all mass on it) or probabilities of shape V."""
        if self.tokens is not None:
            return self.tokens[index]
        if self.probs_NV is None:
            raise ContractError("there are no probabilities")
        return self.probs_NV[index]


def empty_laws(count: int, logits_V: Tensor) -> Tensor:
    """Room for `count` laws made of logits like these, in their dtype."""
    # MPS lacks float64, in which sums are made and draws fall.
    device = "cpu" if logits_V.device.type == "mps" else logits_V.device
    return logits_V.new_empty((count, logits_V.shape[-1]), device=device)


def processed_probs(
    logits_NV: Tensor,
    params: SamplingParams,
    sampling: Sampling = PLAIN,
    out_NV: Tensor | None = None,
) -> Tensor:
    """Probabilities under `params`, temperature > 0; the dtype of `logits_NV` is kept.

    Filters apply in the order temperature, top-k, top-p, min-p, each on what is left. Ties at a
    top-k edge are all kept, so the law does not depend on the order of a sort. `out_NV`, if given,
    is what is returned: room from `empty_laws`, or the logits themselves on a CPU.
    """
    if out_NV is None:
        out_NV = empty_laws(len(logits_NV), logits_NV)
    if 0 < params.top_k < logits_NV.shape[-1]:
        sampling.top_k(logits_NV, params.top_k, out_NV)
        logits_NV = out_NV
    sampling.softmax(logits_NV, max(params.temperature, MIN_TEMPERATURE), out_NV)
    if params.top_p < 1 or params.min_p > 0:
        sampling.keep_likely(out_NV, params.top_p, params.min_p)
    return out_NV


def mass(law: int | Tensor, token: int) -> float:
    """The probability that `law`, a point mass or probabilities of shape V, gives `token`."""
    if isinstance(law, int):
        return float(law == token)
    return float(law[token])


def draw(law: int | Tensor, noise: Noise, node: int) -> int:
    """The target's own token after draft node `node`."""
    return law if isinstance(law, int) else noise.pick(law, node, Role.NEXT)


def draw_at(law: int | Tensor, noise: Noise, depth: int) -> int:
    """The target's own token `depth` places after the round's start, keyed by position."""
    return law if isinstance(law, int) else noise.pick_at(law, depth)
