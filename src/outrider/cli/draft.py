"""`outrider draft`: what can draft for a target, and whether a certain draft fits it."""

from __future__ import annotations

from dataclasses import asdict
from shlex import quote

from outrider.bench.studies.drafters_lineup import available
from outrider.cli.call import Call, needed
from outrider.cli.draft_fit import Fit, Measured, compare, measure
from outrider.cli.draft_suggest import suggestions
from outrider.cli.model_options import DraftCheckOptions, DraftSuggestOptions
from outrider.cli.output import json_line, table
from outrider.core.config import EngineConfig


def suggest(call: Call[DraftSuggestOptions]) -> int:
    """What fits TARGET, the most promising first, each with its reason and its command."""
    target = needed(call, "TARGET")
    found = suggestions(target)
    ready = [one.contestant for one in found if one.ready and one.drafter in available()]
    command = (
        f"outrider bench drafters --target {quote(target)} --drafters {quote(','.join(ready))}"
    )
    if call.options.json:
        print(json_line({"suggestions": [asdict(one) for one in found], "measure": command}))
        return 0
    rows = [
        (one.drafter, one.draft or "", "here" if one.ready else "to be made or fetched", one.reason)
        for one in found
    ]
    print(table(rows, header=("drafter", "draft", "", "why")))
    print("\nTry them:")
    for one in found:
        print(f"  {one.command}")
    print(f"\nMeasure those that are here:\n  {command}")
    return 0


def check(call: Call[DraftCheckOptions]) -> int:
    """Compare TARGET and DRAFT. Exit code 1 if they do not fit, or if nothing is accepted."""
    target, draft = needed(call, "TARGET"), needed(call, "DRAFT", position=1)
    fit = compare(target, draft)
    measured = _measured(call.options, fit) if call.options.measure and not fit.wrong else None
    dead = measured is not None and measured.dead
    if call.options.json:
        record = asdict(fit) | {"fits": fit.fits, "advice": fit.advice}
        if measured is not None:
            derived = ("tokens_per_round", "first_high", "dead", "text")
            record["measured"] = asdict(measured) | {n: getattr(measured, n) for n in derived}
        print(json_line(record))
        return 0 if fit.fits and not dead else 1
    _show(fit)
    if measured is not None:
        print(measured.text)
        for note in measured.notes:
            print(f"note: {note}")
    if dead:
        print(
            "dead acceptance: next to nothing that this draft proposes is kept, although ids and "
            "sizes agree. Was it trained for this target?"
        )
    return 0 if fit.fits and not dead else 1


def _measured(options: DraftCheckOptions, fit: Fit) -> Measured:
    drafter = "auto" if fit.same_ids else "bridge"
    config = EngineConfig(drafter=drafter, k=options.k, profile=True)
    return measure(
        fit.target.name,
        fit.draft.name,
        config,
        num_prompts=options.prompts,
        max_tokens=options.max_tokens,
    )


def _show(fit: Fit) -> None:
    sides = [("target", fit.target), ("draft" if fit.kind == "model" else fit.kind, fit.draft)]
    rows = [(role, side.name, side.num_tokens, side.num_ids) for role, side in sides]
    print(table(rows, header=("", "model", "tokens", "ids in its law")))
    if fit.differences:
        print(f"\n{100 * fit.shared:.0f} % of the draft's tokens are tokens of the target.")
        print("The first ids that differ:")
        differing = [(d.token_id, _shown(d.first), _shown(d.second)) for d in fit.differences]
        print(table(differing, header=("id", "target", "draft")))
    for remark in fit.remarks:
        print(f"{'wrong' if remark.wrong else 'caution'}: {remark.text}")
    print(f"\n{fit.advice}")


def _shown(token: str | None) -> str:
    return "(none)" if token is None else repr(token)
