"""What a CUDA graph can capture: calls that neither allocate nor wait for the device.

Read from the source of every module of the wrappers, and watched while they run.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core.rng import Role, RoundKeys
from outrider.kernels.plan import PackedPlan
from outrider.plugins.gpu.kernels import launchers as distributions
from outrider.plugins.gpu.kernels import ops
from outrider.plugins.gpu.kernels.launchers import Chains, ProbRows, Verdicts
from outrider.plugins.gpu.kernels.scratch import (
    PART,
    Workspace,
    attention_scratch,
    workspace_bytes,
)
from outrider.plugins.gpu.kernels.tiles import launch
from unit.kernels.implementations import randn
from unit.kernels.paged_cases import Heads, Sequenced, make_pass
from unit.kernels.triton.interpreted import triton_distributions, triton_ops

pytestmark = pytest.mark.wide

WAITS = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "host_ints", "host_floats"}
ALLOCATES = {
    "empty", "zeros", "ones", "full", "tensor", "arange", "cat", "stack", "clone", "contiguous",
    "to", "float", "double", "int", "repeat", "new_empty", "new_zeros", "empty_like",
    "zeros_like", "ones_like", "full_like", "where", "index_select", "as_tensor",
}  # fmt: skip
# Python's own conversions are fine; these are methods and functions of tensors.
PLAIN = {"int"}


@pytest.mark.parametrize("module", [ops, distributions])
def test_wrappers_call_nothing_that_waits_or_allocates(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = {func.attr for func in calls if isinstance(func, ast.Attribute)}
    functions = {func.id for func in calls if isinstance(func, ast.Name)}
    assert not methods & (WAITS | ALLOCATES)
    assert not functions & (WAITS | ALLOCATES) - PLAIN


def test_nothing_is_tuned_at_run_time() -> None:
    sources = Path(ops.__file__).parent.glob("*.py")
    assert not [path for path in sources if "autotune" in path.read_text(encoding="utf-8")]


class Watch(TorchDispatchMode):
    """The names of PyTorch's operators that ran."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.add(str(func))
        return func(*args, **(kwargs or {}))


# Triton's own calls are left out, since its interpreter copies tensors; what is watched are the
# wrappers. The first call of a shape carves its room, so the second is watched.
CASE = make_pass([Sequenced(5, (-1, 0, 0))], heads=Heads(2, 1, 16))
X_ND, WEIGHT_D, OUT_ND = randn(3, 32), randn(32), torch.empty(3, 32)
TABLES = (randn(9, 8), randn(9, 8))
KEYS = RoundKeys(torch.zeros(1).long(), torch.zeros(1).int(), torch.zeros(1).int())
DISTRIBUTION, TOKEN_1 = ProbRows(randn(1, 9), torch.ones(1)), torch.zeros(1).long()


def _judge() -> None:
    chains = Chains(TOKENS_BK, LENGTHS_B)
    triton_distributions().judge(chains, P, Q, KEYS, Verdicts(TOKEN_1, TOKEN_1))


TOKENS_BK, LENGTHS_B = torch.zeros(1, 2).long(), torch.full((1,), 2).int()
P, Q = ProbRows(randn(1, 3, 9), torch.ones(1)), ProbRows(randn(1, 2, 9), torch.ones(1))
PACKED = {scheme: triton_ops(scheme).pack(randn(32, 32)) for scheme in ("none", "int8", "int4")}
PACKED["head"] = triton_ops("int4").pack_head(randn(32, 32))
ARENA = (CASE.k_GSD, CASE.v_GSD)
CALLS: dict[str, Callable[[], None]] = {
    "linear": lambda: triton_ops().linear(X_ND, PACKED["none"], OUT_ND),
    "int8": lambda: triton_ops("int8").linear(X_ND, PACKED["int8"], OUT_ND),
    "int4": lambda: triton_ops("int4").linear(X_ND, PACKED["int4"], OUT_ND),
    "head of int4": lambda: triton_ops("int4").linear(X_ND, PACKED["head"], OUT_ND),
    "rms_norm": lambda: triton_ops().rms_norm(X_ND, WEIGHT_D, 1e-5, OUT_ND),
    "layer_norm": lambda: triton_ops().layer_norm(X_ND, WEIGHT_D, WEIGHT_D, 1e-5, OUT_ND),
    "rope": lambda: triton_ops().rope_append(CASE.qkv_NE, *TABLES, CASE.plan, *ARENA),
    "attention": lambda: triton_ops().attention(CASE.qkv_NE, *ARENA, CASE.plan, 1.0, OUT_ND),
    "gelu": lambda: triton_ops().gelu(X_ND, OUT_ND),
    "argmax": lambda: triton_distributions().argmax(DISTRIBUTION.rows_RV, TOKEN_1),
    "draw": lambda: triton_distributions().draw(DISTRIBUTION, KEYS, 0, Role.DRAFT, TOKEN_1),
    "judge": _judge,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_no_operator_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def note(kernel: Any, *_: object, **__: object) -> None:
        launched.append(kernel)

    monkeypatch.setattr(ops, "launch", note)
    monkeypatch.setattr(distributions, "launch", note)
    CALLS[name]()
    num_launches = len(launched)
    seen: set[str] = set()
    with Watch(seen):
        CALLS[name]()
    assert seen == set()
    assert len(launched) == 2 * num_launches > 0


def test_a_kernel_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the thread's current device: of two GPUs, the first."""
    calls: list[object] = []

    @contextmanager
    def device_of(tensor: object) -> Generator[None]:
        calls.append(tensor)
        yield
        calls.append("left")

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: calls.append(grid)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch(Kernel(), (2, 3), X_ND, 5)
    launch(Kernel(), (0, 3), X_ND, 5)
    assert calls == [X_ND, (2, 3), "left"]


def test_attention_of_any_context_takes_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of an 8B model, texts that grow to 128k tokens: scratch stays below what memory was
    planned for, and that below 256 MiB. Tensors have no data."""

    def nothing(*_: object, **__: object) -> None:
        """Tensors have no data."""

    monkeypatch.setattr(ops, "launch", nothing)
    meta, heads, page = torch.device("meta"), Heads(32, 8, 128), 32
    room = Workspace(meta)
    k_GSD = torch.empty(8, 64, 128, dtype=torch.bfloat16, device=meta)
    for rows, positions in ((64, 1000), (5, 4000), (64, 20_000), (16, 131_072), (64, 131_072)):
        zero_N = torch.zeros(rows, dtype=torch.int32, device=meta)
        pages_BP = torch.zeros(rows, -(-positions // page), dtype=torch.int32, device=meta)
        plan = PackedPlan(page, zero_N, zero_N, zero_N, zero_N, zero_N, pages_BP)
        qkv_NE, out_NO = (torch.empty(rows, n * 128, device=meta) for n in (48, 32))
        assert qkv_NE.shape[1] == heads.row_size
        ops.TritonOps(room).attention(qkv_NE, k_GSD, k_GSD, plan, 1.0, out_NO)
    held = sum(one.nbytes for one in (*room._kept, room._bytes))  # pyright: ignore[reportPrivateUsage]
    planned = workspace_bytes(attention_scratch(64, 32, 128, -(-131_072 // PART)))
    assert held <= planned <= 256 << 20


def test_a_room_grows_and_keeps_what_captures_saw() -> None:
    room = Workspace(torch.device("cpu"), 1 << 20)
    (small,) = room.carve(((3, 5), torch.float32))
    small.fill_(7)
    seen = weakref.ref(room._bytes)  # pyright: ignore[reportPrivateUsage]
    (big,) = room.carve(((1 << 19,), torch.float32))
    # Both begin where the device's allocator put a room, which is aligned enough on CUDA.
    assert all(one.data_ptr() == one.untyped_storage().data_ptr() for one in (big, small))
    assert small.eq(7).all()
    del small
    assert seen() is not None
    first, second = room.carve(((3,), torch.int8), ((2, 2), torch.float64))
    assert second.data_ptr() - first.data_ptr() == 256
