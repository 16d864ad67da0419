"""Native rounds where they could differ from the stages: at edges, after interrupts, beside others.

Everything is told twice, by rounds in one call and stage by stage, and must be the same.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM
from outrider.api.reader import Reader
from outrider.core.budget import Budget, RoundTrace
from outrider.core.config import EngineConfig
from outrider.core.env import cache_folder, compiler
from outrider.core.errors import NumericsError
from outrider.core.params import SamplingParams
from outrider.core.sampling import PLAIN
from outrider.drafters import model as drafter_module
from outrider.engine import native_round as round_module
from outrider.engine.native_round import NativeRound
from outrider.engine.stages import Stages
from outrider.kernels import build, forward
from outrider.kernels import round as kernel_module
from outrider.kernels.build import built_kernels
from unit.kernels.implementations import IMPLEMENTATIONS, kernels_named

pytestmark = pytest.mark.weights

PROMPTS = (
    "def fibonacci(n):\n",
    "x = [" + ", ".join(map(str, range(30))) + "]\n",
    [5],
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i",
)
MIX = (
    SamplingParams(max_tokens=1, temperature=0.9),
    SamplingParams(max_tokens=9, temperature=1e-30),
    SamplingParams(max_tokens=13, temperature=100.0),
    SamplingParams(max_tokens=8, temperature=1.0, top_k=1, seed=2**63 - 1),
    SamplingParams(max_tokens=12, temperature=1.0, top_k=2**64 + 1),
    SamplingParams(max_tokens=10, temperature=1.2, top_p=0.0),
    SamplingParams(max_tokens=9, temperature=1.2, min_p=1.0),
    SamplingParams(max_tokens=2),
    SamplingParams(max_tokens=14, temperature=0.9, n=3, seed=4, stop=("\n\n", "(", "zz")),
    SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, min_p=0.1, top_k=30),
)


@pytest.fixture(autouse=True)
def library() -> ctypes.CDLL:
    built = built_kernels(compiler(), cache_folder())
    if built.library is None:
        pytest.skip(f"no native kernels: {built.refusal}")
    return built.library


@dataclass
class _Scripted:
    """A draft length that comes and goes, and differs among the sequences of a round."""

    depths: Sequence[int]
    num_rounds: dict[int, int] = field(default_factory=dict[int, int])

    def budget(self, seq_id: int) -> Budget:
        return Budget(self.depths[(self.num_rounds.get(seq_id, 0) + seq_id) % len(self.depths)])

    def observe(self, trace: RoundTrace) -> None:
        self.num_rounds[trace.seq_id] = self.num_rounds.get(trace.seq_id, 0) + 1


def _llm(fused: bool, depths: Sequence[int] = (), **config: Any) -> LLM:
    llm = LLM(config=EngineConfig(fused_round=fused, profile=True, **config))
    engine = llm._engine  # pyright: ignore[reportPrivateUsage]
    assert isinstance(engine.round, NativeRound if fused else Stages)
    if depths and isinstance(engine.round, NativeRound):
        stages = replace(engine.round.stages, controller=_Scripted(depths))
        engine.round = replace(engine.round, stages=stages)
    elif depths and isinstance(engine.round, Stages):
        engine.round = replace(engine.round, controller=_Scripted(depths))
    return llm


def _told(llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[object]:
    results = llm.generate(prompts, params)
    _check_memory(llm)
    return [
        (
            one.token_ids,
            one.finish_reason,
            one.text,
            [(r.num_drafted, r.num_accepted, r.num_prompt_tokens) for r in one.rounds],
        )
        for one in results
    ]


def _check_memory(llm: LLM) -> None:
    pair = llm._pair  # pyright: ignore[reportPrivateUsage]
    for model in (pair.target, pair.draft):
        if model is not None:
            model.state.check()  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"k": 6, "page_size": 1, "batch_size": 4},
        {"k": 64, "page_size": 4096, "batch_size": 2, "sampler": "token"},
        {"k": 4, "context": 60, "page_size": 7, "quantise": "int4", "threads": 2},
        {"k": 5, "depths": (5, 0, 0, 3, 0, 1, 5, 0, 0, 0), "batch_size": 3, "dtype": "float32"},
        {"k": 5, "depths": (0, 4, 1), "batch_size": 16, "sampler": "match", "prefill_chunk": 3},
        {"k": 6, "drafter": "ngram", "page_size": 2, "quantise": "int8"},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_edges_share_batches(config: dict[str, Any]) -> None:
    """Ragged and empty drafts, room for one token, one-token prompts, tables that widen, pages
    that completions share, extreme filters and temperatures, stop strings, the window's end."""
    prompts = [PROMPTS[i % 3 if "context" in config else i % 4] for i in range(len(MIX))]
    fused, staged = (
        _told(_llm(on, **config), [p if isinstance(p, list) else p[:40] for p in prompts], MIX)
        for on in (True, False)
    )
    assert fused == staged


@dataclass
class _Interrupt:
    """Raises KeyboardInterrupt at line event number `at` of the code that is watched."""

    at: int
    seen: int = 0

    def __call__(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., Any] | None:
        return self._line if frame.f_code in _watched() else None

    def _line(self, _frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        self.seen += event == "line"
        if self.seen == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


@cache
def _watched() -> frozenset[object]:
    """Code from the start of a round to the call, and from there to the commit."""
    lane, call = kernel_module._Lane, kernel_module.NativeRounds  # pyright: ignore[reportPrivateUsage]
    drafter, outer = drafter_module.ModelDrafter, round_module.NativeRound
    functions: list[Any] = [
        lane.read, lane._widen, call.fits, call.__call__, call._take, call._laws,  # pyright: ignore
        drafter.begin, drafter.note, drafter._feed,  # pyright: ignore
        outer.run, outer._row, outer._draft_feed, outer._end, round_module._feed,  # pyright: ignore
    ]  # fmt: skip
    return frozenset(function.__code__ for function in functions)


def _readers(llm: LLM) -> list[Reader]:
    asked = (
        ("for i in range(10):\n    print(i)\nfor i", SamplingParams(max_tokens=7)),
        ("x = [0, 1, 2, 3", SamplingParams(max_tokens=9, temperature=0.8, stop=("zzz",))),
    )
    return [
        llm._reader(llm._ids(prompt), params, None, live=bool(params.stop))  # pyright: ignore
        for prompt, params in asked
    ]


def _play(llm: LLM, interrupt: _Interrupt) -> tuple[bool, list[object]]:
    """Whether two requests were interrupted, and what became of them, going on all the same."""
    readers, interrupted = _readers(llm), False
    for reader in readers:
        llm._submit(reader)  # pyright: ignore[reportPrivateUsage]
    sys.settrace(interrupt)
    try:
        while any(reader.seq.finish is None for reader in readers):
            try:
                llm._advance()  # pyright: ignore[reportPrivateUsage]
            except KeyboardInterrupt:
                interrupted = True
    finally:
        sys.settrace(None)
        for reader in readers:
            llm._retire(reader)  # pyright: ignore[reportPrivateUsage]
    return interrupted, [(tuple(one.seq.tokens), one.seq.finish) for one in readers]


@pytest.mark.slow
def test_an_interrupted_round_was_never_begun() -> None:
    """Wherever the interrupt comes before the commit: those who go on get the same text, and no
    page is lost."""
    llm = _llm(True, k=3, batch_size=2, page_size=1)
    interrupt = _Interrupt(at=-1)
    _, wanted = _play(llm, _Interrupt(at=-1))
    assert _play(llm, interrupt) == (False, wanted)  # with pages found again, as from now on
    free, num_interrupted = llm.free_tokens, 0
    # Every line comes up in several rounds; a prime stride meets each line in one of them.
    for at in range(1, interrupt.seen, 11):
        interrupted, got = _play(llm, _Interrupt(at))
        num_interrupted += interrupted
        assert got == wanted, at
        assert llm.free_tokens == free
        _check_memory(llm)
    assert num_interrupted > 40


def test_an_interrupted_page_table_is_written_again() -> None:
    """Other, more pages were to take a row's place, which its own then come back to."""
    lane = _llm(True, k=2, batch_size=2)._engine.round.call._target  # pyright: ignore
    described, interrupted, at = lane.memory.described, True, 0
    while interrupted:
        mine, others, at = [at, at + 1, at + 2], list(range(90, 120 + 40 * at)), at + 1
        lane.read(1, kernel_module.Feed(0, [1], mine), 0)
        sys.settrace(_Interrupt(at))
        try:
            lane.read(1, kernel_module.Feed(0, [1], others), 0)
            interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        lane.read(1, kernel_module.Feed(0, [1], mine), 0)
        columns = described.num_page_columns
        assert len(lane._pages) == 2 * columns
        assert described.pages == ctypes.addressof(lane._pages)
        assert lane._pages[columns : columns + 3] == mine
    assert at > 10


def test_a_broken_draft_model_is_told_of_and_leaves_no_trace() -> None:
    params = [SamplingParams(max_tokens=6, temperature=t, seed=1) for t in (0.0, 0.7)]
    told: list[object] = []
    for fused in (True, False):
        llm = _llm(fused, k=3, batch_size=2)
        before = _told(llm, PROMPTS[:2], params)
        draft = llm._pair.draft  # pyright: ignore[reportPrivateUsage]
        norm_D: Tensor = draft._tables.norm_D  # pyright: ignore
        kept_D = norm_D.clone()
        norm_D.fill_(float("nan"))
        with pytest.raises(NumericsError) as caught:
            llm.generate(PROMPTS[:2], params)
        norm_D.copy_(kept_D)
        _check_memory(llm)
        told.append((str(caught.value), before, _told(llm, PROMPTS[:2], params)))
    assert told[0] == told[1]


@pytest.mark.slow
def test_two_engines_share_one_team() -> None:
    """In two threads at once, as each does alone."""
    params = [replace(MIX[9], max_tokens=24), SamplingParams(max_tokens=24)]
    makes = ({"k": 4}, {"k": 3, "sampler": "token"})

    def run(make: dict[str, Any]) -> list[object]:
        return _told(_llm(True, threads=2, **make), PROMPTS[:2], params)

    alone = [run(make) for make in makes]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, makes)) == alone


_STRUCTURES = {
    "round.cpp": (
        ("Memory", kernel_module._Memory, {"described": "pass"}),  # pyright: ignore[reportPrivateUsage]
        ("Row", kernel_module._Row, {}),  # pyright: ignore[reportPrivateUsage]
        ("Round", kernel_module._Round, {}),  # pyright: ignore[reportPrivateUsage]
        ("Pass", forward.Pass, {}),
    ),
    "forward.cpp": (
        ("Linear", forward._Linear, {}),  # pyright: ignore[reportPrivateUsage]
        ("Layer", forward._Layer, {}),  # pyright: ignore[reportPrivateUsage]
        ("Decoder", forward._Decoder, {}),  # pyright: ignore[reportPrivateUsage]
    ),
}


@pytest.mark.parametrize("source", _STRUCTURES)
def test_structures_lie_in_memory_as_python_says(source: str, tmp_path: Path) -> None:
    lines = [f'#include "{source}"', "#include <cstddef>"]
    for name, mirror, renamed in _STRUCTURES[source]:
        lines.append(f"static_assert(sizeof(outrider::{name}) == {ctypes.sizeof(mirror)});")
        for item, *_ in mirror._fields_:  # pyright: ignore
            at: Any = getattr(mirror, item)  # pyright: ignore
            there = f"outrider::{name}, {renamed.get(item, item)}"
            size = f"sizeof(decltype(outrider::{name}::{renamed.get(item, item)}))"
            lines.append(f"static_assert(offsetof({there}) == {at.offset});")
            lines.append(f"static_assert({size} == {at.size});")
    check = tmp_path / "check.cpp"
    check.write_text("\n".join(lines))
    command = build._compiler_command(compiler())  # pyright: ignore[reportPrivateUsage]
    sources = f"-I{build._SOURCES}"  # pyright: ignore[reportPrivateUsage]
    flags = [*build.FLAGS, build._tuning(), "-fsyntax-only", "-Wno-invalid-offsetof"]  # pyright: ignore
    done = subprocess.run(
        [*command, *flags, sources, str(check)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("num_likely", [20, 77, 300])
def test_a_nucleus_reaches_its_mass_by_the_definition_s_sum(name: str, num_likely: int) -> None:
    """Where `top_p` lies a little above the mass of all likely tokens, one unlikely one belongs to
    them; a sum in float32 cannot tell."""
    side, generator = kernels_named(name, torch.float32).sampling, torch.Generator().manual_seed(0)
    for _ in range(40):
        law_V = torch.zeros(3000)
        law_V[:num_likely] = torch.rand(num_likely, generator=generator) / 2 + 0.5
        law_V[num_likely : num_likely + 50] = 0.02
        law_V /= law_V.double().sum().float()
        likely = float(law_V[:num_likely].double().sum())
        law_V = law_V[torch.randperm(3000, generator=generator)]
        for more in (3e-9, 3e-8, 1e-7):
            got_NV, wanted_NV = law_V[None].clone(), law_V[None].double()
            side.keep_likely(got_NV, likely + more, 0.0)
            PLAIN.keep_likely(wanted_NV, likely + more, 0.0)
            assert torch.equal(got_NV > 0, wanted_NV > 0)
