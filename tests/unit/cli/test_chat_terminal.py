"""Ctrl-C at a terminal, as its driver sends it: to every process of the foreground."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Makes the terminal that it was given its own, and becomes the command.
_LEADER = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.environ.update(TERM='dumb', PYTHON_BASIC_REPL='1'); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_CTRL_C = b"\x03"
_SECONDS = 240.0


class Terminal:
    """A pseudo-terminal with a command in its foreground. `seen` is all that it shows."""

    def __init__(self, end: int, process: subprocess.Popen[bytes]) -> None:
        self._end, self.process = end, process
        self.seen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def read(self, seconds: float) -> None:
        """Add to `seen` for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._end], [], [], left)[0]:
                self.seen += os.read(self._end, 4096)

    def wait(self, words: bytes, *, after: int) -> None:
        """Read until `words` are shown behind so many bytes."""
        until = time.monotonic() + _SECONDS
        while words not in self.seen[after:]:
            assert time.monotonic() < until, self.seen[-2000:].decode(errors="replace")
            self.read(0.02)

    def interrupt(self, words: bytes, *, times: int = 1) -> None:
        """Type Ctrl-C until `words` are shown.

        Python's readline waits on without an end where a signal arrives between the
        look at its flag and the wait for a key (CPython's `readline_until_enter_or_signal`),
        so a key that changes nothing within ten seconds is typed again.
        """
        after, until = len(self.seen), time.monotonic() + _SECONDS
        while words not in self.seen[after:]:
            assert time.monotonic() < until, self.seen[-2000:].decode(errors="replace")
            self.type(_CTRL_C * times)
            again = time.monotonic() + 10
            while words not in self.seen[after:] and time.monotonic() < again:
                self.read(0.02)


@contextmanager
def terminal(folder: Path, *command: str) -> Generator[Terminal]:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _LEADER, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        cwd=folder,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _is_answered(screen: Terminal, number: int) -> None:
    """At the prompt, another message has a reply."""
    before = len(screen.seen)
    screen.type(f"What is 3 plus {number}?\r".encode())
    screen.wait(b" tokens, ", after=before)
    screen.wait(b"you> ", after=screen.seen.index(b" tokens, ", before))
    assert b"error" not in screen.seen[before:]


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.weights
def test_the_message_after_an_interrupt_is_answered(tmp_path: Path) -> None:
    pick = random.Random(5)
    chat = ("-m", "outrider", "chat", "--max-tokens", "100")
    with terminal(tmp_path, *chat) as screen:
        screen.wait(b"you> ", after=0)
        for number in range(5):
            kind = ("writing", "starting", "empty", "typing", "twice")[number % 5]
            before = len(screen.seen)
            if kind == "typing":
                screen.type(b"a message that nobody sen")
            elif kind != "empty":
                screen.type(b"Count to one hundred, please.\r")
                screen.wait(b"\r\n", after=before)
            screen.read(pick.uniform(0, 0.02 if kind == "starting" else 0.3))
            screen.interrupt(b"you> ", times=2 if kind == "twice" else 1)
            _is_answered(screen, number)
        screen.type(b"/bye\r")
        assert screen.process.wait(_SECONDS) == 0


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.weights
def test_a_python_prompt_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    with terminal(tmp_path, "-i", "-q") as screen:
        screen.type(b"from outrider import LLM; llm = LLM()\r")
        screen.type(b"print('a' + 'b', llm.chat('What is 3 plus 4?').result().finish_reason)\r")
        screen.wait(b"ab ", after=0)
        for number in range(2):
            before = len(screen.seen)
            screen.type(b"def loop():\r while print('o' + 'n') is None: ")
            screen.type(b"llm.chat('Hello', max_tokens=9).result()\r\rloop()\r")
            screen.wait(b"on\r\n", after=before)
            screen.read(0.2 * number)
            screen.interrupt(b"KeyboardInterrupt")
            before = len(screen.seen)
            screen.type(b"print('a' + 'b', llm.chat('What is 3?').result().finish_reason)\r")
            screen.wait(b"ab ", after=before)


def test_a_killed_helper_is_replaced_before_anybody_is_told() -> None:
    from outrider.api.chat_template import ChatTemplate

    template = ChatTemplate("{{ messages[0].content }}", {})
    message = {"role": "user", "content": "one"}
    assert template.render([message]).text == "one"
    process = template._helper._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    assert os.getsid(process.pid) == process.pid
    for number in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        process = template._helper._process  # pyright: ignore[reportPrivateUsage]
        assert process is not None
        process.send_signal(number)
        assert template.render([message | {"content": number.name}]).text == number.name
    template.close()
