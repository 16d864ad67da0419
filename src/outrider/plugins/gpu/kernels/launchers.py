"""Launchers of the Triton kernels of sampling and acceptance; no launch waits for the device.

A distribution is a row of logits and a temperature, or a row of probabilities. A pass over the
logits stores the largest and the sum of each piece of the vocabulary, and later kernels compute
probabilities from these, with the bits of `softmax`. Temperature 0 is a point mass on the first
largest logit, so greedy and sampled sequences share a batch. Random numbers are those of
core/rng.py. Shares and running sums are float64, as in verify/. If logits are NaN, the drawn token
is -1.

Shapes:  M = logits rows, B = sequences, K = drafted tokens, V = vocabulary, N = nodes, W = K + 1,
         R = rows of distributions, C = pieces of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.rng import Role, RoundKeys
from outrider.plugins.gpu.kernels import accept, sampling
from outrider.plugins.gpu.kernels.scratch import Part, Workspace
from outrider.plugins.gpu.kernels.tiles import MOST_REGISTERS, cdiv, launch, power_of_two

# Kernels have no types.
# pyright: reportUnknownMemberType=false


# Numbers of a row that one program processes; a row of 128,000 takes 32 programs.
MOST_OF_A_PIECE = 4096


@dataclass(frozen=True, slots=True)
class ProbRows:
    """Contiguous float32 rows of shape RV, or BWV and the like, which count as rows.

    With `temperature_B` (float32, one for each sequence) they are logits; with None they are
    probabilities. Rows of a sequence are consecutive.
    """

    rows_RV: Tensor
    temperature_B: Tensor | None


@dataclass(frozen=True, slots=True)
class Chains:
    """Drafted chains: the first `lengths_B[b]` <= K of `tokens_BK`, of any integer dtypes."""

    tokens_BK: Tensor
    lengths_B: Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Outputs of `judge`, of any integer dtype: the number of accepted tokens, and the target's own
    token after them, -1 if its distribution has NaN."""

    num_accepted_B: Tensor
    next_B: Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """The cut of rows of `size` into pieces, for kernels with a program for each piece."""

    size: int

    @property
    def piece(self) -> int:
        return min(MOST_OF_A_PIECE, power_of_two(self.size))

    @property
    def count(self) -> int:
        return cdiv(self.size, self.piece)

    @property
    def num_warps(self) -> int:
        return max(1, self.piece // 512)

    def constants(self) -> dict[str, int]:
        return {
            "PIECE": self.piece,
            "PIECES": power_of_two(self.count),
            "num_warps": self.num_warps,
        }

    def parts(self, num_rows: int) -> tuple[Part, Part, Part]:
        """Scratch memory for the largest, sum and first largest of the pieces of rows."""
        shape = (num_rows, self.count)
        return (shape, torch.float32), (shape, torch.float32), (shape, torch.int32)


class TritonProbs:
    """The operators of one stream; `workspace` may be the one of `TritonOps`."""

    __slots__ = ("_workspace",)

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def softmax(self, logits_RV: Tensor, temperature_R: Tensor, out_RV: Tensor) -> None:
        """Rows of softmax(logits / temperature); `out` may be `logits`. Temperatures are one for
        each row, or one for each group of as many consecutive rows."""
        num_rows, size = logits_RV.shape
        assert out_RV.is_contiguous()
        cut, rows_per_distribution = Pieces(size), num_rows // max(1, temperature_R.shape[0])
        distributions = ProbRows(logits_RV, temperature_R)
        seen = _look(
            distributions, rows_per_distribution, self._workspace.carve(*cut.parts(num_rows))
        )
        launch(
            sampling.softmax_kernel,
            (num_rows, cut.count),
            *seen, out_RV, size, cut.count, rows_per_distribution, **cut.constants(),
        )  # fmt: skip

    def argmax(self, logits_RV: Tensor, out_R: Tensor) -> None:
        """The first largest of each row, -1 for a NaN; `out` is of any integer dtype."""
        assert logits_RV.is_contiguous()
        assert out_R.is_contiguous()
        cut, num_rows = Pieces(logits_RV.shape[-1]), out_R.numel()
        best_RC, total_RC, first_RC = self._workspace.carve(*cut.parts(num_rows))
        _fill(logits_RV, None, 1, (best_RC, total_RC, first_RC))
        launch(
            sampling.argmax_kernel, (num_rows,), best_RC, first_RC, out_R, cut.count,
            PIECES=power_of_two(cut.count), num_warps=1,
        )  # fmt: skip

    def draw(
        self, distributions: ProbRows, keys: RoundKeys, node: int, role: Role, out_B: Tensor
    ) -> None:
        """Draw one token from each of B distributions, by the random number of (`node`, `role`)."""
        numbers = (keys.seed_B, keys.sample_B, keys.start_B)
        self._pick(distributions, numbers, out_B, node_word=node + 1, GIVEN=False, ROLE=int(role))

    def pick(self, distributions: ProbRows, uniform_B: Tensor, out_B: Tensor) -> None:
        """Draw one token from each of B distributions, by given numbers: float64, in [0, 1)."""
        assert uniform_B.dtype == torch.float64
        numbers = (uniform_B, uniform_B, uniform_B)
        self._pick(distributions, numbers, out_B, node_word=0, GIVEN=True, ROLE=0)

    def leftover(
        self, p_V: Tensor, proposal: int | Tensor, share_1: Tensor, out_V: Tensor, sums_C: Tensor
    ) -> None:
        """max(share * p - q, 0) into `out_V`, which may be `p_V`, and its sum in each of
        `num_pieces(V)` pieces; a token id is a point mass. Share and sums are float64."""
        cut, point = Pieces(p_V.shape[0]), isinstance(proposal, int)
        assert sums_C.shape == (cut.count,)
        assert share_1.dtype == sums_C.dtype == torch.float64
        launch(
            sampling.leftover_kernel,
            (cut.count,),
            p_V, p_V if point else proposal, share_1, out_V, sums_C, proposal if point else -1,
            cut.size, POINT=point, PIECE=cut.piece, num_warps=cut.num_warps,
        )  # fmt: skip

    def _pick(
        self,
        distributions: ProbRows,
        numbers: tuple[Tensor, Tensor, Tensor],
        out_B: Tensor,
        *,
        node_word: int,
        **constants: int,
    ) -> None:
        num, size = distributions.rows_RV.shape
        cut = Pieces(size)
        *views, sums_BC2 = self._workspace.carve(
            *cut.parts(num), ((num, cut.count, 2), torch.float64)
        )
        seen = _look(distributions, 1, views)
        # There is no chain: pointers to the data of chains are not read.
        flags = _flags(distributions, None) | cut.constants() | {"CHAINS": False}
        before = (out_B, out_B, out_B, out_B, *seen, *seen, sums_BC2)
        launch(accept.left_kernel, (num, cut.count), *before, 0, size, cut.count, **flags)
        launch(
            accept.pick_kernel,
            (num,),
            *before, *numbers, out_B, out_B, node_word, 0, size, cut.count, **flags, **constants,
        )  # fmt: skip

    def judge(
        self,
        chains: Chains,
        p: ProbRows,
        q: ProbRows | None,
        keys: RoundKeys,
        out: Verdicts,
        *,
        block: bool = True,
    ) -> None:
        """Apply the block rule, or the token rule, to B chains (verify/exact.py).

        `p` has shape BWV: row n is the target's distribution after n drafted tokens. `q` has shape
        BKV; None means that drafted tokens were chosen deterministically, and then the token rule
        applies.
        """
        num, drafted = chains.tokens_BK.shape
        size = p.rows_RV.shape[-1]
        cut = Pieces(size)
        num_q = num * drafted if q is not None else 0
        views = self._workspace.carve(
            *cut.parts(num * (drafted + 1)),
            *cut.parts(num_q),
            ((num, drafted), torch.float64),
            ((num, drafted, cut.count), torch.float64),
            ((num,), torch.int32),
            ((num,), torch.float64),
            ((num, cut.count, 2), torch.float64),
        )
        ratio_BK, left_BKC, kept_B, share_B, sums_BC2 = views[6:]
        seen = _look(p, drafted + 1, views[:3])
        seen = (*seen, *(seen if q is None else _look(q, drafted, views[3:6])))
        lengths_B, tokens_BK = chains.lengths_B, chains.tokens_BK
        block = block and q is not None
        flags, sizes = _flags(p, q), (drafted, size, cut.count)
        pieces = {"PIECES": cut.constants()["PIECES"]}
        launch(
            accept.ratio_kernel,
            (num, drafted),
            tokens_BK, lengths_B, *seen, ratio_BK, *sizes, **flags, **pieces, num_warps=1,
        )  # fmt: skip
        if block:
            launch(
                accept.uncovered_kernel,
                (num * drafted, cut.count),
                lengths_B, *seen, ratio_BK, left_BKC, *sizes, **flags, **cut.constants(),
                maxnreg=MOST_REGISTERS,
            )  # fmt: skip
        numbers = (keys.seed_B, keys.sample_B, keys.start_B)
        launch(
            accept.decide_kernel,
            (num,),
            lengths_B, *numbers, ratio_BK, left_BKC, kept_B, share_B, drafted, cut.count,
            BLOCK_RULE=block, **pieces, num_warps=1,
        )  # fmt: skip
        flags = flags | cut.constants() | {"CHAINS": True}
        before = (kept_B, share_B, lengths_B, tokens_BK, *seen, sums_BC2)
        launch(accept.left_kernel, (num, cut.count), *before, *sizes, **flags)
        launch(
            accept.pick_kernel,
            (num,),
            *before, *numbers, out.num_accepted_B, out.next_B, 0, *sizes, **flags,
            GIVEN=False, ROLE=int(Role.NEXT),
        )  # fmt: skip


def num_pieces(size: int) -> int:
    """The number of pieces of a vocabulary of `size`."""
    return Pieces(size).count


def _flags(p: ProbRows, q: ProbRows | None) -> dict[str, bool]:
    q_ready = q is None or q.temperature_B is None
    return {"P_READY": p.temperature_B is None, "Q_READY": q_ready, "POINT": q is None}


def _look(
    distributions: ProbRows, rows_per_distribution: int, views: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of kernels: rows, temperatures and pieces, which a launch here fills."""
    rows_RV, temperature_B = distributions.rows_RV, distributions.temperature_B
    assert rows_RV.is_contiguous()
    if temperature_B is None:
        return rows_RV, rows_RV, rows_RV, rows_RV, rows_RV
    _fill(rows_RV, temperature_B, rows_per_distribution, views)
    best_RC, total_RC, first_RC = views
    return rows_RV, temperature_B, best_RC, total_RC, first_RC


def _fill(
    rows_RV: Tensor,
    temperature_B: Tensor | None,
    rows_per_distribution: int,
    views: Sequence[Tensor],
) -> None:
    size = rows_RV.shape[-1]
    cut = Pieces(size)
    tempered = temperature_B is not None
    launch(
        sampling.pieces_kernel, (rows_RV.numel() // size, cut.count), rows_RV, temperature_B if
        tempered else rows_RV, *views, size, cut.count, rows_per_distribution, TEMPERED=tempered,
        PIECE=cut.piece, num_warps=cut.num_warps,
    )  # fmt: skip
