"""Part four: the certificate can fail. Bugs that others have shipped, one line each, are planted in
the functions that just passed, and the checks of the earlier parts must catch every one.

Bugs in a round's decisions go to the algebra, bugs in the keys of its numbers to the chi-square
test of walked texts, and bugs in the engine around it to parity, on the embedded pair.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias, cast

from outrider.api.llm import LLM
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams
from outrider.core.process import deferred
from outrider.plugins.proof.algebra import DEFECTS, prove_rule
from outrider.plugins.proof.cases import FIXED, PAIRS
from outrider.plugins.proof.check import PROMPTS, Check, Part
from outrider.plugins.proof.distributions import exact_samplers
from outrider_lab.proof.chisquare import threshold
from outrider_lab.proof.ensemble import walked_trial


class CannotPlantError(Exception):
    """The source that runs cannot be read here, or is not the one that the bug was written for."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug: `old`, found once in the source of `module`, becomes `new`, on as many lines."""

    name: str
    module: str
    old: str
    new: str


@contextmanager
def planted(mutant: Mutant) -> Generator[None]:
    """Run the block with the bug in. Raises CannotPlantError, with nothing changed."""
    changes = _changes(mutant)
    with deferred():
        try:
            for function, _, mutated in changes:
                function.__code__ = mutated
            yield
        finally:
            for function, shipped, _ in changes:
                function.__code__ = shipped


def _changes(mutant: Mutant) -> list[tuple[FunctionType, CodeType, CodeType]]:
    """Return (function, its code, its code with the bug) for each function that the bug changes."""
    module = import_module(mutant.module)
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise CannotPlantError(f"the source of {mutant.module} is not available") from error
    if source.count(mutant.old) != 1 or mutant.old.count("\n") != mutant.new.count("\n"):
        raise CannotPlantError(f"{mutant.module} is not the source that this bug was written for")
    shipped = _code_by_name(source, module)
    mutated = _code_by_name(source.replace(mutant.old, mutant.new), module)
    live = functions(module)
    changes = [
        (live[name], code, mutated[name])
        for name, code in shipped.items()
        if name in live and mutated.get(name) != code
    ]
    if not changes or any(function.__code__ != code for function, code, _ in changes):
        raise CannotPlantError(f"{mutant.module} as it runs is not the source on disk")
    return [(function, function.__code__, new) for function, _, new in changes]


def _code_by_name(source: str, module: ModuleType) -> dict[str, CodeType]:
    """Return the code of every function and method that `source` defines, by qualified name."""
    whole = compile(source, str(module.__file__), "exec", dont_inherit=True)
    return {code.co_qualname: code for code in _nested(whole)}


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and "<locals>" not in constant.co_qualname:
            yield constant
            yield from _nested(constant)


def functions(module: ModuleType) -> dict[str, FunctionType]:
    """Return the functions and methods that `module` defines, by qualified name."""
    found: dict[str, FunctionType] = {}
    for value in vars(module).values():
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = _function(member)
            if function is not None and function.__module__ == module.__name__:
                found[function.__qualname__] = function
    return found


def _function(member: Any) -> FunctionType | None:
    if isinstance(member, property):
        return _function(member.fget)
    if isinstance(member, staticmethod | classmethod):
        return _function(cast("Any", member).__func__)
    return member if isinstance(member, FunctionType) else None


_EXACT = "outrider.verify.exact"
_MATCH = "outrider.verify.exact"
_RNG = "outrider.core.rng"
_SAMPLING = "outrider.core.sampling"
_LOGITS = "outrider.core.logits"
_ROUND = "outrider.engine.round"
_DRAFT = "outrider.core.draft"

# Bugs in the decisions of a round, and in the distributions of these decisions.
DECISIONS = (
    Mutant(
        "token: residual is p",
        _EXACT,
        "distribution = residual(distribution, proposal, leftover)",
        "residual(distribution, proposal, leftover)",
    ),
    Mutant(
        "token: a refused point mass stays",
        _SAMPLING,
        "left_V[proposal] = 0",
        "left_V[proposal] += 0",
    ),
    Mutant(
        "token: acceptance times 1.02",
        _EXACT,
        "mass(distribution, token) / drawn if",
        "1.02 * mass(distribution, token) / drawn if",
    ),
    Mutant(
        "token: soft q taken for one-hot",
        _EXACT,
        "distribution = residual(distribution, proposal, leftover)",
        "distribution = residual(distribution, token, leftover)",
    ),
    Mutant(
        "token: the draft's number used again",
        _EXACT,
        "rng.coin(ratio, child, Role.ACCEPT)",
        "rng.coin(ratio, child, Role.DRAFT)",
    ),
    Mutant(
        "token: bonus from the wrong row",
        _EXACT,
        "distribution = row.distributions.at(node + 1)",
        "distribution = row.distributions.at(max(node, 0))",
    ),
    Mutant(
        "residual is p",
        _SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "share * p_V.double()",
    ),
    Mutant(
        "residual is |p - q|",
        _SAMPLING,
        "(share * p_V.double() - proposal.double()).clamp_min(0)",
        "(share * p_V.double() - proposal.double()).abs()",
    ),
    Mutant("block: acceptance times 1.02", _EXACT, "wanted / drawn if", "1.02 * wanted / drawn if"),
    Mutant(
        "block: bonus from the wrong row",
        _EXACT,
        "p_WV[len(tokens)], shares[-1]",
        "p_WV[len(tokens) - 1], shares[-1]",
    ),
    Mutant(
        "match: a draft kept unlooked-at",
        _MATCH,
        "if row.draft.tokens[c] == token)",
        "if row.draft.tokens[c] >= 0)",
    ),
    Mutant(
        "coupled: one race for all positions",
        _MATCH,
        "rng.race_at(distribution, depth)",
        "rng.race_at(distribution, 0)",
    ),
    Mutant(
        "temperature times 0.97",
        _SAMPLING,
        "max(params.temperature, MIN_TEMPERATURE)",
        "max(0.97 * params.temperature, MIN_TEMPERATURE)",
    ),
    Mutant(
        "penalties one token late",
        _LOGITS,
        "paths.append((*paths[parent + 1], token))",
        "paths.append(paths[parent + 1])",
    ),
)

# Bugs in the keys of numbers, which enumeration does not see.
KEYS = (
    Mutant(
        "keys without the round",
        _RNG,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (node + 1, 0, self.sample, int(role))",
    ),
    Mutant(
        "keys without the node",
        _RNG,
        "counter = (node + 1, start, self.sample, int(role))",
        "counter = (0, start, self.sample, int(role))",
    ),
)

# Bugs in the engine around a round.
ROUNDS = (
    Mutant(
        "a refused draft kept in memory",
        _ROUND,
        "_kept(one.num_fed, one.outcome)",
        "range(one.num_fed + len(one.outcome.draft))",
    ),
    Mutant(
        "drafts hung from the wrong row",
        _DRAFT,
        "*(root + 1 + parent for",
        "*(max(root, parent) for",
    ),
)


# The part that failed and what it found; (None, "") if none did.
Caught: TypeAlias = tuple[str | None, str]

_NUM_WALKED = 1_000
_NUM_PROMPTS = 3
_NUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class MutantResult:
    """One planted bug: the part that caught it and its finding, `caught_by` None if none did.
    `obstacle` is the reason if it could not be planted."""

    mutant: Mutant
    caught_by: str | None
    finding: str
    obstacle: str | None = None


def mutants(*, seed: int) -> Part:
    """Plant every bug in turn. The process does nothing else meanwhile."""
    attempts = yield from _tried(DECISIONS, catch_by_algebra)
    attempts += yield from _tried(KEYS, partial(catch_by_chi_square, seed))
    yield "the embedded pair's own text"
    attempts += yield from _tried(ROUNDS, partial(catch_by_parity, embedded_texts("none")))
    return (_check(attempts),)


def _tried(
    bugs: Sequence[Mutant], catch: Callable[[], Caught]
) -> Generator[str, None, list[MutantResult]]:
    found: list[MutantResult] = []
    for mutant in bugs:
        yield mutant.name
        found.append(attempt(mutant, catch))
    return found


def attempt(mutant: Mutant, catch: Callable[[], Caught]) -> MutantResult:
    """Run `catch`, which returns a part and a finding, with the bug in."""
    try:
        with planted(mutant):
            return MutantResult(mutant, *catch())
    except CannotPlantError as error:
        return MutantResult(mutant, None, "", obstacle=str(error))


def catch_by_algebra() -> Caught:
    samplers = exact_samplers()
    for case in FIXED:
        for sampler in samplers:
            proof = prove_rule(sampler, [case])
            if not proof.holds:
                return "algebra", f"{sampler.name}, {proof.finding}"
    return None, ""


def catch_by_chi_square(seed: int) -> Caught:
    for pair in PAIRS:
        for sampler in exact_samplers():
            trial = walked_trial(sampler, pair, seed=seed, num_texts=_NUM_WALKED)
            if trial.defect or trial.p_value < threshold(100):
                return "chi-square", f"{trial.name}: {trial.defect or f'p = {trial.p_value:.0e}'}"
    return None, ""


def catch_by_parity(wanted: list[tuple[int, ...]]) -> Caught:
    """Compare the embedded pair's texts on a CPU, whose kernels are row-invariant."""
    try:
        texts = embedded_texts("model")
    except (OutriderError, *DEFECTS) as error:
        return "parity", f"{type(error).__name__} {error}".strip()
    if texts == wanted:
        return None, ""
    num_different = sum(a != b for a, b in zip(texts, wanted, strict=True))
    return "parity", f"{num_different} of {len(wanted)} texts differ"


def embedded_texts(drafter: str) -> list[tuple[int, ...]]:
    # Bugs are planted in Python, so rounds must go through it.
    config = EngineConfig(drafter=drafter, batch_size=_NUM_PROMPTS, device="cpu", fused_round=False)
    llm = LLM(config=config)
    params = SamplingParams(max_tokens=_NUM_TOKENS)
    return [result.token_ids for result in llm.generate(PROMPTS[:_NUM_PROMPTS], params)]


def _check(attempts: list[MutantResult]) -> Check:
    planted_ones = [a for a in attempts if a.obstacle is None]
    missed = [a for a in planted_ones if a.caught_by is None]
    unplanted = [a for a in attempts if a.obstacle is not None]
    parts = [a.caught_by for a in planted_ones if a.caught_by]
    shares = ", ".join(f"{parts.count(part)} by {part}" for part in dict.fromkeys(parts))
    summary = f"{len(parts)} of {len(attempts)} caught" + (f": {shares}" if shares else "")
    return Check(
        name="mutants",
        title="planted bugs",
        holds=False if missed else None if unplanted else True,
        summary=summary,
        facts={
            "num_planted": len(planted_ones),
            "num_caught": len(parts),
            "mutants": [
                {
                    "name": a.mutant.name,
                    "module": a.mutant.module,
                    "caught_by": a.caught_by,
                    "finding": a.finding,
                    "obstacle": a.obstacle,
                }
                for a in attempts
            ],
        },
        problems=tuple(f"{a.mutant.name} ({a.mutant.module}): not caught" for a in missed),
        warnings=tuple(f"{a.mutant.name}: not checked, {a.obstacle}" for a in unplanted[:3]),
    )
