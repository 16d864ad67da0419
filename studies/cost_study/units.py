"""The samples of a cost study: units that are measured in turns, and the file that holds them.

Heavy things (models, matrices) are held from one unit to the next that needs the same ones, and no
longer. The file has a JSON line of kind "study" with the circumstances of the lines after it, and a
line of kind "sample" for each measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from cost_study.engines import Bed, CostEngine
from cost_study.pair import Make, PairShape, PassTimer, ProductTimer, pass_names, pass_room
from outrider.plugins.measure.turns import Neighbours, rotated
from outrider_lab.bench.cost_record import SAMPLES, SCHEMA
from outrider_lab.measure.machine import Attempt, attempt
from outrider_lab.measure.store import RecordError, Store, difference, made
from outrider_lab.models.gemm import GemmShape

BRANCHES = (1, 2, 4, 8, 16, 32)
ROWS = (1, 2, 4, 8, 16, 32, 64)
CEILINGS = "machine"
_DIFFERENT = "DifferentTokens: not those of plain decoding"

Part: TypeAlias = str
Key = tuple[Part, str, int]
Values = Mapping[str, Any]
# What is heavy (models, matrices): its name, and how it is made.
Rig = tuple[object, Callable[[], Any]]
# What a turn measured, and the texts that were written in it.
Turn = tuple[Values, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSample:
    """A measurement: its `part` (ceilings, products, passes, engines), its `name` within that, its
    repetition, and the `values` found or the `reason` why there are none. `foreign_cpu_share` is of
    the whole machine while it was taken, None if unknown."""

    part: Part
    name: str
    repeat: int
    values: dict[str, Any] | None
    reason: str | None = None
    foreign_cpu_share: float | None = None

    @property
    def key(self) -> Key:
        return self.part, self.name, self.repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Samples of one part and repeat that are taken in turns, all or none; `turns` are in order.
    Texts are to be those of the turn `plain`, if any, as far as both go: each is cut where its
    batch was done. What fails is a sample with a reason, so that one engine does not end the study
    of all."""

    part: Part
    title: str
    repeat: int
    rig: Rig
    turns: Mapping[str, Callable[[Any], Turn]]
    plain: str | None = None

    @property
    def keys(self) -> list[Key]:
        return [(self.part, name, self.repeat) for name in self.turns]

    def take(self, held: Held) -> list[CostSample]:
        with Neighbours() as neighbours:
            rig = attempt(lambda: held.get(*self.rig))
            found: dict[str, Attempt[Turn]] = {
                name: rig if rig.reason else attempt(partial(turn, rig.value))
                for name, turn in self.turns.items()
            }
        return [
            CostSample(
                part=self.part,
                name=name,
                repeat=self.repeat,
                values=dict(one.value[0]) if one.value and not reason else None,
                reason=reason,
                foreign_cpu_share=neighbours.share,
            )
            for name, one in found.items()
            for reason in [one.reason or self._judged(one, found)]
        ]

    def _judged(self, one: Attempt[Turn], found: Mapping[str, Attempt[Turn]]) -> str | None:
        plain = found[self.plain].value if self.plain else None
        if one.value is None or plain is None:
            return None
        both = zip(one.value[1], plain[1], strict=True)
        return None if all(a[: len(b)] == b[: len(a)] for a, b in both) else _DIFFERENT


class Held:
    """The one heavy thing that is in memory, from one unit to the next that needs the same."""

    def __init__(self) -> None:
        self._name: object = None
        self._thing: object = None

    def get(self, name: object, make: Callable[[], Any]) -> Any:
        """What `make` makes, made anew unless it was the last thing asked for under this name."""
        if self._name != name:
            self._name = self._thing = None
            self._thing = make()
            self._name = name
        return self._thing


def ceilings_unit(make: Make, repeat: int) -> Unit:
    def turn(timer: ProductTimer) -> Turn:
        return timer.ceilings(), ()

    return Unit(
        part="ceilings",
        title="ceilings",
        repeat=repeat,
        rig=(("products", make), lambda: ProductTimer(make)),
        turns={CEILINGS: turn},
    )


def products_unit(make: Make, shape: GemmShape, repeat: int) -> Unit:
    """All products of a layer of `shape`, for every number of rows."""

    def turn(num_rows: int, timer: ProductTimer) -> Turn:
        return timer.seconds(shape, num_rows), ()

    return Unit(
        part="products",
        title=f"products of {shape.name}",
        repeat=repeat,
        rig=(("products", make), lambda: ProductTimer(make)),
        turns={product_name(shape, num): partial(turn, num) for num in ROWS},
    )


def passes_unit(make: Make, pair: PairShape, ks: tuple[int, ...], repeat: int) -> Unit:
    """All passes of a pair, to and fro, so that drift of the machine does not fall on the same
    passes each time."""

    def timer() -> PassTimer:
        room = pass_room(ks, BRANCHES)
        return PassTimer(pair, make.pair(pair, room, room))

    def turn(name: str, timer: PassTimer) -> Turn:
        return {"seconds": timer.time(name)}, ()

    names = pass_names(ks, BRANCHES)[:: -1 if repeat % 2 else 1]
    return Unit(
        part="passes",
        title=f"passes of {pair.name}",
        repeat=repeat,
        rig=(("passes", make, pair, ks), timer),
        turns={f"{pair.name} {name}": partial(turn, name) for name in names},
    )


def engines_unit(pair: str, contestants: Sequence[CostEngine], repeat: int, rig: Rig) -> Unit:
    def turn(one: CostEngine, bed: Bed) -> Turn:
        taken = bed.run(one, repeat=repeat)
        return asdict(taken.numbers), taken.texts

    return Unit(
        part="engines",
        title=f"engines of {pair}, batch {contestants[0].batch}",
        repeat=repeat,
        rig=rig,
        turns={engine_name(pair, one): partial(turn, one) for one in rotated(contestants, repeat)},
        plain=next((engine_name(pair, one) for one in contestants if one.method == "ar"), None),
    )


def product_name(shape: GemmShape, num_rows: int) -> str:
    return f"{shape.name} rows={num_rows}"


def engine_name(pair: str, one: CostEngine) -> str:
    return f"{pair} {one.name}"


@dataclass(slots=True)
class SamplesFile:
    """The samples of one folder, newest per key, and the file that new ones are appended to. A
    study that was stopped goes on where it ended; a sample that failed is taken again."""

    folder: Path
    store: Store = field(init=False)
    samples: dict[Key, CostSample] = field(default_factory=dict[Key, CostSample])

    def __post_init__(self) -> None:
        self.store = Store(self.folder / SAMPLES, SCHEMA, "study", self._take)

    @classmethod
    def open(cls, folder: Path, circumstances: Mapping[str, object]) -> SamplesFile:
        """Read what is there, to go on. Raises ConfigError if it was measured under other
        circumstances, or is not ours, and MachineError if it cannot be read; nothing is changed."""
        file, ours = cls(folder), json.loads(json.dumps(circumstances))
        file.store.open()
        file.store.check(lambda head: difference(head["circumstances"], ours))
        return file

    def done(self, key: Key) -> bool:
        return key in self.samples and self.samples[key].reason is None

    def by_repeat(self, part: Part) -> dict[str, dict[int, Values]]:
        """Of every name its values by repetition, in order: what was measured in turns has the same
        one. Those that failed are left out."""
        found: dict[str, dict[int, Values]] = {}
        for sample in sorted(self.samples.values(), key=lambda one: one.repeat):
            if sample.part == part and sample.values is not None:
                found.setdefault(sample.name, {})[sample.repeat] = sample.values
        return found

    def num_failures(self, part: Part, name: str) -> int:
        own = [one for one in self.samples.values() if (one.part, one.name) == (part, name)]
        return sum(one.reason is not None for one in own)

    def add(self, samples: Sequence[CostSample], circumstances: Mapping[str, object]) -> None:
        """Append samples that were measured in turns, all or none."""
        if not self.store.heads:
            self.store.begin({"circumstances": circumstances})
        self.store.add("sample", [asdict(one) for one in samples])
        self.samples |= {one.key: one for one in samples}

    def _take(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "study":
            if not isinstance(record.get("circumstances"), dict):
                raise RecordError("circumstances are missing")
        elif kind == "sample":
            sample = made(CostSample, {k: v for k, v in record.items() if k != "record"})
            if (sample.values is None) == (sample.reason is None):
                raise RecordError("neither values nor a reason, or both")
            self.samples[sample.key] = sample
        else:
            raise RecordError(f"record is {kind!r:.40}")
