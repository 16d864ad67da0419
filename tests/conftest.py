"""Generated examples are the same on every machine and every run.

`pytest --hypothesis-profile=deep` looks for new ones, thirty times as long.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tomllib
from collections.abc import Generator, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.strategies import text

# Before anything imports a helper: its assertions hold under `python -O` too, as those of tests do.
pytest.register_assert_rewrite(*(path.name for path in Path(__file__).parent.iterdir()))

pytest_plugins = ["checks.processes"]

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("deep", max_examples=1000, deadline=None, suppress_health_check=SLOW)
settings.register_profile(
    "same",
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=SLOW,
)
settings.load_profile("same")

# A shell starts what runs in the background with Ctrl-C ignored, and then nothing could defer it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports the hub's client, here or in a process that a test starts.
pytest.MonkeyPatch().setenv("HF_HUB_OFFLINE", "1")

# Before anything imports Triton: its kernels are interpreted, since the suite needs no GPU.
pytest.MonkeyPatch().setenv("TRITON_INTERPRET", "1")

# On a busy machine prompts would be read in smaller chunks now and then, and runs that are compared
# pass by pass would differ. tests/unit/sched/test_pace.py has it as it is.
for name in ("CHUNK_SECONDS", "ALONE_SECONDS"):
    pytest.MonkeyPatch().setattr(f"outrider.sched.admission.{name}", float("inf"))


@pytest.fixture(scope="session")
def native_library() -> ctypes.CDLL:
    """The native kernels of this machine; without a compiler the test is skipped."""
    from outrider.core.env import cache_folder, compiler
    from outrider.kernels.native.build import built_kernels

    built = built_kernels(compiler(), cache_folder())
    if built.library is None:
        pytest.skip(f"no native kernels: {built.refusal}")
    return built.library


@pytest.fixture(scope="session", autouse=True)
def warm_engines() -> Iterator[None]:
    """Processes of engines begin as forks of one that has imported PyTorch."""
    from doubles.warm_python import warm_engines

    with warm_engines():
        yield


@pytest.fixture(scope="module", autouse=True)
def same_variables() -> Iterator[None]:
    """A file that leaves a variable changed fails: children of later tests would inherit it, and
    begin anew where they could be forks of an interpreter that was started before."""
    from doubles.warm_python import read_by_imports

    before = read_by_imports(os.environ)  # noqa: TID251 - those of children
    yield
    changed = set(read_by_imports(os.environ).items()) ^ set(before.items())  # noqa: TID251
    assert not changed


@pytest.fixture
def no_plugin_stays() -> Iterator[None]:
    """What a test adds by name, such as a drafter, is gone after it: other tests of this process
    count drafters."""
    from outrider.core.plugins import KINDS

    added = KINDS._added  # pyright: ignore[reportPrivateUsage]
    before = dict(added)
    yield
    added.clear()
    added.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """An engine that was given threads leaves PyTorch with as many: on busy cores the small tensors
    of all later tests would wait for each other."""
    del item
    result = yield
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != FIRST.setdefault(
        "num_threads", torch.get_num_threads()
    ):
        torch.set_num_threads(FIRST["num_threads"])
    return result


# As PyTorch is imported, for the tests at the latest.
FIRST: dict[str, int] = {}


@pytest.fixture(scope="module")
def warm_python() -> Iterator[None]:
    """So do all others that the module's tests start."""
    from doubles.warm_python import warm

    with warm():
        yield


def pytest_collection() -> None:
    """Nothing that is collected is garbage: looking for it takes a third of the time."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What deep.toml names is `deep`. Of a test marked `covering(t)` a covering array of strength t
    stays, and of one marked `sample(n)` n of its rows; the rest is `deep`.

    Any t parameters meet in all their pairs of values (t = 2), or each value comes once (t = 1).
    """
    from checks.effort import covering, spread

    folder = Path(__file__).parent
    left_out = tuple(tomllib.loads((folder / "deep.toml").read_text(encoding="utf-8")))
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(left_out):
            item.add_marker("deep")
    for strength, same in marked("covering", items):
        leave(same, covering([values(item) for item in same], strength))
    for number, same in marked("sample", items):
        leave(same, spread(len(same), number))


def marked(name: str, items: list[pytest.Item]) -> list[tuple[int, list[pytest.Function]]]:
    """The rows of each test with this mark that are in the gate, and the number in the mark."""
    tests: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        mark = item.get_closest_marker(name)
        if mark and isinstance(item, pytest.Function) and not item.get_closest_marker("deep"):
            tests.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    return [(number, same) for (_, number), same in tests.items()]


def leave(items: list[pytest.Function], rows: set[int]) -> None:
    """All but these rows are `deep`."""
    for row, item in enumerate(items):
        if row not in rows:
            item.add_marker("deep")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of collected tests stay to the end, so that no collection looks at them again."""
    if session.config.option.processes > 1:
        # Else each of the processes that share the tests would find which characters there are.
        text().validate()
    if (torch := sys.modules.get("torch")) is not None:
        FIRST["num_threads"] = torch.get_num_threads()
    gc.collect()
    gc.freeze()
    if session.config.option.processes > 1 and any(
        "design" in one.path.parts for one in session.items
    ):
        # Else each of them would parse all sources.
        from checks.sources import nodes

        nodes()
    gc.enable()


def values(item: pytest.Function) -> list[tuple[str, Hashable]]:
    """Of each parameter which value the item has; those that come in rows are one."""
    own = {name: id(value) for name, value in item.callspec.params.items()}
    rows = [mark.args[0] for mark in item.iter_markers("parametrize")]
    named = [row.replace(",", " ").split() if isinstance(row, str) else row for row in rows]
    together = [(" ".join(row), tuple(own.pop(name) for name in row)) for row in named]
    return [*together, *own.items()]
