"""A real server for real clients, each in an environment of its own (scripts/client_tests).

Nothing of the program is imported here: the server runs with the program's own Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
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
        with urllib.request.urlopen(request, timeout=60) as answer:
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


def _model(folder: Path) -> Path:
    for file in (ROOT / "src" / "outrider" / "pairs" / "tiny" / "target").iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text("utf-8"))
    config.unlink()
    config.write_text(json.dumps(told | {"chat_template": _TEMPLATE}), "utf-8")
    return folder


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = _model(tmp_path_factory.mktemp("embedded"))
    if not Path(PYTHON).exists():
        pytest.skip(f"no {PYTHON}: scripts/setup makes it")
    command = [PYTHON, "-m", "outrider", "serve", str(model), "--drafter", "ngram"]
    command += ["--served-model-name", "outrider/embedded", "--port", "0", "--json"]
    command += ["--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server ended before it was ready"
        told = json.loads(line)
        served = Served(told["url"], told["model"])
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(served.url + "/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield served
        process.terminate()
        assert process.wait(60) == 0, "the server did not end in order"
    sys.stdout.flush()
