"""README's moving picture: an answer of a real model as it came, token by token.

A record has every round of one run, when it ended and where its tokens came from, and when the same
tokens came without drafts. The picture shows both on one scale of time, which is stretched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from readme_svg import WIDTH, svg, text

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "Write a Python function that says whether a number is even."
# A copy of the model itself in 4 bits.
DRAFTER = "quantised-self"
MAX_TOKENS = 160
# Each way is run so often; its quickest run is the one that other programs disturbed least.
TURNS = 12
# Seconds that the picture takes for decoding without drafts, and then stands.
PLAYED, HELD = 7.0, 3.0
LABELS = {
    "accepted": "draft, kept",
    "recovered": "target's own after a refusal",
    "bonus": "target's own after a whole draft",
}
# A share of the CPU that others may have while the run is made without a word about it.
BUSY = 0.1
# Characters of a line of the picture.
COLUMNS = 66
LEFT, RIGHT, STEP = 18, 18, 18
LANE, CELL = 92, 7


def record(folder: Path) -> dict[str, Any]:
    """Runs the model of `folder`. Raises RuntimeError if speculation changed the text."""
    from outrider import LLM, SamplingParams
    from outrider.plugins.measure.turns import provenance

    llm = LLM(str(folder), drafter=DRAFTER)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    best: dict[bool, tuple[Any, list[Any]]] = {}
    for turn in range(2 * TURNS):
        drafting = turn % 2 == 0
        llm.forget()
        stream = llm.chat(PROMPT, params, speculative=drafting)
        events = list(stream)
        found = stream.result(), events
        if drafting not in best or _seconds(found[0]) < _seconds(best[drafting][0]):
            best[drafting] = found
    (spec, events), (plain, _) = best[True], best[False]
    if spec.token_ids != plain.token_ids:
        raise RuntimeError("the texts differ")
    ends = accumulate(len(event.token_ids) for event in events if event.token_ids)
    rounds = [
        [
            round(spec.token_seconds[end - 1], 6),
            [list(pair) for pair in zip(event.pieces, event.origins, strict=True)],
        ]
        for event, end in zip((e for e in events if e.token_ids), ends, strict=True)
    ]
    return {
        "provenance": provenance() | {"command": "scripts/readme --record"},
        "model": MODEL,
        "drafter": DRAFTER,
        "prompt": PROMPT,
        "turns": TURNS,
        "num_drafted": spec.stats.num_drafted,
        "num_accepted": spec.stats.num_accepted,
        "rounds": rounds,
        "plain_seconds": [round(seconds, 6) for seconds in plain.token_seconds],
    }


def _seconds(result: Any) -> float:
    return result.token_seconds[-1]


def facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a record: numbers of tokens, and milliseconds of both ways."""
    spec, plain = run["rounds"][-1][0], run["plain_seconds"][-1]
    return {
        "model": run["model"],
        "tokens": len(run["plain_seconds"]),
        "rounds": len(run["rounds"]),
        "spec": round(1e3 * spec),
        "plain": round(1e3 * plain),
        "faster": plain / spec,
        "slower": max(1, 5 * round(PLAYED / plain / 5)),
        "others": run["foreign_cpu_share"] or 0,
        "where": f"{run['provenance']['cores']} cores of {run['provenance']['cpu']}",
    }


def alternative(run: Mapping[str, Any]) -> str:
    """The picture in words."""
    told = facts(run)
    return (
        f"An answer of {told['tokens']} tokens, coloured by origin, arrives in {told['rounds']} "
        f"rounds and {told['spec']} ms; without drafts the same tokens take {told['plain']} ms"
    )


def draw(run: Mapping[str, Any]) -> str:
    told = facts(run)
    total = run["plain_seconds"][-1]
    played = told["slower"] * total
    command = f"$ outrider run {run['model']} --drafter {run['drafter']} \\"
    parts = [text(LEFT, 28, command, "m c")]
    parts.append(text(LEFT, 46, f'    "{run["prompt"]}"', "m c"))
    lines = _lines(run)
    for number, line in enumerate(lines):
        if line:
            where = f'x="{LEFT}" y="{76 + STEP * number}"'
            parts.append(f'<text {where} class="c" xml:space="preserve">{line}</text>')
    y = 82 + STEP * len(lines)
    x = float(LEFT)
    for kind, label in LABELS.items():
        parts += [_cells(x, y - 9, [kind]), text(x + 14, y, label, "m s")]
        x += 26 + 6.1 * len(label)
    scale = (WIDTH - LANE - RIGHT - CELL) / total
    y += 74
    for seconds, tokens in run["rounds"]:
        parts.append(_cells(LANE + scale * seconds, y - 10, [origin for _, origin in tokens]))
    for seconds in run["plain_seconds"]:
        parts.append(_cells(LANE + scale * seconds, y + 38, ["plain"]))
    # What is to the right of now is covered.
    parts.append(
        f'<rect x="{LANE}" y="{y - 50}" width="{WIDTH - LANE - 2}" height="98" class="w"/>'
    )
    parts += _lane(y, "with drafts", f"{told['spec']} ms")
    parts += _lane(y + 48, "without", f"{told['plain']} ms")
    for number, said in enumerate(_caption(told)):
        parts.append(text(LEFT, y + 76 + 17 * number, said, "m s"))
    moments = [told["slower"] * seconds for seconds, _ in run["rounds"]]
    # The cover's left edge passes the last cell when the last token comes.
    style = _style(moments, played, played * (WIDTH - LANE - 2) / (scale * total))
    return svg(int(y + 74 + 17 * len(_caption(told))), alternative(run), style, parts)


def _caption(told: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{told['model']} on {told['where']}, shown {told['slower']} times slower:",
        f"{told['tokens']} tokens, the same text, {told['faster']:.1f} times as fast with drafts.",
    ]
    if told["others"] > BUSY:
        lines.append(f"Other programs used {told['others']:.0%} of the CPU meanwhile.")
    return lines


def _style(moments: Sequence[float], played: float, swept: float) -> str:
    """`swept` is when the cover would be gone."""
    shown = played + HELD
    gone = f"{100 * swept / shown:.2f}%"
    frames = "".join(
        f"@keyframes t{number}{{0%{{fill-opacity:0}}{100 * moment / shown:.2f}%{{fill-opacity:1}}}}"
        f".t{number}{{animation-name:t{number}}}\n"
        for number, moment in enumerate(moments)
    )
    return (
        ".c{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.s{font-size:12px}"
        ".accepted{fill:var(--accepted)}.plain{fill:var(--theirs)}"
        ".recovered{fill:var(--recovered)}.bonus{fill:var(--bonus)}"
        ".c .recovered,.c .bonus{font-weight:700}.c .recovered{text-decoration:underline}"
        f".k{{animation:{shown:.2f}s step-end infinite}}\n{frames}"
        f".w{{fill:var(--page);transform-origin:{WIDTH - 2}px 0;transform:scaleX(0);"
        f"animation:w {shown:.2f}s linear infinite}}"
        f"@keyframes w{{0%{{transform:scaleX(1)}}{gone}{{transform:scaleX(0)}}}}"
        "@media(prefers-reduced-motion:reduce){.k,.w{animation:none}}"
    )


def _lines(run: Mapping[str, Any]) -> list[str]:
    """The text's lines as spans that appear round by round; a long line goes on below."""
    lines, used = [""], 0
    for number, (_, tokens) in enumerate(run["rounds"]):
        for piece, origin in tokens:
            first, *others = piece.split("\n")
            for place, part in enumerate([first, *others]):
                shown = part
                if place or used + len(part) > COLUMNS:
                    lines.append("")
                    used = 0
                    shown = part if place else part.lstrip()
                if shown:
                    lines[-1] += f'<tspan class="k t{number} {origin}">{escape(shown)}</tspan>'
                    used += len(shown)
    while not lines[-1]:
        lines.pop()
    return lines


def _cells(x: float, y: float, kinds: Sequence[str]) -> str:
    """One above the other."""
    return "".join(
        f'<path class="{kind}" d="M{x:.1f} {y - (CELL + 1) * height:g}h{CELL}v{CELL}h-{CELL}z"/>'
        for height, kind in enumerate(kinds)
    )


def _lane(y: float, name: str, took: str) -> list[str]:
    line = f'<path d="M{LANE} {y}H{WIDTH - RIGHT}" style="stroke:var(--line)"/>'
    return [text(LEFT, y - 16, name, "s"), text(LEFT, y, took, "m s"), line]
