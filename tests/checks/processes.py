"""`pytest --processes N`: N processes share the tests, each a fork of the one that collected them.

Modules are imported and tests collected once, whatever N is. A process gets neighbouring tests of
one folder, so that they share the fixtures of their modules and what a process keeps, such as the
parsed sources, and fewer of them towards the end. A process that dies fails the test that it was
running, and a new one runs what is left.
"""

# Clearing and running the functions of atexit, and the base of temporary folders, have no public
# name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

# The first of N processes gets an eighth of an N-th of all tests.
SHARE = 8
MORE = "more"
# Of a worker that is to end, though its test may have taken the signal for its own.
PATIENCE_SECONDS = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="so many processes share the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """None leaves the tests to pytest: one process, errors of collection, nothing but a list."""
    options = session.config.option
    if options.processes < 2 or options.collectonly or session.testsfailed:
        return None
    Team(session, options.processes).run()
    return True


def shares(folders: Sequence[object], count: int) -> Iterator[range]:
    """Runs of neighbouring tests, whose folders are given, for `count` processes to take."""
    start = 0
    while start < len(folders):
        most = max(1, (len(folders) - start) // (SHARE * count))
        end = start + 1
        while end < min(start + most, len(folders)) and folders[end] == folders[start]:
            end += 1
        yield range(start, end)
        start = end


@dataclass(eq=False)
class Worker:
    """A process, this side's end of its line, and the tests that it has not reported."""

    process: BaseProcess
    line: Connection
    tests: deque[int] = field(default_factory=deque[int])


class Team:
    """The process that has the terminal: hands out tests and reports what they say."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._count, self._num_started = session, count, 0
        self._config: Any = session.config
        self._shares = deque(shares([item.path.parent for item in session.items], count))
        self._workers: list[Worker] = []

    def run(self) -> None:
        """Raises Failed or Interrupted where pytest would: after `-x`, or `--maxfail` failures."""
        # The base of the temporary folders of all.
        self._config._tmp_path_factory.getbasetemp()
        try:
            for _ in range(self._count):
                self._start()
            while self._workers:
                lines: dict[object, Worker] = {one.line: one for one in self._workers}
                for line in wait([one.line for one in self._workers]):
                    self._hear(lines[line])
        finally:
            for worker in self._workers:
                worker.process.terminate()
                worker.process.join(PATIENCE_SECONDS)
                worker.process.kill()
                worker.process.join()

    def _start(self) -> None:
        ours, theirs = get_context("fork").Pipe()
        others = [worker.line for worker in self._workers]
        words = (self._session, self._num_started, theirs, [ours, *others])
        process = get_context("fork").Process(target=work, args=words)
        process.start()
        theirs.close()
        self._num_started += 1
        self._workers.append(Worker(process, ours))

    def _hear(self, worker: Worker) -> None:
        try:
            heard = worker.line.recv()
        except (EOFError, ConnectionResetError):
            self._part(worker)
            return
        if heard == MORE:
            share = self._shares.popleft() if self._shares else range(0)
            worker.tests.extend(share)
            with suppress(BrokenPipeError):
                worker.line.send(share)
            return
        read = self._config.hook.pytest_report_from_serializable
        for told in heard:
            self._report(worker.tests[0], read(config=self._config, data=told))
        worker.tests.popleft()

    def _part(self, worker: Worker) -> None:
        """A worker has ended: for want of tests, or in the middle of one."""
        worker.process.join()
        worker.line.close()
        self._workers.remove(worker)
        if worker.tests:
            number = worker.tests.popleft()
            item = self._session.items[number]
            text = f"the process of the test ended with status {worker.process.exitcode}"
            keywords: Any = dict.fromkeys(item.keywords, 1)
            words = (item.nodeid, item.location, keywords)
            self._report(number, pytest.TestReport(*words, "failed", text, "call"))
        if worker.tests:
            self._shares.appendleft(range(worker.tests[0], worker.tests[-1] + 1))
        if self._shares and len(self._workers) < self._count:
            self._start()

    def _report(self, number: int, report: pytest.TestReport) -> None:
        session = self._session
        session.items[number].ihook.pytest_runtest_logreport(report=report)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def work(
    session: pytest.Session, number: int, line: Connection, others: Sequence[Connection]
) -> None:
    """The life of a worker."""
    for other in others:
        other.close()
    config: Any = session.config
    reports = Reports(session.config)
    # What was registered before the fork, the process of the terminal does once for all.
    atexit._clear()
    factory = config._tmp_path_factory
    factory._given_basetemp, factory._basetemp = factory.getbasetemp() / f"process-{number}", None
    for name in ("terminalreporter", "terminalprogress-plugin"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(reports)
    # Forks share the files, and the places in them, that output is caught in.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()

    def more() -> range:
        line.send(MORE)
        found: range = line.recv()
        return found

    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        tests = deque(more())
        while tests:
            item = session.items[tests.popleft()]
            if not tests:
                # Which one comes next decides what the teardown of this one keeps.
                tests.extend(more())
            following = session.items[tests[0]] if tests else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            line.send(reports.taken())
    atexit._run_exitfuncs()


class Reports:
    """Plugin of a worker: what its tests say, until the process of the terminal gets it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._found = config, list[dict[str, Any]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._found.append(hook.pytest_report_to_serializable(config=self._config, report=report))

    def taken(self) -> list[dict[str, Any]]:
        found, self._found = self._found, []
        return found
