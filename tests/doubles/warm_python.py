"""Child processes that begin as forks of an interpreter which has PyTorch and the engine loaded.

So begin the package's own processes, and inside `warm()` each `python -m NAME`, `python -c CODE`
and `python FILE`, by way of subprocess or of asyncio: imports are most of what such a child costs.
It is a process of its own like any other, a child of the process that starts it. Whatever could
notice the difference begins anew: other flags, terminals, changed variables that an import may
read; and all elsewhere than on Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, TextIO, cast

import pytest

NAME = "warm python"
_TESTS = str(Path(__file__).parents[1])
_PROGRAM = (
    f"import sys; sys.path.insert(0, {_TESTS!r}); from doubles.warm_python import main; main()"
)
# All that engines, servers, ranks and drafters import; not the modules that `-m` names.
_MODULES = (
    *("outrider.api.llm", "outrider.api.chat_template", "outrider.server.thread_port"),
    *(
        "outrider.cli.serve",
        "outrider.cli.generate",
        "outrider.plugins.batches.verbs",
        "outrider.server.run",
    ),
    *("outrider.plugins.lanes.process.child", "outrider.plugins.parallel.sharded", "granian"),
)
_OWN = {
    "outrider.server.engine_process",
    "outrider.plugins.lanes.process",
    "outrider.plugins.parallel.ranks",
}
# Beginnings of variables that an import, or a library when it is loaded, may read.
_READ = (
    *("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "CUDA_"),
    *("TORCH_", "PYTORCH_", "TRITON_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OTEL_"),
    *("HOME", "XDG_", "TMPDIR", "LANG", "LC_", "TZ"),
)
_MOST_BYTES, _MOST_FILES = 1 << 17, 64
_SET_NAME, _SET_SUBREAPER = 15, 36
_DONE = 7
_START: Any = vars(subprocess.Popen)["_execute_child"]
_environ = os.environ  # noqa: TID251 - that of a process to be
_AT_FIRST = dict(_environ)
_SIGNATURE = inspect.signature(_START)


@dataclass(frozen=True, slots=True)
class Request:
    """A process to be: its words after `python`, and its own numbers of the files sent along."""

    words: Sequence[str]
    files: Sequence[int]
    folder: str
    variables: Mapping[str, str]
    session: bool
    group: int

    @property
    def starts_others(self) -> bool:
        return _OWN.isdisjoint(self.words[:3])


class Starter:
    """This process's end of a pair of sockets, whose other end forks."""

    def __init__(
        self, line: socket.socket, variables: Mapping[str, str], flags: Sequence[str] = ()
    ) -> None:
        self._line, self._lock, self._flags = line, Lock(), list(flags)
        self._variables = read_by_imports(variables)

    def start(self, asked: Mapping[str, Any]) -> int | None:
        """The new process's number; None for one that must begin anew."""
        words = [os.fsdecode(word) for word in asked["args"]]
        flags, words = words[: 1 + len(self._flags)], words[1 + len(self._flags) :]
        variables = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (_environ if asked["env"] is None else asked["env"]).items()
        }
        files = _files(asked)
        if (
            flags != [sys.executable, *self._flags]
            or not words
            or (words[0][0] == "-" and words[words[0] == "-P"] not in ("-m", "-c"))
            or read_by_imports(variables) != self._variables
            or any(os.isatty(file) for file in files.values())
        ):
            return None
        request = Request(
            words,
            list(files),
            str(Path(os.fsdecode(asked["cwd"] or ".")).absolute()),
            variables,
            asked["start_new_session"],
            asked["process_group"],
        )
        return self._ask(request, list(files.values()))

    def works(self) -> bool:
        """Whether a process that it starts is this one's child."""
        try:
            process_id = self._ask(Request((), (0,), "/", {}, False, -1), [0])
            return process_id is not None and os.waitpid(process_id, 0)[1] == _DONE << 8
        except (OSError, ValueError):
            return False

    def _ask(self, request: Request, files: Sequence[int]) -> int | None:
        message = json.dumps(asdict(request)).encode()
        if len(message) > _MOST_BYTES or len(files) > _MOST_FILES:
            return None
        with self._lock:
            # What a fork of a fork leaves behind becomes a child of this process.
            _prctl(_SET_SUBREAPER, 1)
            try:
                socket.send_fds(self._line, [message], list(files))
                answer = self._line.recv(_MOST_BYTES)
            finally:
                _prctl(_SET_SUBREAPER, 0)
        return int(answer)

    def close(self) -> None:
        self._line.close()


def _is_plain(asked: Mapping[str, Any]) -> bool:
    return (
        not isinstance(asked["args"], str | bytes | os.PathLike)
        and not (asked["shell"] or asked["preexec_fn"])
        and asked["close_fds"]
        and asked["executable"] is None
        and all(asked[name] in (None, -1) for name in ("gid", "gids", "uid", "umask"))
    )


def _files(asked: Mapping[str, Any]) -> dict[int, int]:
    """This process's files by the numbers that the other will have."""
    own = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
    standard = {number: number if file == -1 else file for number, file in own.items()}
    return standard | {int(file): int(file) for file in asked["pass_fds"]}


def read_by_imports(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process must share with the interpreter that it is a fork of."""
    return {name: value for name, value in variables.items() if name.startswith(_READ)}


def _prctl(*words: Any) -> None:
    ctypes.CDLL(None).prctl(*words, 0, 0, 0)


@cache
def _starter(flags: tuple[str, ...]) -> Starter | None:
    """That of this process, with an interpreter that has these flags and ends with it. None where
    the kernel knows no such thing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *flags, "-P", "-c", _PROGRAM, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=_AT_FIRST,
            pass_fds=(theirs.fileno(),),
        )
    starter = Starter(ours, _AT_FIRST, flags)
    ours.recv(1)

    @atexit.register
    def end() -> None:
        starter.close()
        process.wait()

    return starter if starter.works() else None


@contextmanager
def warm(*flags: str) -> Generator[None]:
    """A block in which processes that have these flags of `python` begin so. They share one such
    interpreter, whose start is not part of the block."""
    if sys.platform == "linux":
        _starter(flags)
    with _patched(lambda: _starter(flags), lambda _: True):
        yield


@contextmanager
def warm_engines() -> Generator[None]:
    """A block in which the package's own processes begin so: engines, drafters, ranks."""
    with _patched(lambda: _starter(()), lambda words: not _OWN.isdisjoint(words[2:4])):
        yield


@contextmanager
def anew() -> Generator[None]:
    """A block in which all processes begin anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", _START)
        yield


@contextmanager
def _patched(
    starter: Callable[[], Starter | None], concerns: Callable[[Sequence[str]], bool]
) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            otherwise: Any = vars(subprocess.Popen)["_execute_child"]
            start = _execute_child(starter, concerns, otherwise)
            patch.setattr(subprocess.Popen, "_execute_child", start)
        yield


def _execute_child(
    starter: Callable[[], Starter | None], concerns: Callable[[Sequence[str]], bool], otherwise: Any
) -> Any:
    def started(process: Any, *given: Any, **named: Any) -> None:
        asked = _SIGNATURE.bind(process, *given, **named).arguments
        plain = _is_plain(asked) and concerns(asked["args"])
        found = starter() if plain else None
        process_id = found and found.start(asked)
        if process_id is None:
            otherwise(process, *given, **named)
            return
        process.pid, process._child_created = process_id, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(asked[end] for end in ends))

    return started


def main() -> None:
    """The interpreter that others are forks of. Each of them leaves this function's loop."""
    line = socket.socket(fileno=int(sys.argv[1]))
    sys.path.remove(_TESTS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()
    line.send(b"1")
    request, files = _next(line)
    if not request.words:
        os._exit(_DONE)
    while request.starts_others:
        ours, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if _fork():
            line.close()
            # Out of the way of the numbers that the program's files get.
            with ours:
                above = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 200)
            ours = socket.socket(fileno=above)
            _become(request, files)
            inner = Starter(ours, request.variables)
            start = _execute_child(lambda inner=inner: inner, lambda _: True, _START)
            setattr(subprocess.Popen, "_execute_child", start)  # noqa: B010 - it has no type
            break
        ours.close()
        for file in files:
            os.close(file)
        request, files = _next(line)
    else:
        _become(request, files)
    _run(request.words)


def _next(line: socket.socket) -> tuple[Request, list[int]]:
    """Returns in a new process for each request; in this one, never."""
    _prctl(_SET_NAME, NAME.encode())
    while True:
        message, files, _, _ = socket.recv_fds(line, _MOST_BYTES, _MOST_FILES)
        if not message:
            os._exit(0)
        heard, told = os.pipe()
        between = _fork()
        if not between:
            parent = os.getpid()
            if number := _fork():
                os.write(told, str(number).encode())
                os._exit(0)
            for file in (heard, told):
                os.close(file)
            line.close()
            while os.getppid() == parent:
                time.sleep(0)
            return Request(**json.loads(message)), files
        os.waitpid(between, 0)
        line.send(os.read(heard, 32))
        for file in (heard, told, *files):
            os.close(file)


def _fork() -> int:
    with warnings.catch_warnings():
        # Threads of OpenBLAS, which knows what to do.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(request: Request, files: Sequence[int]) -> None:
    _prctl(_SET_NAME, b"python")
    _environ.clear()
    _environ.update(request.variables)
    os.chdir(request.folder)
    if request.session:
        os.setsid()
    if request.group >= 0:
        os.setpgid(0, request.group)
    above = max(*request.files, *files) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request.files, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = (
        _stream(0, sys.stdin, "r"),
        _stream(1, sys.stdout, "w"),
        _stream(2, sys.stderr, "w", buffering=1),
    )


def _stream(number: int, like: TextIO, mode: str, *, buffering: int = -1) -> TextIO:
    """A standard stream as the interpreter would make it, of what the file is now."""
    how = (mode, buffering, like.encoding, like.errors)
    return cast("TextIO", open(number, *how, closefd=False))


def _run(words: Sequence[str]) -> None:
    """The program, as the interpreter would run it."""
    safe = words[0] == "-P"
    flag, *rest = words[safe:]
    if flag[0] != "-":
        sys.argv = [flag, *rest]
        sys.path.insert(0, str(Path(flag).absolute().parent))
        runpy.run_path(flag, run_name="__main__")
        return
    subject, *rest = rest
    sys.argv = [flag, *rest]
    if not safe:
        sys.path.insert(0, str(Path.cwd()) if flag == "-m" else "")
    if flag == "-m":
        runpy.run_module(subject, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(subject, "<string>", "exec"), module.__dict__)  # noqa: S102
