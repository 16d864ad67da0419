"""Compiles what a GPU would be asked to run, for devices that are not there; needs Triton.

    scripts/gpu_compile                                everything, compared with the table
    scripts/gpu_compile --write                        writes the table anew
    scripts/gpu_compile --write --kernels NAME ...     writes the rows of these kernels anew
    scripts/gpu_compile --targets sm_90 --cache DIR    leaves binaries for a machine with such a GPU

Engines and captured rounds run on PyTorch's meta device, which has shapes and no numbers. Every
form of every launch is compiled to machine code. It must not use a stack, which is what a kernel
with too few registers does, and must fit into the shared memory of its target. gfx942 is reported
and fails nothing: the engine does not choose these kernels there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import triton
from gpu_compile import trace
from gpu_compile.binaries import CUDA, TARGETS, Binary, compiled, resident
from gpu_compile.meta import Launch, Recorder, pretend, source_of
from triton import knobs

TABLE = Path(__file__).with_name("table.json")
# Multiprocessors of an H100 and an H200, the bytes a second that the latter reads, and how long a
# read takes: their product is what must be under way (Little's law).
PROCESSORS, RATE, LATENCY = 132, 4.3e12, 0.8e-6
Results = dict[tuple[int, str], Binary]


def main() -> int:
    options = _options()
    if knobs.runtime.interpret:
        sys.exit("error: Triton's interpreter is asked for\n  try: unset TRITON_INTERPRET")
    if options.cache is not None:
        knobs.cache.dir = str(options.cache.resolve())
    torch.set_num_threads(1)
    recorder = pretend()
    rounds, matrices = _traced(recorder, options)
    launches = list(recorder.forms.values())
    sources = {one.name: source_of(one.kernel) for one in launches}
    if options.kernels:
        check_names(options.kernels, {one.name for one in (*launches, *recorder.ahead.values())})
        launches = [one for one in launches if one.name in options.kernels]
    results = _compiled(launches, options)
    found = {
        "triton": triton.__version__,
        "sources": dict(sorted(sources.items())),
        "kernels": kernel_rows(launches, results),
        "rounds": rounds,
        "matrices": {} if options.rounds == "few" else dict(_matrices(matrices)),
    }
    for line in report(found):
        print(line)
    faults = list(_faults(launches, results))
    # Loading compiles more than these requests launch, which no table has.
    more = [one for form, one in recorder.ahead.items() if form not in recorder.forms]
    more = [one for one in more if one.name in (options.kernels or (one.name,))]
    faults += _faults(more, _compiled(more, options))
    for line in faults:
        print(line)
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    is_part = bool(options.kernels) or options.rounds == "few"
    if options.write:
        TABLE.write_text(written(merged(table, found, is_part=is_part)), encoding="utf-8")
    else:
        others = differences(table, found, is_part=is_part)
        print(*others[-40:], sep="\n")
        faults += others
    wrong = [line for line in faults if not line.startswith("reported")]
    done = {"benchmark": "gpu_compile", "binaries": len(results), "passed": not wrong}
    print(json.dumps(done))
    return 1 if wrong else 0


def check_names(names: Sequence[str], known: set[str]) -> None:
    """Exits with 1 where a name is that of no kernel: then nothing of it would be checked."""
    if unknown := sorted(set(names) - known):
        listed = ", ".join(sorted(known))
        sys.exit(f"error: no round launches {', '.join(unknown)}\n  try: one of {listed}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "gpu_compile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="these kernels alone")
    parser.add_argument(
        "--rounds",
        choices=("all", "few"),
        default="all",
        help="few: three captured rounds of 1b, one of which the table has, and no engine",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--cache", type=Path, help="where Triton keeps the binaries")
    parser.add_argument("--write", action="store_true", help="write the table anew")
    options = parser.parse_args()
    if options.write and options.rounds == "few":
        parser.error("the table is of all rounds: --write needs --rounds all")
    return options


FEW = (trace.Case("1b", "0.4b", 3, sampled=True), trace.Case("1b", dtype="float32"))


def _traced(
    recorder: Recorder, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, list[Launch]]]:
    """What the rounds of the table cost, and the launches of those that show linears."""
    started = perf_counter()
    rounds: dict[str, Any] = {}
    matrices: dict[str, list[Launch]] = {}
    if options.rounds == "few":
        for case in FEW:
            trace.rounds(case, recorder)
        shown = trace.TABLED[0]
        rounds[shown.name] = asdict(trace.rounds(shown, recorder)[0])
        return rounds, matrices
    for case in (*trace.TABLED, *trace.OTHERS):
        cost, made = trace.rounds(case, recorder)
        if case in trace.TABLED:
            rounds[case.name] = asdict(cost)
        if case.k == 0 and not case.sampled and case.window < 10_000 and case.batch == 1:
            matrices[case.name] = made
    trace.gpt2_round(recorder)
    trace.hybrid(recorder)
    trace.verdicts()
    runs = list(trace.engines(recorder))
    seconds = perf_counter() - started
    _say(f"{len(runs)} runs of engines, {len(recorder.forms)} forms, {seconds:.0f} s")
    return rounds, matrices


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_LAUNCHES: list[Launch] = []


def _compiled(launches: list[Launch], options: argparse.Namespace) -> Results:
    """Of each launch and target. Children share the launches, which have no data to copy."""
    _LAUNCHES[:] = launches
    tasks = [(index, name) for name in options.targets for index in range(len(launches))]
    results: Results = {}
    started = perf_counter()
    if options.jobs == 1:
        made: Iterator[tuple[tuple[int, str], Binary]] = map(_one, tasks)
        results.update(_with_progress(made, len(tasks), started))
    else:
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            made = pool.imap_unordered(_one, tasks, chunksize=4)
            results.update(_with_progress(made, len(tasks), started))
    return results


def _one(task: tuple[int, str]) -> tuple[tuple[int, str], Binary]:
    index, name = task
    return task, compiled(_LAUNCHES[index], name)


def _with_progress(
    made: Iterator[tuple[tuple[int, str], Binary]], count: int, started: float
) -> Iterator[tuple[tuple[int, str], Binary]]:
    for number, one in enumerate(made, 1):
        if number % 100 == 0 or number == count:
            _say(f"{number} of {count} binaries, {perf_counter() - started:.0f} s")
        yield one


def _faults(launches: Sequence[Launch], results: Results) -> Iterator[str]:
    """A line for each binary that is not as it must be."""
    for (index, name), binary in sorted(results.items()):
        fault = binary.fault(TARGETS[name])
        if fault:
            one = launches[index]
            kind = "FAILED" if name in CUDA else "reported"
            constants = " ".join(f"{key}={value}" for key, value in one.constants.items())
            yield f"{kind} {name} {one.name} [{one.types}] {constants}: {fault}"


def kernel_rows(launches: Sequence[Launch], results: Results) -> dict[str, dict[str, Any]]:
    """Of each kernel and the dtypes of its pointers: how many forms there are, and for each target
    the most registers and the most bytes of shared memory of any of them."""
    rows: dict[str, dict[str, Any]] = {}
    for index, one in enumerate(launches):
        row = rows.setdefault(f"{one.name} {one.types}", {"forms": 0})
        row["forms"] += 1
        for name in TARGETS:
            binary = results.get((index, name))
            if binary is not None and not binary.error:
                most = row.setdefault(name, [0, 0])
                row[name] = [max(most[0], binary.registers), max(most[1], binary.shared)]
    return dict(sorted(rows.items()))


def _matrices(cases: Mapping[str, list[Launch]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each linear of a token of plain decoding: its programs, how many of them an H200 runs at
    once on each multiprocessor, and how many bytes of weights are under way in all."""
    for case, launches in cases.items():
        linears: dict[str, Launch] = {}
        for one in launches:
            named = one.by_name
            if "weight_ptr" in named and len(one.grid) == 2:
                width = named.get("num_in", named.get("padded_in"))
                linears.setdefault(f"{case}: {named['num_out']} x {width}", one)
        for name, one in linears.items():
            yield name, _in_flight(one, compiled(one, "sm_90", with_pipeline=True))


def _in_flight(one: Launch, binary: Binary) -> dict[str, Any]:
    programs, at_once = one.grid[1], resident(binary, TARGETS["sm_90"])
    row: dict[str, Any] = {"programs": programs, "at_once": at_once}
    if binary.pipeline is None:
        # No copy is asynchronous: each turn waits for its own loads.
        return row | {"turns": 0.0, "bytes_in_flight": 0, "share": 0.0}
    weight, rows = one.by_name["weight_ptr"], one.arguments[0]
    outputs, inputs = one.constants["OUTPUTS"], one.constants["INPUTS"]
    halves = 2 if weight.dtype == torch.uint8 else 1
    of_weights = outputs * inputs * weight.element_size() // halves
    of_rows = one.constants["ROWS"] * inputs * rows.element_size()
    # Half a turn more on average: the next one is asked for behind the wait.
    turns = binary.pipeline.turns + 0.5
    share = of_weights / (of_weights + of_rows)
    running = min(programs, at_once * PROCESSORS)
    in_flight = running * turns * binary.pipeline.bytes_a_turn * share
    wanted = min(1.0, in_flight / (RATE * LATENCY))
    return row | {"turns": turns, "bytes_in_flight": round(in_flight), "share": round(wanted, 2)}


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """The table in lines."""
    for name, row in found["kernels"].items():
        cells = "  ".join(f"{key} {row[key][0]}/{row[key][1]}" for key in TARGETS if key in row)
        yield f"{name} ({row['forms']}): {cells}"
    for name, row in found["rounds"].items():
        count, sizes = sum(row["launches"].values()), row["bytes"]
        cells = "  ".join(f"{key} {size / 1e6:.1f} MB" for key, size in sizes.items())
        yield f"{name}: {count} launches, {row['operators']} operators of PyTorch;  {cells}"
        yield "    " + "  ".join(f"{key} {number}" for key, number in row["launches"].items())
    for name, row in found["matrices"].items():
        cells = "  ".join(f"{key} {value}" for key, value in row.items())
        yield f"{name}: {cells}"


def differences(
    table: Mapping[str, Any], found: Mapping[str, Any], *, is_part: bool = False
) -> list[str]:
    """A line for each number that is not as in the table. Lines of what cannot be compared begin
    with "reported": kernels whose source has changed since, and registers and shared memory of
    another version of Triton. Of targets that were not compiled nothing is said. If `found` has but
    a part of the forms, its numbers may be less than the table's."""
    same = table["triton"] == found["triton"]
    changed = dict(found["sources"].items() - table["sources"].items()).keys()
    lines = [
        f"reported: {name} has changed since the table was written; --write --kernels {name} "
        "renews its rows"
        for name in sorted(changed)
    ]
    if not same:
        lines.append(
            f"reported: the table is of Triton {table['triton']}, this is {found['triton']}: "
            "registers and shared memory are not compared"
        )
    for part in ("kernels", "rounds", "matrices"):
        before, now = table[part], found[part]
        if not before and now:
            lines.append(f"reported: the table has no {part}; --write adds them")
            continue
        rows = [name for name in before | now if name.split()[0] not in changed]
        lines += [f"{part}: {name} is not in the table" for name in rows if name not in before]
        if not is_part:
            lines += [f"{part}: {name} is no longer there" for name in rows if name not in now]
        for name in sorted(set(before) & set(now)):
            if changed & _kernels_of(part, name, now[name]):
                continue
            for key in sorted(set(before[name]) & set(now[name])):
                was, is_now = before[name][key], now[name][key]
                compared = same or (key not in TARGETS and part != "matrices")
                less = is_part and part == "kernels" and _is_less(is_now, was)
                if compared and is_now != was and not less:
                    lines.append(f"{part}: {name}: {key} is {is_now}, was {was}")
    return lines


def _kernels_of(part: str, name: str, row: Mapping[str, Any]) -> set[str]:
    """The kernels whose source the row called `name` depends on."""
    if part == "matrices":
        return {"linear_kernel", "int8_kernel", "groups_kernel"}
    return set(row["launches"]) if part == "rounds" else {name.split()[0]}


def _is_less(number: int | list[int], most: int | list[int]) -> bool:
    one, other = ([cell] if isinstance(cell, int) else cell for cell in (number, most))
    return all(left <= right for left, right in zip(one, other, strict=True))


def merged(
    table: Mapping[str, Any], found: Mapping[str, Any], *, is_part: bool = False
) -> dict[str, Any]:
    """`found`, and what only the table has: rows of other kernels, if a part of them was compiled,
    and numbers of other targets of the same source. Another version of Triton has a table of its
    own."""
    new = dict(found)
    if table["triton"] != found["triton"]:
        return new
    rows, made = dict[str, Any](), {name.split()[0] for name in found["kernels"]}
    for name, row in table["kernels"].items():
        kernel = name.split()[0]
        is_same = table["sources"].get(kernel) == found["sources"].get(kernel)
        if is_same and name in found["kernels"]:
            rows[name] = row | found["kernels"][name]
        elif is_part and kernel not in made:
            rows[name] = row
    new["kernels"] = dict(sorted((found["kernels"] | rows).items()))
    if is_part:
        own = {name: digest for name, digest in found["sources"].items() if name in made}
        new["sources"] = dict(sorted((table["sources"] | own).items()))
    return new


def written(found: Mapping[str, Any]) -> str:
    """JSON with a line for each row."""
    parts = [f'"{part}": {json.dumps(found[part])}' for part in ("triton", "sources")]
    for part in ("kernels", "rounds", "matrices"):
        rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in found[part].items()]
        parts.append(f'"{part}": {{\n' + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
