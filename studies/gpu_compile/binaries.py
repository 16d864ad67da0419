"""Machine code of launches for devices that are not there, by Triton's own way of launching.

Triton asks a driver for the device and compiles for its target; here the driver is made up. The
wheel of Triton brings ptxas and cuobjdump, so nothing else is needed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from gpu_compile.meta import Launch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

KB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of device: what Triton calls it, and the shared memory, in bytes, that one program may
    have and that one multiprocessor has."""

    backend: str
    arch: int | str
    shared: int
    shared_in_all: int

    @property
    def of_triton(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, 32 if self.backend == "cuda" else 64)


# CUDA C++ Programming Guide, technical specifications by compute capability; AMD's CDNA 3 ISA.
TARGETS = {
    "sm_80": Target("cuda", 80, 163 * KB, 164 * KB),
    "sm_89": Target("cuda", 89, 99 * KB, 100 * KB),
    "sm_90": Target("cuda", 90, 227 * KB, 228 * KB),
    "sm_100": Target("cuda", 100, 227 * KB, 228 * KB),
    "sm_120": Target("cuda", 120, 99 * KB, 100 * KB),
    "gfx942": Target("hip", "gfx942", 64 * KB, 64 * KB),
}
# Those that must compile without a fault; others are reported.
CUDA = tuple(name for name, target in TARGETS.items() if target.backend == "cuda")


class _Driver:
    """A driver of one device that is not there. Triton keeps binaries by device number."""

    def __init__(self) -> None:
        self.name = CUDA[0]

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.name)

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name].of_triton


_DRIVER = _Driver()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The asynchronous copies of a kernel's main loop: bytes that one program asks for in a turn,
    and how many turns are under way where it waits. After the wait it asks for one more."""

    bytes_a_turn: int
    turns: float


@dataclass(frozen=True, slots=True)
class Binary:
    """What one form takes on one target: registers a thread, bytes of stack and of memory that
    spills go to, bytes of shared memory and of code. `error` says why there is none."""

    registers: int = 0
    stack: int = 0
    shared: int = 0
    code: int = 0
    num_warps: int = 0
    pipeline: Pipeline | None = None
    error: str = ""

    def fault(self, target: Target) -> str:
        """What must not be, in words; "" if nothing is wrong."""
        if self.error:
            return f"does not compile: {self.error}"
        if self.stack:
            return f"{self.stack} bytes of stack"
        if self.shared > target.shared:
            return f"{self.shared} bytes of shared memory, where {target.shared} are"
        return ""


def compiled(launch: Launch, name: str, *, with_pipeline: bool = False) -> Binary:
    """The binary of `launch` for the target `name`. Triton's cache is used (TRITON_CACHE_DIR)."""
    _DRIVER.name = name
    driver.set_active(_DRIVER)
    others = _OF_CUDA if TARGETS[name].backend == "hip" else ()
    constants = {key: one for key, one in launch.constants.items() if key not in others}
    try:
        made: Any = launch.kernel.warmup(
            *launch.arguments, grid=launch.grid, **constants, enable_fp_fusion=False
        )
    except Exception as error:  # noqa: BLE001 whatever a compiler raises is the answer
        last = str(error).strip().splitlines() or [""]
        return Binary(error=f"{type(error).__name__}: {last[-1][:200]}")
    shared, num_warps = made.metadata.shared, made.metadata.num_warps
    if "amdgcn" in made.asm:
        found = {key: _number(made.asm["amdgcn"], key) for key in _OF_AMD}
        stack = found[".private_segment_fixed_size"]
        return Binary(found[".vgpr_count"], stack, shared, len(made.asm["hsaco"]), num_warps)
    cubin = made.asm["cubin"]
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        registers, stack = usage(_cuobjdump("--dump-resource-usage", file.name))
        pipeline = None
        if with_pipeline:
            pipeline = pipeline_of(_cuobjdump("-sass", file.name), num_warps)
    return Binary(registers, stack, shared, len(cubin), num_warps, pipeline)


# Options that Triton has for CUDA alone; and numbers in the assembly of AMD.
_OF_CUDA = ("maxnreg",)
_OF_AMD = (".vgpr_count", ".private_segment_fixed_size")


def _number(text: str, key: str) -> int:
    found = re.search(rf"{re.escape(key)}:\s+(\d+)", text)
    return int(found[1]) if found else 0


def _cuobjdump(*words: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), *words], capture_output=True, text=True, check=True).stdout


def usage(text: str) -> tuple[int, int]:
    """Registers a thread, and bytes of stack and local memory a thread, as cuobjdump says them.
    What a kernel spills goes to its stack."""
    found = re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump names no registers: {text[-200:]!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+?)\s*;")
_WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")
THREADS = 32


def pipeline_of(sass: str, num_warps: int) -> Pipeline | None:
    """Of the smallest loop that copies to shared memory without waiting; None if none does.

    LDGSTS copies 4, 8 or 16 bytes a thread, LDGDEPBAR ends a group of copies, and DEPBAR.LE waits
    until at most so many groups are under way.
    """
    code = [(int(at, 16), text) for at, text in _LINE.findall(sass)]
    loops: list[Sequence[str]] = []
    for at, text in code:
        target = re.findall(r"0x([0-9a-f]+)", text)
        if re.search(r"\bBRA\b", text) and target and int(target[-1], 16) <= at:
            loops.append([one for place, one in code if int(target[-1], 16) <= place <= at])
    copying = [loop for loop in loops if any("LDGSTS" in one for one in loop)]
    if not copying:
        return None
    loop = min(copying, key=len)
    copies = [one for one in loop if "LDGSTS" in one]
    groups = sum("LDGDEPBAR" in one for one in loop)
    waits = [int(found[1], 16) for one in loop if (found := _WAIT.search(one))]
    if not (groups and waits):
        return None
    num_bytes = THREADS * num_warps * sum(map(_copied, copies))
    return Pipeline(num_bytes, min(waits) / groups)


def _copied(instruction: str) -> int:
    """Bytes of one thread."""
    return 16 if re.search(r"\.128\b", instruction) else 8 if ".64 " in instruction else 4


# Of a multiprocessor: registers, warps, programs, and shared memory of a program besides its own.
REGISTERS, WARPS, PROGRAMS, RESERVED = 65_536, 64, 32, KB


def resident(binary: Binary, target: Target) -> int:
    """How many programs one multiprocessor runs at once."""
    # Registers are given out to warps, 256 at a time.
    of_a_warp = -(-binary.registers * THREADS // 256) * 256
    return min(
        PROGRAMS,
        WARPS // binary.num_warps,
        REGISTERS // (of_a_warp * binary.num_warps),
        target.shared_in_all // (binary.shared + RESERVED),
    )
