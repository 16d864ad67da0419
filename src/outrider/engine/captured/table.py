"""The programs of an engine's captured rounds: one a bucket of rows, at one K.

A bucket is the next power of two, so that few graphs serve every batch size; memory is allocated
once, for the largest. Batches with a sampled row have programs of their own, since a greedy round
makes no law. A program is made when its bucket is first met.

Shapes:  B = rows, K = drafted tokens, W = K + 1, M = B, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.errors import ContractError
from outrider.core.sequence import LiveSequence
from outrider.engine.captured.buffers import RoundBuffers
from outrider.engine.captured.capture import Launcher, Mailbox, Ticket
from outrider.engine.captured.laws import RoundLaws
from outrider.engine.captured.memory import Entry
from outrider.engine.captured.passes import StackModel, StaticPass
from outrider.engine.captured.program import RoundProgram

# Checkpoints name a handful at most; requests add the tokenizer's own.
MAX_STOPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSizes:
    """`makes_laws` says that sampled rows can be judged."""

    k: int
    batch_size: int
    page_size: int
    num_pages: int
    makes_laws: bool


# (rooms for laws_BKV) -> what draws and judges; None: of batches without a sampled row.
MakeLaws: TypeAlias = Callable[[Tensor | None], RoundLaws]


@dataclass(slots=True)
class RoundTable:
    """Owns the static memory. `enter` writes rows and picks the program that `launch` runs."""

    sizes: RoundSizes
    target: StackModel
    draft: StackModel | None
    launcher: Launcher
    make_laws: MakeLaws
    _memory: _Memory | None = None
    _buffers: RoundBuffers | None = None
    _launches: dict[tuple[int, bool], Callable[[], None]] = field(
        default_factory=dict[tuple[int, bool], Callable[[], None]]
    )
    _current: tuple[int, bool] = (0, False)

    @property
    def k(self) -> int:
        return self.sizes.k

    @property
    def buffers(self) -> RoundBuffers:
        """Those of the bucket that runs now."""
        if self._buffers is None:
            raise ContractError("there is no buffers")
        return self._buffers

    def refusal(self, seq: LiveSequence) -> str | None:
        """Why rounds of `seq` cannot be captured; None when they can."""
        params, most = seq.params, self.sizes.num_pages * self.sizes.page_size
        filters = bool(params.top_k or params.top_p < 1 or params.min_p > 0)
        obstacles = (
            (seq.shaper is not None, "a request changes logits (penalties, bans or a mask)"),
            (params.logprobs, "a request asks for log-probabilities"),
            (len(seq.stop_ids) > MAX_STOPS, f"a request has over {MAX_STOPS} stop tokens"),
            (seq.prompt_length + seq.limit + self.k > most, f"a request may pass {most} tokens"),
            (not params.greedy and filters, "a request filters its law (top_k, top_p, min_p)"),
            (
                not params.greedy and not self.sizes.makes_laws,
                "at temperature > 0 only the samplers token and block are captured",
            ),
        )
        return next((reason for stands, reason in obstacles if stands), None)

    def enter(self, entries: Sequence[Entry]) -> None:
        """Write rows, and make their program if this is the first batch of its size."""
        bucket = bucket_of(len(entries), self.sizes.batch_size)
        sampled = any(not entry.seq.params.greedy for entry in entries)
        self._current = (bucket, sampled)
        buffers = self._buffers = self._static().buffers.first(bucket)

        def write() -> None:
            buffers.write(entries)

        if self._current in self._launches:
            write()
            return
        program = self.program(bucket, sampled=sampled)
        self._launches[self._current] = self.launcher.make(program, write)

    def write_budgets(self, budgets: Sequence[int]) -> None:
        self.buffers.write_budgets(budgets)

    def launch(self) -> Ticket:
        """One round of the rows that entered; its report is on its way when this returns."""
        self._launches[self._current]()
        return self._static().mailbox.post(self.buffers.report_BR)

    def program(self, bucket: int, *, sampled: bool) -> RoundProgram:
        """The straight line for `bucket` rows."""
        memory = self._static()
        return RoundProgram(
            buffers=memory.buffers.first(bucket),
            target=memory.target,
            draft=memory.draft,
            wanted_M=memory.wanted_M[:bucket],
            places_W=memory.places_W,
            k=self.k,
            laws=self.make_laws(memory.laws(self.sizes, bucket) if sampled else None),
        )

    def _static(self) -> _Memory:
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = _Memory.allocate(self.sizes, self.target, self.draft)
        return self._memory


def bucket_of(num_rows: int, batch_size: int) -> int:
    """The next power of two, or the batch size if that is less."""
    return min(1 << (num_rows - 1).bit_length(), batch_size)


@dataclass(slots=True)
class _Memory:
    """All tensors that outlive a round, for the largest bucket. Laws are made room for when the
    first sampled row comes."""

    buffers: RoundBuffers
    mailbox: Mailbox
    target: StaticPass
    draft: StaticPass | None
    wanted_M: Tensor
    places_W: Tensor
    laws_BKV: Tensor | None = None

    @classmethod
    def allocate(cls, sizes: RoundSizes, target: StackModel, draft: StackModel | None) -> _Memory:
        num_rows, k = sizes.batch_size, sizes.k
        device = target.scratch.x_ND.device
        buffers = RoundBuffers.allocate(
            device,
            num_rows=num_rows,
            num_pages=sizes.num_pages,
            page_size=sizes.page_size,
            num_stops=MAX_STOPS,
            k=k,
        )
        passes = StaticPass.of(
            target,
            num_rows=num_rows * (k + 1),
            num_logits=num_rows * (k + 1),
            page_size=sizes.page_size,
        )
        drafts = None
        if draft is not None:
            drafts = StaticPass.of(
                draft, num_rows=2 * num_rows, num_logits=num_rows, page_size=sizes.page_size
            )
        return cls(
            buffers=buffers,
            mailbox=Mailbox(buffers.report_BR),
            target=passes,
            draft=drafts,
            wanted_M=torch.arange(num_rows, device=device) * 2 + 1,
            places_W=torch.arange(k + 1, device=device),
        )

    def laws(self, sizes: RoundSizes, bucket: int) -> Tensor:
        if self.laws_BKV is None:
            vocab_size, device = self.target.logits_MV.shape[1], self.places_W.device
            self.laws_BKV = torch.zeros(sizes.batch_size, sizes.k, vocab_size, device=device)
        return self.laws_BKV[:bucket]
