"""The trial a transformers model must pass when it is loaded: a few tokens, fed in every way.

Three texts are read by the model's own attention, without a cache, and then through the arena: the
beginning of a chain in one step, its rest together with a second branch of the tree and a second
sequence in another. What then differs cannot be used: a model that counts positions itself, adds to
attention what we do not, or mixes neighbouring tokens outside attention fails here, whatever it is
called. The chain's rest is fed once more token by token, which tells whether rows are invariant.

Shapes:  N = tokens of all texts that are compared, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.errors import CheckpointError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.rng import ROOT
from outrider.models.config_keys import OTHER_CHECKPOINT
from outrider.models.decoder import Room

_MOST_TOKENS = 8
_PAGE_SIZE = 4
# The largest error allowed, relative to the spread of the logits. Attention and residuals are
# float32 on both sides; shorter weights round what they are multiplied by, which spreads errors.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}


class Trial:
    """Texts of one model. Every text is fed from its beginning, and `run` compares all of it."""

    def __init__(self, max_tokens: int, vocab_size: int) -> None:
        length = min(_MOST_TOKENS, max_tokens)
        self._start = length // 2
        chain = tuple((7 * i * i + 3 * i + 1) % vocab_size for i in range(length))
        begin, rest = chain[: self._start], chain[self._start :]
        branch = tuple((token + 1) % vocab_size for token in rest[:-1])
        self.texts = (chain, begin + branch, chain[::-1])

    @property
    def room(self) -> Room:
        """A small arena of pages that the texts cross."""
        tokens = sum(map(len, self.texts))
        return Room(num_slots=2 * tokens, page_size=_PAGE_SIZE, max_rows=tokens)

    def run(self, model: CausalLM, expected_NV: Tensor, weights: torch.dtype) -> bool:
        """`expected_NV` are the logits of all texts in turn, `weights` the type of the linears'.

        True if rows are bit-identical alone and together. Raises CheckpointError if logits differ.
        """
        chain, other_path, other = self.texts
        begin, rest, branch = (
            chain[: self._start],
            chain[self._start :],
            other_path[self._start :],
        )
        model.state.open(0, ())
        model.state.open(1, ())
        begin_NV = _step(model, StepRow.chain(0, begin))
        model.state.commit({0: range(len(begin))})
        forks = (ROOT, *range(len(rest), len(rest) + len(branch) - 1))[: len(branch)]
        tree = StepRow(0, rest + branch, (*range(ROOT, len(rest) - 1), *forks))
        together_NV = _step(model, tree, StepRow.chain(1, other))
        model.state.commit({0: ()})
        alone_NV = torch.cat(
            [
                _step(model, StepRow.chain(0, rest[i : i + 1], parent=i - 1))
                for i in range(len(rest))
            ]
        )
        found_NV = torch.cat(
            [
                begin_NV,
                together_NV[: len(rest)],
                begin_NV,
                together_NV[len(rest) :],
            ]
        )
        _compare(found_NV, expected_NV, _TOLERANCE[weights], model.spec.name)
        return torch.equal(together_NV[: len(rest)], alone_NV)


def _step(model: CausalLM, *rows: StepRow) -> Tensor:
    return model.step(rows, DraftNeeds()).logits_MV.clone()


def _compare(found_NV: Tensor, expected_NV: Tensor, tolerance: float, name: str) -> None:
    if found_NV.shape != expected_NV.shape:
        raise CheckpointError(
            f"{name}: its logits have shape {list(expected_NV.shape)}, "
            f"while {list(found_NV.shape)} were asked for.",
            hint=OTHER_CHECKPOINT,
        )
    spread = (expected_NV - expected_NV.mean(-1, keepdim=True)).abs().max()
    error = (found_NV - expected_NV).abs().max()
    # Written so that NaN fails.
    if not bool(error <= tolerance * spread):
        raise CheckpointError(
            f"{name}: over the arena this model computes other logits than by itself (off by "
            f"{float(error):.2g}, allowed are {float(tolerance * spread):.2g}): it counts "
            "positions or mixes tokens in a way that the adapter does not know.",
            hint=OTHER_CHECKPOINT,
        )
