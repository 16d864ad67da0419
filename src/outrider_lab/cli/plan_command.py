"""Commands that follow from a plan: what runs as planned, and what decides where nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from shlex import quote

from outrider.cli.call import Call
from outrider.cli.options import setting_flags
from outrider.core.config import EngineConfig
from outrider.core.plugins import MODEL
from outrider.core.settings import SETTINGS, ProgramConfig, Setting
from outrider.pairs.catalog import draft_of
from outrider.planner.advise import AdvisedPlan
from outrider.planner.candidates import Option
from outrider_lab.bench.calibrate.found import Found
from outrider_lab.cli.verb_options import DECIDED_BY_PLANS, PlanOptions

# A device here is told as a setting is.
_DECIDED = frozenset(DECIDED_BY_PLANS) - {"device"}
# Options of a plan that a longer one has anew or not at all.
_ANEW = ("seconds", "save", "fresh", "json")
# How much longer it takes, and at the least and the most.
_MORE_SECONDS, _LEAST_SECONDS, _MOST_SECONDS = 4, 120, 600


def command_of(
    plan: AdvisedPlan, program: ProgramConfig, engine: EngineConfig, found: Found | None
) -> str:
    """What runs as planned, with the settings of `engine`, for which it was planned; with the
    drafter that is taken by default where nobody knows."""
    words = ["outrider", "generate", '"..."', "--target", quote(program.target)]
    best = plan.best
    if not plan.known:
        return " ".join([*words, *_settings(engine)])
    if best is None or not plan.speculate:
        return " ".join([*words, "--drafter", "none", *_settings(engine)])
    drafter, _, named = best.drafter.partition("=")
    draft = named or _draft_of(best, program, found)
    if draft is not None:
        words += ["--draft", quote(draft)]
    words += ["--drafter", drafter, "--k", str(best.k)]
    if best.num_nodes:
        words += ["--tree-nodes", str(best.num_nodes)]
    if best.engine != "single":
        words += ["--schedule", best.engine]
    if best.fallback is not None:
        engine = replace(engine, fallback=best.fallback)
    return " ".join([*words, "--batch-size", str(plan.job.batch), *_settings(engine)])


def deciding_command(call: Call[PlanOptions]) -> str:
    """The same plan, with more time."""
    options, verb = call.options, PlanOptions.verb
    words = ["outrider", "plan", quote(call.resolved.program().target)]
    for item in verb.own_options():
        value = getattr(options, item.name)
        if item.name not in _ANEW and value != item.default:
            words.append(_flag(item, value))
    decided = call.resolved.decided()
    words += [
        _flag(item, decided[item.name])
        for item in verb.offered_settings()
        if item.name in decided and item.name != "target"
    ]
    seconds = min(max(_MORE_SECONDS * options.seconds, _LEAST_SECONDS), _MOST_SECONDS)
    return " ".join([*words, f"--seconds {seconds:g}"])


def _settings(engine: EngineConfig) -> Iterator[str]:
    """Flags of what is not as usual, without what a plan decides."""
    for item in SETTINGS.values():
        if item.group != "engine" or item.name in _DECIDED:
            continue
        value = getattr(engine, item.name)
        if value != item.default:
            yield _flag(item, value)


def _flag(item: Setting, value: object) -> str:
    if item.kind is bool:
        return setting_flags(item)[0 if value else 1]
    return f"{item.flag} {quote(str(value))}"


def _draft_of(best: Option, program: ProgramConfig, found: Found | None) -> str | None:
    if found is not None:
        return found.drafts.get(best.drafter)
    if best.drafter != MODEL:
        return None
    return draft_of(program.target) if program.draft in ("auto", "none") else program.draft
