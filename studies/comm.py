"""Cost of communication: sums over all ranks and messages between two, by size.

The time of a message of b bytes is fitted by  t = alpha + b / beta  (Hockney 1994): a latency that
every message pays and a bandwidth that large ones see. The fit weighs relative errors, so that
small messages count as much as large ones. Of a sum over n ranks every rank sends 2 (n - 1) / n of
its bytes at least, and that is what the bandwidth of the wire is taken from.

A pass of a model among ranks needs two sums a layer, each of one float32 residual a packed token.
Its communication is therefore predicted from the fit, to be compared with what shared weights save.

    run.py comm --largest-mb 1
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from time import perf_counter

import torch
from common import Report, note, study
from options import Options
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.spec import ModelSpec
from outrider.kernels.native.cpu import hardware_threads, num_physical_cores
from outrider.kernels.operators import pick_device
from outrider.models.families import read_config
from outrider.models.llama_weights import Comm
from outrider.models.loading import resolve
from outrider.plugins.measure.turns import Neighbours
from outrider.plugins.parallel.meeting import Meeting
from outrider.plugins.parallel.ranks import Link, RankGroup

PEER = "comm"
READY = "ready"
FLOAT_BYTES = 4
# A step of decoding, a verified draft, a prompt chunk.
ROWS = (1, 8, 256)
SMALLEST_BYTES = 1 << 10
# What is measured of one size takes about so long, and is done so often.
POINT_SECONDS = 0.12
REPEATS = (5, 200)
WARMUPS = 2


class Exercise(IntEnum):
    """A sum over all ranks; a tensor from rank 0 to rank 1 and back."""

    ALL_REDUCE = 0
    SEND_RECV = 1


def do(exercise: Exercise, comm: Comm, tensor: Tensor, repeats: int) -> list[float]:
    """The seconds of each time. All ranks have to call it alike."""
    comm.barrier()
    seconds: list[float] = []
    for _ in range(repeats):
        _settle(tensor)
        began = perf_counter()
        match exercise:
            case Exercise.ALL_REDUCE:
                comm.all_reduce_(tensor)
            case Exercise.SEND_RECV:
                _there_and_back(comm, tensor)
        _settle(tensor)
        seconds.append(perf_counter() - began)
    return seconds


def _there_and_back(comm: Comm, tensor: Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
        comm.recv_(tensor, 1)
    elif comm.rank == 1:
        comm.recv_(tensor, 0)
        comm.send(tensor, 0)


def _settle(tensor: Tensor) -> None:
    """Calls on a CUDA device only queue their work."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def place_of(device: str, rank: int) -> torch.device:
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


@dataclass(frozen=True, slots=True)
class Point:
    """One size: the median and the shortest of `repeats` times. Of send_recv it is one way."""

    exercise: str
    num_bytes: int
    repeats: int
    median_seconds: float
    min_seconds: float
    wire_bytes: float

    @property
    def gb_per_second(self) -> float:
        """Bytes on the wire of one rank over the median."""
        return self.wire_bytes / self.median_seconds / 1e9


@dataclass(frozen=True, slots=True)
class Fit:
    """`alpha_seconds` a message, `beta_bytes_per_second` beyond; `worst_error` is the largest
    relative distance of a point. Without a bandwidth (None) size did not matter."""

    exercise: str
    alpha_seconds: float
    beta_bytes_per_second: float | None
    worst_error: float

    def seconds(self, num_bytes: float) -> float:
        beta = self.beta_bytes_per_second
        return self.alpha_seconds + (num_bytes / beta if beta else 0.0)


@dataclass(frozen=True, slots=True)
class Topology:
    """Who met, and over what. `peer_access` has the pairs of devices that read each other."""

    ranks: int
    backend: str
    devices: Sequence[str]
    hardware_threads: int
    physical_cores: int
    peer_access: Sequence[str]


@dataclass(frozen=True, slots=True)
class CommReport:
    """`foreign_cpu` is the share of the machine that others used meanwhile, None if unknown."""

    topology: Topology
    points: Sequence[Point]
    fits: Sequence[Fit]
    foreign_cpu: float | None

    def to_dict(self) -> dict[str, object]:
        return {
            "topology": asdict(self.topology),
            "points": [{**asdict(p), "gb_per_second": p.gb_per_second} for p in self.points],
            "fits": [asdict(fit) for fit in self.fits],
            "foreign_cpu": self.foreign_cpu,
        }


@study(target="outrider/embedded", ranks=2, device="auto", largest_mb=16)
def comm(options: Options, report: Report) -> None:
    """What do sums over processes or devices cost, and messages between two, by size?

    Each size is timed for an eighth of a second. A latency and a bandwidth are fitted to the
    medians, and predict the cost of the sums of one pass of --target. With `--device cuda` each
    rank has a device.
    """
    # Sizes alone: weights are not read.
    config = read_config(resolve(options.target))
    spec = config.spec(options.target, bytes_per_weight=2, bytes_per_kv=2)
    largest_bytes = (1 if options.quick else options.largest_mb) << 20
    found = measure(size=options.ranks, device=options.device, largest_bytes=largest_bytes)
    report |= found.to_dict()
    for rows in ROWS:
        note(report, model=spec.name, rows=rows, seconds=pass_seconds(found.fits[0], spec, rows))


def measure(*, size: int = 2, device: str = "auto", largest_bytes: int = 1 << 24) -> CommReport:
    """Seconds of work on one machine. Raises ConfigError where there are not `size` devices and
    RankError if a rank does not start."""
    kind = pick_device(device).type
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"{size} ranks need as many CUDA devices, and PyTorch sees "
            f"{torch.cuda.device_count()}.",
            hint="lower --ranks, or use --device cpu",
        )
    place = place_of("cpu" if kind == "mps" else kind, 0)
    # Ranks start with an interpreter that does not search the working folder.
    inherited = os.environ  # noqa: TID251 - of the ranks' processes
    folders = (str(Path(__file__).parent), inherited.get("PYTHONPATH", ""))
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    with Neighbours() as neighbours:
        ranks = RankGroup(PEER, Meeting.on(place, size), {"device": place.type})
        comm = ranks.meet()
        try:
            ranks.hear(READY)
            points = _points(comm, ranks, place, largest_bytes)
        finally:
            ranks.close()
    fits = [fit([p for p in points if p.exercise == kind.name.lower()]) for kind in Exercise]
    return CommReport(_topology(comm, place), points, fits, neighbours.share)


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of relative errors; neither part is below 0."""
    sizes = [float(point.num_bytes) for point in points]
    times = [point.median_seconds for point in points]
    weights = [1 / t**2 for t in times]
    s = sum(weights)
    sx = sum(w * x for w, x in zip(weights, sizes, strict=True))
    sxx = sum(w * x * x for w, x in zip(weights, sizes, strict=True))
    sy = sum(w * y for w, y in zip(weights, times, strict=True))
    sxy = sum(w * x * y for w, x, y in zip(weights, sizes, times, strict=True))
    spread = s * sxx - sx * sx
    slope = max((s * sxy - sx * sy) / spread, 0.0) if spread > 0 else 0.0
    alpha = (sy - slope * sx) / s
    if alpha < 0:
        alpha, slope = 0.0, sxy / sxx
    errors = [abs(alpha + slope * x - y) / y for x, y in zip(sizes, times, strict=True)]
    return Fit(points[0].exercise, alpha, 1 / slope if slope else None, max(errors))


def pass_seconds(found: Fit, spec: ModelSpec, num_rows: int) -> float:
    """What the sums of one pass over `num_rows` packed tokens cost by the fit of all_reduce."""
    return 2 * spec.num_layers * found.seconds(num_rows * spec.hidden_size * FLOAT_BYTES)


def _points(comm: Comm, ranks: RankGroup, place: torch.device, largest_bytes: int) -> list[Point]:
    def run(exercise: Exercise, num_numbers: int, repeats: int) -> list[float]:
        ranks.tell([exercise, num_numbers, repeats])
        ranks.check()
        return do(exercise, comm, torch.ones(num_numbers, device=place), repeats)

    points: list[Point] = []
    num_bytes = SMALLEST_BYTES
    while num_bytes <= largest_bytes:
        points += [_point(run, exercise, num_bytes, comm.size) for exercise in Exercise]
        num_bytes *= 4
    return points


def _point(
    run: Callable[[Exercise, int, int], list[float]],
    exercise: Exercise,
    num_bytes: int,
    size: int,
) -> Point:
    num_numbers = num_bytes // FLOAT_BYTES
    first = min(run(exercise, num_numbers, WARMUPS))
    repeats = min(max(int(POINT_SECONDS / first), REPEATS[0]), REPEATS[1])
    seconds = run(exercise, num_numbers, repeats)
    ways = 2 if exercise is Exercise.SEND_RECV else 1
    share = 2 * (size - 1) / size if exercise is Exercise.ALL_REDUCE else 1.0
    return Point(
        exercise.name.lower(),
        num_bytes,
        repeats,
        statistics.median(seconds) / ways,
        min(seconds) / ways,
        share * num_bytes,
    )


def _topology(comm: Comm, place: torch.device) -> Topology:
    on_cuda = place.type == "cuda"
    numbers = range(comm.size)
    return Topology(
        ranks=comm.size,
        backend=comm.backend,
        devices=[torch.cuda.get_device_name(n) if on_cuda else place.type for n in numbers],
        hardware_threads=len(hardware_threads()),
        physical_cores=num_physical_cores(),
        peer_access=[
            f"{a}-{b}"
            for a in numbers
            for b in numbers
            if on_cuda and a < b and torch.cuda.can_device_access_peer(a, b)
        ],
    )


def follow() -> None:
    """What each of the other ranks does. A message is the number of an exercise, the size of its
    tensor and how often to do it."""
    link = Link()
    torch.set_num_threads(1)
    place = place_of(link.setup["device"], link.setup["meeting"]["rank"])
    if place.type == "cuda":
        torch.cuda.set_device(place)
    comm = link.meet()
    link.say(READY)
    for exercise, num_numbers, repeats in link.messages(comm):
        do(Exercise(exercise), comm, torch.ones(num_numbers, device=place), repeats)


if __name__ == "__main__":
    follow()
