"""Parts that set this program beside others: ratios of speed, and whether the texts agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from outrider.bench.frame import Ratio
from outrider.bench.peers.contestants import OURS
from outrider.bench.report.parts import Claim, ClaimKind, Figure, Part, Record, Source
from outrider.bench.report.plots import claims_chart
from outrider.bench.report.reading import (
    flat_ratio,
    number_of,
    object_of,
    objects_of,
    part_of,
    plain_table,
    positive_of,
    several,
    text_of,
    texts_of,
)
from outrider.bench.store import RecordError

_RATIO_NOTE = "faster: their median seconds a token over ours, with a 95 % bootstrap interval."
_NOTE = (
    "Tokens a second over all prompts, by one count of tokens. Equal: texts that are those of this "
    "program's plain decoding in the same format."
)


def peers(source: Source) -> list[Part]:
    """Of a comparison with other programs. Raises RecordError."""
    record = source.record
    scores, found = objects_of(record, "scores"), objects_of(record, "ratios")
    if not scores:
        raise RecordError("it has no scores")
    owners = {text_of(score, "contestant"): text_of(score, "peer") for score in scores}
    claims = [c for c in several("ratio", found, partial(_claim, owners)) if c is not None]
    tier = text_of(record, "tier", "?").upper()
    versions = object_of(record, "versions")
    return [
        part_of(
            source,
            kind="peers",
            title=f"Beside other programs: tier {tier}",
            about=[
                f"{len(scores)} contestants on tier {tier}, {text_of(record, 'threads', '?')} "
                f"threads, up to {text_of(record, 'max_tokens', '?')} tokens; "
                f"{text_of(record, 'order', 'in turns')}."
            ],
            findings=[
                *(
                    f"{name}: {', '.join(str(v) for v in object_of(versions, name).values()):.160}"
                    for name in versions
                ),
                *(
                    f"Refused: {name}: {str(why).strip():.200}"
                    for name, why in object_of(record, "refused").items()
                ),
                *texts_of(record, "notes"),
            ],
            claims=claims,
            figures=_figures(claims, f"tier {tier}"),
            tables=[
                plain_table("Contestants", list(map(_score, scores)), note=_NOTE),
                *([plain_table("Ratios", found, note=_RATIO_NOTE)] if found else []),
            ],
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
        scores, best = object_of(batch, "scores"), object_of(batch, "best")
        rows += [{"batch": words, "contestant": n, **object_of(scores, n)} for n in scores]
        for what, ours, theirs in (("plain", "plain", "hf_plain"), ("speculation", "spec", "hf")):
            pair = f"{text_of(best, ours, '?')} over {text_of(best, theirs, '?')}"
            ratio = Ratio(positive_of(batch, f"{what}_ratio"), None, None, 0)
            where = f"{words}, {pair}"
            claims.append(Claim(kind="peer", where=where, against="transformers", ratio=ratio))
    return [
        part_of(
            source,
            kind="peers",
            title="Beside transformers",
            about=[f"{text_of(record, 'prompts', '?')} prompts, the same tokens counted."],
            claims=claims,
            figures=_figures(claims, "medians"),
            tables=[plain_table("Contestants", rows)],
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
        plain = text_of(record, "what").endswith("over plain")
        kind = "speculation" if plain else "arrangement"
    where = f"{ours} over {theirs}{f', T={heat:g}' if heat else ''}"
    return Claim(kind=kind, where=where, against=theirs, ratio=ratio)


def _figures(claims: Sequence[Claim], foot: str) -> list[Figure]:
    if not claims:
        return []
    beside = [claim for claim in claims if claim.kind == "peer"] or claims
    title = "Tokens a second over those of other programs"
    chart = claims_chart(beside, title, "times the other program", foot)
    words = (
        "A dot a pair of contestants with its interval, beside a line at 1. Numbers are in the "
        "table of ratios below."
    )
    return [Figure(name="beside_peers", chart=chart, words=words)]


def _score(score: Record) -> Record:
    same = object_of(score, "same_text")
    told = f"{text_of(same, 'equal', '?')} of {text_of(same, 'of', '?')}" if same else "-"
    return {**score, "equal texts": told}
