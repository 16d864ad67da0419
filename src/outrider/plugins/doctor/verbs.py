"""`outrider doctor`: this machine's hardware, its kernels, and the models that fit its memory.

A problem is reported as a sentence; doctor then exits with 1. Ceilings are the read bandwidth of
one thread and of all, which limits decoding, and the operations per second, which limit the
verification of many rows.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from time import perf_counter
from typing import Any, TypeVar

import torch

from outrider import __version__
from outrider.cache.pages import free_bytes, total_bytes
from outrider.cli.call import Call
from outrider.cli.models import memory_fit, read_spec
from outrider.cli.output import fitted, json_line, screen_table
from outrider.cli.session import start_logging
from outrider.cli.verb_options import DoctorOptions
from outrider.cli.verdict import toy_note
from outrider.core.config import QUANTISE_COSTS
from outrider.core.env import CALIBRATIONS, cache_folder, compiler
from outrider.core.errors import MachineError, OutriderError, reason_of
from outrider.core.fields import size
from outrider.core.files import NotPrivateError, private_folder
from outrider.core.plugins import install_command
from outrider.core.settings import Resolved
from outrider.kernels.native.build import COMPILERS, built_kernels, trusted_folders
from outrider.kernels.native.cpu import hardware_threads, memory_nodes, pinned_threads
from outrider.kernels.native.tuning import forget
from outrider.kernels.operators import DTYPES, Choice, Kernels, pick_device
from outrider.kernels.registry import choose
from outrider.models.loading import resolve, shipped_models
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.plugins.doctor.ceilings import (
    ArithmeticCeiling,
    Ceiling,
    arithmetic_ceilings,
    ceilings,
)

T = TypeVar("T")
# Sizes of models, in parameters, and the bits of one in a file of Q4_K_M.
SIZES = (600_000_000, 1_700_000_000, 4_000_000_000, 8_000_000_000, 14_000_000_000, 32_000_000_000)
_Q4_K_M_BITS = 4.85
_TRIALS = 5
_INSTALL = "`apt install g++`, `dnf install gcc-c++` or `xcode-select --install` gives one"


def doctor(call: Call[DoctorOptions]) -> int:

    start_logging(call.resolved.program())
    report = examine(call.resolved, measure=call.options.measure)
    if call.options.json:
        print(json_line(report.to_dict()))
    else:
        print(fitted("\n\n".join(_sections(report))))
    return 1 if report.problems else 0


def _sections(report: Report) -> Iterator[str]:
    yield screen_table([(name, value) for name, value in report.facts.items()])
    yield f"Kernels, the first that accepts is used:\n{_kernels(report)}"
    if report.ceilings:
        yield f"Read ceilings, GB/s (the limit of decoding):\n{_ceilings(report)}"
    if report.compute:
        yield (
            "Compute ceilings of vectors, GFLOP/s (the limit of verifying many rows):\n"
            f"{_compute(report)}"
        )
    yield f"Memory:\n{_memory(report)}"
    toys = filter(None, (toy_note(fit["model"]) for fit in report.fits))
    yield from (f"note: {toy}" for toy in toys)
    yield from (f"problem: {problem}" for problem in report.problems)
    if report.sizes:
        yield _sizes(report)
    yield _summary(report)


def _summary(report: Report) -> str:
    """Return two lines: what can run here and how fast, and what is missing."""
    how = "in Q4_K_M" if report.threads else "in bfloat16"
    fitting = [one for one in report.sizes if one["fits"]]
    runs = "nothing of the sizes above fits the free memory"
    if fitting:
        rates = [f"{one['tokens_per_second']:.2g}" for one in (fitting[-1], fitting[0])]
        most, least = (f"{one['parameters'] / 1e9:g} billion" for one in (fitting[-1], fitting[0]))
        runs = (
            f"models of up to {most} parameters {how}, at most {rates[0]} tokens a second, "
            f"and {least} at most {rates[1]}; speculation adds to that"
        )
    origin, lacks = report.facts["native kernels"], list(report.problems)
    if report.threads is None and "compiler" in origin and "found" in origin:
        lacks.append(f"a C++ compiler, for speed and 4 bits a weight; {_INSTALL}")
    if find_spec("msgspec") is None:
        lacks.append(f"the server's packages: {install_command('server')}")
    missing = "; ".join(lacks) or (
        "nothing; `outrider pull Qwen/Qwen3-0.6B` fetches a small model, and `outrider plan MODEL` "
        "times one"
    )
    lines = [f"runs: {runs}"] if report.sizes else []
    return "\n".join([*lines, f"missing: {missing}"])


def _kernels(report: Report) -> str:
    ops: dict[tuple[str, str], list[str]] = {}
    for c in [*report.kernels, *([report.threads] if report.threads else [])]:
        why = "; ".join(filter(None, [*c.refusals, c.why]))
        ops.setdefault((f"{c.name} {c.kind}".strip(), why), []).append(c.op)
    return screen_table([(", ".join(same), name, why) for (name, why), same in ops.items()])


def _ceilings(report: Report) -> str:
    return _by_threads("level", [(c.level, c.threads, c.gb_per_second) for c in report.ceilings])


def _compute(report: Report) -> str:
    return _by_threads("weights", [(c.arithmetic, c.threads, c.gflops) for c in report.compute])


def _by_threads(name: str, rates: Sequence[tuple[str, int, float]]) -> str:
    """Return a table with a row for each name and a column for each number of threads."""
    threads = sorted({number for _, number, _ in rates})
    rows: dict[str, dict[int, str]] = {}
    for row, number, rate in rates:
        rows.setdefault(row, {})[number] = f"{rate:.1f}"
    header = (name, *(f"{n} thread{'s' if n > 1 else ''}" for n in threads))
    return screen_table(
        [(row, *(found.get(n, "") for n in threads)) for row, found in rows.items()], header=header
    )


def _sizes(report: Report) -> str:
    rows = [
        (
            f"{one['parameters'] / 1e9:g} billion",
            size(one["weights_bytes"]),
            "fits" if one["fits"] else "does not fit",
            f"{one['tokens_per_second']:.2g}" if one["fits"] else "",
        )
        for one in report.sizes
    ]
    header = ("parameters", "weights", "free memory", "tokens a second")
    how = "a GGUF file in Q4_K_M" if report.threads else "bfloat16, for PyTorch"
    return (
        f"What can run here, as {how}, and how fast at most without speculation: for each token "
        f"all weights are read from memory.\n{screen_table(rows, header=header)}"
    )


def _memory(report: Report) -> str:
    rows = [
        (
            fit["model"],
            size(fit["weights_bytes"]),
            size(fit["kv_per_1000_tokens_bytes"]),
            fit["num_tokens_that_fit"],
            fit["num_windows_that_fit"],
        )
        for fit in report.fits
    ]
    header = ("model", "weights", "KV per 1k tokens", "tokens that fit", "full windows")
    return screen_table(rows, header=header)


@dataclass(frozen=True, slots=True)
class Report:
    """Facts by name, kernels and their threads (None for the reference), ceilings of reading and
    arithmetic (empty without native kernels), memory by model, problems, and for models of some
    `sizes` whether they fit and the most tokens a second (empty on other devices than CPUs)."""

    facts: Mapping[str, str]
    kernels: Sequence[Choice]
    threads: Choice | None
    ceilings: Sequence[Ceiling]
    compute: Sequence[ArithmeticCeiling]
    fits: Sequence[Mapping[str, Any]]
    problems: Sequence[str]
    sizes: Sequence[Mapping[str, Any]] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "facts": dict(self.facts),
            "kernels": [asdict(choice) for choice in self.kernels],
            "threads": self.threads and asdict(self.threads),
            "ceilings": [asdict(ceiling) for ceiling in self.ceilings],
            "compute": [asdict(ceiling) for ceiling in self.compute],
            "memory": [dict(fit) for fit in self.fits],
            "quantise_costs": {
                scheme: {"perplexity": more, "same_first_choice": same}
                for scheme, (more, same) in QUANTISE_COSTS.items()
            },
            "problems": list(self.problems),
            "sizes": [dict(one) for one in self.sizes],
        }


def examine(resolved: Resolved, *, measure: bool = False) -> Report:
    """Return the report. With `measure`, stored measurements are dropped and made again."""
    engine, program = resolved.engine(), resolved.program()
    if measure:
        for folder in (*trusted_folders(cache_folder()), None):
            forget(folder)
    device = pick_device(engine.device)
    problems = [*_embedded_problems(), *_cache_problems()]
    kernels = choose(
        device=device,
        dtype=DTYPES.get(engine.dtype, torch.bfloat16),
        force_reference=engine.force_reference,
        threads=engine.threads,
        quantise=engine.quantise,
    )
    named = [program.target, *([] if program.draft in ("auto", "none") else [program.draft])]
    fits: list[Mapping[str, Any]] = []
    for name in named:
        # Only the target is quantised.
        scheme = engine.quantise if name == program.target else "none"
        try:
            spec = replace(
                read_spec(name, engine.dtype, on_cpu=device.type == "cpu"), quantise=scheme
            )
            fits.append(memory_fit(spec, device))
        except OutriderError as error:
            problems.append(str(error))
    read = _measured(kernels, ceilings)
    return Report(
        facts=_facts(device, kernels),
        kernels=kernels.choices,
        threads=kernels.threads,
        ceilings=read,
        compute=_measured(kernels, arithmetic_ceilings),
        fits=fits,
        problems=problems,
        sizes=_what_runs(device, kernels, read) if device.type == "cpu" else (),
    )


def _what_runs(
    device: torch.device, kernels: Kernels, read: Sequence[Ceiling]
) -> Sequence[Mapping[str, Any]]:
    """Return for each of SIZES the bytes of its weights, and the tokens a second at which memory
    gives them: measured by native kernels, else by a product of PyTorch, which reads bfloat16."""
    rates = [one.gb_per_second * 1e9 for one in read if one.level == "memory"]
    rate = max(rates) if rates else _product_rate()
    free, bits = free_bytes(device), _Q4_K_M_BITS if kernels.threads is not None else 16
    weights = {number: int(number * bits / 8) for number in SIZES}
    return [
        {
            "parameters": number,
            "weights_bytes": num_bytes,
            "fits": num_bytes < free,
            "tokens_per_second": rate / num_bytes,
        }
        for number, num_bytes in weights.items()
    ]


def _product_rate() -> float:
    """Return the bytes of weights that a product of one row by PyTorch reads in a second."""
    weights = torch.ones(4096, 8192, dtype=torch.bfloat16)
    row, seconds = torch.ones(1, 8192, dtype=torch.bfloat16), list[float]()
    for _ in range(_TRIALS):
        began = perf_counter()
        torch.nn.functional.linear(row, weights)
        seconds.append(perf_counter() - began)
    return weights.nbytes / min(seconds)


def _measured(kernels: Kernels, measure: Callable[[Sequence[int]], Sequence[T]]) -> Sequence[T]:
    """Measure with the threads of native kernels; empty without native kernels."""
    if kernels.threads is None:
        return ()
    try:
        return measure(sorted({1, int(kernels.threads.name), len(hardware_threads())}))
    except MachineError:
        return ()


def _facts(device: torch.device, kernels: Kernels) -> dict[str, str]:
    wanted = compiler() or next((name for name in COMPILERS if shutil.which(name)), None)
    facts = {
        "outrider": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": torch.__version__,
        "device": str(device),
        "cores": _cores(kernels),
        "memory": f"{size(free_bytes(device))} free of {size(total_bytes(device))}",
        "compiler": wanted or "none",
        "native kernels": _origin(kernels),
        "cache": str(cache_folder() or "none"),
        "calibrations": _calibrations(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cores(kernels: Kernels) -> str:
    text = f"{os.cpu_count()} ({torch.get_num_threads()} used by torch)"
    if (num_nodes := len(memory_nodes())) > 1:
        text += f", on {num_nodes} NUMA nodes"
    if kernels.threads is not None and pinned_threads(int(kernels.threads.name)):
        text += "; our threads are pinned to them"
    return text


def _origin(kernels: Kernels) -> str:
    """Return the origin of the native kernels, or the reason why there are none."""
    if kernels.threads is None:
        reason = "; ".join(kernels.choices[0].refusals).removeprefix("native: ")
        return f"none, the reference runs instead: {reason}"
    built = built_kernels(compiler(), cache_folder())
    return f"{built.origin} ({built.unbrought})" if built.unbrought else built.origin


def _calibrations() -> str:
    """Return the number and the folder of the calibrations of `outrider plan`."""
    cache = cache_folder()
    stored = [] if cache is None else list((cache / CALIBRATIONS).glob("*.json"))
    if cache is None or not stored:
        return "none yet: `outrider plan` measures one"
    return f"{len(stored)} in {cache / CALIBRATIONS}"


def _embedded_problems() -> list[str]:
    """Return a problem for each missing file of the pair that ships with the package."""
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    missing = [
        str(resolve(name) / file)
        for name in {EMBEDDED_TARGET, EMBEDDED_DRAFT, *shipped_models()}
        for file in needed
        if not (resolve(name) / file).is_file()
    ]
    return [f"the embedded pair lacks {path}; install outrider again" for path in missing]


def _cache_problems() -> list[str]:
    """Check the folder of compiled kernels, which must be writable by this user only."""
    folder = cache_folder()
    if folder is None:
        return ["there is no cache folder: kernels lie among temporary files; set XDG_CACHE_HOME"]
    try:
        writable = os.access(private_folder(folder), os.W_OK | os.X_OK)
        why = None if writable else "it is read-only"
    except NotPrivateError as error:
        why = str(error)
    except OSError as error:
        why = reason_of(error)
    return [f"the cache folder {folder} cannot be used: {why}; set XDG_CACHE_HOME"] if why else []
