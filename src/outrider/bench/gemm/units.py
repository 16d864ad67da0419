"""What a cost study measures in one go: each unit takes its samples in turns, all or none.

What fails is a sample with a reason, so that one engine does not end the study of all. Heavy things
(models, matrices) are held from one unit to the next that needs the same ones, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar, cast

from outrider.bench.gemm.engines import Bed, Taken
from outrider.bench.gemm.pair import Make, PairShape
from outrider.bench.gemm.passes import PassTimer, pass_room
from outrider.bench.gemm.plan import Contestant, Text, Visit, rooms
from outrider.bench.gemm.roof import ROWS, ProductTimer, memory_bytes_per_second
from outrider.bench.gemm.samples import Key, Sample, Values
from outrider.estimate.theory import MissCurve
from outrider.lab.gemm_shape import GemmShape

T = TypeVar("T")
BRANCHES = (1, 2, 4, 8, 16, 32)
CEILINGS = "machine"


class Held:
    """The one heavy thing that is in memory."""

    def __init__(self) -> None:
        self._name: object = None
        self._thing: object = None

    def get(self, name: object, make: Callable[[], T]) -> T:
        """What `make` makes, made anew unless it was the last thing asked for under this name."""
        if self._name != name:
            self._thing = self._name = None
            self._thing = make()
            self._name = name
        return cast("T", self._thing)


class Unit(Protocol):
    @property
    def title(self) -> str: ...
    @property
    def keys(self) -> Sequence[Key]:
        """Of all its samples."""
        ...

    def take(self, held: Held) -> list[Sample]: ...


@dataclass(frozen=True, slots=True)
class CeilingUnit:
    make: Make
    repeat: int

    @property
    def title(self) -> str:
        return "ceilings"

    @property
    def keys(self) -> Sequence[Key]:
        return [("ceilings", CEILINGS, self.repeat)]

    def take(self, held: Held) -> list[Sample]:
        timer = held.get(("products", self.make), lambda: ProductTimer(self.make))

        def measure() -> Values:
            return {
                "bytes_per_second": memory_bytes_per_second(self.make.threads),
                "flops_per_second": timer.peak_flops(),
                "threads": timer.num_threads,
            }

        return [_attempt(self.keys[0], measure)]


@dataclass(frozen=True, slots=True)
class ProductUnit:
    """All products of a layer of `shape`, for every number of rows."""

    make: Make
    shape: GemmShape
    repeat: int

    @property
    def title(self) -> str:
        return f"products of {self.shape.name}"

    @property
    def keys(self) -> Sequence[Key]:
        return [("products", product_name(self.shape, rows), self.repeat) for rows in ROWS]

    def take(self, held: Held) -> list[Sample]:
        timer = held.get(("products", self.make), lambda: ProductTimer(self.make))
        pairs = zip(self.keys, ROWS, strict=True)
        return [_attempt(key, lambda n=n: timer.seconds(self.shape, n)) for key, n in pairs]


@dataclass(frozen=True, slots=True)
class PassUnit:
    """All passes of a pair."""

    make: Make
    pair: PairShape
    ks: tuple[int, ...]
    repeat: int

    @property
    def title(self) -> str:
        return f"passes of {self.pair.name}"

    @property
    def keys(self) -> Sequence[Key]:
        names = PassTimer.names(self.ks, BRANCHES)
        return [("passes", pass_name(self.pair.name, name), self.repeat) for name in names]

    def take(self, held: Held) -> list[Sample]:
        timer = held.get(("passes", self.make, self.pair, self.ks), self._timer)
        names = PassTimer.names(self.ks, BRANCHES)
        pairs = list(zip(self.keys, names, strict=True))
        # To and fro, so that drift of the machine does not fall on the same passes each time.
        order = pairs[::-1] if self.repeat % 2 else pairs
        found = {
            key: _attempt(key, lambda name=name: {"seconds": timer.time(name)})
            for key, name in order
        }
        return [found[key] for key in self.keys]

    def _timer(self) -> PassTimer:
        room = pass_room(self.ks, BRANCHES)
        return PassTimer(self.pair, self.make.pair(self.pair, room, room))


@dataclass(frozen=True, slots=True)
class EngineUnit:
    """A visit: every contestant of a batch. `everybody` is all that the models need room for."""

    make: Make
    pair: PairShape
    text: Text
    seed: int
    misses: MissCurve
    everybody: tuple[Contestant, ...]
    visit: Visit

    @property
    def title(self) -> str:
        return f"engines of {self.pair.name}, batch {self.visit.batch}"

    @property
    def keys(self) -> Sequence[Key]:
        pair, repeat = self.pair.name, self.visit.repeat
        return [("engines", engine_name(pair, one), repeat) for one in self.visit.contestants]

    def take(self, held: Held) -> list[Sample]:
        bed = held.get(("engines", self.make, self.pair), self._bed)
        taken: dict[str, Taken] = {}
        found: dict[Key, Sample] = {}
        for one in self.visit.order:
            key: Key = "engines", engine_name(self.pair.name, one), self.visit.repeat

            def measure(one: Contestant = one) -> Values:
                taken[one.name] = bed.run(one, repeat=self.visit.repeat)
                return asdict(taken[one.name].numbers)

            found[key] = _attempt(key, measure)
        plain = next((one for one in self.visit.contestants if one.method == "ar"), None)
        if plain is not None and plain.name in taken:
            for one in self.visit.contestants:
                key = "engines", engine_name(self.pair.name, one), self.visit.repeat
                if one.name in taken and not same_texts(taken[plain.name], taken[one.name]):
                    found[key] = failed(key, "DifferentTokens: not those of plain decoding")
        return [found[key] for key in self.keys]

    def _bed(self) -> Bed:
        bed = Bed(
            pair=self.make.pair(self.pair, *rooms(self.everybody, self.text)),
            text=self.text,
            seed=self.seed,
            misses=self.misses,
            threads=self.make.threads,
        )
        for one in {one.method: one for one in self.everybody}.values():
            bed.run(one)
        return bed


def product_name(shape: GemmShape, num_rows: int) -> str:
    return f"{shape.name} rows={num_rows}"


def pass_name(pair: str, name: str) -> str:
    return f"{pair} {name}"


def engine_name(pair: str, one: Contestant) -> str:
    return f"{pair} {one.name}"


def same_texts(one: Taken, other: Taken) -> bool:
    """Whether their texts agree as far as both go: each is cut where its batch was done."""
    return all(a[: len(b)] == b[: len(a)] for a, b in zip(one.texts, other.texts, strict=True))


def _attempt(key: Key, measure: Callable[[], Mapping[str, object]]) -> Sample:
    try:
        values = measure()
    except Exception as error:  # noqa: BLE001 - one measurement must not end hours of others
        return failed(key, f"{type(error).__name__}: {error}")
    return Sample(part=key[0], name=key[1], repeat=key[2], values=dict(values))


def failed(key: Key, reason: str) -> Sample:
    return Sample(part=key[0], name=key[1], repeat=key[2], values=None, reason=reason)
