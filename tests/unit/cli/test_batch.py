"""`outrider batch`: what it prints, what stops it, and that being killed costs no line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from doubles.command_line import Command
from outrider.cli.output import duration

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.wide, pytest.mark.weights]

NUM_LINES, NUM_KILLS = 600, 2


def write(path: Path, records: Sequence[object]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--unordered",)])
def test_a_batch_that_is_killed_answers_every_line_once(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Once, and once with an answer that was only half written."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [{"prompt": f"x{number} = ", "id": number} for number in range(NUM_LINES)])
    command = [sys.executable, "-m", "outrider", "batch", str(source), str(target)]
    command += ["--max-tokens", "2", "--batch-size", "16", "--quiet", *words]
    for kill in range(NUM_KILLS):
        before = len(lines(target))
        with subprocess.Popen(command) as process:
            while len(lines(target)) < before + NUM_LINES // 8 and process.poll() is None:
                time.sleep(0.01)
            process.kill()
        assert process.returncode == -9
        if kill == NUM_KILLS // 2:
            with target.open("ab") as stream:
                stream.write(lines(target)[0][:40])
    assert NUM_LINES > len(lines(target)) > NUM_KILLS * (NUM_LINES // 8)
    assert subprocess.run(command, check=False, timeout=600).returncode == 0
    told = [json.loads(line) for line in lines(target)]
    ids = [int(answer["id"]) for answer in told]
    assert sorted(ids) == list(range(NUM_LINES))
    assert words or ids == list(range(NUM_LINES))
    assert all(answer["error"] is None and answer["completion_tokens"] == 2 for answer in told)


def test_failed_lines_make_it_end_with_1(outrider: Command, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": 3}, {"prompt": "b"}])
    shown = outrider("batch", "in.jsonl", "out.jsonl", "--max-tokens", "2", "--json")
    assert shown.code == 1
    record = json.loads(shown.out.splitlines()[-1])
    assert (record["lines"], record["answered"], record["failed"]) == (3, 2, 1)
    assert "3 of 3 lines · 1 failed" in shown.err
    assert "why a line failed is its `error` in out.jsonl" in shown.err
    again = outrider("batch", "in.jsonl", "out.jsonl", "--max-tokens", "2", "--json")
    assert again.code == 1
    record = json.loads(again.out.splitlines()[-1])
    assert (record["answered_before"], record["tokens"]) == (3, 0)
    assert len(lines(tmp_path / "out.jsonl")) == 3
    assert outrider("batch", "in.jsonl", "out.jsonl", "--fresh", "--quiet").err == ""


def test_answers_of_another_file_are_no_answers(outrider: Command, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"prompt": "a"}])
    assert outrider("batch", "in.jsonl", "out.jsonl", "--max-tokens", "2").code == 0
    before = lines(tmp_path / "out.jsonl")
    write(tmp_path / "in.jsonl", [{"prompt": "b"}])
    shown = outrider("batch", "in.jsonl", "out.jsonl", "--max-tokens", "2")
    assert shown.code == 2
    assert "--fresh" in shown.err
    assert lines(tmp_path / "out.jsonl") == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "a file to read and a file to write"),
        (("in.jsonl",), 2, "a file to read and a file to write"),
        (("in.jsonl", "in.jsonl"), 2, "at once"),
        (("no.jsonl", "out.jsonl"), 2, "no such file"),
        (("in.jsonl", "no/out.jsonl"), 3, "cannot be written"),
        (("in.jsonl", "."), 3, "cannot be written"),
        ((".", "out.jsonl"), 3, "cannot be read"),
        (("-", "out.jsonl"), 2, "a lone - has no meaning"),
        (("out.jsonl", "text.txt"), 2, "no answer of a batch"),
    ],
)
def test_what_cannot_be_a_batch(
    outrider: Command, tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    for name in ("in.jsonl", "out.jsonl", "text.txt"):
        (tmp_path / name).write_text("hello\n" if name == "text.txt" else "")
    shown = outrider("batch", *words)
    assert shown.code == code
    assert said in shown.err
    assert (tmp_path / "text.txt").read_text() == "hello\n"


def test_durations_are_said_as_people_say_them() -> None:
    told = [duration(seconds) for seconds in (8.2, 200, 18_720)]
    assert told == ["8 s", "3 min 20 s", "5 h 12 min"]


def test_two_lines_of_one_custom_id_are_refused_before_a_model_is_loaded(
    outrider: Command, tmp_path: Path
) -> None:
    def asked(name: str) -> dict[str, object]:
        body = {"prompt": 'has "custom_id": "same" in it', "max_tokens": 2}
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}

    write(tmp_path / "in.jsonl", [asked("a"), {"prompt": "x", "id": "a"}, asked("b"), asked("a")])
    shown = outrider("batch", "in.jsonl", "out.jsonl", "--model", "nosuch")
    assert shown.code == 2
    assert "lines 1 and 4: both have the custom_id 'a'" in shown.err
    write(tmp_path / "in.jsonl", [asked("a"), {"prompt": "x", "id": "a"}, asked("b")])
    assert outrider("batch", "in.jsonl", "out.jsonl", "--max-tokens", "2").code == 0
