"""What a pair takes is known before it is taken, shrinks to what there is, or is refused."""

from __future__ import annotations

import errno
import json
import mmap
import re
import resource
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.pairs as pairs
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api import memory
from outrider.api.loading import load_pair
from outrider.api.memory import (
    Part,
    _scratch_bytes,  # pyright: ignore[reportPrivateUsage]
    files_of,
    fitted,
    memory_parts,
    needed,
)
from outrider.api.plan import LoadPlan, plan_pair
from outrider.cache.pages import MemoryLimit, free_bytes, limits, total_bytes
from outrider.core import files, process
from outrider.core.config import MOST_BATCH
from outrider.core.errors import CapacityError, CheckpointError, out_of_memory
from outrider.core.fields import WHOLE
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.kernels.native import huge_pages
from outrider.models.decoder import ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.sched import jobs
from outrider.sched.jobs import OPEN_TOKENS

CPU = torch.device("cpu")
TARGET = Path(pairs.__path__[0]) / "tiny" / "target"
PLAIN = EngineConfig(drafter="none", device="cpu")
pytestmark = pytest.mark.weights


def claiming(folder: Path, **claims: object) -> str:
    """The embedded target, with other words in its config.json."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | claims))
    return str(folder)


def limited(monkeypatch: pytest.MonkeyPatch, *found: MemoryLimit) -> None:
    def told(_: torch.device, __: float) -> tuple[MemoryLimit, ...]:
        return found

    monkeypatch.setattr(memory, "limits", told)


def embedded(config: EngineConfig) -> LoadPlan:
    return plan_pair("outrider/embedded", None, config)


def parts_of(plan: LoadPlan) -> dict[str, int]:
    parts = memory_parts(plan, files_of(plan))
    return {part.name: part.num_bytes for part in parts}


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(),
        PLAIN,
        EngineConfig(schedule="ssd"),
        EngineConfig(drafter="quantised-self", quantise="int4"),
        EngineConfig(drafter="suffix", context=512, batch_size=32),
        EngineConfig(arena_tokens=4096),
    ],
)
def test_where_memory_is_not_short_no_size_changes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, MemoryLimit("plenty", 1 << 40))
    plan = embedded(config)
    assert fitted(plan)[0] == plan


def test_a_gpu_holds_scratch_of_attention_and_captured_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, 8 << 30))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    config = replace(PLAIN, device="cuda", batch_size=16)
    short, long = (parts_of(embedded(replace(config, context=n))) for n in (256, 2048))
    assert "captured rounds" not in parts_of(embedded(replace(config, fused_round=False)))
    assert "captured rounds" not in parts_of(embedded(PLAIN))
    plan = embedded(replace(config, context=2048))
    assert short["attention of the target"] < long["attention of the target"]
    num_heads, head_dim = plan.target.num_heads, plan.target.head_dim
    # The maximum, the sum and the mixed values of each of 8 parts at least.
    assert long["attention of the target"] >= 64 * num_heads * 8 * (head_dim + 2) * 4
    tables = 16 * (2048 - 256) * 8
    assert long["captured rounds"] == short["captured rounds"] + tables
    assert short["captured rounds"] > 16 * plan.target.vocab_size * 4


def test_a_second_gpu_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model goes there, and its limit alone is short."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    free = {"cuda": 8 << 30, "cuda:1": 1 << 20}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[str(gpu)], 8 << 30))  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    config = EngineConfig(device="cuda", drafter_device="cuda:1")
    with pytest.raises(CapacityError, match="free memory of cuda:1"):
        fitted(plan_pair("outrider/embedded", "outrider/embedded-draft", config))


@pytest.mark.parametrize(
    "config",
    [
        replace(PLAIN, force_reference=True),
        replace(PLAIN, force_reference=True, quantise="int8"),
        PLAIN,
        replace(PLAIN, dtype="float16"),
        replace(PLAIN, quantise="int4"),
    ],
)
def test_the_plan_is_what_loading_takes(config: EngineConfig) -> None:
    pair = load_pair("outrider/embedded", None, config)
    target = pair.target
    assert isinstance(target, LlamaModel)
    plan = embedded(config)
    told = parts_of(plan)
    turns = target._operators[0].turns  # pyright: ignore[reportPrivateUsage]
    tables = sum(table.nbytes for table in turns)
    table = target.tables.embedding
    # A table of blocks is the output head, which is streamed.
    held = table.nbytes if isinstance(table, Tensor) else 0
    streamed = sum(one.nbytes for one in target.streamed) + held
    taken = {
        "weights of the target": streamed,
        f"KV arena of the target, {plan.num_slots} tokens": target.state.arena.nbytes,
        "positions and pages of the target": tables,
        "scratch of the target": sum(
            getattr(target.scratch, name).nbytes for name in target.scratch.__slots__
        ),
        "logits of the target": target.logits.nbytes,
    }
    for name, num_bytes in taken.items():
        assert num_bytes <= 1.05 * told[name] + 200_000, name
        assert told[name] <= 2.5 * num_bytes + 200_000, name


def test_a_mixture_has_room_for_its_choices() -> None:
    """Three a row: what each of them reads and what it gives, and the sum of these."""
    spec = embedded(PLAIN).target.spec("", bytes_per_weight=4, bytes_per_kv=4)
    sparse, capacity = (
        replace(spec, num_experts=8, num_active_experts=3),
        ModelCapacity(num_slots=64),
    )
    more = _scratch_bytes(sparse, capacity) - _scratch_bytes(spec, capacity)
    assert more == 4 * capacity.max_rows * (3 + 3 + 1) * spec.hidden_size


def test_an_arena_that_nobody_sized_shrinks_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=12)
    whole = LLM(config=PLAIN)
    text = whole.generate("def f(x):", params)[0].text
    full = embedded(PLAIN)
    parts = memory_parts(full, files_of(full))
    most = needed(parts, of_addresses=False)
    limited(monkeypatch, MemoryLimit("a tight limit", most - (20 << 20)))
    small = LLM(config=PLAIN)
    assert small.free_tokens < whole.free_tokens == full.num_slots
    assert any("memory is short" in note for note in small.notes)
    assert small.generate("def f(x):", params)[0].text == text


@pytest.mark.parametrize(
    ("config", "limit", "advice"),
    [
        (replace(PLAIN, arena_tokens=1 << 30), 4 << 30, r"--arena-tokens (\d+)"),
        (
            replace(PLAIN, batch_size=1024, tree_nodes=256, drafter="suffix"),
            8 << 30,
            "--batch-size",
        ),
        (replace(PLAIN, prefill_chunk=65536), 600 << 20, r"--prefill-chunk (\d+)"),
        (replace(PLAIN, context=100_000), 300 << 20, r"--context (\d+)"),
    ],
)
def test_what_does_not_fit_is_refused_with_sizes_and_a_way(
    config: EngineConfig, limit: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = claiming(tmp_path / "model", max_position_embeddings=100_000)
    limited(monkeypatch, MemoryLimit("a tight limit", limit))
    with pytest.raises(CapacityError) as refused:
        fitted(plan_pair(name, None, config))
    message, hint = str(refused.value), refused.value.hint or ""
    assert refused.value.exit_code == 3
    assert "a tight limit" in message
    assert "weights of the target" in message
    assert re.match(advice, hint), hint
    flags = dict(zip(hint.split()[::2], hint.split()[1::2], strict=True))
    changes = {flag[2:].replace("-", "_"): value for flag, value in flags.items()}
    typed: dict[str, Any] = {name: int(v) if v.isdigit() else v for name, v in changes.items()}
    followed = replace(config, **typed)
    fitted(plan_pair(name, None, followed))


def test_where_nothing_helps_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, MemoryLimit("hardly anything", 1 << 20))
    with pytest.raises(CapacityError, match="hardly anything") as refused:
        fitted(embedded(PLAIN))
    assert refused.value.hint == "a smaller model, or a machine with more memory"


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"vocab_size": 2**31 - 1}, "config.json implies"),
        ({"hidden_size": 1 << 30}, "config.json implies"),
        ({"intermediate_size": 1 << 30}, "config.json implies"),
        ({"head_dim": 1 << 30}, "config.json implies"),
        ({"num_hidden_layers": 4096}, "config.json implies"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers must be from 1 to 4096"),
    ],
)
def test_weights_that_are_not_in_the_files_are_refused(
    claims: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_pair(claiming(tmp_path / "model", **claims), None, PLAIN)


def test_a_window_that_no_model_has_makes_small_tables(tmp_path: Path) -> None:
    name = claiming(tmp_path / "model", max_position_embeddings=2**31 - 1)
    plan, parts = fitted(plan_pair(name, None, PLAIN))
    sizes = {part.name: part.num_bytes for part in parts}
    assert plan.window == 1 << 24
    assert sizes["positions and pages of the target"] <= total_bytes(CPU) / 128
    assert "float32 can tell positions apart" in " ".join(plan.target.notes)
    short = replace(PLAIN, context=256)
    parts = fitted(plan_pair(name, None, short))[1]
    sizes = {part.name: part.num_bytes for part in parts}
    assert sizes["positions and pages of the target"] < 1 << 20


def test_tables_reach_as_far_as_the_window(tmp_path: Path) -> None:
    name = claiming(tmp_path / "model", max_position_embeddings=100_000)
    config = replace(PLAIN, context=64, prefill_chunk=16)
    target = load_pair(name, None, config).target
    assert isinstance(target, LlamaModel)
    assert len(target._operators[0].turns[0]) < 64 + 16 + 200  # pyright: ignore[reportPrivateUsage]


def test_memory_counts_the_largest_chunk() -> None:
    """The default reads 512 tokens at once where nothing decodes: their buffers count."""
    default, small = (
        parts_of(embedded(PLAIN)),
        parts_of(embedded(replace(PLAIN, prefill_chunk=256))),
    )
    assert default == parts_of(embedded(replace(PLAIN, prefill_chunk=512)))
    assert default["scratch of the target"] > small["scratch of the target"]


def test_a_part_of_addresses_counts_only_where_addresses_do() -> None:
    parts = [
        Part("weights", 100, "cpu", is_weights=True),
        Part("arena", 50, "cpu"),
        Part("loading", 70, "cpu", "loading"),
        Part("files", 1000, "cpu", "addresses"),
    ]
    assert needed(parts, of_addresses=False) == 170
    assert needed(parts, of_addresses=True) == 1220


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available, of which nothing is known but what a test writes."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:  8388608 kB\n")
    monkeypatch.setattr(files, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(files, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(process, "_STATUS", tmp_path / "proc" / "self" / "status")
    return tmp_path


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_a_machine_without_groups_has_what_is_available(machine: Path) -> None:
    assert free_bytes(CPU) == 8 << 30
    (machine / "proc" / "self" / "cgroup").write_text("0::/\ngarbage\n")
    assert free_bytes(CPU) == 8 << 30


def test_every_group_of_version_2_counts(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    usage = {"memory__current": 1 << 30, "memory__stat": f"anon 5\ninactive_file {256 << 20}"}
    group(machine / "cgroup" / "outer", memory__max=2 << 30, **usage)
    group(machine / "cgroup" / "outer" / "inner", memory__max="max", **usage)
    assert free_bytes(CPU) == (2 << 30) - (1 << 30) + (256 << 20)
    assert total_bytes(CPU) == 2 << 30
    assert any("control group" in limit.name for limit in limits(CPU))


def test_a_group_of_version_1_counts(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("7:cpu:/x\n4:memory:/not/visible/here\n0::/")
    group(
        machine / "cgroup" / "memory",
        memory__limit_in_bytes=1 << 30,
        memory__usage_in_bytes=600 << 20,
        memory__stat=f"total_inactive_file {100 << 20}",
    )
    assert free_bytes(CPU) == (1024 - 500) << 20
    (machine / "cgroup" / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert free_bytes(CPU) == 8 << 30


def test_a_group_of_64_mib_is_refused_before_anything_is_loaded(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("0::/\n")
    group(machine / "cgroup", memory__max=64 << 20, memory__current=0)
    with pytest.raises(CapacityError, match="memory limit of the control group, 67 MB"):
        LLM(config=PLAIN)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."),
        RuntimeError("unable to mmap 12 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("can't start new thread"),
    ],
)
def test_memory_that_ended_has_one_name(error: Exception) -> None:
    found = out_of_memory(error, "loading", parts="  weights  1 GB")
    assert found is not None
    assert "memory ended while loading" in str(found)
    assert "  weights  1 GB" in str(found)
    assert "--batch-size" in (found.hint or "")


@pytest.mark.parametrize(
    ("limits", "said", "hint"),
    [
        ((-1, -1), "while loading.", "lower"),
        ((1 << 61, -1), "while loading.", "lower"),
        ((600_000_000, -1), "while loading under `ulimit -v` of 600 MB.", "raise the limit, or"),
        ((-1, 2_000_000_000), "under `ulimit -d` of 2000 MB.", "raise the limit, or"),
    ],
)
def test_a_limit_of_addresses_is_named_where_memory_ends(
    limits: tuple[int, int], said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    by_name = dict(zip(names, limits, strict=True))

    def limit_of(name: int) -> tuple[int, int]:
        return by_name[name], -1

    monkeypatch.setattr(resource, "getrlimit", limit_of)
    found = out_of_memory(MemoryError(), "loading")
    assert str(found).endswith(said)
    assert str(getattr(found, "hint", "")).startswith(hint)


def test_other_errors_are_no_want_of_memory() -> None:
    others = (ValueError("x"), OSError(errno.ENOENT, "no"), CapacityError("full"), None)
    assert all(out_of_memory(error, "loading") is None for error in others)
    assert out_of_memory(KeyboardInterrupt("out of memory"), "loading") is None


def test_pytorch_says_it_as_expected() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(failed.value, "loading") is not None


def test_memory_that_ends_while_loading_is_told_with_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr("outrider.api.loading.load_model", full)
    with pytest.raises(CapacityError, match="memory ended while loading") as failed:
        LLM(config=PLAIN)
    assert "weights of the target" in str(failed.value)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: no")])
def test_memory_that_ends_while_generating_ends_one_request(error: Exception) -> None:
    llm = LLM(config=EngineConfig(drafter="none", batch_size=2, fused_round=False))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    texts = [llm.generate(prompt, params)[0].text for prompt in ("def f(x):", "import os")]
    first = llm.submit("def f(x):", params)
    second = llm.submit("import os", params)
    target = llm._pair.target  # pyright: ignore[reportPrivateUsage]
    step, culprit = target.step, first.reader.seq.seq_id

    def starving(_: object, rows: Sequence[StepRow], needs: DraftNeeds) -> StepOutput:
        if any(row.seq_id == culprit for row in rows):
            raise error
        return step(rows, needs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "step", starving)
        while llm.has_work:
            llm.advance()
    with pytest.raises(CapacityError, match="memory ended while generating"):
        first.result()
    assert second.result().text == texts[1]
    assert llm.generate("def f(x):", params)[0].text == texts[0]


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="no anonymous mappings")
def test_zeros_that_nobody_wrote_take_no_memory() -> None:
    def resident() -> int:
        found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    before = resident()
    found = huge_pages.zeros((4, 512 << 20), dtype=torch.bfloat16, device=CPU)
    assert found.shape == (4, 512 << 20)
    assert found[3, -1] == 0
    found[2, 5] = 1
    assert found[2, 4:7].equal(torch.tensor([0.0, 1, 0], dtype=torch.bfloat16))
    assert resident() - before < 256 << 20


@pytest.mark.parametrize("window", [2048, 1_000_000])
def test_as_many_requests_run_at_once_as_memory_holds(
    window: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody said how many: fewer where there is less memory, and never more than it holds."""
    name = claiming(tmp_path / "target", max_position_embeddings=window)
    found = list[int]()
    for free in (1 << 40, 1 << 29, 1 << 28, 180_000_000, 150_000_000, 140_000_000):
        limited(monkeypatch, MemoryLimit("little", free))
        plan, parts = fitted(plan_pair(name, None, PLAIN))
        batch = plan.settings.most_batch
        assert needed(parts, of_addresses=False) <= free
        assert batch == 1 or plan.num_slots >= batch * OPEN_TOKENS
        assert plan.at_once.startswith(f"up to {batch} requests at once")
        found.append(batch)
    assert found[0] == MOST_BATCH
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_a_chosen_number_stays() -> None:
    assert embedded(EngineConfig(batch_size=1000)).settings.most_batch == 1000
    assert embedded(EngineConfig(batch_size=3)).at_once.startswith("3 requests at once")


def test_a_text_without_a_limit_ends_where_the_arena_does() -> None:
    """The window is longer than the arena."""
    llm = LLM(config=replace(PLAIN, arena_tokens=256))
    (result,) = llm.generate([[5, 6, 7]], max_tokens=WHOLE, ignore_eos=True)
    assert len(result.token_ids) == 253
    assert (result.finish_reason, result.notes) == ("length", ())
    with pytest.raises(CapacityError):
        llm.generate([[5, 6, 7]], max_tokens=300)


def test_texts_without_a_limit_run_at_once_and_stay_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may fill the arena, and all start: the youngest wait again where it ends."""
    monkeypatch.setattr(jobs, "OPEN_TOKENS", 16)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
    asked = SamplingParams(max_tokens=WHOLE, ignore_eos=True)
    llm = LLM(config=replace(PLAIN, arena_tokens=160, batch_size=4))
    together = llm.generate(prompts, asked)
    assert llm.counts.preempted > 0
    for prompt, result in zip(prompts, together, strict=True):
        assert llm.generate([prompt], asked)[0].token_ids == result.token_ids
