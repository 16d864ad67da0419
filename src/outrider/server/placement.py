"""Placement of several engines of one model on a machine: each has a GPU or a share of the cores.

Cores are those that this process may use. Hardware threads of one core stay together, and so do
the cores of a NUMA node, as far as equal shares allow. An engine uses as many threads as its share
has cores, unless configured otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from msgspec import Struct

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError, MachineError, did_you_mean
from outrider.kernels.native.cpu import allowed_cores

_DEVICE = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)


class Placement(Struct, frozen=True, kw_only=True):
    """Resources of one engine. Empty `cores` means all cores; `gpu` is the number of the only GPU
    that CUDA shows to the engine. `num_engines` share this machine."""

    cores: tuple[int, ...] = ()
    gpu: int | None = None
    num_engines: int = 1

    def shared(self, config: EngineConfig) -> EngineConfig:
        """Return `config` with this engine's share of the memory. An engine with its own GPU may
        use all of that GPU's memory. Raises MachineError for a missing device."""
        # Imported here: the server's front end needs no PyTorch.
        from outrider.kernels.kinds import pick_device

        self.check_device(config.device, is_alone=True)
        if pick_device(config.device).type == "cuda":
            return config
        return replace(config, memory_share=max(0.01, config.memory_share / self.num_engines))

    def check_device(self, device: str, *, is_alone: bool = False) -> None:
        """Check that the GPU exists; in its own process, it `is_alone`. Raises MachineError."""
        if device != "cuda" or self.gpu is None:
            return
        import torch

        count = torch.cuda.device_count()
        if count <= (0 if is_alone else self.gpu):
            raise MachineError(
                f"there is no device cuda:{self.gpu}: PyTorch {torch.__version__} does not see it.",
                hint="`outrider doctor` says what it sees; or --devices cpu",
            )

    def describe(self, device: str) -> str:
        """Describe the placement in words; `device` is the configured device."""
        where = f"cuda:{self.gpu}" if device == "cuda" else device
        return f"{where}, cores {spans(self.cores)}" if self.cores else where


ALONE = Placement()


def placements(replicas: int, devices: Sequence[str], config: EngineConfig) -> list[Placement]:
    """Return the placement of each engine. The number of engines is `replicas`, or that of
    `devices`. Raises ConfigError for options that exclude each other."""
    if devices and replicas > 1:
        raise ConfigError("--devices says how many engines there are.", hint="leave --replicas out")
    gpus = _gpus(devices)
    number = max(replicas, len(devices))
    if number > 1 and config.tensor_parallel > 1:
        raise ConfigError(
            f"{number} engines, each of {config.tensor_parallel} ranks: ranks take all devices.",
            hint="leave --tensor-parallel or --replicas out",
        )
    if number == 1:
        return [Placement(gpu=gpus[0])] if gpus else [ALONE]
    counted = [None] * number if config.device in ("cpu", "mps") else list(range(number))
    return [
        Placement(cores=cores, gpu=gpu, num_engines=number)
        for cores, gpu in zip(shares_of(allowed_cores(), number), gpus or counted, strict=True)
    ]


def device_of(devices: Sequence[str], device: str) -> str:
    """Return the `device` setting of an engine: the kind of `devices` if some are named, else
    `device`. Raises ConfigError for devices of several kinds."""
    _gpus(devices)
    kinds = {name.partition(":")[0] for name in devices}
    if len(kinds) > 1:
        raise ConfigError(
            f"--devices {','.join(devices)}: texts of different kinds of devices differ.",
            hint="devices of one kind",
        )
    return kinds.pop() if kinds else device


def _gpus(devices: Sequence[str]) -> list[int | None]:
    found: list[int | None] = []
    for name in devices:
        match = _DEVICE.fullmatch(name)
        if match is None and name not in ("cpu", "mps"):
            known = ("cpu", "mps", "cuda:0", "cuda:1")
            raise ConfigError(f"--devices: {name!r} is no device.", hint=did_you_mean(name, known))
        gpu = int(match[1] or 0) if match else None
        if gpu in found:
            hint = "--replicas shares the cores out" if name == "cpu" else "each one once"
            raise ConfigError(f"--devices names {name} twice.", hint=hint)
        found.append(gpu)
    return found


def shares_of(cores: Sequence[tuple[int, ...]], number: int) -> list[tuple[int, ...]]:
    """Divide the cores into `number` parts, as equal as possible; few cores are shared."""
    if len(cores) < number:
        return [cores[i % len(cores)] for i in range(number)]
    bounds = [len(cores) * i // number for i in range(number + 1)]
    return [
        tuple(sorted(thread for core in cores[start:end] for thread in core))
        for start, end in pairwise(bounds)
    ]


def spans(numbers: Sequence[int]) -> str:
    """Format numbers like a CPU list of Linux: 0-3,8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ",".join("-".join(map(str, span)) for span in found)
