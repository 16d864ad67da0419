"""A real server for real clients, each in an environment of its own (scripts/client_tests).

Nothing of the program is imported here: the server runs with the program's own Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clients import programs

ROOT = Path(__file__).parents[2]
MODEL = "outrider/embedded"
PYTHON = str(ROOT / ".venv" / "bin" / "python")
# The embedded target under a template that knows of tools, as those of Qwen do.
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Served(NamedTuple):
    """A server and its one model. `call` runs a line of Python in the program's environment."""

    url: str
    model: str

    def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            found: dict[str, object] = json.load(answer)
        return found


@pytest.fixture(scope="session")
def ours() -> Callable[[str], object]:
    """The JSON that a program, run in the program's own environment, prints."""

    def run(program: str) -> object:
        done = subprocess.run(
            [PYTHON, "-c", program], capture_output=True, text=True, check=True, timeout=120
        )
        return json.loads(done.stdout)

    return run


def _model(folder: Path, **changed: dict[str, object]) -> Path:
    """The embedded target in a folder of its own, with some fields of its files changed."""
    files = {"tokenizer_config": {"chat_template": _TEMPLATE}} | changed
    for file in (ROOT / "src" / "outrider" / "pairs" / "tiny" / "target").iterdir():
        if file.stem in files:
            told = json.loads(file.read_text("utf-8")) | files[file.stem]
            (folder / file.name).write_text(json.dumps(told), "utf-8")
        else:
            (folder / file.name).symlink_to(file)
    return folder


def _ends_of_lines() -> list[int]:
    """Tokens with a newline, and the end of the text."""
    file = ROOT / "src" / "outrider" / "pairs" / "tiny" / "target" / "tokenizer.json"
    vocabulary = json.loads(file.read_text("utf-8"))["model"]["vocab"]
    return [0, *(token_id for token, token_id in vocabulary.items() if "Ċ" in token)]


@contextmanager
def _running(*command: str, **variables: str) -> Generator[Served]:
    """A server that says its address in a line of JSON, until the end of the block."""
    if not Path(PYTHON).exists():
        pytest.skip(f"no {PYTHON}: scripts/setup makes it")
    environment = os.environ | variables  # noqa: TID251 - a child's
    with subprocess.Popen(
        [PYTHON, *command], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server ended before it was ready"
        told = json.loads(line)
        served = Served(told["url"], told["model"])
        programs.wait_for(served.url + "/ready", 60)
        yield served
        process.terminate()
        assert process.wait(60) == 0, "the server did not end in order"
    sys.stdout.flush()


def _outrider(model: Path, *more: str) -> list[str]:
    command = ["-m", "outrider", "serve", str(model), "--drafter", "ngram", "--port", "0"]
    return [*command, "--served-model-name", MODEL, "--threads", "1", "--json", *more]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    files = str(tmp_path_factory.mktemp("files") / "files")
    with _running(
        *_outrider(_model(tmp_path_factory.mktemp("embedded")), "--files", files)
    ) as found:
        yield found


@pytest.fixture(scope="session")
def agent_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same for coding agents: a window for their long instructions, and answers of a line, for
    some take one that was cut off for an error."""
    model = _model(
        tmp_path_factory.mktemp("agents"),
        config={"max_position_embeddings": 1 << 16},
        generation_config={"eos_token_id": _ends_of_lines()},
    )
    with _running(*_outrider(model, "--max-tokens", "200", "--temperature", "0")) as found:
        yield found


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Servers with more variables in their environment."""
    with ExitStack() as servers:

        def start(**variables: str) -> Served:
            model = _model(tmp_path_factory.mktemp("started"))
            return servers.enter_context(_running(*_outrider(model), **variables))

        yield start


@pytest.fixture
def scripted() -> Iterator[Callable[..., Served]]:
    """Servers whose engine writes by rules: pairs of a text in the prompt and the answer to it.
    `knows` is what their chat template has besides, by which families are told apart, and
    `first_seconds` the time to the first token of an answer."""
    with ExitStack() as servers:

        def start(*rules: tuple[str, str], knows: str = "", first_seconds: float = 0) -> Served:
            program = str(Path(__file__).with_name("scripted_server.py"))
            template = f"{_TEMPLATE}{{# {knows} #}}"
            told = json.dumps([template, rules, first_seconds])
            return servers.enter_context(_running(program, told))

        yield start


@pytest.fixture
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Programs of .clients, at home in a folder of this test."""
    records = request.config.getoption("--record")
    return partial(programs.program, home=tmp_path / "home", records=records)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="keep what clients ask")
    parser.addoption("--slow", action="store_true", help="run tests that wait for minutes, too")
    parser.addoption("--cases", type=int, default=20, help="bodies that schemathesis makes of each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With other folders in the same run, this sees their tests as well.
    own = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if not config.getoption("--slow"):
        for item in own:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="scripts/client_tests --slow runs it"))


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only scripts/client_tests runs these, each in its client's environment."""
    return None if config.inipath == Path(__file__).with_name("pytest.ini") else True
