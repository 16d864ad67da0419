"""Tensor-parallel model as rank 0 sees it: one CausalLM whose weights and KV cache are shared out.

Calls go to one thread, one after another, and each is first told to the followers (messages.py), so
all ranks make the same calls in the same order and no interrupt cuts a call in half. Sums over
inputs are cut into one part a rank, so logits differ from those of one process in their last bits
(1e-4 at most in float32 on the models of the tests), and greedy text only where two tokens tie that
closely. With two ranks a row's bits do not depend on its batch, hence speculation changes nothing;
with more, `Kernels.exact` is false (comm.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeVar

from outrider.core.protocols import CacheStore, DraftNeeds, StepOutput, StepRow
from outrider.core.spec import DecoderConfig, ModelSpec
from outrider.kernels.native.cpu import num_physical_cores
from outrider.kernels.registry import Kernels
from outrider.models.decoder import Decoder
from outrider.models.loading import LoadOptions, load_model, pick_device, refuse_split
from outrider.models.parallel import messages
from outrider.models.parallel.comm import RankError, TorchComm
from outrider.models.parallel.ranks import HERE, LOADED, SILENT_SECONDS, RankGroup, RankSetup

# Reading a large share from a slow disk takes a while.
LOAD_SECONDS = 1800.0
FOLLOWER = "outrider.models.parallel.ranks"
T = TypeVar("T")


class Peers(Protocol):
    """The followers, as their leader sees them (ranks.py)."""

    @property
    def process_ids(self) -> list[int]: ...
    def tell(self, message: Sequence[int]) -> None: ...
    def check(self) -> None: ...
    def lose(self, reason: str) -> RankError: ...
    def end(self, reason: str) -> RankError: ...


class MirroredKV:
    """The StateStore of rank 0's share; what changes it is done by all ranks.

    A call that fails here is not told. Once a rank is lost, `commit` and `close` still tidy up
    this side, so that an engine can let its requests go; nothing can be opened.
    """

    def __init__(self, store: CacheStore, ranks: Peers) -> None:
        self._store, self._ranks = store, ranks
        self._turns = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank0")
        # The thread must run before an interrupt can fall: a pool does not count one that was being
        # started then, and starts another.
        self._turns.submit(int).result()

    def open(self, seq_id: int, tokens: Sequence[int], salt: str = "") -> int:
        # Ranks are told of no salt: they must find the same pages, so they look for none.
        known = () if salt else tokens

        def act() -> int:
            self._ranks.check()
            reused = self._store.open(seq_id, known, salt)
            self._ranks.tell(messages.open_message(seq_id, known))
            return reused

        return self.in_turn(act)

    def fork(self, source: int, new: int, length: int | None = None) -> None:
        def act() -> None:
            self._ranks.check()
            kept = self._store.length(source) if length is None else length
            self._store.fork(source, new, kept)
            self._ranks.tell(messages.fork_message(source, new, kept))

        self.in_turn(act)

    def length(self, seq_id: int) -> int:
        return self._store.length(seq_id)

    def num_staged(self, seq_id: int) -> int:
        return self._store.num_staged(seq_id)

    def reserve(self, counts: Mapping[int, int]) -> None:
        def act() -> None:
            self._store.reserve(counts)
            self._ranks.tell(messages.reserve_message(counts))

        self.in_turn(act)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> int:
        def act() -> int:
            num_copied = self._store.commit(paths)
            self._ranks.tell(messages.commit_message(paths))
            return num_copied

        return self.in_turn(act)

    def close(self, seq_id: int) -> None:
        def act() -> None:
            self._store.close(seq_id)
            self._ranks.tell(messages.close_message(seq_id))

        self.in_turn(act)

    @property
    def num_free_tokens(self) -> int:
        return self._store.num_free_tokens

    def in_turn(self, act: Callable[[], T]) -> T:
        """The result of `act`, which runs after all earlier ones, to its end in any case."""
        return self._turns.submit(act).result()


class ShardedLM:
    """A `Decoder` of which this process has rank 0's share. Rank 0 runs everything but its peers'
    parts of a pass: engine, drafter and sampling know nothing of ranks."""

    def __init__(self, model: Decoder, ranks: Peers) -> None:
        self._model, self._ranks = model, ranks
        self._state = MirroredKV(model.state, ranks)
        self._of_lane: Kernels | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def config(self) -> DecoderConfig:
        return self._model.config

    @property
    def kernels(self) -> Kernels:
        return self._of_lane or self._model.kernels

    @kernels.setter
    def kernels(self, kernels: Kernels) -> None:
        if self._of_lane is not None:
            self._of_lane = kernels
        else:
            self._model.kernels = kernels

    @property
    def state(self) -> MirroredKV:
        return self._state

    @property
    def process_ids(self) -> list[int]:
        """Those of the followers, rank 1 first."""
        return self._ranks.process_ids

    def twin(self) -> ShardedLM | None:
        """For another lane, which may draft or judge meanwhile; passes of all take turns."""
        make = self._model.kernels.twin
        if make is None:
            return None
        other = copy(self)
        other._of_lane = make()
        return other

    def step(self, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        """Raises RankError when a follower is gone, CapacityError with nothing staged."""

        def act() -> StepOutput:
            self._ranks.check()
            # Whatever can be refused is refused here, before any rank has begun.
            self._model.state.reserve({row.seq_id: len(row.tokens) for row in rows})
            self._ranks.tell(messages.step_message(rows, needs))
            self._ranks.check()
            try:
                output = self._model.step(rows, needs)
            except BaseException as error:
                raise self._ranks.lose(f"a pass failed: {error}") from error
            # Another lane's pass may follow at once, into the same buffer.
            return replace(output, logits_MV=output.logits_MV.clone())

        return self._state.in_turn(act)

    def close(self) -> None:
        """End the followers; the model cannot run afterwards. Also done when it is collected."""
        self._ranks.end("they were ended when it was closed")


def load_sharded(folder: Path, options: LoadOptions, *, size: int, name: str = "") -> ShardedLM:
    """As `load_model`, by `size` processes, of which this is rank 0.

    On a CPU the ranks share its cores, or `options.threads`; on CUDA each has a device. Raises
    ConfigError if the model cannot be split so, RankError if a process does not start.
    """
    refuse_split(folder, options, size)
    cores = options.threads or num_physical_cores()
    options = replace(options, threads=max(cores // size, 1))
    with TemporaryDirectory(prefix="outrider-ranks-") as meeting:
        store = Path(meeting) / "store"
        setup = RankSetup(
            folder=str(folder.resolve()), name=name, store=str(store), options=options
        )
        ranks = RankGroup(FOLLOWER, size, setup.to_dict())
        try:
            ranks.hear(HERE)
            comm = TorchComm(0, size, store=store, place=pick_device(options.device))
            model = load_model(folder, options, name=name, comm=comm)
            ranks.hear(LOADED, LOAD_SECONDS)
            ranks.patience = SILENT_SECONDS
        except BaseException:
            ranks.close()
            raise
    return ShardedLM(model, ranks)
