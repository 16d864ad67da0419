"""The models of `outrider serve`: their names, their settings, and whether they fit into memory.

A word is a model, or NAME=MODEL, or NAME=MODEL,DRAFT. All other settings apply to all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.replicas import Engines
from outrider.cli.serve_options import ServeOptions
from outrider.cli.session import fetch_missing, without_draft
from outrider.core.errors import ConfigError
from outrider.core.settings import Chosen, Resolved
from outrider.pairs.catalog import is_called

if TYPE_CHECKING:
    from outrider.api.memory_parts import Part
    from outrider.api.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Served:
    """A model, its names, and its settings."""

    names: tuple[str, ...]
    resolved: Resolved

    @property
    def name(self) -> str:
        return self.names[0]


def served_models(
    words: tuple[str, ...], resolved: Resolved, options: ServeOptions
) -> tuple[Served, ...]:
    """Return the models of the command line. Raises ConfigError for contradictions."""
    if len(words) < 2:
        models = [_served(words[0] if words else resolved.program().target, resolved)]
    else:
        models = [_served(word, resolved) for word in words]
        _check_several(resolved, options)
    if options.served_model_name:
        models = [Served(options.served_model_name, models[0].resolved)]
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are called {twice!r}.", hint="NAME=MODEL")
    return tuple(models)


def _served(word: str, resolved: Resolved) -> Served:
    name, _, model = ("", "", word) if Path(word).exists() else word.rpartition("=")
    target, _, draft = (model, "", "") if Path(model).exists() else model.partition(",")
    said = {"target": target} | ({"draft": draft} if draft else {})
    own = {
        key: Chosen(resolved.chosen[key].setting, value, resolved.chosen[key].setting.flag)
        for key, value in said.items()
    }
    known = Path(target).name if Path(target).exists() else target
    return Served((name or known,), Resolved({**resolved.chosen, **own}))


def _check_several(resolved: Resolved, options: ServeOptions) -> None:
    if options.served_model_name:
        raise ConfigError("--served-model-name names one model.", hint="NAME=MODEL for each")
    if resolved.program().draft not in ("auto", "none"):
        raise ConfigError("--draft drafts for one model.", hint="NAME=MODEL,DRAFT for each")


def check_name(target: str) -> None:
    """Check the name of a model. Raises CheckpointError if there is no such model. Local models are
    found without importing the code that runs models; hub ids are fetched later, before loading."""
    from outrider.models.hub_cache import cached_models

    is_path = target.startswith(("/", ".", "~")) or target.endswith(".gguf")
    if Path(target).expanduser().exists() or (target.count("/") == 1 and not is_path):
        return
    if not any(is_called(model.name, target) for model in cached_models()):
        from outrider.models.loading import resolve

        resolve(target)


def share_of(words: str) -> float:
    """Parse a share such as `1/1000` or `0.001`; "" is 0. Raises ConfigError."""
    try:
        share = float(Fraction(words or "0"))
    except (ValueError, ZeroDivisionError, OverflowError):
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--audit is a share from 0 to 1, got {words!r}.", hint="--audit 1/1000")
    return share


def planned(model: Served, engines: Engines) -> tuple[LoadPlan, tuple[Part, ...]]:
    """Return the plan of loading an engine without its weights. Raises the errors of loading."""
    from outrider.api.memory import fitted
    from outrider.api.plan import plan_pair

    program, engine = model.resolved.program(), engines.shared(model.resolved.engine())
    draft = None if program.draft in ("auto", "none") else program.draft
    engine = without_draft(engine) if program.draft == "none" else engine
    fetch_missing(program.target, draft)
    return fitted(plan_pair(program.target, draft, engine))


def record_of(
    model: Served, engines: Engines, plan: LoadPlan, parts: tuple[Part, ...]
) -> dict[str, Any]:
    """Return the record of a model that would run. Memory is that of one engine."""
    return {
        "models": model.names,
        "engines": engines.described,
        "drafter": plan.resolved.drafter.name,
        "k": plan.resolved.k,
        "batch_size": plan.settings.most_batch,
        "window": plan.window,
        "arena_tokens": plan.num_slots,
        "memory_bytes": {part.name: part.num_bytes for part in parts if part.when == "held"},
        "notes": plan.notes,
    }


def together(
    plans: list[tuple[LoadPlan, tuple[Part, ...]]], engines: Engines, most_loaded: int
) -> dict[str, Any]:
    """Return what all engines of the largest `most_loaded` models hold, and what is free."""
    from outrider.cache.capacity import free_bytes
    from outrider.kernels.kinds import pick_device

    device = pick_device(plans[0][0].settings.device)
    number = 1 if device.type == "cuda" else len(engines)
    held = [[part.num_bytes for part in parts if part.when == "held"] for _, parts in plans]
    sizes = sorted((number * sum(parts) for parts in held), reverse=True)
    most, free = sum(sizes[:most_loaded]), free_bytes(device)
    fits = most <= free
    return {"most_loaded": most_loaded, "held_bytes": most, "free_bytes": free, "fits": fits}
