"""Admission: the engine that gets a request, the key whose request is next, and how many run.

Which of several engines of one model gets a request, `best_known` says to the server and to the
simulator: the engine that has already read the longest beginning of its prompt. If that engine has
clearly more to do than another, the request goes to the least busy one.

`FairQueue` is the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024): a key's counter grows by the tokens that are read and written for it, divided
by its weight, and of the keys with waiting requests the one with the least counter goes first. A
key whose requests begin to wait starts at the least counter of the waiting keys. So no key saves up
a share while idle, or pays for hours in which it was alone.

How many sequences run at once is learned from measured passes. A bigger batch reads the weights
once for more tokens, until arithmetic or memory is the limit; from there on every request only
waits longer. `Knee` follows the measured cost of passes of growing batches, for configurations that
give no number. `BatchLimit` holds a latency target: after every `NUM_PASSES` passes under its
limit, the first true line counts:

    p95 > target                              a quarter lower, at least one; rest
    no request waited in most passes          no change: the limit limits nothing
    a step up did not raise throughput        back down, and rest
    the rest is over                          a quarter higher, at least one

p95 is the 95th percentile of milliseconds per emitted token over these passes; throughput is tokens
a second. Each rest is twice as long as the one before, until a step up pays. Passes that read
prompt tokens count in both.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from statistics import median
from typing import Final, Generic, Protocol, TypeVar

from outrider.core.draft import RoundTrace
from outrider.core.errors import ContractError, given
from outrider.estimate.acceptance import OpenPasses, ms_per_token, nearest_rank, seconds_of
from outrider.estimate.cost import CostMeter
from outrider.sched.jobs import Job, ReadyQueues, Stage

# Tokens of a block, and the most blocks remembered for an engine.
BLOCK_TOKENS: Final = 16
_MOST_BLOCKS = 1 << 15
# An engine that read the prompt before may have at most so many requests more than the least busy.
_MOST_AHEAD = 2


class KnownBlocks:
    """The beginnings of prompts that an engine has read; of many only the most recently used."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def note(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def num_known(self, blocks: Sequence[int]) -> int:
        """Return how many of the first blocks the engine has read."""
        for number, block in enumerate(blocks):
            if block not in self._blocks:
                return number
        return len(blocks)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def forget(self) -> None:
        self._blocks.clear()


class Routed(Protocol):
    """An engine that requests can go to."""

    @property
    def known(self) -> KnownBlocks: ...

    @property
    def num_in_flight(self) -> int: ...


R = TypeVar("R", bound=Routed)


def best_known(engines: Sequence[R], blocks: Sequence[int]) -> R:
    """Return the engine for a request of these blocks; there must be at least one. Of equals the
    one that has read least, so that idle engines share out families of prompts."""
    least = least_busy(engines).num_in_flight
    near = [one for one in engines if one.num_in_flight <= least + _MOST_AHEAD]

    def worth(one: R) -> tuple[int, int, int]:
        return one.known.num_known(blocks), -one.num_in_flight, -one.known.num_blocks

    return max(near, key=worth)


def least_busy(engines: Sequence[R]) -> R:
    """Return the engine with the fewest requests; the first of equals."""
    return min(engines, key=lambda one: one.num_in_flight)


def blocks_of(ids: Sequence[int], salt: Hashable = None) -> Iterator[int]:
    """Yield a number for each whole block of a prompt; it identifies the block and everything
    before it. Prompts of different salts have no beginning in common."""
    so_far = hash(salt)
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far = hash((so_far, *ids[start : start + BLOCK_TOKENS]))
        yield so_far


T = TypeVar("T", bound=Hashable)
# Outside this range a key would have infinitely many tokens, or none, for ever.
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6


class FairQueue(Generic[T]):
    """A queue in which items of one key start in the order in which they came. Keys are never
    forgotten: there are only as many as the operator configured."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[T, None]] = {}
        self._running: Counter[str] = Counter()
        self._tokens: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        # The key whose last waiting item left most recently.
        self._left: str | None = None

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._waiting.values() for item in items)

    def add(self, item: T, key: str, *, weight: float = 1.0) -> None:
        """Add an item. Raises ContractError for a weight outside LEAST_WEIGHT to MOST_WEIGHT."""
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ContractError(f"a weight of {weight}")
        if key not in self._waiting:
            others = [*self._waiting] or [self._left or key]
            floor = min(self._tokens.get(other, 0.0) for other in others)
            self._tokens[key] = max(self._tokens.get(key, 0.0), floor)
            self._waiting[key] = {}
        self._weights[key] = weight
        self._waiting[key][item] = None

    def remove(self, item: T, key: str) -> bool:
        """Remove an item; return whether it was waiting."""
        if item not in self._waiting.get(key, ()):
            return False
        del self._waiting[key][item]
        if not self._waiting[key]:
            del self._waiting[key]
            self._left = key
        return True

    @property
    def next_key(self) -> str | None:
        """The key whose item starts next; of equals the one with fewer running, or the first."""
        return min(self._waiting, key=self._rank, default=None)

    def _rank(self, key: str) -> tuple[float, int]:
        return self._tokens[key], self._running[key]

    def pop(self) -> T:
        """Return the next item and count it as running."""
        key = given(self.next_key, "item that waits")
        item = next(iter(self._waiting[key]))
        self.take(item, key)
        return item

    def take(self, item: T, key: str) -> None:
        """Count an item as running, even if it is not its turn."""
        self.remove(item, key)
        self._running[key] += 1

    def charge(self, key: str, num_tokens: int) -> None:
        """Charge a key for tokens that were read or written for one of its items."""
        self._tokens[key] += num_tokens / self._weights[key]

    def ended(self, key: str) -> None:
        """Count one running item of the key less."""
        self._running[key] -= 1

    @property
    def owing_key(self) -> str | None:
        """The key that should give way to `next_key`, or None. Several of its items run while the
        next key has none running, and it has had at least as many tokens."""
        key = self.next_key
        if key is None or self._running[key]:
            return None
        running = {k: num for k, num in self._running.items() if num > 1}
        most = max(running, key=running.__getitem__, default=None)
        return most if most is not None and self._tokens[most] >= self._tokens[key] else None


NUM_PASSES = 32
SHARE = 4
PERCENT = 95
# The factor by which throughput must rise for a step up to pay.
GAIN = 1.02
# The first and the longest rest after a step up that did not pay, in decisions.
FIRST_REST = 2
LONGEST_REST = 64


# Running sequences allowed before any pass was timed, and timed passes needed before more may run.
KNEE_START = 8
KNEE_PASSES = 8
# The factor by which twice as many sequences must raise the throughput. Below it little can be
# gained by any larger batch.
KNEE_GAIN = 1.03


class Limit(Protocol):
    """A limit on the sequences that run at once, learned from the times of rounds."""

    @property
    def limit(self) -> int: ...

    def observe(self, trace: RoundTrace) -> None: ...


class Knee:
    """A limit from 1 to `highest`, a pure function of the observed traces. It doubles while
    requests wait, up to the number at which twice as many sequences would not raise the throughput
    by KNEE_GAIN, as estimated for plain rounds from the costs of all (estimate/cost.py). A limit
    that was reached is tried again after a pause that doubles each time."""

    def __init__(self, *, highest: int) -> None:
        self._highest, self._limit = highest, min(KNEE_START, highest)
        self._meter, self._open = CostMeter(), OpenPasses()
        self._num_full, self._num_timed = 0, 0
        self._rest, self._next_rest = FIRST_REST, FIRST_REST

    @property
    def limit(self) -> int:
        return self._limit

    def observe(self, trace: RoundTrace) -> None:
        traces = self._open.add(trace)
        if not traces:
            return
        self._meter.observe(traces, caught_up=False)
        if traces[0].num_waiting:
            self._num_full += 1
            self._num_timed += all(one.num_emitted and not one.num_prompt_tokens for one in traces)
        # When every pass reads prompts, none measures the cost of rounds; then more may run anyway.
        if self._num_timed >= KNEE_PASSES or self._num_full >= SHARE * KNEE_PASSES:
            self._num_full = self._num_timed = 0
            self._decide()

    def _decide(self) -> None:
        knee = self._measured_knee()
        if knee > self._limit:
            self._limit = min(2 * self._limit, self._highest)
            self._rest = self._next_rest = FIRST_REST
        elif self._rest:
            self._limit = knee
            self._rest -= 1
        else:
            self._limit = min(2 * knee, self._highest)
            self._next_rest = self._rest = min(2 * self._next_rest, LONGEST_REST)

    def _measured_knee(self) -> int:
        table = self._meter.table()
        if table is None:
            return self._highest
        count = 1
        while count < self._highest:
            seconds = table.round_seconds(count, count, 0, 0)
            if 2 * seconds < KNEE_GAIN * table.round_seconds(2 * count, 2 * count, 0, 0):
                return count
            count *= 2
        return self._highest


class BatchLimit:
    """A limit from `start` up to `highest` for a latency target; a pure function of the traces."""

    def __init__(self, *, highest: int, target_ms: float, start: int = 1) -> None:
        if not 1 <= start <= highest:
            raise ContractError("a start lies between 1 and the highest")
        if not target_ms > 0:
            raise ContractError("a target is above 0")
        self._highest, self._target_ms = highest, target_ms
        self._limit = start
        self._before: tuple[int, float] | None = None
        self._rest = 0
        self._next_rest = FIRST_REST
        self._open = OpenPasses()
        self._passes: list[list[RoundTrace]] = []

    @property
    def limit(self) -> int:
        return self._limit

    def observe(self, trace: RoundTrace) -> None:
        traces = self._open.add(trace)
        if traces and any(one.num_emitted for one in traces):
            self._passes.append(traces)
        if len(self._passes) == NUM_PASSES:
            self._decide()
            self._passes.clear()

    def _decide(self) -> None:
        if self._p95_ms() > self._target_ms:
            self._limit = max(self._limit - _step(self._limit), 1)
            self._before = None
            self._begin_rest()
            return
        if not self._has_demand():
            return
        rate = self._rate()
        if self._before is not None:
            limit, rate_before = self._before
            self._before = None
            if rate < GAIN * rate_before:
                self._limit = limit
                self._begin_rest()
                return
            self._next_rest = FIRST_REST
        if self._rest:
            self._rest -= 1
        elif self._limit < self._highest:
            self._before = (self._limit, rate)
            self._limit = min(self._limit + _step(self._limit), self._highest)

    def _begin_rest(self) -> None:
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)

    def _has_demand(self) -> bool:
        """Return whether requests waited during most passes."""
        return 2 * sum(traces[0].num_waiting > 0 for traces in self._passes) > len(self._passes)

    def _rate(self) -> float:
        """Return the throughput in tokens a second."""
        num_tokens = sum(one.num_emitted for traces in self._passes for one in traces)
        seconds = sum(seconds_of(traces[0]) for traces in self._passes)
        return num_tokens / seconds if seconds > 0 else float("inf")

    def _p95_ms(self) -> float:
        rounds = [one for traces in self._passes for one in traces if one.num_emitted]
        return nearest_rank(list(map(ms_per_token, rounds)), PERCENT)


def _step(limit: int) -> int:
    return max(limit // SHARE, 1)


# Chunk size of chunked prefill: how many prompt tokens a job may read, so that no job takes long.
#
# Decisions between jobs (admission, cancelling, Ctrl-C) wait for the longest job, and so do the
# other requests of its pass. So a chunk takes at most `CHUNK_SECONDS`, or the time of a few passes
# of one row if the model is so large that any pass takes long. While no request decodes, it takes
# at most `ALONE_SECONDS`: a pass reads all weights, and in small chunks a large model reads
# prompts slowly. When clients stream their texts, a prompt that takes longer than that, and longer
# than `LONG_ROUNDS` rounds, is read in chunks that take half as long as the rounds of the same
# passes: the other requests then get tokens about two thirds as fast. The time of a round changes
# with texts, drafts and the machine, and while prompts wait no pass shows it. So every eighth pass
# in a row that would read prompts next to rounds reads one prompt token and measures the round
# anew. Otherwise drafts that take long would count as slow reading, and prompts would wait for
# ever smaller chunks.
CHUNK_SECONDS, ALONE_SECONDS = 0.2, 1.0
# A round of a drafter and a pass is longer than a pass of one row: three rounds are about four such
# passes.
NUM_ROUNDS = 3
# A prompt that takes less than so many rounds is read in few chunks, for which the others wait:
# small chunks cost more than large ones.
LONG_ROUNDS = 16
# The time of a long prompt's chunk as a share of the rounds in the same pass. Rounds differ and a
# chunk's time is estimated: with a half, slow rounds still take less than twice as long as slow
# rounds without a chunk.
SHARE_WITH_ROUNDS = 0.5
# With fewer tokens a pass would read the weights for too little work; the latter while no request
# decodes.
LEAST_CHUNK, LEAST_ALONE = 16, 64
# With rounds, which read the weights anyway: as many tokens as kernels compute together.
LEAST_WITH_ROUNDS = 4
PASSES_A_TRIAL = 8
_MANY = 2**31
_PASS = (Stage.PREFILL, Stage.VERIFY)
# The number of remembered passes. Of passes that only read, the fastest counts, for another process
# may have slowed the others down. Of passes with rounds, where a slow pass does harm, the median
# counts, and so it does of rounds, which differ by their drafts.
_NUM_REMEMBERED = 3


def observed(
    sink: Callable[[RoundTrace], None], limit: Limit | None
) -> Callable[[RoundTrace], None]:
    """Return `sink`, called after `limit` has seen the trace."""
    if limit is None:
        return sink

    def observe(trace: RoundTrace) -> None:
        limit.observe(trace)
        sink(trace)

    return observe


class PromptPace:
    """The pace of reading prompts, learned from jobs; at first `seconds` per prompt token."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._reads: deque[float] = deque([seconds] if seconds else [], maxlen=_NUM_REMEMBERED)
        # Seconds of a round, and its number of sequences.
        self._rounds: deque[tuple[float, int]] = deque(maxlen=_NUM_REMEMBERED)
        # Passes with rounds and prompts since a round was timed.
        self._num_mixed = 0
        # Whether a prompt that waits now was too long for a chunk when it came.
        self._has_long = False

    def limit(self, pool: ReadyQueues) -> int | None:
        """Return the most prompt tokens of a job that also runs the rounds that wait in `pool`;
        None until some number is known to be too many."""
        if not self._reads:
            return None
        if pool.draft and self._num_mixed >= PASSES_A_TRIAL - 1:
            return 1
        seconds, least = ALONE_SECONDS, LEAST_ALONE
        if pool.is_decoding:
            seconds, least = CHUNK_SECONDS, LEAST_CHUNK
        most = max(seconds, NUM_ROUNDS * self._round_seconds(0))
        return _tokens_in(most, min(self._reads), least)

    def limit_with_rounds(self, pool: ReadyQueues) -> int | None:
        """Return the limit of such a job if clients stream their texts."""
        most, num_rounds = self.limit(pool), len(pool.draft)
        longest = max([work.num_tokens for work in pool.prefill], default=0)
        if most is None or not self._rounds:
            return most
        # The rest of a long prompt is read as slowly as its beginning, whatever its own length.
        round_seconds = self._round_seconds(num_rounds)
        is_long = longest * min(self._reads) > max(CHUNK_SECONDS, LONG_ROUNDS * round_seconds)
        self._has_long = is_long or (self._has_long and longest > 0)
        if not self._has_long:
            return most
        seconds = SHARE_WITH_ROUNDS * round_seconds
        return min(most, _tokens_in(seconds, median(self._reads), LEAST_WITH_ROUNDS))

    def observe(self, job: Job, seconds: float) -> None:
        """Learn from a job that ended. A job that read few prompt tokens counts as a round."""
        read = [work.num_tokens for work in job.works if work.stage in _PASS]
        num_rounds = read.count(1)
        num_tokens = sum(read) - num_rounds
        if not num_tokens and Stage.VERIFY in job.stages:
            self._rounds.append((seconds, num_rounds))
            self._num_mixed = 0
            return
        self._num_mixed += num_rounds > 0
        if num_rounds and self._reads and not self._rounds:
            # How much of the pass was reading cannot be said.
            return
        if num_tokens >= (LEAST_WITH_ROUNDS if num_rounds else LEAST_CHUNK):
            # Rounds may be faster now than when they were measured: the chunk took at least most of
            # its share of the job.
            least = 0.75 * SHARE_WITH_ROUNDS / (1 + SHARE_WITH_ROUNDS) * seconds
            own = max(seconds - self._round_seconds(num_rounds), least)
            self._reads.append((own if num_rounds else seconds) / num_tokens)

    def _round_seconds(self, num_rounds: int) -> float:
        """Return a round's seconds; 0 while none is known. A larger round than the measured takes
        proportionally longer, for its rows; a smaller one as long, as weights are read once."""
        if not self._rounds:
            return 0.0
        return median([took * max(1, num_rounds / num) for took, num in self._rounds])


def _tokens_in(seconds: float, each: float, least: int) -> int:
    return max(int(min(seconds / each, _MANY)), least)
