"""Whether the CPU's matrix tiles (AMX) can be used, found out without risking the process.

Three questions, the harmless ones first: does the CPU have tiles, does the operating system keep
them, and did the compiler know them? If so, a short trial of the kernels runs in another process,
so that whatever is wrong with this machine, compiler or hypervisor ends that process and not the
user's. A trial that was passed leaves an empty file beside the library and is not repeated. At last
this process asks the kernel for its own permission, which must come before it uses a tile.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

TRIAL_SECONDS = 60

_FORBIDDEN = "AMX: the kernel forbids it"
# As in csrc/tiles.cpp.
_MISSING = (
    None,
    "AMX: this CPU has no tiles for bfloat16 and int8",
    "AMX: the operating system does not keep tiles",
    "AMX: the compiler does not know it",
)
# As in csrc/tiles_check.cpp.
_VERDICTS = {3: _FORBIDDEN, 4: "AMX: its trial gave wrong sums"}
# Without site packages, so it starts in some 20 ms; without a core file, since it may crash.
_TRIAL = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.exit(ctypes.CDLL(sys.argv[1]).outrider_tiles_check())
"""
_log = logging.getLogger(__name__)


@functools.cache
def tiles_refusal(library: ctypes.CDLL) -> str | None:
    """Why linears cannot use tiles, in one sentence; None if they can, in this process from now on.

    `library` is the one of `built_kernels`. The permission is for all threads of the process, those
    that run already too.
    """
    missing: int = library.outrider_tiles_missing()
    if missing:
        return _MISSING[missing]
    path = Path(library._name)  # pyright: ignore[reportPrivateUsage] - its only name
    passed = path.with_suffix(".tiles")
    if not passed.exists():
        if refusal := _trial(path):
            return refusal
        with contextlib.suppress(OSError):
            passed.touch()
    return None if library.outrider_tiles_permit() else _FORBIDDEN


def _trial(library: Path) -> str | None:
    start = time.monotonic()
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TRIAL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"AMX: its trial did not run: {error}"
    _log.info("Tried tiles in %.2f s: %d.", time.monotonic() - start, result.returncode)
    if result.returncode == 0:
        return None
    if result.returncode < 0:
        return f"AMX: its trial crashed: {signal.strsignal(-result.returncode)}"
    if result.returncode in _VERDICTS:
        return _VERDICTS[result.returncode]
    last = (result.stderr.strip().splitlines() or ["it gave no message"])[-1]
    return f"AMX: its trial failed: {last}"
