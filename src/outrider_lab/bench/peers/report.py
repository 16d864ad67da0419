"""From runs to figures, and from figures to the tables and findings of a page.

A ratio above 1 says by how much ours is faster: their median seconds a token over ours, on the same
prompts of one session, with a bootstrap interval; of a prompt that two ran together in several
sessions the median counts. Pairs are those of like with like (plain, the same draft model, lookup),
then the best of ours with the best of theirs, in the same number format; and of each peer its own
speculation with its own plain decoding.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from outrider.core.draft import common_prefix
from outrider.metrics import percentile
from outrider.plugins.measure.turns import MIN_PAIRS, Score, is_busy, ratio_of_medians
from outrider_lab.bench.peers.contestants import DRAFTERS, OURS
from outrider_lab.bench.peers.match import Entry, Found, Place, Run
from outrider_lab.measure.store import Section, plain_table

_NOTE = (
    "Tokens over seconds, each engine's own clock around the call that writes: reading the prompt "
    "is in it, loading is not. Times to tokens are of engines that tell when a token came. Texts "
    "are compared greedily, with ours in plain decoding and the same number format."
)
_RATIO_NOTE = (
    "faster: their median seconds a token over ours, on the same prompts, with a 95 % bootstrap "
    "interval: above 1 ours is faster."
)

Row = Mapping[str, Any]


def sections(record: Mapping[str, Any]) -> Iterator[Section]:
    """Of what `results.json` has: everything said here stands in it."""
    yield from tables(record["scores"], record["ratios"])
    yield Section(title="What this run shows", points=findings(record))
    absent = [*_missing(record), *((name, why[:200]) for name, why in record["refused"].items())]
    if absent:
        yield Section(title="Not measured", header=("who", "why"), rows=absent)


def tables(scores: Sequence[Row], ratios: Sequence[Row]) -> list[Section]:
    return [
        plain_table("Rates", [{**score, **_same_of(score)} for score in scores], note=_NOTE),
        *([plain_table("Ratios", ratios, note=_RATIO_NOTE)] if ratios else []),
    ]


def _same_of(score: Row) -> Row:
    """How many texts and tokens are as ours."""
    same = score.get("same_text")
    if not isinstance(same, dict):
        return {}
    counts: Row = cast("dict[str, object]", same)
    return {
        "texts as ours": f"{counts.get('equal')}/{counts.get('of')}",
        "tokens as ours": f"{counts.get('equal_tokens')}/{counts.get('of_tokens')}",
        "first difference": counts.get("first_difference"),
    }


def findings(record: Mapping[str, Any]) -> list[str]:
    """Sentences made from the numbers and from nothing else."""
    return [*_against(record), *_same(record), *_caveats(record)]


def _spoken(ratio: Row) -> str:
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['faster']:.2f}×" + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def _against(record: Mapping[str, Any]) -> Iterator[str]:
    """Each one's best with ours, in words; a loss is said as plainly as a gain."""
    owners = {score["contestant"]: score["peer"] for score in record["scores"]}
    for ratio in record["ratios"]:
        if ratio["what"] != "best":
            continue
        low, high = ratio["low"], ratio["high"]
        if low is None:
            judged = f"not judged below {MIN_PAIRS} prompts"
        elif low > 1:
            judged = "ours is faster"
        else:
            judged = "ours is slower" if high < 1 else "no measurable difference"
        yield (
            f"{ratio['format']} at temperature {ratio['temperature']:g}, best against best: "
            f"{_spoken(ratio)} {owners[ratio['theirs']]}, {judged}."
        )


def _same(record: Mapping[str, Any]) -> Iterator[str]:
    """Whether our own speculation wrote what our plain decoding does."""
    own = [s for s in record["scores"] if s["peer"] == OURS and s["drafter"] != "none"]
    found = [score["same_text"] for score in own if score["same_text"]]
    if found:
        equal, of = sum(s["equal"] for s in found), sum(s["of"] for s in found)
        yield f"Our own speculation wrote the text of plain decoding in {equal} of {of} runs."


def _caveats(record: Mapping[str, Any]) -> Iterator[str]:
    shares: Row | None = record["cpu_share"]
    if shares is not None:
        strange = shares["strangers"]
        warning = ": do not rely on these times" if is_busy(strange) else ""
        yield (
            f"While one was timed, the others used {100 * shares['waiting']:.1f} % of the CPUs and "
            f"other programs {100 * strange:.1f} %{warning}."
        )
    if len(record["sessions"]) > 1:
        yield (
            f"Measured in {len(record['sessions'])} sessions: ratios pair runs of one session, "
            "rates are over all of them."
        )
    if any(score["usage_tokens"] is not None for score in record["scores"]):
        yield (
            "Servers are timed from here, the way over HTTP included; their tokens are those that "
            "our tokenizer finds in the text. One that remembers prompts may have read some before."
        )


def _missing(record: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [(name, f"missing; get it with: {how}") for name, how in record["missing"].items()]


def summary(found: Found, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Everything that a match came to, as JSON. `stop_ids` end a text; some peers say them, some
    leave them out."""
    return {
        "scores": [_score_of(found, entry, stop_ids) for entry in found.runs],
        "ratios": list(_ratios(found)),
        "trials_seconds_per_token": found.trials,
        "far_behind_in_trials": found.behind,
        "refused": found.refused,
        "notes": found.notes,
        "cpu_share": _cpu_share(found),
    }


def _cpu_share(found: Found) -> dict[str, float] | None:
    """Parts of all CPU time while somebody was timed: his, that of those who waited, and that of
    strangers."""
    shares = [run.cpu for runs in found.runs.values() for run in runs.values() if run.cpu]
    total = sum(cpu[-1] for cpu in shares)
    if not total:
        return None
    names = ("timed", "waiting", "strangers")
    return {name: round(sum(cpu[i] for cpu in shares) / total, 4) for i, name in enumerate(names)}


def run_rows(found: Found) -> list[dict[str, object]]:
    """A row for every run, without its tokens."""
    return [
        {
            "contestant": who.name,
            "temperature": temperature,
            "session": session,
            "prompt": turn,
            "tokens": len(run.ids),
            "seconds": run.seconds,
            "first_token_seconds": run.first_seconds,
            "drafted": run.drafted,
            "accepted": run.accepted,
        }
        for (who, temperature), runs in found.runs.items()
        for (session, turn), run in sorted(runs.items())
    ]


def _score_of(found: Found, entry: Entry, stop_ids: Sequence[int]) -> dict[str, Any]:
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
        "prompts": len({turn for _, turn in found.runs[entry]}),
        "runs": len(runs),
        **score.to_dict(),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        **_latencies(runs),
        "same_text": _same_text(found, entry, stop_ids) if not temperature else None,
    }


def _latencies(runs: Sequence[Run]) -> dict[str, Any]:
    """Milliseconds to the first token and between later ones, of peers that tell; and how many
    tokens a server counted itself, where it says so."""
    first = [run.first_seconds for run in runs if run.first_seconds is not None]
    later = [seconds for run in runs for seconds in run.later_seconds]
    usage = [run.usage for run in runs if run.usage is not None]
    return {
        "first_token_ms": round(1e3 * statistics.median(first), 3) if first else None,
        "later_token_ms": round(1e3 * statistics.median(later), 3) if later else None,
        "later_token_p95_ms": round(1e3 * percentile(later, 95), 3) if later else None,
        "usage_tokens": sum(usage) if usage else None,
    }


def _same_text(found: Found, entry: Entry, stop_ids: Sequence[int]) -> dict[str, Any] | None:
    """How many greedy texts equal our plain ones in the same format, and where the first of the
    others parts."""
    plain = [e for e in found.runs if e[0].group == (OURS, "none", entry[0].form) and not e[1]]
    if not plain:
        return None
    pairs = [
        (_trimmed(mine.ids, stop_ids), _trimmed(other.ids, stop_ids))
        for mine, other in _paired(found.runs[entry], found.runs[plain[0]])
    ]
    common = [common_prefix(mine, other) for mine, other in pairs if mine != other]
    return {
        "equal": sum(mine == other for mine, other in pairs),
        "of": len(pairs),
        "first_difference": min(common, default=None),
        "equal_tokens": sum(common_prefix(mine, other) for mine, other in pairs),
        "of_tokens": sum(len(other) for _, other in pairs),
    }


def _paired(first: Mapping[Place, Run], second: Mapping[Place, Run]) -> list[tuple[Run, Run]]:
    """Runs of the same prompts in the same sessions."""
    return [(first[place], second[place]) for place in sorted(first.keys() & second.keys())]


def _trimmed(ids: tuple[int, ...], stop_ids: Sequence[int]) -> tuple[int, ...]:
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def _ratios(found: Found) -> Iterator[dict[str, Any]]:
    peers = [name for name in dict.fromkeys(e[0].peer for e in found.runs) if name != OURS]
    for form, temperature in dict.fromkeys((e[0].form, e[1]) for e in found.runs):
        mine = _by_drafter(found, OURS, form, temperature)
        for peer in peers:
            theirs = _by_drafter(found, peer, form, temperature)
            for drafter in DRAFTERS:
                if drafter in mine and drafter in theirs:
                    pair = mine[drafter], theirs[drafter]
                    yield from _ratio_of(found, "plain" if drafter == "none" else drafter, pair)
            if mine and theirs:
                yield from _ratio_of(found, "best", (_best(found, mine), _best(found, theirs)))
        for peer in (OURS, *peers):
            yield from _speculation(found, _by_drafter(found, peer, form, temperature))
    yield from _narrower(found)


def _speculation(found: Found, entries: dict[str, Entry]) -> Iterator[dict[str, Any]]:
    """One peer's best speculation against its own plain decoding."""
    plain = entries.pop("none", None)
    if plain and entries:
        yield from _ratio_of(found, "speculation over plain", (_best(found, entries), plain))


def _narrower(found: Found) -> Iterator[dict[str, Any]]:
    """Our narrower weights against our bf16."""
    for temperature in dict.fromkeys(e[1] for e in found.runs):
        wide = _by_drafter(found, OURS, "bf16", temperature)
        for form in dict.fromkeys(e[0].form for e in found.runs):
            mine = _by_drafter(found, OURS, form, temperature)
            if mine and wide and form != "bf16":
                pair = _best(found, mine), _best(found, wide)
                yield from _ratio_of(found, f"our best {form} over our best bf16", pair)


def _by_drafter(found: Found, peer: str, form: str, temperature: float) -> dict[str, Entry]:
    return {
        entry[0].drafter: entry
        for entry in found.runs
        if (entry[0].peer, entry[0].form, entry[1]) == (peer, form, temperature)
    }


def _best(found: Found, entries: dict[str, Entry]) -> Entry:
    """The fastest on the prompts that all of them ran together; on their own if there are none."""
    shared = set[Place].intersection(*(set(found.runs[entry]) for entry in entries.values()))

    def pace(entry: Entry) -> float:
        runs = [run for at, run in found.runs[entry].items() if at in shared or not shared]
        return sum(run.seconds for run in runs) / max(sum(len(run.ids) for run in runs), 1)

    return min(entries.values(), key=pace)


def _ratio_of(found: Found, what: str, pair: tuple[Entry, Entry]) -> Iterator[dict[str, Any]]:
    """Nothing where the two have no prompt in common."""
    (mine, temperature), (other, _) = pair
    theirs, ours = _by_prompt(found, pair[1], pair[0])
    if not ours:
        return
    ratio = ratio_of_medians(theirs, ours)
    yield {
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


def _by_prompt(found: Found, first: Entry, second: Entry) -> tuple[list[float], list[float]]:
    """Seconds a token of two entries, one a prompt: the median of the sessions that both ran it
    in."""
    shared = found.runs[first].keys() & found.runs[second].keys()
    sessions: dict[int, list[Place]] = {}
    for place in sorted(shared):
        sessions.setdefault(place[1], []).append(place)

    def paces(entry: Entry) -> list[float]:
        runs = found.runs[entry]
        return [
            statistics.median(runs[place].seconds_per_token for place in places)
            for places in sessions.values()
        ]

    return paces(first), paces(second)
