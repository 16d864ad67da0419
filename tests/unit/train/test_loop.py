"""The loop on a toy: it learns, saves in time, and goes on as if it had never been stopped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from doubles.clocks import FakeClock
from outrider.core.errors import CheckpointError, ConfigError
from outrider_lab.train.checkpoint import load
from outrider_lab.train.loop import Batch, Export, Progress, Trainer, TrainJob, TrainPlan

pytestmark = pytest.mark.wide

SIZE = 4


class Line(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(1))


@dataclass(frozen=True)
class ToyBatches:
    facts: Mapping[str, object] = field(default_factory=lambda: {"text": "toy"})

    def batch(self, step: int, device: torch.device) -> Batch:
        generator = torch.Generator().manual_seed(step)
        ids_BT = torch.randint(0, 9, (3, SIZE), generator=generator).to(device)
        return Batch(ids_BT, (step, step, step), step)


@dataclass(frozen=True)
class ToyRecipe:
    """Learns that a row's last entry is the sum of the others. A step takes `seconds`."""

    clock: FakeClock
    seconds: float = 1.0
    breaks_at: int = -1
    facts: Mapping[str, object] = field(default_factory=lambda: {"size": SIZE})
    name: str = "toy"

    def build(self, generator: torch.Generator) -> Line:
        return Line(torch.randn(1, SIZE, generator=generator))

    def loss(self, module: Line, batch: Batch) -> Tensor:
        self.clock.advance(self.seconds)
        x_BT = batch.ids_BT.float()
        guess_B = (x_BT @ module.weight.T + module.bias)[:, 0]
        loss = ((guess_B - x_BT.sum(-1)) ** 2).mean()
        return loss * math.nan if batch.step == self.breaks_at else loss

    def measure(self, module: Line) -> Mapping[str, float]:
        return {"away": float((module.weight - 1).abs().max())}

    def export(self, module: Line) -> Export:
        return Export({"weight": module.weight.detach()}, {})


def trainer(
    path: Path, plan: TrainPlan, recipe: ToyRecipe | None = None, batches: ToyBatches | None = None
) -> Trainer[Line]:
    recipe = recipe or ToyRecipe(FakeClock())
    job = TrainJob(recipe=recipe, batches=batches or ToyBatches(), plan=plan, file=path)
    return Trainer(job, clock=recipe.clock)


def plan(**changes: float) -> TrainPlan:
    wish = {"steps": 60, "learning_rate": 0.05, "warmup_steps": 5, "save_seconds": 10.0}
    return TrainPlan(**{**wish, **changes})  # pyright: ignore[reportArgumentType]


def test_it_learns_and_says_so(tmp_path: Path) -> None:
    run = trainer(tmp_path / "state", plan(steps=400, weight_decay=0.0))
    seen = list(run.run())
    assert [one.step for one in seen] == [*range(1, 401), 400]
    assert seen[0].figures["away"] > 0.3 > seen[-1].figures["away"]
    assert seen[-1].loss < seen[0].loss / 10
    assert seen[-1].share == 1
    assert seen[-1].num_tokens == 400 * 3 * SIZE
    assert seen[-1].tokens_per_second == pytest.approx(3 * SIZE)


@pytest.mark.parametrize("stop", [1, 7, 23])
def test_a_run_that_was_left_goes_on_bit_for_bit(stop: int, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", plan())
    ended = list(whole.run())[-1]
    with closing(trainer(tmp_path / "parts", plan()).run()) as steps:
        first_steps(steps, stop)
    again = trainer(tmp_path / "parts", plan())
    assert again.resumed
    assert again.standing.step == stop
    last = list(again.run())[-1]
    assert torch.equal(again.module.weight, whole.module.weight)
    assert (last.step, last.loss, last.seconds) == (ended.step, ended.loss, ended.seconds)


def first_steps(steps: Iterator[Progress], count: int) -> None:
    for _ in range(count):
        next(steps)


def test_a_killed_run_loses_no_more_than_it_said(tmp_path: Path) -> None:
    """Killed: nothing is closed, so nothing is saved at the end."""
    recipe = ToyRecipe(FakeClock(), seconds=1.5)
    steps = trainer(tmp_path / "state", plan(), recipe).run()
    for number, progress in enumerate(steps, start=1):
        saved = load(tmp_path / "state")
        kept = 0.0 if saved is None else saved.record["standing"]["seconds"]  # pyright: ignore
        assert progress.seconds - kept <= 10.0 + 1.5
        if number == 30:
            break


@given(st.integers(1, 1000), st.floats(0.1, 1e4))
def test_the_rate_rises_and_then_falls_to_its_floor(steps: int, seconds: float) -> None:
    made = TrainPlan(steps=steps, seconds=seconds, warmup_steps=10, floor=0.1)
    rates = [made.rate(step, made.share(step, 0.0)) for step in range(steps + 1)]
    assert all(0 < rate <= made.learning_rate for rate in rates)
    assert all(later <= rate for rate, later in pairwise(rates[10:]))
    if steps > 10:
        assert rates[-1] == pytest.approx(0.1 * made.learning_rate)
    assert made.share(0, seconds) == made.share(steps, 0.0) == 1


def test_seconds_end_a_run_and_count_all_its_processes(tmp_path: Path) -> None:
    recipe = ToyRecipe(FakeClock(), seconds=2.0)
    wish = plan(steps=0, seconds=21.0)
    with closing(trainer(tmp_path / "state", wish, recipe).run()) as steps:
        first_steps(steps, 4)
    last = list(trainer(tmp_path / "state", wish, ToyRecipe(FakeClock(), seconds=2.0)).run())[-1]
    assert (last.step, last.seconds) == (11, 22.0)


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    list(trainer(path, plan(steps=2)).run())
    with pytest.raises(ConfigError, match=r"size 4.*has 5"):
        trainer(path, plan(), ToyRecipe(FakeClock(), facts={"size": 5}))
    with pytest.raises(ConfigError, match="text toy"):
        trainer(path, plan(), None, ToyBatches({"text": "other"}))


def test_a_longer_plan_goes_on_with_a_run_that_ended(tmp_path: Path) -> None:
    list(trainer(tmp_path / "state", plan(steps=2)).run())
    assert list(trainer(tmp_path / "state", plan(steps=5)).run())[-1].step == 5
    assert len(list(trainer(tmp_path / "state", plan(steps=5)).run())) == 1


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_state(tmp_path: Path) -> None:
    recipe = ToyRecipe(FakeClock(), seconds=4.0, breaks_at=8)
    with pytest.raises(ConfigError, match="step 8") as caught:
        list(trainer(tmp_path / "state", plan(), recipe).run())
    assert "--learning-rate" in (caught.value.hint or "")
    again = trainer(tmp_path / "state", plan())
    assert 3 <= again.standing.step <= 8
    assert bool(again.module.weight.isfinite().all())


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="end"):
        TrainPlan()


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_damaged_state_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="state") as caught:
        trainer(path, plan())
    assert "--fresh" in (caught.value.hint or "")


def test_a_half_written_state_leaves_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    list(trainer(path, plan(steps=3)).run())
    (tmp_path / ".state.part").write_bytes(path.read_bytes()[:100])
    assert trainer(path, plan()).standing.step == 3
