"""Why two texts differ at a token: rounding at a near-tie, or a bug.

Sums of floating-point numbers depend on the shape of a kernel call, so on kernels that are not
row-invariant a verify pass of several rows can differ from passes of one row in the last bits, and
a choice between two tokens that are all but equal can turn. Whether it did is measured: the text up
to the difference is fed to a fresh sequence token by token, and again several tokens and several
sequences at a time. No draft, rule or commit of a round takes part in that, so the largest
difference of the two last rows of logits is the kernels' own error. The difference is a near-tie if
an error of that size can turn plain decoding's choice: for greedy decoding, if the margin of its
two best tokens is below twice the error. Anything else is a bug, and so is an error that is too
large to be rounding.

Shapes:  V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from outrider.core.protocols import CausalLM, DraftNeeds, StepRow

# Rounding moves logits by far less than this share of their range.
MAX_ROUNDING = 1 / 64

Decide = Callable[[Tensor], int]


@dataclass(frozen=True, slots=True)
class Place:
    """A difference to look into: what the target had read, the tokens that plain and speculative
    decoding then chose, and the shapes (rows, sequences) that the speculative passes had."""

    context: tuple[int, ...]
    prompt_length: int
    plain: int
    speculative: int
    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """`margin` is the gap of the two best logits of plain decoding, `error` the kernels' own."""

    near_tie: bool
    margin: float
    error: float
    reason: str

    def __str__(self) -> str:
        kind = "near-tie" if self.near_tie else "BUG"
        return f"{kind}: margin {self.margin:.2e}, logit error {self.error:.2e}; {self.reason}"


def look_into(model: CausalLM, place: Place, decide: Decide) -> Finding:
    """`decide` is plain decoding's choice from a row of logits. `model` must hold no sequences."""
    plain_V = replay(model, place, width=1, copies=1)
    best = torch.topk(plain_V, 2).values
    margin = float(best[0] - best[1])
    error = max(
        float((replay(model, place, width=width, copies=copies) - plain_V).abs().max())
        for width, copies in place.shapes
    )
    if decide(plain_V) != place.plain:
        return Finding(False, margin, error, "plain decoding cannot be repeated")
    finite_V = plain_V[plain_V.isfinite()]
    if error > MAX_ROUNDING * float(finite_V.max() - finite_V.min()):
        return Finding(False, margin, error, "packed passes are off by more than rounding")
    turned = any(decide(nudged_V) != place.plain for nudged_V in _nudged(plain_V, place, error))
    if turned:
        return Finding(True, margin, error, "kernels are not row-invariant here")
    return Finding(False, margin, error, "the kernels' error is too small to turn this choice")


def _nudged(plain_V: Tensor, place: Place, error: float) -> Iterator[Tensor]:
    """The logits as an error of that size could have them, turned most against the choice: the
    other token up and this one down, or all mass shifted towards lower or higher ids."""
    towards_V = torch.zeros_like(plain_V)
    towards_V[place.plain] = -error
    towards_V[place.speculative] = error
    yield plain_V + towards_V
    split = min(place.plain, place.speculative) + 1
    shift_V = torch.full_like(plain_V, -error)
    shift_V[:split] = error
    yield plain_V + shift_V
    yield plain_V - shift_V


def replay(model: CausalLM, place: Place, *, width: int, copies: int) -> Tensor:
    """Logits after the context: the prompt in one go, the rest `width` tokens a pass in each of
    `copies` sequences. Of the first of them, as a copy of shape V."""
    ids = range(copies)
    for seq_id in ids:
        model.state.open(seq_id, ())
    try:
        for start, end in _passes(len(place.context), place.prompt_length, width):
            last = end == len(place.context)
            tokens = place.context[start:end]
            logits_from = len(tokens) - 1 if last else len(tokens)
            rows = [StepRow.chain(seq_id, tokens, logits_from=logits_from) for seq_id in ids]
            out = model.step(rows, DraftNeeds())
            if last:
                return out.logits_MV[0].clone()
            model.state.commit({seq_id: range(len(tokens)) for seq_id in ids})
        raise AssertionError("a context has at least one token")
    finally:
        for seq_id in ids:
            model.state.close(seq_id)


def _passes(num_tokens: int, prompt_length: int, width: int) -> Iterator[tuple[int, int]]:
    """Ends of the passes; the last one is `width` tokens wide if there are so many."""
    start = min(prompt_length - 1, max(num_tokens - width, 0))
    if start:
        yield 0, start
    first = (num_tokens - start) % width
    if first:
        yield start, start + first
        start += first
    for step in count():
        begin = start + step * width
        if begin >= num_tokens:
            return
        yield begin, begin + width
