"""From runs to figures: rates, ratios with their intervals, and whether the texts are the same.

A ratio above 1 says by how much ours is faster: their median seconds a token over ours, on the same
pieces, with a bootstrap interval. Pairs are those of like with like (plain, the same draft model,
lookup), then the best of ours with the best of theirs, in the same number format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peers.cells import DRAFTERS, OURS, PEERS
from peers.match import Entry, Found, Run

from outrider.bench.interval import ratio_of_medians
from outrider.bench.race import Score


def summary(found: Found) -> dict[str, Any]:
    """Everything that a match came to, as JSON."""
    return {
        "scores": [_score(found, entry) for entry in found.runs],
        "ratios": list(_ratios(found)),
        "trials_seconds_per_token": found.trials,
        "far_behind_in_trials": found.behind,
        "refused": found.refused,
        "notes": found.notes,
        "cpu_share": found.cpu.share(),
    }


def _score(found: Found, entry: Entry) -> dict[str, Any]:
    who, temperature = entry
    runs = list(found.runs[entry].values())
    score = Score([len(run.ids) for run in runs], [run.seconds for run in runs])
    drafted, accepted = sum(r.drafted for r in runs), sum(r.accepted for r in runs)
    return {
        "contestant": who.name,
        "peer": who.peer,
        "drafter": who.drafter,
        "format": who.form,
        "temperature": temperature,
        "prompts": len(runs),
        **score.to_dict(),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "same_text": _same_text(found, entry) if not temperature else None,
    }


def _same_text(found: Found, entry: Entry) -> dict[str, Any] | None:
    """How many greedy texts equal our plain ones in the same format, and how far the others do."""
    plain = [e for e in found.runs if e[0].group == (OURS, "none", entry[0].form) and not e[1]]
    if not plain:
        return None
    pairs = _paired(found.runs[entry], found.runs[plain[0]])
    common = [_common(mine.ids, other.ids) for mine, other in pairs]
    equal = sum(_trimmed(mine.ids) == _trimmed(other.ids) for mine, other in pairs)
    least = min(common, default=0)
    return {"equal": equal, "of": len(pairs), "shortest_common_beginning": least}


def _paired(first: dict[int, Run], second: dict[int, Run]) -> list[tuple[Run, Run]]:
    """Runs of the same prompts."""
    return [(first[turn], second[turn]) for turn in sorted(first.keys() & second.keys())]


def _trimmed(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Some say the end-of-text token, some leave it out."""
    return ids[:-1] if ids and ids[-1] == 0 else ids


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)


def _ratios(found: Found) -> Iterator[dict[str, Any]]:
    for form, temperature in dict.fromkeys((e[0].form, e[1]) for e in found.runs):
        mine = _by_drafter(found, OURS, form, temperature)
        for peer in PEERS:
            theirs = _by_drafter(found, peer, form, temperature)
            for drafter in DRAFTERS:
                if drafter in mine and drafter in theirs:
                    pair = mine[drafter], theirs[drafter]
                    yield _ratio(found, "plain" if drafter == "none" else drafter, pair)
            if mine and theirs:
                yield _ratio(found, "best", (_best(found, mine), _best(found, theirs)))
    yield from _own_ratios(found)


def _own_ratios(found: Found) -> Iterator[dict[str, Any]]:
    """Our narrower weights against our bf16, and our speculation against our plain decoding."""
    for temperature in dict.fromkeys(e[1] for e in found.runs):
        wide = _by_drafter(found, OURS, "bf16", temperature)
        for form in dict.fromkeys(e[0].form for e in found.runs):
            mine = _by_drafter(found, OURS, form, temperature)
            if mine and wide and form != "bf16":
                pair = _best(found, mine), _best(found, wide)
                yield _ratio(found, f"our best {form} over our best bf16", pair)
            plain = mine.pop("none", None)
            if plain and mine:
                yield _ratio(found, "speculation over plain", (_best(found, mine), plain))


def _by_drafter(found: Found, peer: str, form: str, temperature: float) -> dict[str, Entry]:
    return {
        entry[0].drafter: entry
        for entry in found.runs
        if (entry[0].peer, entry[0].form, entry[1]) == (peer, form, temperature)
    }


def _best(found: Found, entries: dict[str, Entry]) -> Entry:
    """The fastest on the prompts that all of them ran."""
    shared = set[int].intersection(*(set(found.runs[entry]) for entry in entries.values()))

    def pace(entry: Entry) -> float:
        runs = [run for turn, run in found.runs[entry].items() if turn in shared]
        return sum(run.seconds for run in runs) / max(sum(len(run.ids) for run in runs), 1)

    return min(entries.values(), key=pace)


def _ratio(found: Found, what: str, pair: tuple[Entry, Entry]) -> dict[str, Any]:
    (mine, temperature), (other, _) = pair
    runs = _paired(found.runs[pair[1]], found.runs[pair[0]])
    theirs, ours = ([run.seconds_per_token for run in side] for side in zip(*runs, strict=True))
    ratio = ratio_of_medians(theirs, ours)
    return {
        "what": what,
        "format": mine.form,
        "temperature": temperature,
        "ours": mine.name,
        "theirs": other.name,
        "faster": round(ratio.value, 3),
        "low": None if ratio.low is None else round(ratio.low, 3),
        "high": None if ratio.high is None else round(ratio.high, 3),
        "pairs": ratio.num_pairs,
    }
