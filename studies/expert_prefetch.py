"""Would drafts that name the experts of their verification pay? `run.py expert_prefetch`.

Shapes:  N = tokens, X = experts of a layer, D = hidden size, L = layers.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from common import TARGET, Report, note, study
from options import Options
from torch import Tensor
from torch.nn import functional

from outrider.api.tokenizer import Tokenizer
from outrider.models.loading import resolve
from outrider_lab.bench.workload import load_prompts
from outrider_lab.train.data import python_sources

LAYERS, EXPERTS, CHOSEN, HIDDEN = 6, 32, 4, 128
ROWS = 4
# Floats of an expert on disk: two products of this many inputs, 2 MiB.
WIDTH, INNER = 1024, 256
EXPERT_BYTES = 2 * WIDTH * INNER * 4
WARM_PASSES = 40

# The experts of each layer that the rows of one pass need, and what each predictor names.
Sets = list[frozenset[int]]


@study(steps=250, passes=60, share=0.35, rates=["500", "1000", "2000", "4000"])
def expert_prefetch(options: Options, report: Report) -> bool:
    """How many of a pass's missing experts can drafts name, and what does it gain to read them
    ahead?

    A small mixture is trained on Python source, so that its routers are those of text. Its routing
    of other text is taken in passes of 4 rows, with a `share` of all experts in memory, the last
    used ones. Predictors name experts: by the token ids of the rows (`token`, a table of the
    training text: all that a draft knows before its verification), by the layer's router over the
    input of the first mixture (`first`) or of the one before (`before`, which needs no draft), and
    exactly (`known`, the bound). Then each pass is run over a file of experts, whose reader sleeps
    to a rate and leaves nothing in the page cache: on demand, or with the named experts queued
    ahead, those that are needed first. Ratios are of passes in turns.
    """
    if options.quick:
        options.steps, options.passes, options.rates = 2, 4, ["2000"]
    model, ids = _trained(options.steps, report)
    passes = _routed(model, ids)[: WARM_PASSES + options.passes]
    for name in NAMED:
        note(report, predictor=name, **_found(passes, name, options.share))
    gains: list[float] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "experts"
        data = np.random.default_rng(0).standard_normal(EXPERT_BYTES // 4, np.float32).tobytes()
        with path.open("wb") as file:
            for _ in range(LAYERS * EXPERTS):
                file.write(data)
        for rate in map(int, options.rates):
            cell = _timed(path, passes, rate * 1e6, options.share)
            note(report, megabytes_per_second=rate, **cell)
            gains.append(cell["token"])
    report["largest_gain"] = max(gains)
    return max(gains) >= 1.2


def _trained(steps: int, report: Report) -> tuple[Any, Tensor]:
    """Return a mixture trained on Python source, and the ids of its training text."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = Tokenizer.load(resolve(TARGET))
    text = "\n".join(one.path.read_text(errors="replace") for one in islice(python_sources(), 60))
    ids = torch.tensor(tokenizer.encode(text, add_special=False))
    sizes: dict[str, Any] = {
        "vocab_size": 8192,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.05,
        "tie_word_embeddings": True,
    }
    with torch.random.fork_rng():  # pyright: ignore[reportUnknownMemberType]
        torch.default_generator.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    dice = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        starts = torch.randint(len(ids) - 128, (8,), generator=dice)
        batch = torch.stack([ids[at : at + 128] for at in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(float(loss.detach()))
    report["training"] = {"steps": steps, "tokens": len(ids), "loss": median(losses[-20:])}
    return model.eval(), ids


@dataclass(frozen=True, slots=True)
class Routing:
    """The inputs of every layer's router, of shape [L, N, D], and the experts that they choose."""

    inputs_LND: Tensor
    chosen: Tensor


def _routing(model: Any, ids: Tensor) -> Routing:
    inputs: list[Tensor] = []

    def noted(_: object, given: tuple[Tensor]) -> None:
        inputs.append(given[0].flatten(0, 1))

    hooks = [layer.mlp.register_forward_pre_hook(noted) for layer in model.model.layers]
    with torch.inference_mode():
        model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    states = torch.stack(inputs)
    return Routing(states, _choices(model, states))


def _choices(model: Any, inputs_LND: Tensor) -> Tensor:
    """Return what each layer's router chooses for its inputs, of shape [L, N, chosen]."""
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    with torch.inference_mode():
        found = [
            functional.linear(x, gate).topk(CHOSEN).indices
            for x, gate in zip(inputs_LND, gates, strict=True)
        ]
    return torch.stack(found)


NAMED = ("token", "first", "before", "known")


@dataclass(frozen=True, slots=True)
class Pass:
    """The experts by layer that one pass needs, and those that each predictor names."""

    needed: Sets
    named: Mapping[str, Sets]


def _routed(model: Any, ids: Tensor) -> list[Pass]:
    """Return the passes over texts that were not trained on, 4 tokens each."""
    counts = torch.zeros(LAYERS, 8192, EXPERTS)
    for at in range(0, min(len(ids), 40_000) - 512, 512):
        part = ids[at : at + 512]
        chosen = _routing(model, part).chosen
        for layer in range(LAYERS):
            counts[layer].index_put_(
                (part[:, None].expand(-1, CHOSEN), chosen[layer]), torch.ones(1), accumulate=True
            )
    counts += 1e-3 * counts.sum(1, keepdim=True) / counts.sum()
    table = counts.topk(CHOSEN, dim=2).indices
    tokenizer = Tokenizer.load(resolve(TARGET))
    passes: list[Pass] = []
    for name in ("humaneval", "gsm8k"):
        text = "\n".join(load_prompts(name))
        part = torch.tensor(tokenizer.encode(text, add_special=False)[:256])
        routing = _routing(model, part)
        states = routing.inputs_LND
        before = torch.cat([states[:1], states[:-1]])
        named = {
            "token": table[:, part],
            "first": _choices(model, states[:1].expand_as(states)),
            "before": _choices(model, before),
            "known": routing.chosen,
        }
        for at in range(0, len(part) - ROWS + 1, ROWS):
            sets = {name: _sets(one[:, at : at + ROWS]) for name, one in named.items()}
            passes.append(Pass(sets["known"], sets))
    return passes


def _sets(chosen: Tensor) -> Sets:
    return [frozenset(map(int, layer.flatten())) for layer in chosen]


class Memory:
    """The experts in memory, as (layer, expert); the least recently used one goes."""

    def __init__(self, num: int) -> None:
        self._free = [np.empty(EXPERT_BYTES, np.uint8) for _ in range(num)]
        self._held: OrderedDict[tuple[int, int], np.ndarray[Any, Any]] = OrderedDict()

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._held

    def use(self, key: tuple[int, int]) -> np.ndarray[Any, Any]:
        self._held.move_to_end(key)
        return self._held[key]

    def taken(self) -> np.ndarray[Any, Any]:
        return self._free.pop() if self._free else self._held.popitem(last=False)[1]

    def add(self, key: tuple[int, int], data: np.ndarray[Any, Any]) -> None:
        self._held[key] = data


def _found(passes: Sequence[Pass], name: str, share: float) -> dict[str, Any]:
    """Return the share of experts, and of those missing in memory, that a predictor names, and how
    many it names for nothing for each one that it names rightly."""
    held = OrderedDict[tuple[int, int], None]()
    most = int(share * LAYERS * EXPERTS)
    num_needed = num_right = num_missing = num_found = num_useless = 0
    for number, one in enumerate(passes):
        for layer, (needed, named) in enumerate(zip(one.needed, one.named[name], strict=True)):
            missing = {expert for expert in needed if (layer, expert) not in held}
            ahead = {expert for expert in named if (layer, expert) not in held}
            if number >= WARM_PASSES:
                num_needed, num_right = num_needed + len(needed), num_right + len(needed & named)
                num_missing, num_found = (
                    num_missing + len(missing),
                    num_found + len(missing & ahead),
                )
                num_useless += len(ahead - missing)
        for layer, needed in enumerate(one.needed):
            for expert in needed:
                held[layer, expert] = None
                held.move_to_end((layer, expert))
        while len(held) > most:
            held.popitem(last=False)
    num = max(len(passes) - WARM_PASSES, 1)
    return {
        "experts_of_a_pass": round(num_needed / num, 1),
        "missing": round(num_missing / num, 1),
        "named": round(num_right / max(num_needed, 1), 3),
        "named_of_missing": round(num_found / max(num_missing, 1), 3),
        "useless_for_each_found": round(num_useless / max(num_found, 1), 3),
    }


@dataclass(slots=True)
class Reader:
    """A thread that reads experts at a rate: those that are `wanted` now before those `ahead`."""

    file: int
    memory: Memory
    seconds_each: float
    wanted: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    ahead: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    changed: threading.Condition = field(default_factory=threading.Condition)
    layer: int = 0
    ended: bool = False
    num_read: int = 0

    def run(self) -> None:
        free_at = perf_counter()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ended or self.wanted or self.ahead)
                if self.ended:
                    return
                key = self._next()
                if key is None:
                    continue
                data = self.memory.taken()
            at = (key[0] * EXPERTS + key[1]) * EXPERT_BYTES
            # The device is busy with one expert after another, and has pauses of its own only.
            free_at = max(free_at, perf_counter()) + self.seconds_each
            os.preadv(self.file, [data], at)  # pyright: ignore[reportArgumentType]
            os.posix_fadvise(self.file, at, EXPERT_BYTES, os.POSIX_FADV_DONTNEED)
            sleep(max(free_at - perf_counter(), 0))
            with self.changed:
                self.memory.add(key, data)
                self.num_read += 1
                self.changed.notify_all()

    def _next(self) -> tuple[int, int] | None:
        """Return the next one that is not there, and of no layer that has passed."""
        if self.wanted:
            key = self.wanted.popleft()
        else:
            key = self.ahead.popleft()
            if key[0] < self.layer:
                return None
        return None if key in self.memory else key


@dataclass(slots=True)
class Runner:
    """Passes with one predictor, or none, over a memory of its own."""

    reader: Reader
    name: str = ""
    x: Tensor = field(default_factory=lambda: torch.randn(ROWS, WIDTH))

    def run(self, one: Pass) -> float:
        """Return the seconds of a pass."""
        reader, memory = self.reader, self.reader.memory
        began = perf_counter()
        with reader.changed:
            reader.ahead.clear()
            reader.layer = 0
        if self.name and self.name != "before":
            self._queue(one, range(LAYERS))
        for layer in range(LAYERS):
            if self.name == "before":
                self._queue(one, range(layer, min(layer + 2, LAYERS)))
            keys = [(layer, expert) for expert in sorted(one.needed[layer])]
            with reader.changed:
                reader.layer = layer
                # First those that are there: reading the others goes on meanwhile.
                keys.sort(key=lambda key: key not in memory)
                reader.wanted.extend(key for key in keys if key not in memory)
                reader.changed.notify_all()
            for key in keys:
                with reader.changed:
                    while key not in memory:
                        if key not in reader.wanted:
                            reader.wanted.append(key)  # it was there, and had to go
                            reader.changed.notify_all()
                        reader.changed.wait(0.05)
                    data = memory.use(key)
                self.compute(data)
        return perf_counter() - began

    def _queue(self, one: Pass, layers: Sequence[int]) -> None:
        with self.reader.changed:
            queued = {*self.reader.ahead}
            for layer in layers:
                for key in [(layer, expert) for expert in sorted(one.named[self.name][layer])]:
                    if key in self.reader.memory:
                        self.reader.memory.use(key)  # what is read ahead replaces others
                    elif key not in queued:
                        self.reader.ahead.append(key)
            self.reader.changed.notify_all()

    def compute(self, data: np.ndarray[Any, Any]) -> None:
        weights: Tensor = torch.from_numpy(data.view(np.float32))  # pyright: ignore[reportUnknownMemberType]
        up, down = weights.view(2, INNER, WIDTH)
        functional.linear(functional.silu(functional.linear(self.x, up)), down.T.contiguous())


def _timed(path: Path, passes: Sequence[Pass], rate: float, share: float) -> dict[str, Any]:
    """Return the times over of on-demand passes with each predictor, and the seconds of a pass."""
    file = os.open(path, os.O_RDONLY)
    runners = dict(_runners(file, rate, share))
    threads = [threading.Thread(target=one.reader.run, daemon=True) for one in runners.values()]
    for thread in threads:
        thread.start()
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    computing: list[float] = []
    try:
        for number, one in enumerate(passes):
            order = list(runners)[number % len(runners) :] + list(runners)[: number % len(runners)]
            for name in order:
                spent = runners[name].run(one)
                if number >= WARM_PASSES:
                    seconds[name].append(spent)
            began = perf_counter()
            runner, any_data = runners["demand"], np.zeros(EXPERT_BYTES, np.uint8)
            for _ in range(sum(map(len, one.needed))):
                runner.compute(any_data)
            computing.append(perf_counter() - began)
    finally:
        for one in runners.values():
            with one.reader.changed:
                one.reader.ended = True
                one.reader.changed.notify_all()
        for thread in threads:
            thread.join()
        os.close(file)
    demand = sum(seconds["demand"])
    return {
        **{name: round(demand / sum(each), 3) for name, each in seconds.items()},
        "demand_ms": round(1e3 * median(seconds["demand"]), 1),
        "computing_ms": round(1e3 * median(computing), 1),
        "read": {name: one.reader.num_read for name, one in runners.items()},
    }


def _runners(file: int, rate: float, share: float) -> Iterator[tuple[str, Runner]]:
    for name in ("demand", *NAMED):
        memory = Memory(int(share * LAYERS * EXPERTS))
        reader = Reader(file, memory, EXPERT_BYTES / rate)
        yield name, Runner(reader, "" if name == "demand" else name)
