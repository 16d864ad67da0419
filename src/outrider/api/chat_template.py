"""Messages to prompt text, by the checkpoint's own chat template.

A template is untrusted code, so it runs in a helper process (`template_helper`) with one second,
512 MB and an output of at most four times the messages plus 64 KB. The helper starts on the first
render, serves all later ones, and is killed and replaced when a template misbehaves.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from outrider.core.errors import CheckpointError, ContractError, MachineError

RENDER_SECONDS = 1.0
START_SECONDS = 20.0
BASE_OUTPUT_CHARS = 64 * 1024
OUTPUT_RATIO = 4
# JSON writes a character as at most six ASCII bytes (\uXXXX), twice that beyond the BMP.
_JSON_BYTES_PER_CHAR = 12

_HINT = "the chat template of this checkpoint cannot be used; `outrider generate` needs none"


class ChatTemplate:
    """One template and the names it may use besides the messages. Safe to share by threads."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._helper: Helper | None = None

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt. Raises CheckpointError if the template fails, in at most 1.5 seconds."""
        plain = [dict(message) for message in messages]
        limit = OUTPUT_RATIO * len(json.dumps(plain)) + BASE_OUTPUT_CHARS
        request = {
            "template": self._source,
            "limit": limit,
            "variables": {
                **self._variables,
                "messages": plain,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        }
        with self._lock:
            try:
                reply = self._ask(request, limit)
            except HelperLostError as problem:
                self.close()
                raise CheckpointError(f"chat template: {problem}.", hint=_HINT) from None
        if "text" not in reply:
            problem = reply.get("error", "no text").rstrip(".")
            raise CheckpointError(f"chat template: {problem}.", hint=_HINT)
        return reply["text"]

    def close(self) -> None:
        """Stop the helper; the next render starts another one."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def _ask(self, request: Mapping[str, object], limit: int) -> dict[str, str]:
        if self._helper is None:
            self._helper = Helper()
        reply = self._helper.ask(request, max_bytes=_JSON_BYTES_PER_CHAR * limit)
        # A helper that reports an unforeseen exception ends itself afterwards.
        if "error" in reply:
            self.close()
        return reply


class HelperLostError(Exception):
    """The helper gave no answer; the message says why."""


class Helper:
    """The running process. Its answers are one JSON object a line. With `job` "patterns" it tries
    those of tokenizers as well. Raises MachineError if it does not start."""

    def __init__(self, *job: str) -> None:
        script = Path(__file__).with_name("template_helper.py")
        process = subprocess.Popen(
            [sys.executable, "-I", str(script), *job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
        )
        if process.stdin is None or process.stdout is None:
            raise ContractError("the helper has no pipes")
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout
        self.close = weakref.finalize(self, _end, process)
        try:
            self._read(START_SECONDS, max_bytes=BASE_OUTPUT_CHARS)
        except HelperLostError as problem:
            self.close()
            raise MachineError(
                f"the chat template helper does not start: {problem}.",
                hint=f"run {sys.executable} -I {script} to see why",
            ) from None

    def ask(
        self, request: Mapping[str, object], *, max_bytes: int, seconds: float = RENDER_SECONDS
    ) -> dict[str, str]:
        """Raises HelperLostError for no answer in time, or too long a one."""
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise HelperLostError("the helper process ended") from None
        return self._read(seconds, max_bytes=max_bytes + BASE_OUTPUT_CHARS)

    def _read(self, seconds: float, *, max_bytes: int) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        line = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise HelperLostError(f"no answer within {seconds:g} s")
                chunk = self._stdout.read(2**16)
                if not chunk:
                    raise HelperLostError("it ended the helper process (too much memory or time)")
                line += chunk
                if len(line) > max_bytes:
                    raise HelperLostError("the text it writes is too long")
        reply: Any = json.loads(line)
        return cast("dict[str, str]", reply)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
