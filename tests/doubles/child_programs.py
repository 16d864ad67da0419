"""Programs that run as a drafter's process: how to start them, and one that lies.

Nothing here imports PyTorch, so that a liar starts at once.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from struct import Struct

from outrider.plugins.lanes.ahead.choices import AheadChoices
from outrider.plugins.lanes.process.frames import BodyWriter, Frame, Kind, Pipe, receive, send
from outrider.plugins.lanes.process.options import ChildOptions

TESTS = str(Path(__file__).parents[1])
TOY = "toy_child:toy"
PAGED = "toy_child:paged"
LIAR = "child_programs:liar"
LIAR_IN_MEMORY = "child_programs:liar_in_memory"


def command(program: str) -> tuple[str, ...]:
    """That runs TOY or a liar."""
    module, name = program.split(":")
    code = (
        f"import sys; sys.path.insert(0, {TESTS!r}); from doubles.{module} import {name}; {name}()"
    )
    return (sys.executable, "-P", "-c", code)


def toy_options(*, name: str = "", vocab_size: int = 5, ahead: bool = False) -> ChildOptions:
    """A liar goes by `name`: what it lies about."""
    return ChildOptions(
        folder="",
        name=name,
        vocab_size=vocab_size,
        num_distributions=32,
        num_slots=2048,
        page_size=4,
        max_rows=64,
        max_logits=8,
        chunk=3,
        batch_size=4,
        ahead=AheadChoices(k=4) if ahead else None,
    )


def told_options() -> ChildOptions:
    return ChildOptions.from_json(sys.argv[1])


def _drafts(*drafts: tuple[Sequence[int], Sequence[int], int]) -> Frame:
    """An answer with these (tokens, parents, first distribution); -1 is no distribution."""
    writer = BodyWriter()
    writer.put(Struct("<ddI"), 0.0, 0.0, len(drafts))
    for tokens, parents, first_distribution in drafts:
        writer.put(Struct("<BiI"), 0, first_distribution, len(tokens))
        writer.known_ints([*tokens, *parents])
    return writer.frame(Kind.DRAFTS)


def _failure(*, full: bool) -> Frame:
    writer = BodyWriter()
    writer.put(Struct("<?"), full)
    writer.text("out of ideas")
    writer.text("think again")
    return writer.frame(Kind.FAILED)


def _chain(first_distribution: int) -> bytes:
    return _drafts(([1, 2], [-1, 0], first_distribution)).packed()


# What a liar answers to every question.
LIES: Mapping[str, Callable[[], bytes]] = {
    "silent": lambda: b"",
    "garbage": lambda: b"HTTP/1.1 200 OK\r\n\r\n",
    "cut": lambda: _chain(-1)[:-3],
    "longer": lambda: Frame(Kind.DRAFTS, _drafts().body + b"more").packed(),
    "another kind": lambda: Frame(Kind.HELLO).packed(),
    "no draft": lambda: _drafts().packed(),
    "two drafts": lambda: _drafts(([], [], -1), ([], [], -1)).packed(),
    "foreign distribution": lambda: _chain(1000),
    "distribution across the end": lambda: _chain(31),
    "no tree": lambda: _drafts(([1], [5], -1)).packed(),
    "fails": lambda: _failure(full=False).packed(),
    "full": lambda: _failure(full=True).packed(),
}


def liar() -> None:
    options, line = told_options(), socket.socket(fileno=int(sys.argv[2]))
    if options.name == "quits":
        sys.exit("no such luck")
    if options.name == "never ready":
        time.sleep(60)
    _greet(options, line, in_memory=False)
    _lie(options.name, line)


def liar_in_memory() -> None:
    """The same through memory, where there are native kernels for it."""
    from outrider.plugins.lanes.process.child import Inherited

    options, inherited = told_options(), Inherited.named(sys.argv[2:])
    memory = inherited.pipe()
    _greet(options, inherited.line, in_memory=memory is not None)
    _lie(options.name, inherited.line if memory is None else memory)
    os._exit(0)


def _greet(options: ChildOptions, line: socket.socket, *, in_memory: bool) -> None:
    hello = BodyWriter()
    hello.put(Struct("<II??"), options.vocab_size, options.num_distributions, False, in_memory)
    send(line, hello.frame(Kind.HELLO))


def _lie(name: str, pipe: Pipe) -> None:
    while (frame := receive(pipe)) is not None and frame.kind is not Kind.EXIT:
        if frame.kind is Kind.PROPOSE:
            lie = memoryview(LIES[name]())
            while lie:
                lie = lie[pipe.send(lie) :]
            if name == "cut":
                return


def is_running(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/status").read_text("utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A process that ended stays known until its parent asks for how.
    return "\nState:\tZ" not in status


def all_gone(process_ids: list[int], *, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, process_ids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
