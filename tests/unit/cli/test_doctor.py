"""What doctor says of kernels, threads and ceilings, and what `--measure` forgets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider.core.config import QUANTISE_COSTS
from outrider.core.errors import MachineError
from outrider.kernels.native.tuning import KernelTiming, TunedKernel
from outrider.kernels.operators import Choice, Kernels
from outrider.kernels.registry import choose
from outrider.plugins.doctor import verbs as examine
from outrider.plugins.doctor.ceilings import ArithmeticCeiling, Ceiling

pytestmark = pytest.mark.weights

TIMINGS = (KernelTiming("2", "1 row, large", 900.0), KernelTiming("4", "1 row, large", 450.0))
CEILINGS = (
    Ceiling("L2", 1 << 19, 1, 70.0),
    Ceiling("L2", 1 << 20, 2, 141.25),
    Ceiling("memory", 1 << 27, 1, 15.0),
    Ceiling("memory", 1 << 27, 2, 30.0),
)
COMPUTE = (
    ArithmeticCeiling("bfloat16", 1, 102.25),
    ArithmeticCeiling("int4", 2, 660.0),
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with tiles, where four threads were measured to be faster than two."""

    def chosen(**wishes: Any) -> Kernels:
        wishes["force_reference"] = True
        kernels = choose(**wishes)
        linear = Choice("linear", "native", kind="tiles", why="1.31x as fast as vectors")
        why = TunedKernel("4", TIMINGS).why
        threads = Choice("threads", "4", why=why, timings=TIMINGS)
        return replace(kernels, choices=(linear, *kernels.choices[1:]), threads=threads)

    monkeypatch.setattr(examine, "choose", chosen)
    monkeypatch.setattr(examine, "ceilings", lambda threads: CEILINGS)  # pyright: ignore
    monkeypatch.setattr(examine, "arithmetic_ceilings", lambda threads: COMPUTE)  # pyright: ignore


def table_of(outrider: Command, title: str) -> list[list[str]]:
    """The words of three lines below the one that begins with `title`."""
    lines = outrider("doctor").out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    return [line.split() for line in lines[start + 1 : start + 4]]


def read(outrider: Command, *words: str) -> Any:
    shown = outrider("doctor", "--json", *words)
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


@pytest.mark.usefixtures("machine")
def test_a_choice_is_told_with_its_reason_and_its_figures(outrider: Command) -> None:
    found = read(outrider)
    assert found["kernels"][0]["kind"] == "tiles"
    assert found["kernels"][0]["why"] == "1.31x as fast as vectors"
    assert found["threads"]["name"] == "4"
    assert found["threads"]["why"] == "2.00x as fast as 2 on this machine"
    assert found["threads"]["timings"][1] == {
        "candidate": "4",
        "work": "1 row, large",
        "microseconds": 450.0,
    }
    shown = outrider("doctor").out
    assert "native tiles" in shown
    assert "2.00x as fast as 2 on this machine" in shown


@pytest.mark.usefixtures("machine")
def test_ceilings_are_a_table_of_levels_by_threads(outrider: Command) -> None:
    assert read(outrider)["ceilings"][1] == {
        "level": "L2",
        "num_bytes": 1 << 20,
        "threads": 2,
        "gb_per_second": 141.25,
    }
    assert table_of(outrider, "Read ceilings") == [
        ["level", "1", "thread", "2", "threads"],
        ["L2", "70.0", "141.2"],
        ["memory", "15.0", "30.0"],
    ]


@pytest.mark.usefixtures("machine")
def test_compute_ceilings_are_a_table_of_weights_by_threads(outrider: Command) -> None:
    assert read(outrider)["compute"][0] == {
        "arithmetic": "bfloat16",
        "threads": 1,
        "gflops": 102.25,
    }
    assert table_of(outrider, "Compute ceilings") == [
        ["weights", "1", "thread", "2", "threads"],
        ["bfloat16", "102.2"],
        ["int4", "660.0"],
    ]


def test_the_reference_has_no_ceilings(outrider: Command) -> None:
    found = read(outrider, "--force-reference")
    assert (found["threads"], found["ceilings"], found["compute"]) == (None, [], [])
    assert "ceilings" not in outrider("doctor", "--force-reference").out


@pytest.mark.usefixtures("machine")
def test_what_cannot_be_read_has_no_ceilings(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> object:
        raise MachineError("no compiler.")

    monkeypatch.setattr(examine, "ceilings", refuse)
    monkeypatch.setattr(examine, "arithmetic_ceilings", refuse)
    assert (read(outrider)["ceilings"], read(outrider)["compute"]) == ([], [])


def test_measure_forgets_what_was_measured(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept, forgotten = tmp_path / "outrider/kernels-1.so", tmp_path / "outrider/measured-1.json"
    kept.parent.mkdir()
    kept.touch()
    forgotten.touch()
    read(outrider, "--force-reference")
    assert forgotten.exists()
    read(outrider, "--force-reference", "--measure")
    assert kept.exists()
    assert not forgotten.exists()


@pytest.mark.usefixtures("machine")
def test_it_ends_with_what_runs_here_and_how_fast(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "free_bytes", lambda _: 6_000_000_000)  # pyright: ignore
    rates = {one["parameters"]: one for one in read(outrider)["sizes"]}
    # 30 GB/s over 8e9 * 4.85 / 8 bytes.
    assert rates[8_000_000_000]["weights_bytes"] == 4_850_000_000
    assert rates[8_000_000_000]["tokens_per_second"] == pytest.approx(30 / 4.85)
    assert [one["fits"] for one in rates.values()] == [True] * 4 + [False] * 2
    shown = outrider("doctor").out
    (row,) = (line for line in shown.splitlines() if line.startswith("8 billion"))
    assert row.split()[-2:] == ["fits", "6.2"]
    runs, missing = shown.splitlines()[-2:]
    assert runs == (
        "runs: models of up to 8 billion parameters in Q4_K_M, at most 6.2 tokens a second, and "
        "0.6 billion at most 82; speculation adds to that"
    )
    assert missing.startswith("missing: nothing; `outrider pull")
    monkeypatch.setattr(examine, "free_bytes", lambda _: 1_000)  # pyright: ignore
    monkeypatch.setattr(examine, "find_spec", lambda _: None)  # pyright: ignore
    runs, missing = outrider("doctor").out.splitlines()[-2:]
    assert runs == "runs: nothing of the sizes above fits the free memory"
    assert missing.startswith("missing: the server's packages: pip install ")


def test_without_native_kernels_it_says_how_fast_pytorch_is(outrider: Command) -> None:
    found = read(outrider, "--force-reference")
    assert all(one["weights_bytes"] == 2 * one["parameters"] for one in found["sizes"])
    assert all(one["tokens_per_second"] > 0 for one in found["sizes"])
    shown = outrider("doctor", "--force-reference").out
    assert "bfloat16, for PyTorch" in shown
    # One sentence for all operators that have the same reason.
    assert shown.count("the reference was requested") <= 2


def test_what_fewer_bits_cost_is_what_was_measured(outrider: Command) -> None:
    file = Path(__file__).parents[3] / "studies" / "results" / "quality-r-2core-zen3.json"
    rows = {row["form"]: row for row in json.loads(file.read_text())["formats"]}
    for scheme, (more, same) in QUANTISE_COSTS.items():
        ratio = rows[scheme]["perplexity"] / rows["float32"]["perplexity"]
        assert more == pytest.approx(ratio - 1, abs=5e-4)
        assert same == pytest.approx(rows[scheme]["same_first_choice"], abs=5e-4)
    assert QUANTISE_COSTS["int4"][0] < 0.05
    told = json.loads(outrider("doctor", "--json").out)["quantise_costs"]
    assert told["int4"]["perplexity"] == QUANTISE_COSTS["int4"][0]


@pytest.mark.wide
def test_a_machine_without_a_compiler_is_told_once_what_to_install(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    shown = outrider("doctor").out
    assert shown.count("the C++ compiler 'no-such-compiler' was not found") == 2
    assert shown.count("apt install g++") == 1
    assert shown.splitlines()[-1].startswith("missing: a C++ compiler, for speed and 4 bits")
