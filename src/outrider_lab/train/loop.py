"""The loop that all recipes share: batches in, steps of AdamW, figures, a state on disk.

A `TrainRecipe` knows one kind of net: how it begins, what its loss is, how good it is on held-out
text and what its folder holds. `Batches` know the text. The loop knows neither; it decides the
learning rate, when to measure and when to save.

Nothing random is kept: how a net begins and which text comes at a step are functions of the seed
and the step. So a run that was killed goes on from its last state as if it had never stopped, and
has lost what came after that state, at most `save_seconds`.

The rate rises for `warmup_steps` and then falls to `floor` of its peak along half a cosine of the
share that is done, by steps or by seconds, whichever has come further. The optimiser is AdamW
(Loshchilov and Hutter, 2019); only matrices decay.

Shapes:  B = windows of a batch, T = tokens of a window.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from outrider.core.clock import HOST_CLOCK, Clock
from outrider.core.errors import ConfigError
from outrider_lab.train.checkpoint import Saved, Standing, load, read_standing, save

M = TypeVar("M", bound=nn.Module)
_BETAS = (0.9, 0.95)
# The loss that is shown is a running mean over about so many steps.
_SMOOTH = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids_BT` are token ids, int64, on the device of the net. `windows` are the numbers of the
    windows within the text: what is computed once for a window is kept under its number."""

    ids_BT: Tensor
    windows: tuple[int, ...]
    step: int


class Batches(Protocol):
    """Text to learn from: a function of the step alone."""

    @property
    def facts(self) -> Mapping[str, object]:
        """What decides every batch, as JSON values."""
        ...

    def batch(self, step: int, device: torch.device) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Export:
    """What a folder of the finished net holds: tensors by name, `config.json`, and files that are
    copied from elsewhere under their own names."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, object]
    copied: tuple[Path, ...] = ()


class TrainRecipe(Protocol[M]):
    """How one kind of net is trained. The module has what is trained and nothing else; models that
    only teach belong to the recipe."""

    @property
    def name(self) -> str:
        """As in `outrider train NAME`."""
        ...

    @property
    def facts(self) -> Mapping[str, object]:
        """What decides the net and its loss, as JSON values; a run goes on only under the same."""
        ...

    def build(self, generator: torch.Generator) -> M:
        """A net as it begins, in float32 on the host; all random numbers from `generator`."""
        ...

    def loss(self, module: M, batch: Batch) -> Tensor:
        """A scalar in nats a token, to go down."""
        ...

    def measure(self, module: M) -> Mapping[str, float]:
        """Figures on held-out text, by name; `tokens_per_round` for whatever drafts."""
        ...

    def export(self, module: M) -> Export: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """How long and how fast to learn. 0 steps or 0 seconds set no bound, but one of them must;
    seconds count all processes of a run together."""

    steps: int = 0
    seconds: float = 0.0
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    floor: float = 0.02
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    save_seconds: float = 30.0
    measure_seconds: float = 60.0
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if not (self.steps or self.seconds):
            raise ConfigError(
                "a training run needs an end.", hint="name one with --minutes or --steps"
            )

    def share(self, step: int, seconds: float) -> float:
        """How much is done, of 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_seconds = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_seconds))

    def rate(self, step: int, share: float) -> float:
        """The learning rate of step `step`."""
        falling = self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2
        return self.learning_rate * falling * min(1.0, (step + 1) / max(1, self.warmup_steps))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step. `loss` is a running mean in nats a token; `figures` are
    those of the last measurement, as old as it is."""

    step: int
    share: float
    seconds: float
    num_tokens: int
    tokens_per_second: float
    loss: float
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob(Generic[M]):
    """All of one run; `file` is where its state is kept."""

    recipe: TrainRecipe[M]
    batches: Batches
    plan: TrainPlan
    file: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def facts(self) -> dict[str, object]:
        own = {"recipe": self.recipe.name, "seed": self.plan.seed}
        return {**own, **self.recipe.facts, **self.batches.facts}


class Trainer(Generic[M]):
    """Builds the net, or takes up the state of a run that was stopped.

    Raises ConfigError if the state is of a run with other facts, CheckpointError if it is damaged.
    """

    def __init__(self, job: TrainJob[M], *, clock: Clock = HOST_CLOCK) -> None:
        self._job, self._clock = job, clock
        generator = torch.Generator().manual_seed(job.plan.seed)
        self.module = job.recipe.build(generator).to(job.device)
        self._optimiser = _adamw(self.module, job.plan)
        saved = load(job.file)
        self.resumed = saved is not None
        self.standing = Standing() if saved is None else self._take_up(saved)
        self._began, self._before = clock(), self.standing.seconds
        self._first_step, self._last_save, self._last_measure = self.standing.step, 0.0, 0.0

    def run(self) -> Generator[Progress]:
        """Train to the end of the plan, yielding after every step. Leaving early saves."""
        plan, standing = self._job.plan, self.standing
        if not standing.history:
            self._measure()
        try:
            while (share := plan.share(standing.step, self._spend())) < 1:
                self._step(plan.rate(standing.step, share))
                if self._spend() - self._before - self._last_measure >= plan.measure_seconds:
                    self._measure()
                if self._spend() - self._before - self._last_save >= plan.save_seconds:
                    self.save()
                yield self._progress()
        except GeneratorExit:
            self.save()
            raise
        self._measure()
        self.save()
        yield self._progress()

    def save(self) -> None:
        self._spend()
        record = {"facts": self._job.facts, "standing": self.standing.record()}
        save(self._job.file, Saved(self._tensors(), record))
        self._last_save = self.standing.seconds - self._before

    def export(self) -> Export:
        self.module.eval()
        return self._job.recipe.export(self.module)

    def _step(self, rate: float) -> None:
        plan, standing, device = self._job.plan, self.standing, self._job.device
        batch = self._job.batches.batch(standing.step, device)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self.module.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.bfloat16):
            loss = self._job.recipe.loss(self.module, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ConfigError(
                f"the loss is {value} at step {standing.step}.",
                hint="lower --learning-rate; the run goes on from its last saved state",
            )
        self._optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.module.parameters(), plan.clip)
        self._optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        standing.took_step(value, batch.ids_BT.numel(), smooth=_SMOOTH)

    def _measure(self) -> None:
        self.module.eval()
        with torch.no_grad():
            figures = self._job.recipe.measure(self.module)
        self._spend()
        self.standing.measured(figures)
        self._last_measure = self.standing.seconds - self._before

    def _spend(self) -> float:
        """Seconds of all processes of this run, up to now."""
        self.standing.seconds = self._before + self._clock() - self._began
        return self.standing.seconds

    def _progress(self) -> Progress:
        standing = self.standing
        here = max(standing.seconds - self._before, 1e-9)
        per_step = standing.num_tokens / max(standing.step, 1)
        return Progress(
            step=standing.step,
            share=self._job.plan.share(standing.step, standing.seconds),
            seconds=standing.seconds,
            num_tokens=standing.num_tokens,
            tokens_per_second=(standing.step - self._first_step) * per_step / here,
            loss=standing.loss,
            figures=standing.history[-1].figures,
        )

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"module.{name}": part for name, part in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            for key, value in self._optimiser.state.get(parameter, {}).items():
                found[f"optimiser.{key}.{name}"] = value
        return found

    def _take_up(self, saved: Saved) -> Standing:
        standing = read_standing(saved.record, self._job.facts, self._job.file)
        module = {
            name.removeprefix("module."): part
            for name, part in saved.tensors.items()
            if name.startswith("module.")
        }
        self.module.load_state_dict(module)
        for name, parameter in self.module.named_parameters():
            state: dict[str, Tensor] = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = saved.tensors.get(f"optimiser.{key}.{name}")
                if value is not None:
                    # A step counter is a scalar, and stays on the host.
                    state[key] = value if key == "step" else value.to(parameter.device)
            if state:
                self._optimiser.state[parameter] = state
        return standing


def _adamw(module: nn.Module, plan: TrainPlan) -> torch.optim.AdamW:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": plan.weight_decay},
        {"params": [one for one in parameters if one.ndim <= 1], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=plan.learning_rate, betas=_BETAS)
