"""A planted bug is in while it is in, and gone whatever happens."""

from __future__ import annotations

import inspect
import signal
import threading
from types import ModuleType

import pytest
import torch

from outrider.verify import exact as token
from outrider.verify.exact import residual
from outrider_lab.proof.mutants import CannotPlantError, Mutant, planted

MUTANT = Mutant(
    "residual is p",
    "outrider.verify.exact",
    "= leftover(distribution, proposal)",
    "= distribution.clone(), 1.0",
)
P_V = torch.tensor([0.5, 0.5])
Q_V = torch.tensor([1.0, 0.0])


def is_planted() -> bool:
    left = residual(P_V, Q_V)
    assert isinstance(left, torch.Tensor)
    return torch.equal(left, P_V)


def test_whoever_imported_it_runs_the_bug_and_then_not() -> None:
    shipped = residual.__code__
    with planted(MUTANT):
        assert is_planted()
        assert token.residual is residual
    assert not is_planted()
    assert residual.__code__ is shipped


def test_it_goes_when_the_block_raises() -> None:
    with pytest.raises(AssertionError, match="it was planted"), planted(MUTANT):
        assert not is_planted(), "it was planted"
    assert not is_planted()


def test_an_interrupt_waits_until_it_is_gone() -> None:
    handler = signal.getsignal(signal.SIGINT)
    reached = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - what happens within is the point
        with planted(MUTANT):
            signal.raise_signal(signal.SIGINT)
            reached = is_planted()
        pytest.fail("the interrupt was lost")
    assert reached
    assert not is_planted()
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_may_plant() -> None:
    seen: list[bool] = []

    def plant() -> None:
        with planted(MUTANT):
            seen.append(is_planted())

    thread = threading.Thread(target=plant)
    thread.start()
    thread.join()
    assert seen == [True]
    assert not is_planted()


def test_methods_are_found_by_their_class() -> None:
    certain = "if not 0 < probability < 1:\n            return probability >= 1"
    always = certain.replace("probability >= 1", "True")
    mutant = Mutant("always", "outrider.core.rng", certain, always)
    from outrider.core.rng import KeyedRng, Role

    rng = KeyedRng(0, 0, 0)
    with planted(mutant):
        assert rng.coin(0.0, 0, Role.ACCEPT) is True
    assert rng.coin(0.0, 0, Role.ACCEPT) is False


@pytest.mark.parametrize("old", ["no such text", "return", "torch import Tensor"])
def test_a_bug_that_does_not_fit_is_refused(old: str) -> None:
    mutant = Mutant("stale", "outrider.verify.exact", old, f"{old}  ")
    with pytest.raises(CannotPlantError), planted(mutant):
        pytest.fail("it was planted")
    assert not is_planted()


def test_without_sources_nothing_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(module: ModuleType) -> str:
        raise OSError(f"could not get source code of {module.__name__}")

    monkeypatch.setattr(inspect, "getsource", unavailable)
    with pytest.raises(CannotPlantError, match="not available"), planted(MUTANT):
        pytest.fail("it was planted")


def test_a_source_that_is_not_what_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an edit of the file: its compiled code is not the code in memory."""
    source = inspect.getsource(token)
    edited = source.replace("total > 0 else distribution", "total >= 0 else distribution")
    assert edited != source

    def source_on_disk(_: ModuleType) -> str:
        return edited

    monkeypatch.setattr(inspect, "getsource", source_on_disk)
    with pytest.raises(CannotPlantError, match="not the source on disk"), planted(MUTANT):
        pytest.fail("it was planted")
