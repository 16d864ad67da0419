"""Several engines of one model, for `outrider serve` and `outrider batch`, and their placement.

Errors in the options are reported before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from outrider import __version__
from outrider.cli.options import ReplicasOption
from outrider.cli.output import say
from outrider.cli.session import open_llm, run_record, to_load
from outrider.core.config import EngineConfig
from outrider.core.errors import MachineError
from outrider.core.settings import Resolved

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.server.frames import Load
    from outrider.server.placement import Placement
    from outrider.server.pool import EnginePool


@dataclass(frozen=True, slots=True)
class Engines:
    """Placements of a model's engines. `device` is the device setting of each engine."""

    device: str
    placements: tuple[Placement, ...]

    def __len__(self) -> int:
        return len(self.placements)

    def config(self, config: EngineConfig) -> EngineConfig:
        return replace(config, device=self.device)

    def shared(self, config: EngineConfig) -> EngineConfig:
        """Return the configuration of one engine. Raises MachineError for a missing device."""
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
    def described(self) -> list[str]:
        """The placement of each engine, in words."""
        return [one.describe(self.device) for one in self.placements]


def engines_of(options: ReplicasOption, config: EngineConfig) -> Engines:
    """Return the engines of the options. Raises ConfigError for invalid devices or numbers."""
    from outrider.kernels.native.cpu import allowed_cores
    from outrider.server.placement import device_of, placements

    devices = [name.strip() for name in options.devices.split(",") if name.strip()]
    device = device_of(devices, config.device)
    found = placements(options.replicas, devices, replace(config, device=device))
    num_cores = len(allowed_cores())
    if len(found) > num_cores:
        say(f"note: {len(found)} engines share {num_cores} cores; each alone would be faster")
    return Engines(device, tuple(found))


def opened(
    options: ReplicasOption, resolved: Resolved
) -> tuple[LLM | EnginePool, dict[str, object]]:
    """Open the model of the settings, in this process or as several engines in child processes.
    Return it with its entry in the record of a run."""
    if options.replicas == 1 and not options.devices:
        llm = open_llm(resolved)
        return llm, run_record(llm, resolved)
    if find_spec("msgspec") is None:
        raise MachineError("several engines need msgspec.", hint="pip install 'outrider[server]'")
    from outrider.server.pool import EnginePool

    engines = engines_of(options, resolved.engine())
    target, draft, config = to_load(resolved)
    pool = EnginePool.of(target, draft, engines.config(config), engines.placements)
    for note in pool.card.notes:
        say(f"note: {note}")
    record: dict[str, object] = {"version": __version__, "settings": resolved.decided()}
    return pool, record | {"engines": engines.described, "numerics": pool.card.numerics}
