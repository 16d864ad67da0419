"""Processes of tensor-parallel ranks: started and ended by rank 0, and the program that they run.

Ranks 1 and up are new interpreters, since a fork of a process with threads may hang. Each gets its
messages through the ranks' shared memory, or through its pipe if they share none, and ends when the
pipe does. A rank that ends by itself is an error for all: the first call that notices ends the
others and raises an error that names the rank, and every later call raises it again.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any

import torch

from outrider.core.errors import ContractError, given
from outrider.core.spec import RecurrentCapacity, RopeScaling
from outrider.kernels.native.rounds import RoundModel
from outrider.kernels.operators import pick_device
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.llama_weights import Comm
from outrider.models.loading import load_model
from outrider.plugins.parallel.comm import RankError
from outrider.plugins.parallel.meeting import Meeting, join
from outrider.plugins.parallel.messages import apply

HEADER = struct.Struct("<I")
PULSE_SECONDS = 1.0


def encode(message: Sequence[int]) -> bytes:
    """A message as bytes: a count, and as many integers of 64 bits."""
    return HEADER.pack(len(message)) + array("q", message).tobytes()


class Link:
    """A follower's link to rank 0 through its stdin and stdout; reports an uncaught error to it.

    One thread reads, so that rank 0 need not wait for a follower that computes, and so that the end
    of the pipe ends the follower at once, whatever it waits for. Another thread writes a byte to
    the pulse pipe every PULSE_SECONDS.
    """

    def __init__(self) -> None:
        # The output of a library that prints must not reach rank 0.
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        sys.excepthook = self._report
        self._inward: IO[bytes] = sys.stdin.buffer
        self.setup: Mapping[str, Any] = json.loads(self._inward.readline() or b"{}")
        self._messages: SimpleQueue[list[int]] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._beat, args=(self.setup.get("pulse"),), daemon=True).start()

    def say(self, word: str) -> None:
        self._write({"word": word})

    def meet(self) -> Comm:
        self.say(HERE)
        return join(self.setup["meeting"])

    def messages(self, comm: Comm, share: RoundModel | None = None) -> Iterator[list[int]]:
        """The messages, in order; the process ends when no more can come. Native passes come in
        between, and `share` runs this rank's part of them."""
        if comm.memory is None:
            while True:
                yield self._messages.get()
        while (message := comm.memory.next_message(share)) is not None:
            yield message
        os._exit(0)

    def _read(self) -> None:
        while header := self._inward.read(HEADER.size):
            message = array("q")
            message.frombytes(self._inward.read(message.itemsize * HEADER.unpack(header)[0]))
            self._messages.put(message.tolist())
        os._exit(0)

    def _beat(self, pulse: int) -> None:
        with suppress(OSError):
            while os.write(pulse, b"."):
                time.sleep(PULSE_SECONDS)

    def _report(
        self, kind: type[BaseException], error: BaseException, _trace: TracebackType | None
    ) -> None:
        self._write({"error": f"{kind.__name__}: {error}"[:2000]})
        # The reading thread holds stdin, without which the interpreter cannot end in order.
        os._exit(1)

    def _write(self, answer: Mapping[str, str]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


HERE, LOADED = "here", "loaded"
START_SECONDS = 120.0
# Limit for a follower that has loaded; before that, it may be busy for START_SECONDS.
SILENT_SECONDS = 8.0
_END_SECONDS = 2.0
_HINT = "load the model again; if memory ran out, lower --arena-tokens or --tensor-parallel"


class RankGroup:
    """The followers' processes. Each runs `module` as a program, with `setup`, its rank and its
    invitation to `meeting`.

    A stopped rank does not end. So each rank writes a byte a second to a pipe of its own, and a
    rank that is silent for SILENT_SECONDS is killed, so that ranks that wait for it fail. Seconds
    are counted one by one, so that rank 0 itself may be stopped and resumed.
    """

    def __init__(self, module: str, meeting: Meeting, setup: Mapping[str, object]) -> None:
        self.size = size = meeting.size
        self.patience = START_SECONDS
        self._meeting = meeting
        self._comm: Comm | None = None
        self._lost: RankError | None = None
        self._losing = threading.Lock()
        pulses = [os.pipe() for _ in range(1, size)]
        self._processes = [
            _start(module, (beat, *meeting.inherited(rank)))
            for rank, (_, beat) in enumerate(pulses, start=1)
        ]
        self.close = weakref.finalize(self, _end, self._processes, meeting)
        for rank, (process, (heard, beat)) in enumerate(
            zip(self._processes, pulses, strict=True), start=1
        ):
            os.close(beat)
            greeting = {**setup, "meeting": meeting.invitation(rank), "pulse": beat}
            self._write(process, f"{json.dumps(greeting)}\n".encode())
            threading.Thread(
                target=_watch, args=(weakref.ref(self), rank, heard), daemon=True
            ).start()
        meeting.started()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def meet(self) -> Comm:
        """Wait for all followers and return the `Comm` with them, once. Raises RankError."""
        try:
            self.hear(HERE)
            self._comm = self._meeting.join()
        except BaseException:
            self.close()
            raise
        finally:
            self._meeting.close()
        return self._comm

    def tell(self, message: Sequence[int]) -> None:
        """Send `message` to every follower. Never raises: `check` reports a lost rank."""
        if self._comm is not None and self._comm.memory is not None:
            if not self._comm.memory.tell(message):
                self.lose("a rank reads no more")
            return
        data = encode(message)
        for process in self._processes:
            if self._lost is None:
                self._write(process, data)

    def hear(self, word: str, seconds: float = START_SECONDS) -> None:
        """Wait until every follower has sent `word`. Raises RankError if one does not."""
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(self._processes, start=1):
            answer = _read_line(process, deadline)
            if answer is None:
                raise self.lose(f"rank {rank} did not report {word!r} within {seconds:g} s")
            if "error" in answer:
                raise self.end(f"rank {rank} ended: {answer['error']}")
            if answer.get("word") != word:
                raise self.lose(f"rank {rank} ended")

    def check(self) -> None:
        """Raise RankError if a rank has been lost."""
        if self._lost is not None:
            raise RankError(str(self._lost), hint=self._lost.hint)

    def silent(self, rank: int) -> None:
        """Give up `rank`, which was silent for longer than `patience` seconds."""
        process = self._processes[rank - 1]
        self._say(
            f"rank {rank} (process {process.pid}) is stopped or hangs: "
            f"it sent nothing for {self.patience:g} s"
        )
        # A stopped process is killed too: then ranks that wait for its part or write to it fail at
        # once.
        process.kill()
        self.gone()
        self.close()

    def gone(self) -> None:
        """Make calls that wait for a rank fail, as one has ended. The next call finds out which."""
        if self._comm is not None:
            self._comm.end()

    def lose(self, reason: str) -> RankError:
        """End all followers; the error has `reason`, unless a process ended by itself."""
        return self.end(reason if self._lost else self._who_ended() or reason)

    def end(self, reason: str) -> RankError:
        """End all followers. Return the error with the reason, which later calls raise as well."""
        lost = self._say(reason)
        self.gone()
        self.close()
        return RankError(str(lost), hint=lost.hint)

    def _say(self, reason: str) -> RankError:
        """Record `reason` as an error, unless one is recorded already."""
        with self._losing:
            if self._lost is None:
                self._lost = RankError(
                    f"the model is shared by {self.size} processes, and {reason.rstrip('.')}.",
                    hint=_HINT,
                )
            return self._lost

    def _write(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        pipe, left = given(process.stdin, "pipe"), memoryview(data)
        try:
            while left:
                left = left[pipe.write(left) :]
        except (OSError, ValueError) as error:
            self.lose(f"a rank reads no more ({error})")

    def _who_ended(self) -> str | None:
        """A sentence about the first follower that ended by itself; None if there is none. A
        process whose connection broke may take a moment to end."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() is not None:
                    return f"rank {rank} (process {process.pid}) {_how(process)}"
            time.sleep(0.01)
        return None


def _watch(ranks: weakref.ref[RankGroup], rank: int, heard: int) -> None:
    """Count the seconds without a pulse of `rank` until its pipe or `ranks` ends."""
    silent = 0
    try:
        while True:
            with selectors.DefaultSelector() as selector:
                selector.register(heard, selectors.EVENT_READ)
                ready = selector.select(PULSE_SECONDS)
            ended = bool(ready) and not os.read(heard, 1 << 12)
            silent = 0 if ready else silent + 1
            owner = ranks()
            if owner is None:
                return None
            if ended:
                return owner.gone()
            if silent * PULSE_SECONDS >= owner.patience:
                return owner.silent(rank)
            # Not while waiting: it would keep the processes alive.
            del owner
    finally:
        os.close(heard)


def _start(module: str, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # Safe path: a file of the working folder must not stand in for a module.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        pass_fds=inherited,
        # Ctrl-C is for rank 0 alone; followers end with their pipe.
        start_new_session=True,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]], meeting: Meeting) -> None:
    meeting.close()
    for process in processes:
        with suppress(OSError):
            given(process.stdin, "pipe").close()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _how(process: subprocess.Popen[bytes]) -> str:
    """A description of the end of a process, with the error that it reported, if any."""
    code = process.returncode
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    answer = _read_line(process, time.monotonic() + _END_SECONDS) or {}
    return f"ended: {answer.get('error', f'exit code {code}')}"


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> Mapping[str, str] | None:
    """The next line that a process writes; empty if it ended, None if time ran out."""
    pipe: IO[bytes] = given(process.stdout, "pipe")
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(deadline - time.monotonic(), 0.0)):
                return None
            # Byte by byte: what comes after the line belongs to the next call.
            byte = pipe.read(1)
            if not byte:
                return {}
            line += byte
    return json.loads(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Everything that a follower needs to load its share."""

    folder: str
    name: str
    options: LoadOptions

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def follow() -> None:
    """Run as a follower, which has no requests and no text, only its part of each pass."""
    link = Link()
    setup, rank = link.setup, link.setup["meeting"]["rank"]
    options = _options(setup["options"])
    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    comm = link.meet()
    model = load_model(Path(setup["folder"]), options, name=setup["name"], comm=comm)
    if not isinstance(model, LlamaModel):
        raise ContractError("only decoders of the Llama family can be split")
    link.say(LOADED)
    for message in link.messages(comm, model.native_share):
        apply(message, model, device)


def _options(given: dict[str, Any]) -> LoadOptions:
    capacity: dict[str, Any] = {
        **given["capacity"],
        "states": RecurrentCapacity(**given["capacity"]["states"]),
    }
    rope = RopeScaling(**given["rope"])
    values: dict[str, Any] = {**given, "capacity": ModelCapacity(**capacity), "rope": rope}
    return LoadOptions(**values)


if __name__ == "__main__":
    follow()
