"""The order of a capture, on a pretended device; and numbers that a round makes itself."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.core.clock import host_floats, host_rows
from outrider.core.philox import philox_uniform
from outrider.core.rng import Role, RoundKeys
from outrider.core.tree import ROOT
from outrider.plugins.gpu.rounds.program import EagerLauncher, GraphLauncher, Mailbox, launcher_for
from outrider.plugins.gpu.rounds.sampling import Decisions, keyed_uniforms

words = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4)


@examples(30)
@given(seeds=words, k=st.integers(0, 5), start=st.integers(1, 2**31), sample=st.integers(0, 9))
def test_numbers_are_those_of_keyed_noise(
    seeds: list[int], k: int, start: int, sample: int
) -> None:
    seed_B = torch.tensor(seeds)
    keys = RoundKeys(seed_B, torch.full_like(seed_B, sample), torch.full_like(seed_B, start))
    uniforms_BN = keyed_uniforms(keys, Decisions.of_round(k, torch.device("cpu")))
    asked = [(node, Role.DRAFT) for node in range(k)]
    asked += [(node, Role.ACCEPT) for node in range(k)]
    asked += [(node, Role.NEXT) for node in range(ROOT, k)]
    for seed, uniforms_N in zip(seeds, uniforms_BN, strict=True):
        wanted = [philox_uniform(seed, (n + 1, start, sample, int(role))) for n, role in asked]
        assert host_floats(uniforms_N) == wanted


class Pretended:
    """Notes what is asked of a device, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        stream = self

        @contextmanager
        def capture(graph: object, *, pool: object, capture_error_mode: str) -> Generator[None]:
            assert (graph, pool, capture_error_mode) == (self, self, "thread_local")
            self.calls.append("capture")
            yield
            self.calls.append("captured")

        @contextmanager
        def on(side: object) -> Generator[None]:
            assert side is stream
            yield

        def this(*_: object) -> Pretended:
            return self

        for name in ("Stream", "current_stream", "CUDAGraph", "graph_pool_handle"):
            patch.setattr(torch.cuda, name, this)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "graph", capture)
        patch.setattr(torch.cuda, "synchronize", lambda _: self.calls.append("wait"))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]

    def wait_stream(self, other: object) -> None:
        assert other is self
        self.calls.append("order")

    def replay(self) -> None:
        self.calls.append("replay")


def test_a_capture_starts_from_a_state_that_warm_ups_have_not_moved() -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Pretended(patch)
        launcher = GraphLauncher(torch.device("cuda"))
        launch = launcher.make(
            lambda: device.calls.append("run"), lambda: device.calls.append("prepare")
        )
        launch()
        launch()
    # What `prepare` launches lies before the warm-ups on their own stream.
    before = ["prepare", "order", "run", "run", "order", "wait"]
    assert device.calls == [*before, "capture", "run", "captured", "prepare", "replay", "replay"]


class Owner:
    """A program with memory of its own."""

    def __call__(self) -> None:
        """Nothing is asked of the device."""


def test_memory_of_a_program_stays_as_long_as_its_graph_is_launched() -> None:
    """A graph has addresses. What is freed after its capture is given to others."""
    with pytest.MonkeyPatch.context() as patch:
        Pretended(patch)
        launcher, program = GraphLauncher(torch.device("cuda")), Owner()
        owner = weakref.ref(program)
        launch = launcher.make(program, lambda: None)
        del program
        launch()
        assert owner() is not None
        del launch
        assert owner() is None


def test_other_devices_run_operator_by_operator() -> None:
    launcher = launcher_for(torch.device("cpu"))
    assert isinstance(launcher, EagerLauncher)
    calls: list[str] = []
    launcher.make(lambda: calls.append("run"), lambda: calls.append("prepare"))()
    assert calls == ["prepare", "run"]


def test_a_report_may_be_read_while_the_next_one_is_posted() -> None:
    report_BR = torch.zeros(3, 2, dtype=torch.int32)
    mailbox = Mailbox(report_BR)
    first = mailbox.post(report_BR[:2].fill_(1))
    second = mailbox.post(report_BR[:2].fill_(2))
    assert host_rows(first.read()) == [[1, 1], [1, 1]]
    assert host_rows(second.read()) == [[2, 2], [2, 2]]
