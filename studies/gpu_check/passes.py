"""What rounds and passes take: of time, of memory, of calls into the driver, beside prefill."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import torch
from gpu_check import models
from gpu_check.device import bandwidths
from gpu_check.rounds import Bench, captured_pass, read, text
from gpu_check.setting import Setting, cell, check, race, seconds_of
from torch.profiler import ProfilerActivity, profile

from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.core.rng import RoundKeys
from outrider.engine.round import LiveSequence
from outrider.kernels.registry import choose
from outrider.plugins.gpu.rounds.build import torch_distributions
from outrider.plugins.gpu.rounds.program import launcher_for
from outrider.plugins.gpu.rounds.sampling import RoundProbs, Rows

CONTEXT = 256


def plain(setting: Setting, record: dict[str, Any]) -> None:
    """Plain decoding, one captured round a token: milliseconds, and the share of the copy ceiling.

    Bytes are those of all weights that a pass reads, at the width in which they are held; reading
    them takes `least_ms`. Each launch costs some microseconds besides.
    """
    rates = bandwidths(setting)
    record |= rates
    ceiling = rates["copy_bytes_per_second"]
    full: dict[str, float] = {}
    for name, scheme in product(setting.shapes, setting.schemes):
        model = models.random_model(
            setting.shapes[name], setting, models.room_for(1, 512, rows=128, logits=8), scheme
        )
        bench = Bench(setting, model, None, k=0, batch=1)
        prompt = text(CONTEXT, model.spec.vocab_size)
        rounds = bench.launches([prompt], SamplingParams(max_tokens=32))
        rounds.stand_still()
        seconds = seconds_of(rounds.launch, setting, calls=setting.rounds)
        num_bytes = sum(tensor.nbytes for tensor in model.streamed)
        share = num_bytes / seconds / ceiling
        cell(
            record,
            shape=name,
            quantise=scheme,
            ms=1e3 * seconds,
            tokens_per_second=1 / seconds,
            weight_bytes=num_bytes,
            least_ms=1e3 * num_bytes / rates["read_bytes_per_second"],
            launches=rounds.counts(),
            share_of_copy_ceiling=share,
            against_bfloat16=seconds / full.setdefault(name, seconds),
        )
        rounds.close()
        del model, bench, rounds
        models.let_go()


ROWS = (1, 2, 4, 8, 9, 16, 32)
CONTEXTS = (256, 1000)


def verify_cost(setting: Setting, record: dict[str, Any]) -> None:
    """What a target pass of several rows costs against one row, at two contexts. All read the same
    weights once, which takes `least_ms`."""
    rate = bandwidths(setting)["read_bytes_per_second"]
    rows_tried = (1, 2, 16) if setting.quick else ROWS
    contexts = (40,) if setting.quick else CONTEXTS
    room = models.room_for(1, max(contexts) + 64, rows=128, logits=8)
    for name, shape in setting.shapes.items():
        for scheme in ("none",) if setting.quick or name == "8b" else setting.schemes:
            model = models.random_model(shape, setting, room, scheme)
            num_bytes = sum(tensor.nbytes for tensor in model.streamed)
            least = {"weight_bytes": num_bytes, "least_ms": 1e3 * num_bytes / rate}
            for context in contexts:
                read(model, 0, text(context, model.spec.vocab_size))
                passes = {
                    str(rows): captured_pass(model, setting, rows=rows, context=context)
                    for rows in rows_tried
                }
                found = race(passes, setting, calls=1 if setting.quick else 4)
                for rows, seconds in found.items():
                    about = {"shape": name, "quantise": scheme, "context": context, **least}
                    ratio = seconds / found["1"]
                    cell(record, **about, rows=int(rows), ms=1e3 * seconds, against_one_row=ratio)
                model.state.close(0)
            del model, passes
            models.let_go()


WINDOWS, TEXTS = (4096, 32_768, 131_072), (1000, 16_000)


def windows(setting: Setting, record: dict[str, Any]) -> None:
    """A token of the smallest shape by the window that its memory was made for, behind texts of two
    lengths. Bytes of weights and of the text's keys and values bound it, not the window."""
    name, shape = next(iter(setting.shapes.items()))
    rate = bandwidths(setting)["read_bytes_per_second"]
    sizes = ((128, 1024), (40, 80)) if setting.quick else (WINDOWS, TEXTS)
    for window in sizes[0]:
        room = models.room_for(1, window, rows=128, logits=8)
        model = models.random_model(shape, setting, room, vocab_size=512, window=window)
        weights = sum(tensor.nbytes for tensor in model.streamed)
        for length in sizes[1]:
            if length + 64 > window:
                continue
            bench = Bench(setting, model, None, k=0, batch=1)
            rounds = bench.launches([text(length, 512)], SamplingParams(max_tokens=32))
            rounds.stand_still()
            seconds = seconds_of(rounds.launch, setting, calls=setting.rounds)
            keys = length * model.spec.kv_bytes_per_token
            cell(
                record,
                shape=name,
                window=window,
                text=length,
                ms=1e3 * seconds,
                weight_bytes=weights,
                key_bytes=keys,
                least_ms=1e3 * (weights + keys) / rate,
                launches=rounds.counts(),
            )
            rounds.close()
            del bench, rounds
        del model
        models.let_go()


ACCEPT_K = 8


def accept(setting: Setting, record: dict[str, Any]) -> None:
    """The accept step alone: judging 16 chains of 8 over a vocabulary of 128k, as a captured call;
    and what its bytes take at the read rate, each read once: no way of judging is faster."""
    device, size = setting.device, setting.vocabulary
    batch = 2 if setting.quick else 16
    generator = torch.Generator(device).manual_seed(1)
    logits_BWV = 3 * torch.randn(batch, ACCEPT_K + 1, size, device=device, generator=generator)
    q_BKV = logits_BWV[:, :ACCEPT_K] + torch.randn(
        batch, ACCEPT_K, size, device=device, generator=generator
    )
    tokens_BK = q_BKV.argmax(-1)
    record |= {"batch": batch, "k": ACCEPT_K, "vocabulary": size}
    rate = bandwidths(setting)["read_bytes_per_second"]
    for temperature in (0.0, 0.8):

        def room(drawn: bool = bool(temperature)) -> torch.Tensor | None:
            return torch.zeros_like(q_BKV) if drawn else None

        sides: dict[str, RoundProbs] = {"torch": torch_distributions("block", ACCEPT_K, room())}
        if setting.on_cuda:
            # Imported here: Triton comes with PyTorch for CUDA alone.
            from outrider.plugins.gpu.rounds.triton import RoundKernels

            sides["triton"] = RoundKernels(device).make_probs("block", room())
        for side, distributions in sides.items():
            seconds = _accept_seconds(
                setting, distributions, (logits_BWV, q_BKV, tokens_BK), temperature
            )
            num_bytes = logits_BWV.nbytes + (q_BKV.nbytes if temperature else 0)
            least = num_bytes / rate
            about = {"side": side, "temperature": temperature, "us": 1e6 * seconds}
            cell(record, **about, bytes=num_bytes, least_us=1e6 * least)


def _accept_seconds(
    setting: Setting,
    distributions: RoundProbs,
    chain: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    temperature: float,
) -> float:
    logits_BWV, q_BKV, tokens_BK = chain
    batch, device = logits_BWV.shape[0], setting.device
    numbers_B = torch.arange(batch, device=device)
    rows = Rows(
        torch.full((batch,), temperature, device=device),
        torch.full((batch,), ACCEPT_K, dtype=torch.int64, device=device),
        RoundKeys(numbers_B, torch.zeros_like(numbers_B), numbers_B + 100),
    )
    distributions.begin(rows)
    for node in range(ACCEPT_K):
        distributions.draft(q_BKV[:, node].contiguous(), rows, node)

    def program() -> None:
        distributions.judge(logits_BWV, tokens_BK, rows)

    return seconds_of(launcher_for(device).make(program, lambda: None), setting, calls=8)


ROUNDS = 20
COUNTED = (
    "cudaGraphLaunch",
    "cudaLaunchKernel",
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "cudaMalloc",
)


def syncs(setting: Setting, record: dict[str, Any]) -> None:
    """Graph launches and waits of an engine's rounds, counted by the profiler."""
    setting.need_cuda("calls into the driver, to be counted,")
    room = models.room_for(4, 1024, rows=192, logits=64)
    target = models.embedded(models.TARGET, setting, room)
    draft = models.embedded(models.DRAFT, setting, room)
    bench = Bench(setting, target, draft, k=4, batch=4)
    engine = bench.engine()
    params = SamplingParams(max_tokens=600)
    for seq_id in range(4):
        prompt = text(32, target.spec.vocab_size, seed=seq_id)
        engine.submit(LiveSequence(seq_id, prompt, len(prompt), params, 600))
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(ROUNDS):
            engine.step()
    calls = Counter[str]()
    for event in found.key_averages():
        calls[event.key] += event.count
    record["per_round"] = {name: calls[name] / ROUNDS for name in COUNTED}
    record["note"] = "the profiler itself waits for the device once, when it stops"
    launches = record["per_round"]["cudaGraphLaunch"]
    waits = (calls["cudaStreamSynchronize"] + max(calls["cudaDeviceSynchronize"] - 1, 0)) / ROUNDS
    check(record, "one graph launch a round", passed=launches == 1, detail=str(launches))
    check(record, "no wait for the stream", passed=waits == 0, detail=str(waits))
    for seq_id in range(4):
        engine.cancel(seq_id)


CHUNK, STEPS = 512, 4


def overlap(setting: Setting, record: dict[str, Any]) -> None:
    """Prefill beside decoding: both on streams of their own, against one after the other.

    Decoding is bound by memory and prefill by arithmetic, so together they may take less than the
    sum. The decode rounds have scratch of their own; prefill gets operators with a room of its own.
    """
    setting.need_cuda("streams")
    for name, shape in setting.shapes.items():
        room = models.room_for(6, 2048, rows=CHUNK, logits=8)
        model = models.random_model(shape, setting, room, vocab_size=32_768)
        bench = Bench(setting, model, None, k=0, batch=4)
        prompts = [text(256, model.spec.vocab_size, seed=seed) for seed in range(4)]
        rounds = bench.launches(prompts, SamplingParams(max_tokens=32))
        rounds.stand_still()
        model.kernels = choose(device=setting.device, dtype=setting.dtype)
        model.state.open(99, ())
        row = StepRow.chain(99, text(CHUNK, model.spec.vocab_size), logits_from=CHUNK)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def prefill(row: StepRow = row, model: Any = model) -> None:
            model.step([row], DraftNeeds())
            model.state.commit({99: ()})

        def decode(rounds: Any = rounds) -> None:
            for _ in range(STEPS):
                rounds.launch()

        def both(streams: Any = streams, prefill: Any = prefill, decode: Any = decode) -> None:
            here = torch.cuda.current_stream()
            for stream, work in zip(streams, (decode, prefill), strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    work()
            for stream in streams:
                here.wait_stream(stream)

        alone = seconds_of(decode, setting), seconds_of(prefill, setting)
        together = seconds_of(both, setting)
        cell(
            record,
            shape=name,
            decode_steps=STEPS,
            prefill_tokens=CHUNK,
            weight_bytes=sum(tensor.nbytes for tensor in model.streamed),
            decode_ms=1e3 * alone[0],
            prefill_ms=1e3 * alone[1],
            together_ms=1e3 * together,
            against_one_after_the_other=together / sum(alone),
        )
        rounds.close()
        model.state.close(99)
        del model, bench, rounds
        models.let_go()


ALLOCATING_ROUNDS = 50


def memory(setting: Setting, record: dict[str, Any]) -> None:
    """Memory: what a model takes against what it claims, and what a round allocates."""
    setting.need_cuda("allocator statistics")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    name, shape = next(iter(setting.shapes.items()))
    room = models.room_for(4, 1024, rows=128, logits=32)
    model = models.random_model(shape, setting, room)
    held = torch.cuda.memory_allocated() - before
    claimed = model.spec.weight_bytes + model.state.arena.nbytes
    record |= {
        "shape": name,
        "claimed_bytes": claimed,
        "held_bytes": held,
        "peak_bytes_while_loading": torch.cuda.max_memory_allocated() - before,
    }
    bench = Bench(setting, model, None, k=0, batch=4)
    prompts = [text(64, model.spec.vocab_size, seed=seed) for seed in range(4)]
    rounds = bench.launches(prompts, SamplingParams(max_tokens=900))
    for _ in range(3):
        rounds.launch()
    torch.cuda.synchronize()
    counted = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(ALLOCATING_ROUNDS):
        rounds.launch()
    torch.cuda.synchronize()
    made = torch.cuda.memory_stats()["allocation.all.allocated"] - counted
    record["reserved_bytes"] = torch.cuda.memory_reserved()
    record["allocations_per_round"] = made / ALLOCATING_ROUNDS
    check(record, "a round allocates nothing", passed=made == 0, detail=str(made))
    words = "a model takes at most 1.15 of what it claims"
    check(record, words, passed=held <= 1.15 * claimed, detail=f"{held / claimed:.3f}")
    rounds.close()
