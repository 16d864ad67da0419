"""The faster of two kernels is found and remembered; bad memory is measured again."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import env
from outrider.core.errors import ConfigError
from outrider.kernels import registry
from outrider.kernels.native import tuning as contests
from outrider.kernels.native import tuning as measured
from outrider.kernels.native.cpu import (
    DOTS,
    TILES,
    VECTORS,
    cache_bytes,
    hardware_threads,
    last_cache_bytes,
)
from outrider.kernels.native.huge_pages import PAGE_BYTES
from outrider.kernels.native.ops import NativeInt8, NativeOps
from outrider.kernels.native.tuning import (
    BUDGET_SECONDS,
    MARGIN,
    MAX_TURNS,
    KernelTiming,
    TunedKernel,
    copied,
    decide,
    forget,
    kind_answer,
    thread_answer,
)
from outrider.kernels.registry import choose
from unit.kernels.implementations import CPU, kernels_named, randn

ASKED = {"choice": "loop", "library": "kernels-1", "candidates": "plain,other"}


class Race:
    """Candidates that take the seconds they are told, by a clock of their own."""

    def __init__(self, seconds: dict[str, dict[str, float]]) -> None:
        self.now = 0.0
        self.num_calls = 0
        self.num_contests = 0
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def contest(self) -> dict[str, dict[str, Callable[[], object]]]:
        self.num_contests += 1
        return {
            name: {work: self._turn(seconds) for work, seconds in works.items()}
            for name, works in self._seconds.items()
        }

    def _turn(self, seconds: float) -> Callable[[], None]:
        def turn() -> None:
            self.num_calls += 1
            self.now += seconds

        return turn

    def decide(self, folder: Path | None = None, **asked: str) -> TunedKernel:
        """As a new process would."""
        return decide(ASKED | asked, self.contest, folder=folder, clock=self.clock, known={})


def race(plain: float, other: float) -> Race:
    return Race({"plain": {"a": plain, "b": 1e-3}, "other": {"a": other, "b": 1e-3}})


def test_the_faster_wins_and_says_by_how_much() -> None:
    answer = Race({"plain": {"a": 4e-3}, "other": {"a": 2e-3}}).decide()
    assert answer.chosen == "other"
    assert answer.why == "2.00x as fast as plain on this machine"


def test_gains_are_a_geometric_mean_over_works() -> None:
    found = Race({"plain": {"a": 4e-3, "b": 1e-3}, "other": {"a": 1e-3, "b": 4e-3}}).decide()
    assert found.chosen == "plain"
    assert found.gain("other") == pytest.approx(1.0)
    assert found.why == "other 1.00x as fast on this machine; below 1.05x the plainer wins"


@given(st.floats(1e-5, 1e-2), st.floats(0.25, 4.0))
def test_the_plain_one_stays_unless_it_is_beaten_by_the_margin(
    seconds: float, times: float
) -> None:
    found = Race({"plain": {"a": seconds}, "other": {"a": seconds / times}}).decide()
    gain = found.gain("other")
    assert found.chosen == ("other" if gain >= MARGIN else "plain")
    assert gain == pytest.approx(times, rel=1e-3)


def test_medians_are_taken_so_one_slow_turn_counts_for_nothing() -> None:
    slow = race(2e-3, 1e-3)
    turns = iter([1.0] + [1e-3] * 1000)
    contest = slow.contest()

    def uneven() -> None:
        slow.now += next(turns)

    contest["other"]["a"] = uneven
    found = measured.time_in_turns(contest, started=0.0, clock=slow.clock)
    (timing,) = (t for t in found if (t.candidate, t.work) == ("other", "a"))
    assert timing.microseconds == 1000


def test_the_budget_ends_a_contest() -> None:
    slow = race(0.2, 0.2)
    slow.decide()
    assert slow.now < BUDGET_SECONDS + 1
    quick = race(1e-6, 1e-6)
    quick.decide()
    assert quick.num_calls == 4 * (MAX_TURNS + 1)


def test_an_answer_is_measured_once_a_machine(tmp_path: Path) -> None:
    first, later = race(4e-3, 1e-3), race(1e-3, 4e-3)
    answer = first.decide(tmp_path)
    assert later.decide(tmp_path) == answer
    assert later.num_contests == 0
    assert [path.name.startswith("measured-") for path in tmp_path.iterdir()] == [True]


def test_another_question_has_another_answer(tmp_path: Path) -> None:
    assert race(4e-3, 1e-3).decide(tmp_path).chosen == "other"
    other = race(1e-3, 4e-3)
    assert other.decide(tmp_path, library="kernels-2").chosen == "plain"
    assert other.num_contests == 1
    assert len(list(tmp_path.iterdir())) == 2


DAMAGE: list[Callable[[Any], str]] = [
    lambda record: "",
    lambda record: "[" * 100_000,
    lambda record: json.dumps([record]),
    lambda record: json.dumps(record | {"format": 0}),
    lambda record: json.dumps(record | {"question": {"choice": "another"}}),
    lambda record: json.dumps(record | {"chosen": "nobody"}),
    lambda record: json.dumps(record).replace('"other"', '"nobody"'),
    lambda record: json.dumps(record | {"timings": record["timings"][2:]}),
    lambda record: json.dumps(record | {"timings": record["timings"][1:]}),
    lambda record: json.dumps(record | {"timings": [{"candidate": "plain"}]}),
    lambda record: json.dumps(record).replace("4000.0", "-1"),
    lambda record: json.dumps(record).replace("4000.0", "NaN"),
    lambda record: json.dumps(record)[:-20],
    lambda record: json.dumps(record).replace("4000.0", "1" + "0" * 400),
    lambda record: json.dumps(record).replace("4000.0", "1e-300").replace("1000.0", "1e300"),
    lambda record: json.dumps(record) + " " * (1 << 21),
    lambda record: json.dumps(record | {"timings": ["plain"]}),
    lambda record: "\ud800",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_file_is_measured_again(
    tmp_path: Path, damage: Callable[[Any], str]
) -> None:
    race(4e-3, 1e-3).decide(tmp_path)
    (path,) = tmp_path.iterdir()
    damaged = damage(json.loads(path.read_text()))
    path.write_bytes(damaged.encode(errors="surrogatepass"))
    again = race(1e-3, 4e-3)
    assert again.decide(tmp_path).chosen == "plain"
    assert again.num_contests == 1
    assert race(4e-3, 1e-3).decide(tmp_path).chosen == "plain"


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "for all"])
def test_only_a_regular_file_of_ours_is_read(tmp_path: Path, kind: str) -> None:
    race(4e-3, 1e-3).decide(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.rename(path.with_suffix(".whole"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(whole)
    else:
        path.write_bytes(whole.read_bytes())
        path.chmod(0o666)
    assert race(1e-3, 4e-3).decide(tmp_path).chosen == "plain"


def test_without_a_writable_folder_the_process_remembers(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (None, file / "cache"):
        once = race(4e-3, 1e-3)
        known: measured.Known = {}
        answers = [
            decide(ASKED, once.contest, folder=folder, clock=once.clock, known=known)
            for _ in range(2)
        ]
        assert answers[0] is answers[1]
        assert once.num_contests == 1


def test_the_first_of_two_processes_answers_for_both(tmp_path: Path) -> None:
    late, early = race(1e-3, 4e-3), race(4e-3, 1e-3)
    contest = late.contest

    def overtaken() -> dict[str, dict[str, Callable[[], object]]]:
        assert early.decide(tmp_path).chosen == "other"
        return contest()

    late.contest = overtaken
    assert late.decide(tmp_path).chosen == "other"


def test_forgotten_answers_are_measured_again(tmp_path: Path) -> None:
    race(4e-3, 1e-3).decide(tmp_path)
    (tmp_path / "kernels-1.so").touch()
    assert forget(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["kernels-1.so"]
    assert race(1e-3, 4e-3).decide(tmp_path).chosen == "plain"
    assert forget(None) == 0


def test_a_copy_multiplies_alike_in_its_own_memory() -> None:
    kernels = kernels_named("native-1", torch.bfloat16)
    packed = kernels.pack(randn(70, 33).bfloat16())
    copy = copied(packed)
    assert copy.data.data_ptr() != packed.data.data_ptr()
    x_NI, first_NO, second_NO = randn(3, 33, seed=1), torch.zeros(3, 70), torch.zeros(3, 70)
    kernels.linear(x_NI, packed, first_NO)
    packed.data.zero_()
    kernels.linear(x_NI, copy, second_NO)
    assert first_NO.abs().sum() > 0
    assert torch.equal(first_NO, second_NO)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_a_copy_lies_in_pages_like_those_of_weights() -> None:
    packed = kernels_named("native-1", torch.float32).pack(torch.ones(4500, 1000))
    copy = copied(packed)
    assert [one.data.data_ptr() % PAGE_BYTES for one in (packed, copy)] == [0, 0]


def test_threads_are_a_contest_only_where_there_is_a_choice(
    native_library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contests, "num_physical_cores", lambda: 1)
    monkeypatch.setattr(contests, "num_fast_cores", lambda: 1)
    monkeypatch.setattr(contests, "hardware_threads", lambda: (0,))
    assert thread_answer(native_library, tmp_path) == TunedKernel("1")
    monkeypatch.setattr(contests, "hardware_threads", lambda: (0, 1))
    monkeypatch.setattr(contests, "MAX_LARGE_BYTES", 1 << 20)
    answer = thread_answer(native_library, tmp_path)
    assert answer.chosen in ("1", "2")
    assert {timing.candidate for timing in answer.timings} == {"1", "2"}
    assert len({timing.work for timing in answer.timings}) == 6
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["question"]["hardware_threads"] == "0,1"


def test_the_fast_cores_of_a_hybrid_take_part(
    native_library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contests, "num_physical_cores", lambda: 3)
    monkeypatch.setattr(contests, "num_fast_cores", lambda: 1)
    monkeypatch.setattr(contests, "hardware_threads", lambda: (0, 1, 2))
    monkeypatch.setattr(contests, "MAX_LARGE_BYTES", 1 << 20)
    answer = thread_answer(native_library, tmp_path)
    assert list(dict.fromkeys(timing.candidate for timing in answer.timings)) == ["3", "1"]


def test_a_number_of_threads_that_was_asked_for_is_not_measured() -> None:
    threads = choose(device=CPU, dtype=torch.float32, threads=3).threads
    if threads is None:
        pytest.skip("no native kernels")
    assert (threads.name, threads.why, threads.timings) == ("3", "as the settings say", ())


def test_the_machine_tells_its_threads_and_caches() -> None:
    assert len(hardware_threads()) >= 1
    assert all(size > 0 for size in cache_bytes().values())
    assert last_cache_bytes() > 0


def test_kinds_of_integers_are_tried_where_nothing_refuses_them(
    native_library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, refused = list[str](), dict[str, str]()
    monkeypatch.delenv("OUTRIDER_LINEARS", raising=False)
    monkeypatch.setattr(contests, "MAX_LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(contests, "NativeOps", posing(NativeOps, tried))
    monkeypatch.setattr(contests, "NativeInt8", posing(NativeInt8, tried))
    monkeypatch.setattr(contests, "refused_kinds", lambda *_: refused)  # pyright: ignore
    refused |= {DOTS: "no AVX512-BF16", TILES: "no AMX"}
    assert kind_answer(native_library, torch.bfloat16, "int8", tmp_path) == TunedKernel(VECTORS)
    assert not tried
    del refused[TILES]
    for _ in range(2):
        found = kind_answer(native_library, torch.bfloat16, "int8", tmp_path)
        assert {timing.candidate for timing in found.timings} == {VECTORS, TILES}
        assert tried == [VECTORS, TILES]
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("scheme", ["none", "int8"])
@pytest.mark.parametrize("threads", [0, 1])
def test_tiles_that_are_faster_are_taken_with_any_number_of_threads(
    scheme: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = (KernelTiming(VECTORS, "a", 2.0), KernelTiming(TILES, "a", 1.0))
    found = TunedKernel(TILES, timings)
    made: list[str] = []
    monkeypatch.delenv("OUTRIDER_LINEARS", raising=False)
    monkeypatch.setattr(registry, "kind_answer", lambda *_: found)  # pyright: ignore
    monkeypatch.setattr(registry, "NativeOps", posing(NativeOps, made))
    monkeypatch.setattr(registry, "NativeInt8", posing(NativeInt8, made))
    kernels = choose(device=CPU, dtype=torch.bfloat16, quantise=scheme, threads=threads)
    linear = kernels.choices[0]
    assert (linear.kind, linear.timings) == (TILES, timings)
    assert linear.why.startswith("2.00x as fast as vectors on this machine")
    assert linear.name.startswith("native")
    assert TILES in made
    assert kernels.threads is not None
    assert int(kernels.threads.name) >= 1


def posing(ops: Callable[..., Any], made: list[str]) -> Callable[..., Any]:
    """Vectors that pose as other kinds, which this machine may lack."""

    def make(*arguments: object, kind: str = VECTORS, **_: str) -> Any:
        made.append(kind)
        return ops(*arguments)

    return make


@pytest.mark.usefixtures("native_library")
def test_the_environment_may_name_a_kind_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_LINEARS", VECTORS)
    monkeypatch.setenv("OUTRIDER_THREADS", "3")
    kernels = choose(device=CPU, dtype=torch.bfloat16)
    assert kernels.threads is not None
    assert (kernels.choices[0].kind, kernels.threads.name) == (VECTORS, "3")
    assert kernels.choices[0].why.startswith("as OUTRIDER_LINEARS says")
    for refused in ("0", "1025", "two"):
        monkeypatch.setenv("OUTRIDER_THREADS", refused)
        assert env.threads() == 0
    monkeypatch.setenv("OUTRIDER_LINEARS", "scalars")
    with pytest.raises(ConfigError, match="'scalars' is no kind of linear") as caught:
        choose(device=CPU, dtype=torch.bfloat16)
    assert caught.value.hint == "unset it, or set it to one of: vectors, dots, tiles"


def test_a_kind_that_cannot_be_used_leaves_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_LINEARS", TILES)
    refused = {DOTS: "they multiply bfloat16 only"}
    monkeypatch.setattr(contests, "refused_kinds", lambda *_: refused)  # pyright: ignore
    library: Any = None
    assert kind_answer(library, torch.bfloat16, "int8", tmp_path) == TunedKernel(TILES)
    refused[TILES] = "they multiply bfloat16 and integers only"
    assert kind_answer(library, torch.float32, "none", tmp_path) == TunedKernel(VECTORS)
