"""A whole round as a straight line of tensor operators, run eagerly or captured as one CUDA graph.

    K draft steps; the first reads two tokens of a row, so the token that the last round accepted
        without having fed it (its last draft token) needs no pass of its own
    one target pass over the pending token and K drafts of every row
    the rule, with numbers made on the device
    lengths, pending tokens and remaining counts move; a report is left for the host

Shapes follow from (rows, K) alone and every tensor that outlives the round has a fixed address, so
the eager run is the definition of the captured one.

Shapes:  B = M = rows, R = numbers of a report, K = drafts, W = K + 1, V = vocabulary, S = stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from outrider.core.errors import given
from outrider.core.rng import RoundKeys
from outrider.engine.round import LiveSequence
from outrider.plugins.gpu.rounds.memory import (
    BROKE_DRAFT,
    BROKE_TARGET,
    KEEPS_ALL,
    Entry,
    PassFunction,
    RoundBuffers,
    StackModel,
    StaticPass,
    filters_of,
)
from outrider.plugins.gpu.rounds.sampling import Filters, Judged, RoundProbs, Rows, request_refusal

# Libraries choose algorithms and allocate workspaces in their first calls.
_WARM_UPS = 2


class Launcher(Protocol):
    """A maker of launches of programs. `prepare` puts the memory of a program into the state for
    its next run; it may be called several times."""

    def make(
        self, program: Callable[[], None], prepare: Callable[[], None]
    ) -> Callable[[], None]: ...


class EagerLauncher:
    """A launcher that runs a program operator by operator, on any device."""

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        prepare()
        return program


class GraphLauncher:
    """A launcher that captures one CUDA graph per program. Graphs share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def make(self, program: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
        """Run `program` a few times, capture it, and return a call that replays it."""
        prepare()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                program()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            program()
        prepare()

        def launch(_program: object = program) -> None:
            """Replay the graph; the reference to its program keeps the tensors at its addresses."""
            graph.replay()

        return launch


def launcher_for(device: torch.device) -> Launcher:
    return GraphLauncher(device) if device.type == "cuda" else EagerLauncher()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A report on its way to the host."""

    report_BR: Tensor
    arrived: torch.cuda.Event | None

    def read(self) -> Tensor:
        """Return the report, in host memory. Waits for the report, not for later work."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.report_BR


class Mailbox:
    """Two pinned host buffers used in turns, each with an event: a report may be read while the
    next round runs, until the one after it is posted."""

    def __init__(self, like_BR: Tensor) -> None:
        self._on_cuda = like_BR.is_cuda
        shape, dtype = (2, *like_BR.shape), like_BR.dtype
        self._slots = torch.zeros(shape, dtype=dtype, pin_memory=self._on_cuda)
        self._turn = 0

    def post(self, report_BR: Tensor) -> Ticket:
        """Copy `report_BR` once the work queued so far is done; return at once."""
        slot_BR = self._slots[self._turn][: report_BR.shape[0]]
        self._turn = 1 - self._turn
        slot_BR.copy_(report_BR, non_blocking=True)
        if not self._on_cuda:
            return Ticket(slot_BR, None)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(report_BR.device))
        return Ticket(slot_BR, arrived)


@dataclass(frozen=True, slots=True)
class RoundProgram:
    """One round of the rows in `buffers` at each call. With `draft` None nothing is drafted."""

    buffers: RoundBuffers
    target: PassFunction
    draft: PassFunction | None
    wanted_M: Tensor
    offsets_W: Tensor
    k: int
    distributions: RoundProbs
    filters: Filters | None = None

    def __call__(self) -> None:
        with torch.inference_mode():
            self._run()

    def _run(self) -> None:
        state = self.buffers
        rows = Rows(
            state.temperature_B,
            torch.minimum(state.budget_B, state.remaining_B - 1).clamp_min(0),
            RoundKeys(state.seed_B, state.sample_B, state.length_B),
            self.filters,
        )
        self.distributions.begin(rows)
        tokens_BK, broken_B = self._drafts(rows)
        judged = self.distributions.judge(self._verify(tokens_BK), tokens_BK, rows)
        self._report(tokens_BK, rows, judged, broken_B)
        self._advance(tokens_BK, judged)

    def _drafts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return tokens_BK, and the rows whose draft logits were no numbers."""
        state = self.buffers
        if self.draft is None:
            return state.last_B2[:, :0], torch.zeros_like(state.mirror_B, dtype=torch.bool)
        tables, at_B = state.draft, state.length_B - 1
        positions_B2 = torch.stack([at_B - state.lag_B, at_B], dim=1)
        logits_MV = self.draft(state.last_B2, positions_B2, tables, self.wanted_M)
        tokens: list[Tensor] = []
        broken: list[Tensor] = []
        for node in range(self.k):
            token_B, broken_B = self.distributions.draft(logits_MV, rows, node)
            broken.append(broken_B)
            # An idle row drafts the same tokens as the row whose memory it writes.
            tokens.append(token_B.index_select(0, state.mirror_B))
            if node + 1 < self.k:
                positions_B1 = (state.length_B + node)[:, None]
                logits_MV = self.draft(tokens[-1][:, None], positions_B1, tables, None)
        broken_BK = torch.stack(broken, dim=1) & (self.offsets_W[:-1] < rows.depth_B[:, None])
        return torch.stack(tokens, dim=1), broken_BK.any(-1)

    def _verify(self, tokens_BK: Tensor) -> Tensor:
        state = self.buffers
        tokens_BW = torch.cat([state.last_B2[:, 1:], tokens_BK], dim=1)
        positions_BW = (state.length_B - 1)[:, None] + self.offsets_W
        logits_MV = self.target(tokens_BW, positions_BW, state.target, None)
        return logits_MV.view(tokens_BW.shape[0], tokens_BW.shape[1], -1)

    def _report(self, tokens_BK: Tensor, rows: Rows, judged: Judged, broken_B: Tensor) -> None:
        broke_B = judged.broken_B * BROKE_TARGET + broken_B * BROKE_DRAFT
        numbers_B4 = torch.stack([rows.depth_B, judged.kept_B, judged.next_B, broke_B], dim=1)
        self.buffers.report_BR.copy_(torch.cat([tokens_BK, numbers_B4], dim=1))

    def _advance(self, tokens_BK: Tensor, judged: Judged) -> None:
        """Apply stop tokens and limits as engine/round.py does, and move on by a round."""
        state, kept_B1 = self.buffers, judged.kept_B[:, None]
        next_B1 = judged.next_B[:, None]
        accepted_BW = torch.cat([tokens_BK, next_B1], dim=1)
        emitted_BW = torch.where(self.offsets_W < kept_B1, accepted_BW, next_B1)
        ends_BW = (emitted_BW[:, :, None] == state.stops_BS[:, None]).any(-1)
        end_B = torch.where(ends_BW, self.offsets_W, self.k + 1).amin(-1)
        count_B = torch.minimum(judged.kept_B, end_B) + 1
        count_B = torch.where(state.remaining_B > 0, count_B, 0)
        lag_B = (count_B == self.k + 1) & (self.k > 0)
        text_BX = torch.cat([state.last_B2[:, 1:], emitted_BW], dim=1)
        before_B = count_B - lag_B.long()
        last_B2 = text_BX.gather(1, torch.stack([before_B, count_B], dim=1))
        remaining_B = torch.where(ends_BW.any(-1), 0, state.remaining_B - count_B)
        moved_B = state.remaining_B > 0
        state.lag_B.copy_(torch.where(moved_B, lag_B.long(), state.lag_B))
        state.last_B2.copy_(torch.where(moved_B[:, None], last_B2, state.last_B2))
        state.length_B.add_(count_B)
        state.remaining_B.copy_(remaining_B)
        for buffer in (state.lag_B, state.last_B2, state.length_B, state.remaining_B):
            buffer.copy_(buffer.index_select(0, state.mirror_B))


# Checkpoints name a handful at most; requests add the tokenizer's own stop tokens.
MAX_STOPS = 16
# Page tables hold at least so many positions: shorter contexts do not fill a device.
LEAST_POSITIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSizes:
    """The sizes of captured rounds. `makes_distributions` says that sampled rows can be judged."""

    k: int
    batch_size: int
    page_size: int
    num_pages: int
    makes_distributions: bool


# (space for probs_BKV, None if no row is sampled) -> the object that draws and judges.
MakeProbs: TypeAlias = Callable[[Tensor | None], RoundProbs]

# Number of rows, pages of tables, whether rows are sampled, and whether some filter tokens.
Bucket: TypeAlias = tuple[int, int, bool, bool]


@dataclass(slots=True)
class GraphCache:
    """A cache of captured rounds, which owns the static memory. `enter` writes rows and picks the
    program that `launch` runs.

    A bucket is the next power of two, so that few graphs serve every batch size; memory is
    allocated once, for the largest. Page tables have buckets too: attention's grid covers all that
    they hold. Batches with a sampled row have programs of their own, since a greedy round makes no
    distribution, and so have those with a filtered row, since filters cost passes over them. A
    program is made when its bucket is first met.
    """

    sizes: RoundSizes
    target: StackModel
    draft: StackModel | None
    launcher: Launcher
    make_distributions: MakeProbs
    _memory: _Memory | None = None
    _buffers: RoundBuffers | None = None
    _launches: dict[Bucket, Callable[[], None]] = field(
        default_factory=dict[Bucket, Callable[[], None]]
    )
    _current: Bucket = (0, 0, False, False)

    @property
    def k(self) -> int:
        return self.sizes.k

    @property
    def buffers(self) -> RoundBuffers:
        """The buffers of the current bucket."""
        return given(self._buffers, "bucket")

    def refusal(self, seq: LiveSequence) -> str | None:
        """Return why rounds of `seq` cannot be captured; None if they can."""
        params, most = seq.params, self.sizes.num_pages * self.sizes.page_size
        obstacles = (
            (seq.shaper is not None, "a request changes logits"),
            (not seq.speculation.engine_drafts, "a request has drafts from elsewhere"),
            (bool(seq.speculation.sampler), "a request has an acceptance rule of its own"),
            (len(seq.stop_ids) > MAX_STOPS, f"a request has over {MAX_STOPS} stop tokens"),
            (seq.prompt_length + seq.limit + self.k > most, f"a request may pass {most} tokens"),
            (
                not params.greedy and not self.sizes.makes_distributions,
                "at temperature > 0 only the samplers token and block are captured",
            ),
        )
        own = next((reason for applies, reason in obstacles if applies), None)
        return request_refusal(seq) or own

    def enter(self, entries: Sequence[Entry]) -> None:
        """Write rows, and make their program if this is the first batch of its size."""
        bucket = bucket_of(len(entries), self.sizes.batch_size)
        every = [entry.seq.params for entry in entries]
        sampled = any(not params.greedy for params in every)
        filtered = any(filters_of(params) != KEEPS_ALL for params in every)
        num_pages = self._num_pages([entry.seq for entry in entries])
        self._current = (bucket, num_pages, sampled, filtered)
        buffers = self._buffers = self._static().buffers.first(bucket, num_pages)
        if self._current in self._launches:
            buffers.write(entries)
        else:
            program = self.program(bucket, num_pages, sampled=sampled, filtered=filtered)
            launch = self.launcher.make(program, lambda: buffers.write(entries))
            self._launches[self._current] = launch

    def reaches(self, batch: Sequence[LiveSequence]) -> bool:
        """Return whether page tables hold what `batch` writes in a round after an unread one."""
        return self._num_pages(batch) <= self._current[1]

    def _num_pages(self, batch: Sequence[LiveSequence]) -> int:
        most = max(LEAST_POSITIONS, *(len(seq.tokens) + 2 * (self.k + 1) for seq in batch))
        return bucket_of(-(-most // self.sizes.page_size), self.sizes.num_pages)

    def write_budgets(self, budgets: Sequence[int]) -> None:
        self.buffers.write_budgets(budgets)

    def launch(self) -> Ticket:
        """Launch a round of the entered rows; its report is on its way when this returns."""
        self._launches[self._current]()
        return self._static().mailbox.post(self.buffers.report_BR)

    def program(
        self, bucket: int, num_pages: int | None = None, *, sampled: bool, filtered: bool = False
    ) -> RoundProgram:
        """Return the round of `bucket` rows with tables of `num_pages` pages, None for all."""
        memory = self._static()
        rows = memory.buffers.first(bucket, num_pages)
        return RoundProgram(
            buffers=rows,
            target=memory.target,
            draft=memory.draft,
            wanted_M=memory.wanted_M[:bucket],
            offsets_W=memory.offsets_W,
            k=self.k,
            distributions=self.make_distributions(
                memory.distributions(self.sizes, bucket) if sampled else None
            ),
            filters=Filters(rows.top_k_B, rows.top_p_B, rows.min_p_B) if filtered else None,
        )

    def _static(self) -> _Memory:
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = _Memory.allocate(self.sizes, self.target, self.draft)
        return self._memory


def bucket_of(number: int, most: int) -> int:
    """Return the next power of two, or `most` if that is less."""
    return min(1 << (number - 1).bit_length(), most)


@dataclass(slots=True)
class _Memory:
    """The tensors that outlive a round, for the largest bucket. Distributions come later."""

    buffers: RoundBuffers
    mailbox: Mailbox
    target: StaticPass
    draft: StaticPass | None
    wanted_M: Tensor
    offsets_W: Tensor
    probs_BKV: Tensor | None = None

    @classmethod
    def allocate(cls, sizes: RoundSizes, target: StackModel, draft: StackModel | None) -> _Memory:
        num_rows, k, page_size = sizes.batch_size, sizes.k, sizes.page_size
        width = num_rows * (k + 1)
        device = target.scratch.x_ND.device
        buffers = RoundBuffers.allocate(
            device,
            num_rows=num_rows,
            num_pages=sizes.num_pages,
            page_size=page_size,
            num_stops=MAX_STOPS,
            k=k,
        )
        passes = StaticPass.of(target, num_rows=width, num_logits=width, page_size=page_size)
        drafts = None
        if draft is not None:
            drafts = StaticPass.of(
                draft, num_rows=2 * num_rows, num_logits=num_rows, page_size=page_size
            )
        return cls(
            buffers=buffers,
            mailbox=Mailbox(buffers.report_BR),
            target=passes,
            draft=drafts,
            wanted_M=torch.arange(num_rows, device=device) * 2 + 1,
            offsets_W=torch.arange(k + 1, device=device),
        )

    def distributions(self, sizes: RoundSizes, bucket: int) -> Tensor:
        if self.probs_BKV is None:
            vocab_size, device = self.target.logits_MV.shape[1], self.offsets_W.device
            self.probs_BKV = torch.zeros(sizes.batch_size, sizes.k, vocab_size, device=device)
        return self.probs_BKV[:bucket]
