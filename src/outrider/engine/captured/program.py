"""A whole round as a straight line of tensor operators: draft, verify, accept, advance.

    K draft steps; the first reads two tokens of a row, so the token that the last round
        accepted without having fed it (its last draft token) needs no pass of its own
    one target pass over the pending token and K drafts of every row
    the rule, with numbers made on the device
    lengths, pending tokens and room move; a report is left for the host

Nothing here depends on a number that the host would have to wait for: shapes follow from (rows, K)
alone and every tensor that outlives the round has a fixed address. So the same lines run eagerly,
as the definition, and inside a CUDA graph.

Shapes:  B = rows, K = drafted tokens, W = K + 1, V = vocabulary, M = B, S = stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.captured.buffers import BROKE_DRAFT, BROKE_TARGET, RoundBuffers
from outrider.engine.captured.laws import Judged, Keys, RoundLaws, Rows
from outrider.engine.captured.passes import PassFunction


@dataclass(frozen=True, slots=True)
class RoundProgram:
    """One round of the rows in `buffers` each time it is called. `draft` None drafts nothing."""

    buffers: RoundBuffers
    target: PassFunction
    draft: PassFunction | None
    wanted_M: Tensor
    places_W: Tensor
    k: int
    laws: RoundLaws

    def __call__(self) -> None:
        with torch.inference_mode():
            self._run()

    def _run(self) -> None:
        state = self.buffers
        rows = Rows(
            state.temperature_B,
            torch.minimum(state.budget_B, state.room_B - 1).clamp_min(0),
            Keys(state.seed_B, state.sample_B, state.length_B),
        )
        self.laws.begin(rows)
        tokens_BK, broken_B = self._drafts(rows)
        judged = self.laws.judge(self._verify(tokens_BK), tokens_BK, rows)
        self._report(tokens_BK, rows, judged, broken_B)
        self._advance(tokens_BK, judged)

    def _drafts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """tokens_BK, and which rows' draft logits were no numbers."""
        state = self.buffers
        if self.draft is None:
            return state.last_B2[:, :0], torch.zeros_like(state.mirror_B, dtype=torch.bool)
        tables, at_B = state.draft, state.length_B - 1
        positions_B2 = torch.stack([at_B - state.lag_B, at_B], dim=1)
        logits_MV = self.draft(state.last_B2, positions_B2, tables, self.wanted_M)
        tokens: list[Tensor] = []
        broken: list[Tensor] = []
        for node in range(self.k):
            token_B, broken_B = self.laws.draft(logits_MV, rows, node)
            broken.append(broken_B)
            # An idle row drafts what the row does whose memory it writes.
            tokens.append(token_B.index_select(0, state.mirror_B))
            if node + 1 < self.k:
                positions_B1 = (state.length_B + node)[:, None]
                logits_MV = self.draft(tokens[-1][:, None], positions_B1, tables, None)
        broken_BK = torch.stack(broken, dim=1) & (self.places_W[:-1] < rows.depth_B[:, None])
        return torch.stack(tokens, dim=1), broken_BK.any(-1)

    def _verify(self, tokens_BK: Tensor) -> Tensor:
        state = self.buffers
        tokens_BW = torch.cat([state.last_B2[:, 1:], tokens_BK], dim=1)
        positions_BW = (state.length_B - 1)[:, None] + self.places_W
        logits_MV = self.target(tokens_BW, positions_BW, state.target, None)
        return logits_MV.view(tokens_BW.shape[0], tokens_BW.shape[1], -1)

    def _report(self, tokens_BK: Tensor, rows: Rows, judged: Judged, broken_B: Tensor) -> None:
        broke_B = judged.broken_B * BROKE_TARGET + broken_B * BROKE_DRAFT
        numbers_B4 = torch.stack([rows.depth_B, judged.kept_B, judged.next_B, broke_B], dim=1)
        self.buffers.report_BR.copy_(torch.cat([tokens_BK, numbers_B4], dim=1))

    def _advance(self, tokens_BK: Tensor, judged: Judged) -> None:
        """What engine/clamp.py will say on the host of stop tokens and room, and then one round
        further. Rows that ended stay where they are."""
        state, kept_B1 = self.buffers, judged.kept_B[:, None]
        next_B1 = judged.next_B[:, None]
        accepted_BW = torch.cat([tokens_BK, next_B1], dim=1)
        emitted_BW = torch.where(self.places_W < kept_B1, accepted_BW, next_B1)
        ends_BW = (emitted_BW[:, :, None] == state.stops_BS[:, None]).any(-1)
        end_B = torch.where(ends_BW, self.places_W, self.k + 1).amin(-1)
        count_B = torch.minimum(judged.kept_B, end_B) + 1
        count_B = torch.where(state.room_B > 0, count_B, 0)
        lag_B = (count_B == self.k + 1) & (self.k > 0)
        text_BX = torch.cat([state.last_B2[:, 1:], emitted_BW], dim=1)
        before_B = count_B - lag_B.long()
        last_B2 = text_BX.gather(1, torch.stack([before_B, count_B], dim=1))
        room_B = torch.where(ends_BW.any(-1), 0, state.room_B - count_B)
        moved_B = state.room_B > 0
        state.lag_B.copy_(torch.where(moved_B, lag_B.long(), state.lag_B))
        state.last_B2.copy_(torch.where(moved_B[:, None], last_B2, state.last_B2))
        state.length_B.add_(count_B)
        state.room_B.copy_(room_B)
        for buffer in (state.lag_B, state.last_B2, state.length_B, state.room_B):
            buffer.copy_(buffer.index_select(0, state.mirror_B))
