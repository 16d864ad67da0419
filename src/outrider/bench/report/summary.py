"""What a report says first: what was measured, where, and where speculation gains or loses.

Sentences are made from claims. A ratio counts as a gain or a loss only if its interval leaves out
1; what has no interval is not judged. Of each part the largest gains and losses are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.frame import spoken
from outrider.bench.pages import Section
from outrider.bench.report.parts import Claim, ClaimKind, Part, Report

MAX_NAMED = 3
_KINDS: Mapping[ClaimKind, str] = {
    "speculation": "Speculation against plain decoding",
    "arrangement": "Ways to run it against each other",
    "peer": "This program against others",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`sentences` come first, then `gains` and `losses`, a point each; `table` has a row a part and
    kind."""

    sentences: Sequence[str]
    gains: Sequence[str]
    losses: Sequence[str]
    table: Section | None
    warnings: Sequence[str]


def summarise(report: Report) -> Summary:
    claims = [claim for part in report.parts for claim in _speculation(part)]
    rows = [row for part in report.parts for row in _rows(part)]
    table = Section(
        title="Ratios by part",
        text=["Gain and loss: the 95 % interval lies above or below 1. No difference: it holds 1."],
        header=("part", "what", "gain", "loss", "no difference", "not judged", "best", "worst"),
        rows=rows,
    )
    return Summary(
        sentences=[*_measured(report), *_balance(claims)],
        gains=list(_by_part(report.parts, "gain", -1)),
        losses=list(_by_part(report.parts, "loss", 1)),
        table=table if rows else None,
        warnings=list(_warnings(report)),
    )


def _measured(report: Report) -> Iterator[str]:
    kinds: dict[str, int] = {}
    for part in report.parts:
        kinds[part.kind] = kinds.get(part.kind, 0) + 1
    named = ", ".join(f"{kind} ({num})" if num > 1 else kind for kind, num in kinds.items())
    num = len(report.parts)
    yield f"{num} {'part' if num == 1 else 'parts'}: {named}."
    machines = _machines(report.parts)
    if len(machines) == 1:
        yield f"Measured on {machines[0]}."
    commits = sorted({o.commit for part in report.parts for o in part.origins if o.commit})
    if len(commits) == 1:
        yield f"All numbers are of commit {commits[0]}."


def _balance(claims: Sequence[Claim]) -> Iterator[str]:
    if not claims:
        yield "Nothing here compares speculation with plain decoding."
        return
    gains = [claim for claim in claims if claim.verdict == "gain"]
    if gains:
        best = max(gains, key=lambda claim: claim.ratio.value)
        yield (
            f"Speculation gains in {len(gains)} of {len(claims)} cells; the largest gain is "
            f"{spoken(best.ratio)} plain decoding, at {best.where}."
        )
    else:
        yield f"Speculation measurably gains in none of {len(claims)} cells."
    losses = [claim for claim in claims if claim.verdict == "loss"]
    if losses:
        worst = min(losses, key=lambda claim: claim.ratio.value)
        yield (
            f"It loses in {len(losses)}; the largest loss is {spoken(worst.ratio)}, at "
            f"{worst.where}."
        )
    else:
        yield "It measurably loses in none."
    open_ = [claim for claim in claims if claim.verdict == "no measurable difference"]
    unjudged = [claim for claim in claims if claim.verdict == "not judged"]
    if open_:
        yield f"In {len(open_)} the interval holds 1, so neither can be said."
    if unjudged:
        yield f"{len(unjudged)} have no interval and are not judged."


def _by_part(parts: Sequence[Part], verdict: str, order: int) -> Iterator[str]:
    """A line a part, the largest first with an `order` of -1, else the worst."""
    for part in parts:
        own = _speculation(part)
        found = sorted(own, key=lambda claim: order * claim.ratio.value)
        yield from _named(part, [claim for claim in found if claim.verdict == verdict], len(own))


def _named(part: Part, found: Sequence[Claim], num_of: int) -> Iterator[str]:
    if not found:
        return
    text = "; ".join(f"{spoken(claim.ratio)} at {claim.where}" for claim in found[:MAX_NAMED])
    more = len(found) - MAX_NAMED
    rest = f"; and {more} more in its tables" if more > 0 else ""
    yield f"{part.title}: in {len(found)} of {num_of} cells; {text}{rest}"


def _speculation(part: Part) -> list[Claim]:
    return [claim for claim in part.claims if claim.kind == "speculation"]


def _rows(part: Part) -> Iterator[tuple[str, ...]]:
    for kind, what in _KINDS.items():
        own = [claim for claim in part.claims if claim.kind == kind]
        if own:
            verdicts = [claim.verdict for claim in own]
            best = max(own, key=lambda claim: claim.ratio.value)
            worst = min(own, key=lambda claim: claim.ratio.value)
            yield (
                part.title,
                what,
                *(
                    str(verdicts.count(verdict))
                    for verdict in ("gain", "loss", "no measurable difference", "not judged")
                ),
                f"{spoken(best.ratio)} at {best.where}",
                f"{spoken(worst.ratio)} at {worst.where}",
            )


def _warnings(report: Report) -> Iterator[str]:
    machines = _machines(report.parts)
    if len(machines) > 1:
        yield (
            f"These are results of {len(machines)} machines ({'; '.join(machines)}): compare "
            "within a part only."
        )
    commits = {origin.commit for part in report.parts for origin in part.origins if origin.commit}
    if len(commits) > 1:
        yield f"These are results of {len(commits)} commits; each part names its own."
    doubted = [part.title for part in report.parts if part.warnings]
    if doubted:
        yield f"Warnings of their own stand in {len(doubted)} of {len(report.parts)} parts."
    if report.skipped:
        yield f"{len(report.skipped)} files were skipped; they are named at the end."


def _machines(parts: Sequence[Part]) -> list[str]:
    return sorted({o.machine for part in parts for o in part.origins if o.machine})
