"""Several engines of one model, for `outrider serve` and `outrider batch`: where each runs.

What is wrong with the wish is told before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.cli.options import ReplicasOption
from outrider.cli.output import say
from outrider.core.config import EngineConfig

if TYPE_CHECKING:
    from outrider.server.frames import Load
    from outrider.server.placement import Placement


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the engines of a model run. `device` is what each one's configuration says."""

    device: str
    placements: tuple[Placement, ...]

    def __len__(self) -> int:
        return len(self.placements)

    def config(self, config: EngineConfig) -> EngineConfig:
        return replace(config, device=self.device)

    def shared(self, config: EngineConfig) -> EngineConfig:
        """That of one engine. Raises MachineError for a device that is not there."""
        own = self.config(config)
        for one in self.placements:
            one.check_device(own.device)
        return self.placements[0].shared(own)

    def loads(
        self, target: str, draft: str | None, config: EngineConfig, max_queued: int
    ) -> list[Load]:
        from outrider.server.frames import Load

        own = self.config(config)
        return [Load(target, draft, own, max_queued, one) for one in self.placements]

    @property
    def told(self) -> list[str]:
        return [one.told(self.device) for one in self.placements]


def engines_of(options: ReplicasOption, config: EngineConfig) -> Engines:
    """Raises ConfigError for devices or numbers that cannot be meant."""
    from outrider.server.placement import allowed_cores, device_of, placements

    devices = [name.strip() for name in options.devices.split(",") if name.strip()]
    device = device_of(devices, config.device)
    found = placements(options.replicas, devices, replace(config, device=device))
    num_cores = len(allowed_cores())
    if len(found) > num_cores:
        say(f"note: {len(found)} engines share {num_cores} cores; each alone would be faster")
    return Engines(device, tuple(found))
