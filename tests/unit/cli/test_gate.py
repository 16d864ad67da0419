"""Nothing foreign that a terminal obeys is shown, on any way to it."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.command_line import Command
from doubles.json_server import Answer, serving
from doubles.terminal import Terminal
from doubles.tiny_checkpoints import Variant, random_tensors, save_tensors, write_checkpoint
from outrider.cli import main as program
from outrider.cli.gate import Gate, behind, gate, gated, visible
from outrider.cli.output import Bar, Painter, json_line, table, words

ESC, BEL, ST = "\x1b", "\x07", "\x1b\\"
CLIPBOARD = f"{ESC}]52;c;cm0gLXJmIH4={BEL}"
PAYLOADS = [
    f"{ESC}]0;title{BEL}",
    f"{ESC}]1;icon{BEL}",
    f"{ESC}]2;title{ST}",
    f"{ESC}]4;1;rgb:00/00/00{BEL}",
    f"{ESC}]7;file://host/tmp{BEL}",
    f"{ESC}]8;;http://a.example{ST}click{ESC}]8;;{ST}",
    f"{ESC}]9;notice{BEL}",
    f"{ESC}]10;?{BEL}",
    f"{ESC}]11;#000000{BEL}",
    CLIPBOARD,
    f"{ESC}]52;p;?{ST}",
    f"{ESC}]104{BEL}",
    f"{ESC}]133;A{BEL}",
    f"{ESC}]777;notify;a;b{BEL}",
    f"{ESC}]1337;File=inline=1:AAAA{BEL}",
    f"{ESC}]50;font{BEL}",
    f"{ESC}[2J",
    f"{ESC}[3J",
    f"{ESC}[H",
    f"{ESC}[1;1H",
    f"{ESC}[6n",
    f"{ESC}[c",
    f"{ESC}[>c",
    f"{ESC}[21t",
    f"{ESC}[8;1;1t",
    f"{ESC}[?1049h",
    f"{ESC}[?25l",
    f"{ESC}[?1000h",
    f"{ESC}[?2004h",
    f"{ESC}[31m",
    f"{ESC}[8mhidden",
    f"{ESC}[5mblinking",
    f"{ESC}[1A{ESC}[2K",
    f"{ESC}[999D",
    f"{ESC}[4i",
    f"{ESC}[!p",
    f"{ESC}[1;1r",
    f"{ESC}[20h",
    f"{ESC}c",
    f"{ESC}7{ESC}8",
    f"{ESC}#8",
    f"{ESC}(0",
    f"{ESC}=",
    f"{ESC}Pq#0;2;0;0;0{ST}",
    f"{ESC}P$qm{ST}",
    f"{ESC}Ptmux;{ESC}{ESC}]52;c;AA=={BEL}{ST}",
    f"{ESC}P+q544e{ST}",
    f"{ESC}_Gf=24,s=1;AAAA{ST}",
    f"{ESC}^private{ST}",
    f"{ESC}Xstring{ST}",
    f"{ESC}{ESC}[2J",
    "\x9b2J",
    "\x9d0;title\x9c",
    "\x90q\x9c",
    "\x85\x84\x8d",
    "bell\x07",
    "good\rbad",
    "good\b\b\b\bbad",
    "\x0b\x0c",
    "\x0e\x0f",
    "\x05\x11\x13",
    "\x1a\x18\x7f",
    "a\u202etxt.exe",
    "\u202d\u202a\u202b\u202c",
    "\u2066a\u2067b\u2068c\u2069",
]
MARKUP = ["[red]a[/red]", "[link=http://a.example]a[/link]", "[/]", "[@click=app.quit]a[/]", ":x:"]
CONTROLS = {*map(chr, [*range(32), *range(127, 160)])} - set("\n\t")
OBEYED = CONTROLS | set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
FOREIGN = [*PAYLOADS, *MARKUP]
ALL = " ".join(FOREIGN)
SEVERAL = [" ".join(FOREIGN[start : start + 12]) for start in range(0, len(FOREIGN), 12)]


def check(shown: str, *, some: str = "") -> None:
    """Nothing to obey; `some` of what was foreign is there, and still says what it was."""
    assert not OBEYED & set(shown)
    assert some in shown


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def without_ours(shown: str) -> str:
    """Less the colours of the program, which are the only sequences that it writes in a text."""
    for code in ("0", "2", "32", "1;36", "1;4;33"):
        shown = shown.replace(f"\x1b[{code}m", "")
    return shown


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model whose every token is a payload."""
    folder = tmp_path / "model"
    write_checkpoint(folder, Variant("random", {"bos_token_id": 0, "eos_token_id": 0}))
    vocabulary = {token: i for i, token in enumerate(["[UNK]", *PAYLOADS, *MARKUP])}
    vocabulary |= {f"{CLIPBOARD}{i}": i for i in range(len(vocabulary), 96)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    tokenizer: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_there_are_sixty_payloads_and_each_is_told() -> None:
    assert len(PAYLOADS) >= 60
    for payload in PAYLOADS:
        assert OBEYED & set(payload)
        assert len(visible(payload)) == len(payload)
        check(visible(payload))
    assert visible("a\tb\n naïve \U0001f600 中文 ▁") == "a\tb\n naïve \U0001f600 中文 ▁"


def _print(text: str) -> None:
    print(text)  # noqa: T201 - as a verb does


def _write(text: str) -> None:
    sys.stdout.write(text)


@pytest.mark.parametrize("write", [_print, _write, logging.warning])
def test_streams_are_behind_the_gate_while_a_command_runs(
    write: Callable[[str], object], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    with terminal.watched(), gate(), gate():
        for payload in PAYLOADS:
            write(f"{payload}\n")
        sys.stderr.writelines(PAYLOADS)
        assert sys.stdout.isatty()
        assert isinstance(sys.stdout, Gate)
    check(terminal.getvalue(), some="]0;title")
    assert not isinstance(sys.stdout, Gate)


def test_a_sequence_in_pieces_is_none(terminal: Terminal) -> None:
    painter = Painter("never", gated(terminal))
    for payload in PAYLOADS:
        for char in payload:
            painter.pieces([char], ["plain"])
            gated(terminal).write(char)
    check(terminal.getvalue())


def test_a_gate_is_one_gate(terminal: Terminal) -> None:
    once = gated(terminal)
    assert isinstance(once, Gate)
    assert gated(once) is once
    assert behind(once) is terminal
    assert behind(terminal) is terminal
    assert once.write("\x1b[2J") == 4


@pytest.mark.parametrize("color", ["auto", "always", "never"])
def test_texts_on_a_terminal_obey_nobody(color: str, terminal: Terminal) -> None:
    painter = Painter(color, gated(terminal))
    for payload in FOREIGN:
        painter.write(payload)
        painter.pieces([payload] * 3, ["accepted", "recovered", "bonus"])
        painter.line(payload)
    check(without_ours(terminal.getvalue()), some=MARKUP[1])


def test_a_pipe_has_the_text_as_it_is_and_our_lines_without_sequences() -> None:
    pipe = StringIO()
    painter = Painter("auto", gated(pipe))
    for payload in PAYLOADS:
        painter.pieces([payload], ["plain"])
    assert pipe.getvalue() == "".join(PAYLOADS)
    painter.line(ALL)
    check(pipe.getvalue().removeprefix("".join(PAYLOADS)), some=MARKUP[0])


def test_a_bar_shows_names_as_they_are(terminal: Terminal) -> None:
    columns = (words(), words("{task.fields[more]}"))
    # A task that is added draws those before it once more.
    for start in range(0, len(FOREIGN), 12):
        with terminal.watched(), gate(), Bar(*columns, out=gated(terminal)) as bar:
            for foreign in FOREIGN[start : start + 12]:
                bar.add_task(f"<{foreign}>", more=foreign)
            bar.refresh()
            _print(ALL)
            sys.stderr.write(f"{ALL}\n")
    shown = terminal.getvalue()
    for markup in MARKUP:
        assert f"<{markup}>" in shown
    for sequence in PAYLOADS:
        if sequence.startswith((f"{ESC}]", f"{ESC}P", f"{ESC}_", "\x9b", "\u202d")):
            assert sequence not in shown
    assert "\x1b]" not in shown
    assert not set("\x07\x08\x7f\x85\x9b\u202e") & set(shown)


def test_json_and_tables_keep_their_form() -> None:
    assert json.loads(json_line(ALL)) == ALL
    check(json_line(ALL))
    shown = table([[ALL, "one\ntwo"], ["short", 1]])
    assert len(shown.splitlines()) == 2
    check(shown)


# Words of a command line with foreign text somewhere, and how its output begins to show it.
MISTAKES: dict[str, Callable[[str], Sequence[str]]] = {
    "verb": lambda text: [f"x{text}"],
    "part of a verb": lambda text: ["models", f"x{text}"],
    "flag": lambda text: ["generate", "hi", f"--x{text}"],
    "value": lambda text: ["generate", "hi", "--drafter", f"x{text}"],
    "surplus word": lambda text: ["generate", "hi", f"x{text}"],
    "path of a target": lambda text: ["generate", "hi", "--target", f"./x{text}"],
    "path of a draft": lambda text: ["generate", "hi", "--draft", f"./x{text}"],
    "path of settings": lambda text: ["generate", "hi", "--config", f"./x{text}.toml"],
    "model to inspect": lambda text: ["models", "inspect", f"./x{text}"],
    "model to load": lambda text: ["models", "load", f"./x{text}"],
    "model to export": lambda text: ["export", f"./x{text}", "out.gguf"],
    "device sheet": lambda text: ["simulate", "--device-sheet", f"./x{text}.json"],
    "pair": lambda text: ["pairs", f"x{text}"],
    "output": lambda text: ["generate", "hi", "--output", f"./none{text}/x"],
    "server": lambda text: ["models", "ping", "--url", f"http://127.0.0.1:1/x{text}"],
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("place", MISTAKES)
def test_mistakes_are_told_without_sequences(place: str, outrider: Command) -> None:
    for several in SEVERAL:
        told = outrider(*MISTAKES[place](several.replace("/", "-")))
        assert told.code != 0
        assert "error: " in told.err
        check(told.out + told.err)


def test_settings_of_a_folder_are_told_without_sequences(outrider: Command, tmp_path: Path) -> None:
    for several in SEVERAL:
        key = json.dumps(f"x{several}").replace("\x7f", "\\u007f")
        (tmp_path / "outrider.toml").write_text(f"{key} = 1")
        told = outrider("generate", "hi")
        assert "x" in told.err
        check(told.err)


def test_a_stranger_s_model_is_told_without_sequences(outrider: Command, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for payload in SEVERAL:
        for key in ("model_type", "hidden_act", "rope_scaling", "torch_dtype"):
            (checkpoint / "config.json").write_text(json.dumps(config | {key: payload}))
            for verb in ("inspect", "load"):
                told = outrider("models", verb, str(checkpoint))
                check(told.out + told.err)


def test_names_of_tensors_are_told_without_sequences(outrider: Command, checkpoint: Path) -> None:
    tensors = random_tensors(json.loads((checkpoint / "config.json").read_text()), seed=1)
    for payload in SEVERAL:
        stranger = {f"~{payload}": torch.zeros(2)}
        save_tensors(checkpoint / "model.safetensors", {**tensors, **stranger})
        told = outrider("models", "load", str(checkpoint))
        assert told.code == 3
        check(told.err, some=f"~{visible(payload)} is not part of this model")


def test_reasons_of_a_template_are_told_without_sequences(
    outrider: Command, checkpoint: Path
) -> None:
    template = f"{{{{ raise_exception({json.dumps(ALL)}) }}}}"
    (checkpoint / "chat_template.jinja").write_text(template)
    told = outrider("chat", "--target", str(checkpoint), "--draft", "none", stdin="hi\n")
    check(told.out + told.err, some="chat template: ")
    assert "]0;title" in told.err


@pytest.mark.parametrize("words", [(), ("--n", "2"), ("--color", "always", "--n", "2")])
def test_a_model_s_texts_are_shown_without_sequences(
    words: Sequence[str], terminal: Terminal, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    given = ["--target", str(checkpoint), "--draft", "none", "--max-tokens", "40", "--seed", "1"]
    asked = ["generate", ALL, *given, "--temperature", "5", *words]
    with terminal.watched():
        assert program.run(asked) == 0
    shown = terminal.getvalue()
    check(without_ours(shown))
    assert shown.count("\ufffd") > 40


@pytest.mark.parametrize("words", [(), ("--n", "2")])
def test_a_model_s_texts_are_piped_as_they_are(
    words: Sequence[str], outrider: Command, checkpoint: Path
) -> None:
    given = ["--target", str(checkpoint), "--draft", "none", "--max-tokens", "40", "--seed", "1"]
    piped = outrider("generate", "hi", *given, "--temperature", "5", *words)
    assert piped.code == 0
    assert OBEYED & set(piped.out)
    again = outrider("generate", "hi", *given, "--temperature", "5", *words, "--json")
    record = json.loads(again.out)
    for text in [one["text"] for one in record.get("completions", [record])]:
        assert text in piped.out


def test_what_servers_say_is_told_without_sequences(outrider: Command) -> None:
    reply = {"choices": [{"text": ALL}], "usage": {"completion_tokens": 2}}
    answers = {
        "GET /v1/models": Answer.of({"data": [{"id": ALL}]}),
        "POST /v1/completions": [Answer.of(reply), Answer.of({"error": {"message": ALL}}, 400)],
    }
    with serving(answers) as server:
        for _ in range(2):
            told = outrider("models", "ping", "--url", server.url)
            check(told.out + told.err)
            assert "]0;title" in told.out + told.err


@pytest.mark.parametrize("debug", [True, False])
def test_a_defect_is_told_without_sequences(
    debug: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_words: Sequence[str]) -> int:
        raise ValueError(ALL)

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(program, "_call", fail)
    flags = ["--debug"] if debug else []
    with terminal.watched():
        with pytest.raises(ValueError, match="title") as caught:
            program.main(["generate", *flags])
        sys.excepthook(ValueError, caught.value, caught.tb)
    check(terminal.getvalue(), some="a defect in outrider")
    assert ("Traceback" in terminal.getvalue()) == debug
