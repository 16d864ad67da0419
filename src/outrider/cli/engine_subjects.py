"""Which pairs a comparison of engines is about: the user's models, or several known pairs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.engines.loaded import Models
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.fields import words_of
from outrider.core.settings import DEFAULT, Resolved
from outrider.pairs.catalog import EMBEDDED_TARGET, ModelPair, get_pair


@dataclass(frozen=True, slots=True)
class Subject:
    """A pair under the name it has in results, and the settings of its engines. `own_controller`
    says that the user chose one."""

    name: str
    models: Models
    engine: EngineConfig
    own_controller: bool


def subject(resolved: Resolved, *, most_in_flight: int) -> Subject:
    """The models that settings name. A batch holds all that will be in flight unless its size was
    set."""
    program, engine = resolved.program(), _engine(resolved, most_in_flight)
    if program.draft == "none" and engine.drafter == "auto":
        engine = replace(engine, drafter="none")
    draft = None if program.draft in ("auto", "none") else program.draft
    slug = re.sub(r"[^\w.-]+", "-", Path(program.target).name or program.target).strip("-.")
    return Subject(slug or "model", Models(program.target, draft), engine, _own(resolved))


def known_pairs(resolved: Resolved, names: str, *, most_in_flight: int) -> list[Subject]:
    """Those of `outrider pairs`, each once, in their published precision. Raises ConfigError."""
    for name in ("target", "draft"):
        if resolved.chosen[name].origin.startswith("--"):
            raise ConfigError(f"--pairs and --{name} both name models.", hint="drop one of them")
    pairs = words_of("--pairs", names, hint="`outrider pairs` lists them")
    engine = _engine(resolved, most_in_flight)
    return [_known(get_pair(name), engine, own=_own(resolved)) for name in pairs]


def _known(pair: ModelPair, engine: EngineConfig, *, own: bool) -> Subject:
    if engine.drafter == "auto" and pair.drafter != "auto":
        bits = pair.self_quantise or engine.self_quantise
        engine = replace(engine, drafter=pair.drafter, self_quantise=bits)
    if engine.dtype == "auto" and pair.target_model_id != EMBEDDED_TARGET:
        engine = replace(engine, dtype=pair.target.dtype)
    return Subject(pair.pair_name, Models(pair.target_model_id, pair.draft_to_load), engine, own)


def _engine(resolved: Resolved, most_in_flight: int) -> EngineConfig:
    engine = resolved.engine()
    if resolved.chosen["batch_size"].origin == DEFAULT:
        engine = replace(engine, batch_size=most_in_flight)
    return engine


def _own(resolved: Resolved) -> bool:
    return resolved.chosen["controller"].origin != DEFAULT
