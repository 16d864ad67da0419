"""Command lines in a process that may not have much memory: refused at once, with a way that works.

One process runs them all under RLIMIT_AS, since Python takes longer to start than to refuse.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import outrider.pairs as pairs
from doubles.child_programs import TESTS

TARGET = Path(pairs.__path__[0]) / "tiny" / "target"
pytestmark = [
    pytest.mark.wide,
    pytest.mark.weights,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]

PROGRAM = """
import contextlib, gc, io, json, re, resource, sys, time
from outrider.cli.main import run
import outrider.api.llm
import outrider.models.loading

def held(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

limit = held("VmSize") + 1_200_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for line in sys.stdin:
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before, start, told = held("VmRSS"), time.monotonic(), io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        code = run(json.loads(line))
    seconds, peak = time.monotonic() - start, held("VmHWM") - before
    print(json.dumps([code, told.getvalue(), seconds, peak]), flush=True)
"""
# Generous: a refusal takes a fraction of a second on a quiet machine.
MOST_SECONDS = 30
MOST_BYTES_REFUSED, MOST_BYTES_RUN = 150 << 20, 1 << 30


@dataclass(frozen=True)
class Ended:
    code: int
    err: str
    seconds: float
    peak: int


class Starved:
    """A process that runs one command line after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {TESTS!r})"]
        command[-1] += PROGRAM
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *words: str) -> Ended:
        given, told = self._process.stdin, self._process.stdout
        assert given is not None
        assert told is not None
        given.write(json.dumps(words) + "\n")
        given.flush()
        return Ended(*json.loads(told.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The embedded target, whose config.json claims more than is there."""
    claims: dict[str, dict[str, object]] = {
        "honest": {},
        "endless": {"max_position_embeddings": 2**31 - 1},
        "wordy": {"vocab_size": 2**31 - 1},
        "deep": {"num_hidden_layers": 2**31 - 1},
        "wide": {"intermediate_size": 2**30},
    }
    made: dict[str, str] = {}
    for name, claim in claims.items():
        folder = tmp_path_factory.mktemp(name)
        config = json.loads((TARGET / "config.json").read_text())
        for file in TARGET.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        (folder / "config.json").write_text(json.dumps(config | claim))
        made[name] = str(folder)
    return made


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """`words`, less those flags and their values."""
    pairs_of = zip(("", *words), words, strict=False)
    return [word for before, word in pairs_of if not {before, word} & set(flags)]


def test_claims_and_wishes_beyond_the_limit(folders: dict[str, str]) -> None:
    common = ("--max-tokens", "2", "--force-reference", "def f(x):")
    refused = [
        ("wordy", (), "config.json implies", None),
        ("deep", (), "num_hidden_layers must be", None),
        ("wide", (), "config.json implies", None),
        ("endless", ("--context", "1000000000"), "KV arena of the target", "--context"),
        ("honest", ("--arena-tokens", "100000000"), "RLIMIT_AS", "--arena-tokens"),
        ("honest", ("--prefill-chunk", "65536"), "scratch of the target", "--prefill-chunk"),
        ("honest", ("--batch-size", "1024", "--k", "64"), "logits", "--batch-size"),
    ]
    starved = Starved()
    try:
        for name, flags, said, way in refused:
            drafter = "suffix" if "--k" in flags else "none"
            words = ("generate", "--target", folders[name], "--drafter", drafter, *common, *flags)
            ended = starved.run(*words)
            assert ended.code == 3, (words, ended)
            assert said in ended.err, ended.err
            assert "defect" not in ended.err
            assert ended.seconds < MOST_SECONDS
            assert ended.peak < MOST_BYTES_REFUSED
            if way is not None:
                hint = ended.err.rpartition("try: ")[2].split()
                assert hint[0] == way, ended.err
                followed = starved.run(*without(words, hint[::2]), *hint)
                assert followed.code == 0, (hint, followed.err)
                assert followed.peak < MOST_BYTES_RUN
        ended = starved.run("generate", "--target", folders["endless"], "--draft", "none", *common)
        assert ended.code == 0, ended.err
        assert ended.peak < MOST_BYTES_RUN
    finally:
        starved.close()
