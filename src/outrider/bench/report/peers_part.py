"""Parts that set this program beside others: ratios of speed, and whether the texts agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from outrider.bench.frame import Ratio
from outrider.bench.peers.contestants import OURS
from outrider.bench.report.figure_ratios import MAX_ROWS, ratios
from outrider.bench.report.pieces import plain_table
from outrider.bench.report.reading import (
    Record,
    doubts,
    flat_ratio,
    number_of,
    object_of,
    objects_of,
    origin_of,
    positive_of,
    several,
    text_of,
    texts_of,
)
from outrider.bench.report.sources import Source
from outrider.bench.report.values import Claim, ClaimKind, Figure, Part, Table
from outrider.bench.store import RecordError

_RATIO_NOTE = "faster: their median seconds a token over ours, with a 95 % bootstrap interval."
_OVER_PLAIN = "over plain"
_NOTE = "Tokens a second over all prompts, by one count of tokens. Equal: texts that are those of "


def part(source: Source) -> list[Part]:
    """Of a comparison with other programs. Raises RecordError."""
    record = source.record
    scores, found = objects_of(record, "scores"), objects_of(record, "ratios")
    if not scores:
        raise RecordError("it has no scores")
    owners = {text_of(score, "contestant"): text_of(score, "peer") for score in scores}
    claims = [one for one in several("ratio", found, partial(_claim, owners)) if one is not None]
    origins = [origin_of(record)]
    tier = text_of(record, "tier", "?").upper()
    refused = object_of(record, "refused")
    return [
        Part(
            kind="peers",
            title=f"Beside other programs: tier {tier}",
            place=source.place,
            about=[
                f"{len(scores)} contestants on tier {tier}, {text_of(record, 'threads', '?')} "
                f"threads, up to {text_of(record, 'max_tokens', '?')} tokens; "
                f"{text_of(record, 'order', 'in turns')}."
            ],
            findings=[
                *_versions(record),
                *(f"Refused: {name}: {str(why).strip():.200}" for name, why in refused.items()),
                *texts_of(record, "notes"),
            ],
            claims=claims,
            figures=_figures(claims, f"tier {tier}"),
            tables=[
                _scores(scores),
                *([plain_table("Ratios", found, note=_RATIO_NOTE)] if found else []),
            ],
            warnings=doubts(record, claims, origins),
            origins=origins,
        )
    ]


def transformers(source: Source) -> list[Part]:
    """Of the study `vs_transformers`, whose ratios have no interval. Raises RecordError."""
    record = source.record
    batches = {n: object_of(record, n) for n in record if n.startswith("batch_")}
    if not batches:
        raise RecordError("it has no batches")
    rows: list[Record] = []
    claims: list[Claim] = []
    for name, batch in batches.items():
        words = name.replace("_", " ")
        scores = object_of(batch, "scores")
        rows += [{"batch": words, "contestant": n, **object_of(scores, n)} for n in scores]
        best = object_of(batch, "best")
        for what, ours, theirs in (
            ("plain", "plain", "hf_plain"),
            ("speculation", "spec", "hf"),
        ):
            value = positive_of(batch, f"{what}_ratio")
            pair = f"{text_of(best, ours, '?')} over {text_of(best, theirs, '?')}"
            claims.append(
                Claim(
                    kind="peer",
                    where=f"{words}, {pair}",
                    against="transformers",
                    ratio=Ratio(value, None, None, 0),
                )
            )
    origins = [origin_of(record)]
    return [
        Part(
            kind="peers",
            title="Beside transformers",
            place=source.place,
            about=[f"{text_of(record, 'prompts', '?')} prompts, the same tokens counted."],
            claims=claims,
            figures=_figures(claims, "medians"),
            tables=[plain_table("Contestants", rows)],
            warnings=doubts(record, claims, origins),
            origins=origins,
        )
    ]


def _claim(owners: Mapping[str, str], record: Record) -> Claim | None:
    """Two contestants of this program are ways to run it, its plain decoding among them; two of
    another program are not our claim."""
    heat = number_of(record, "temperature") or 0.0
    ours, theirs = text_of(record, "ours", "?"), text_of(record, "theirs", "?")
    ratio = flat_ratio(record, value="faster", pairs="pairs")
    kind: ClaimKind = "peer"
    if owners.get(ours) and owners.get(ours) == owners.get(theirs):
        if owners[ours] != OURS:
            return None
        plain = text_of(record, "what").endswith(_OVER_PLAIN)
        kind = "speculation" if plain else "arrangement"
    where = f"{ours} over {theirs}{f', T={heat:g}' if heat else ''}"
    return Claim(kind=kind, where=where, against=theirs, ratio=ratio)


def _versions(record: Record) -> list[str]:
    versions = object_of(record, "versions")
    return [
        f"{name}: {', '.join(str(v) for v in object_of(versions, name).values()):.160}"
        for name in versions
    ]


def _figures(claims: Sequence[Claim], foot: str) -> list[Figure]:
    if not claims:
        return []
    words = {
        "title": "Tokens a second over those of other programs",
        "label": "times the other program",
        "foot": foot,
    }
    beside = [claim for claim in claims if claim.kind == "peer"] or claims
    shown = beside if len(beside) <= MAX_ROWS else _spread(beside)
    return [
        Figure(
            name="beside_peers",
            title=words["title"],
            alt="A dot a pair of contestants with its interval, beside a line at 1. Numbers are in "
            "the table of ratios below.",
            draw=partial(ratios, shown, words),
        )
    ]


def _spread(claims: Sequence[Claim]) -> list[Claim]:
    """The least and the most favourable, so that a cut figure shows no better half."""
    order = sorted(claims, key=lambda claim: claim.ratio.value)
    half = MAX_ROWS // 2
    return [*order[:half], *order[-half:]]


def _scores(scores: Sequence[Record]) -> Table:
    rows: list[Record] = []
    for score in scores:
        same = object_of(score, "same_text")
        told = f"{text_of(same, 'equal', '?')} of {text_of(same, 'of', '?')}" if same else "-"
        rows.append({**score, "equal texts": told})
    note = f"{_NOTE}this program's plain decoding in the same format."
    return plain_table("Contestants", rows, note=note)
