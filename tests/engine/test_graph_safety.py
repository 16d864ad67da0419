"""A captured round must not wait for the host, and every launch must find its memory in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import pytest
import torch
from torch import Tensor

from doubles.graphs import PAGE, SLOTS, WINDOW, CaptureGuard, NotCapturableError, make_dense
from doubles.rig import Request, exchange_round, round_of
from doubles.tiny_checkpoints import variant, write_checkpoint
from outrider.core.clock import host_floats, host_ints
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.drafters.common.context import LoadedModels
from outrider.engine.build import build_engine
from outrider.engine.round import LiveSequence
from outrider.engine.stages import Stages
from outrider.kernels.registry import choose
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import GPT2Model, LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.gpu.rounds.build import captured_round
from outrider.plugins.gpu.rounds.program import EagerLauncher, GraphCache, bucket_of
from outrider.plugins.gpu.rounds.round import GraphRound
from outrider.plugins.gpu.rounds.trees import TorchTreeProbs, Way
from outrider.plugins.gpu.rounds.verify import Shape, VerifyCache

pytestmark = pytest.mark.wide

REFERENCE = choose(device=torch.device("cpu"), dtype=torch.float32, force_reference=True)


def model(family: str, seed: int) -> LlamaModel | GPT2Model:
    """With operators of PyTorch alone, which are all seen, and attention that does not wait."""
    capacity = ModelCapacity(num_slots=SLOTS, page_size=PAGE, max_rows=64, max_logits=64)
    options = LoadOptions(capacity=capacity, dtype="float32", device="cpu", force_reference=True)
    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), variant(family), seed=seed, dtype=torch.float32)
        made = load_model(path, options)
    assert isinstance(made, LlamaModel | GPT2Model)
    make_dense(made)
    return made


def table_of(
    k: int, temperature: float, *, sampler: str, family: str = "llama2", top_p: float = 1.0
) -> GraphCache:
    """The programs of an engine that has run three requests at once, each with its own length."""
    target, draft = model(family, 3), model(family, 4)
    config = EngineConfig(k=k, sampler=sampler, page_size=PAGE, batch_size=4, fused_round=False)
    parts = LoadedModels(target, draft, target.kernels.argmax)
    engine = build_engine(parts.resolve(config), parts, num_slots=SLOTS, sink=lambda _: None)
    stages = round_of(engine)
    assert isinstance(stages, Stages)
    made = captured_round(
        config, stages, draft=draft, window=lambda: WINDOW, launcher=EagerLauncher()
    )
    assert isinstance(made, GraphRound)
    exchange_round(engine, made)
    for seq_id in range(3):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=seq_id, top_p=top_p)
        request = Request([5 + seq_id] * (seq_id + 1), params)
        seq = LiveSequence(seq_id, list(request.prompt), seq_id + 1, params, 40)
        engine.submit(seq)
    for _ in range(4):
        engine.step()
    return made.table


CASES = [
    (0, 0.0, "block", "llama2", 1.0),
    (3, 0.0, "block", "llama2", 1.0),
    (3, 0.9, "block", "llama2", 1.0),
    (3, 0.9, "block", "llama2", 0.9),
    (2, 0.9, "token", "llama2", 1.0),
    (0, 0.9, "token", "llama2", 0.9),
    (2, 0.9, "block", "gpt2", 1.0),
    (2, 0.0, "block", "qwen3", 1.0),
]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("k", "temperature", "sampler", "family", "top_p"), CASES)
def test_rounds_repeat_the_same_operators_over_the_same_memory(
    k: int, temperature: float, sampler: str, family: str, top_p: float
) -> None:
    """Whatever the data: lengths, tokens and acceptance differ from round to round."""
    table = table_of(k, temperature, sampler=sampler, family=family, top_p=top_p)
    program = table.program(4, sampled=temperature > 0, filtered=top_p < 1)
    program()  # rooms that grow do so in a first run, which is not captured
    guards, lengths = [CaptureGuard() for _ in range(3)], [host_ints(table.buffers.length_B)]
    for guard in guards:
        with guard:
            program()
        lengths.append(host_ints(table.buffers.length_B))
    assert all(before != after for before, after in pairwise(lengths))
    assert guards[0].calls == guards[1].calls == guards[2].calls
    assert list(guards[0].outside) == list(guards[1].outside) == list(guards[2].outside)
    assert len(guards[0].calls) > 50


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("filtered", [False, True])
def test_verifications_repeat_the_same_operators_over_the_same_memory(
    way: Way, filtered: bool
) -> None:
    target = model("llama2", 3)
    made = partial(TorchTreeProbs, torch.device("cpu"))
    table = VerifyCache(target, (), 7, 4, EagerLauncher(), made)
    drawn = way in ("token", "block")
    shape = Shape(2, 4, 16, way, listed=False, drawn=drawn, filtered=filtered)
    fields, program = table.graph(shape).fields, table.program(shape)
    guards = [CaptureGuard() for _ in range(2)]
    for turn, guard in enumerate(guards):
        # Other trees, texts and numbers.
        fields.host["plan"][:] = 1 + turn
        fields.host["plan"][3] = range(8)
        fields.host["plan"][3] //= 4
        fields.host["parents"][:] = (range(-1, 2), (-1, -1, 0))[turn]
        fields.host["numbers"][:] = 1 + 2 * turn
        fields.host["temperature"][:] = (0.0, 0.7 + turn)
        fields.send()
        with guard:
            program()
    assert guards[0].calls == guards[1].calls
    assert list(guards[0].outside) == list(guards[1].outside)
    assert len(guards[0].calls) > 50


def test_all_that_outlives_a_round_is_where_it_was() -> None:
    table = table_of(2, 0.9, sampler="block")
    program = table.program(4, sampled=True)
    buffers = table.buffers
    names = list(buffers.__dataclass_fields__)
    before = {name: getattr(buffers, name).data_ptr() for name in names}
    program()
    assert {name: getattr(table.buffers, name).data_ptr() for name in names} == before
    assert table.program(4, sampled=True).buffers.length_B.data_ptr() == before["length_B"]


def test_buckets_share_one_memory() -> None:
    table = table_of(2, 0.0, sampler="block")
    small, large = table.program(1, sampled=False), table.program(4, sampled=False)
    assert small.buffers.report_BR.data_ptr() == large.buffers.report_BR.data_ptr()
    assert [bucket_of(rows, 6) for rows in range(1, 7)] == [1, 2, 4, 4, 6, 6]


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": host_floats,
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "from the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "bool": lambda x: bool((x > 0).all()),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_guard_sees_what_waits(name: str) -> None:
    x_D = torch.ones(3)
    with CaptureGuard(), pytest.raises(NotCapturableError):
        WAITS[name](x_D)


def test_the_reference_attention_would_be_caught() -> None:
    table = table_of(1, 0.0, sampler="block")
    target = table.target
    assert isinstance(target, LlamaModel)
    target.kernels = REFERENCE
    with CaptureGuard(), pytest.raises(NotCapturableError):
        table.program(4, sampled=False)()
