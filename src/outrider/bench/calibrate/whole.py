"""A calibration from its parts: from the cache if these engines were measured before, else now."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from outrider import __version__
from outrider.bench.calibrate import store
from outrider.bench.calibrate.clocks import clocks
from outrider.bench.calibrate.costs import Costs, measure_costs
from outrider.bench.calibrate.phases import Wanted
from outrider.bench.calibrate.probe import Probe
from outrider.bench.calibrate.stands import Stand, Stands
from outrider.bench.calibrate.turns import endless
from outrider.bench.machine import Neighbours, machine, provenance, weights_digest
from outrider.estimate.calibration import Calibration, DrafterCosts
from outrider.models.heads import kind_of
from outrider.models.hf_config import read_config
from outrider.models.loading import DTYPES, resolve


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration without counts, where it is kept, and whether it was there before."""

    calibration: Calibration
    path: Path | None
    is_old: bool
    notes: tuple[str, ...]


def calibrated(
    stands: Stands,
    target: str,
    wanted: Wanted,
    *,
    cache: Path | None,
    fresh: bool = False,
    tell: Callable[[str, float], None] = lambda _what, _share: None,
) -> Calibrated:
    """With `fresh` it is measured anew, and takes the place of what was kept."""
    question = question_of(stands, target, wanted)
    found = store.load(cache, question)
    notes = [found.note] if found.note and not fresh else []
    if found.calibration is not None and not fresh:
        return Calibrated(found.calibration, found.path, True, tuple(notes))
    with Neighbours() as neighbours:
        costs = measure_costs(stands, wanted, tell=tell)
    calibration = assembled(stands, target, costs)
    origin = {**calibration.provenance, "foreign_cpu_share": neighbours.share}
    calibration = replace(calibration, provenance=origin)
    kept = store.keep(cache, question, calibration)
    notes += [kept.note] if kept.note else []
    return Calibrated(calibration, kept.path, False, tuple(notes))


def question_of(stands: Stands, target: str, wanted: Wanted) -> dict[str, object]:
    """All that costs depend on."""
    llm = stands.plain.llm
    return {
        "version": __version__,
        "machine": machine(llm.config.device),
        "settings": asdict(llm.config),
        "threads": llm.kernels.threads.name if llm.kernels.threads else None,
        "kernels": {choice.op: f"{choice.name} {choice.kind}" for choice in llm.kernels.choices},
        "weights": weights_digest(resolve(target)),
        "drafters": {stand.name: stand.facts.get("draft_weights") for stand in stands.drafting},
        "batches": list(wanted.batches),
        "ks": list(wanted.ks),
        # What was glanced at must not pass for what was measured.
        "seconds": wanted.seconds,
        "sampling": asdict(endless(wanted.params)),
    }


def assembled(stands: Stands, target: str, costs: Costs) -> Calibration:
    llm = stands.plain.llm
    here = machine(llm.config.device)
    shared = costs.shared
    return Calibration(
        machine=str(here["gpu"] or here["cpu"]),
        target_name=target,
        target=shared.target,
        drafters=tuple(
            _drafter(stand, costs) for stand in stands.drafting if stand.name in costs.drafts
        ),
        overhead=shared.overhead,
        host=shared.host,
        rule=shared.rule,
        token=shared.token,
        scatter=costs.scatter,
        seconds=round(costs.seconds, 3),
        memory_bytes=llm.spec.weight_bytes,
        kv_bytes_per_token=llm.spec.kv_bytes_per_token,
        provenance={
            **provenance(),
            "device": here,
            "dtype": llm.config.dtype,
            "kernels": {choice.op: choice.name for choice in llm.kernels.choices},
            "threads": llm.kernels.threads.name if llm.kernels.threads else None,
            "clocks": clocks(str(here["device"])),
        },
    )


def with_counts(calibration: Calibration, probes: Iterable[Probe]) -> Calibration:
    """The same costs with what was counted on some prompts."""
    by_name = {probe.name: probe for probe in probes}
    return replace(
        calibration,
        drafters=tuple(
            by_name[one.name].counted(one) if one.name in by_name else one
            for one in calibration.drafters
        ),
    )


def _drafter(stand: Stand, costs: Costs) -> DrafterCosts:
    found, folder = costs.drafts[stand.name], stand.draft_folder
    return DrafterCosts(
        name=stand.name,
        draft=found.draft,
        per_context=found.per_context,
        per_emitted=found.per_emitted,
        memory_bytes=0 if folder is None else _weights_bytes(folder),
        kv_bytes_per_token=0 if folder is None else _kv_bytes(folder),
    )


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _kv_bytes(folder: Path) -> int:
    """Of a draft model a token; heads keep so little that it is left out."""
    if kind_of(folder) != "model":
        return 0
    config = read_config(folder)
    size = DTYPES.get(config.dtype, torch.float32).itemsize
    return config.spec("", bytes_per_weight=size, bytes_per_kv=size).kv_bytes_per_token
