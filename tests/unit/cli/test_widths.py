"""What people read fits their terminal: tables, sentences, legends and commands break at words."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from io import StringIO
from pathlib import Path
from shutil import get_terminal_size

import pytest

from doubles.command_line import Command
from doubles.terminal import Terminal
from outrider.api.result import GenerationResult
from outrider.cli import main
from outrider.cli.generate import verdict
from outrider.cli.output import LABELS, Painter, fitted, prose, screen_table
from outrider.cli.verbs import VERBS
from outrider.cli.verdict import headline, is_cut
from outrider.kernels.operators import Choice
from outrider.metrics import summarise
from outrider.plugins.doctor import verbs as doctor
from outrider.plugins.doctor.ceilings import Ceiling
from outrider.plugins.measure.compare import Comparison
from outrider.plugins.measure.turns import Score

WIDTHS = (80, 120)
SENTENCE = "Costs follow from a data sheet and the sizes of the models; nothing was measured. "


@pytest.fixture(params=WIDTHS)
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Of either width."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(request.param))
    return Terminal()


def widest(text: str) -> int:
    return max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()), default=0)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_sentences_break_at_words_and_use_the_room(width: int) -> None:
    for told in (prose(SENTENCE * 4, width=width), fitted(f"  {SENTENCE * 4}", width)):
        assert width - 20 < widest(told) <= width
        assert told.split() == (SENTENCE * 4).split()


def test_a_long_path_breaks_anywhere() -> None:
    told = fitted(f"kept in /{'x' * 200}", 80)
    assert widest(told) <= 80
    assert "".join(told.split()) == f"keptin/{'x' * 200}"


@pytest.mark.parametrize("width", [40, 80])
def test_a_command_that_breaks_can_be_pasted(width: int) -> None:
    words = ["outrider", "generate", "a b  c", *(f"--flag-{i}" for i in range(20))]
    told = fitted(f"    {shlex.join(words)}", width)
    assert widest(told) <= width
    assert shlex.split(told.replace("\\\n", "")) == words


def test_commands_in_sentences_stay_whole() -> None:
    assert "`outrider pull org/model`" in fitted(f"{'x' * 70} `outrider pull org/model`", 80)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_wrap_their_sentences(width: int) -> None:
    rows = [("linear", "native", SENTENCE * 2), ("attention", "reference", "none")]
    told = screen_table(rows, header=("kernel", "which", "why"), width=width)
    assert width - 20 < widest(told) <= width
    assert sorted(told.split()) == sorted(
        " ".join([*rows[0], *rows[1], "kernel which why"]).split()
    )
    assert told.splitlines()[1].startswith("linear     native     Costs follow")
    assert screen_table(rows, width=1000).count("\n") == 1


def test_tables_of_numbers_become_several() -> None:
    rows = [(f"row{i}", *range(10**8, 10**8 + 12)) for i in range(3)]
    told = screen_table(rows, width=80)
    assert widest(told) <= 80
    assert told.count("row0") > 1


def test_what_is_piped_stays_whole() -> None:
    assert fitted(SENTENCE * 4) == prose(SENTENCE * 4) == SENTENCE * 4
    assert screen_table([("a", SENTENCE * 4)]) == f"a  {SENTENCE * 4}".rstrip()


def test_a_legend_breaks_between_its_labels(terminal: Terminal) -> None:
    with terminal.watched():
        Painter("always", terminal).close_text(set(LABELS))
    assert widest(terminal.getvalue()) <= get_terminal_size().columns
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert all(label in plain for label in LABELS.values())


# Lines that load no model, and draw every kind of page.
LINES = [
    "--help",
    *(f"{verb.name} --help" for verb in VERBS if not verb.parts),
    *(f"{verb.name} {part.name} --help" for verb in VERBS for part in verb.parts),
    "generate --help-all",
    "generate --help draft",
    "--help draft",
    "list",
    "models pairs",
    "models pairs llama3",
    "models inspect outrider/embedded",
    "config",
    "bench simulate",
    "bench simulate --sweep k=1,8",
    "bench prompts",
    "plan outrider/embedded --device h100 --alpha .8",
    "plan outrider/embedded --device h100 --alpha .8 --drafters model,ngram --batch 64",
    "draft check outrider/embedded outrider/embedded-draft",
    "draft suggest outrider/embedded --seconds 0",
    "bench sweep --presets",
    "generat hello",
    "generate hi --drafter nobody",
    "generate hi --target nobody",
    "run smollm2 hello",
    "serve --check",
]


# What fits the narrower one is what breaks; at the wider one the functions above are tested.
@pytest.mark.parametrize("terminal", [80, pytest.param(120, marks=pytest.mark.deep)], indirect=True)
@pytest.mark.parametrize("line", LINES)
def test_no_line_is_wider_than_the_terminal(
    line: str, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with terminal.watched():
        main.run(shlex.split(line))
    shown = terminal.getvalue()
    assert shown
    too_wide = [one for one in shown.splitlines() if len(one) > get_terminal_size().columns]
    assert not too_wide


def test_the_page_of_doctor_fits(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.Report(
        facts={
            "cores": "2 (2 used by torch)",
            "cache": f"/home/{'x' * 90}/.cache/outrider",
            "native kernels": f"none, the reference runs instead: {SENTENCE}",
        },
        kernels=(Choice("linear", "native", (SENTENCE, SENTENCE), "tiles", SENTENCE),),
        threads=None,
        ceilings=(Ceiling("L2", 1 << 19, 1, 70.0),),
        compute=(),
        fits=(
            {
                "model": "outrider/embedded",
                "weights_bytes": 16_000_000,
                "kv_per_1000_tokens_bytes": 4_096_000,
                "num_tokens_that_fit": 1_000_000,
                "num_windows_that_fit": 100,
            },
        ),
        problems=(f"the cache folder cannot be used: {SENTENCE}",),
    )
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: report)  # pyright: ignore
    with terminal.watched():
        assert main.run(["doctor"]) == 1
    shown = terminal.getvalue()
    assert widest(shown) <= get_terminal_size().columns
    assert "outrider/embedded is a toy" in shown


def test_the_line_after_a_text_fits(terminal: Terminal) -> None:
    stats = summarise((), drafter="model", k=4, total_seconds=0.5)
    stats = replace(stats, num_drafted=60, num_accepted=44, num_emitted=64)
    result = GenerationResult("x", (1,) * 64, "length", stats, exact=False)
    scores = [Score([64] * 5, [seconds] * 5) for seconds in (0.4, 0.6)]
    ratio = Comparison.of(*scores, identical=True, greedy=True, share=0.01)
    with terminal.watched():
        brief, whole = verdict(result, ratio), verdict(result, ratio, everything=True)
    told = (
        "1.5x faster than without speculation; 44 of 60 draft tokens accepted; "
        "64 tokens, 128 a second"
    )
    assert " ".join(brief.split()).startswith(f"{told}; identical text; LOSSY")
    assert "--max-tokens N for more" in " ".join(brief.split())
    assert whole.startswith(brief)
    assert widest(whole) <= get_terminal_size().columns


@pytest.mark.parametrize(
    ("seconds", "share", "said"),
    [
        ((0.6, 0.4), 0.01, "slower than without speculation: 0.67x"),
        ((0.4, 0.6), 0.6, "1.5x, which is not judged"),
    ],
)
def test_a_ratio_is_told_for_what_it_is(
    seconds: tuple[float, float], share: float, said: str
) -> None:
    scores = [Score([64] * 5, [one] * 5) for one in seconds]
    told = Comparison.of(*scores, identical=False, greedy=True, share=share, advice="x")
    assert told.headline().startswith(said)
    assert told.headline().endswith("`x` measures what would pay") == (share < 0.5)
    assert told.same == "DIFFERENT text"


def test_a_reply_that_ended_by_itself_has_no_mark() -> None:
    stats = summarise((), drafter="none", k=0, total_seconds=0.5)
    ended = GenerationResult("x", (1,) * 64, "stop", stats)
    assert headline(ended, more="--max-tokens N").startswith("64 tokens, ")
    assert "cut" not in headline(ended, more="--max-tokens N")
    assert Painter("never", Terminal()).mark(cut=is_cut(ended)) == ""
    assert Painter("never", Terminal()).mark(cut=True) == "…"
    assert Painter("never", StringIO()).mark(cut=True) == ""


@pytest.mark.parametrize("columns", ["0", "1", "7"])
def test_help_is_shown_on_terminals_of_no_width(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in ((), ("generate", "--help"), ("bench", "--help"), ("generate", "--help-all")):
        shown = outrider(*words)
        assert shown.code == 0
        assert "Usage: outrider" in shown.out
