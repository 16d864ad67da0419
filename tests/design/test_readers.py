"""Files are read, and streams written, by the modules that are there for it and by named others."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from checks.sources import PACKAGE, name_of, nodes

# Who reads without `core/files.py`, and why.
EXCEPTIONS = {
    ("core/errors.py", "read_text"): "names of this package",
    ("core/env.py", "read_text"): "names of this package",
    ("api/chat_template.py", "read_text"): "templates of this package",
    ("api/result.py", "read_text"): "a script and a style of this package",
    ("outrider_lab/bench/reference.py", "read_text"): "figures of this package",
    ("outrider_lab/bench/studies/sweep_recipes.py", "read_text"): "figures of this package",
    ("outrider_lab/bench/workload.py", "read_text"): "prompts of this package",
    ("outrider_lab/cli/simulate_setup.py", "read_text"): "sizes of this package",
    ("kernels/native/build.py", "read_bytes"): "sources of this package, and what it compiled",
    ("kernels/native/build.py", "read_text"): "the RECORD of this package",
    ("plugins/parallel/meeting.py", "open"): "memory that it made",
    ("models/gguf/blocks.py", "fromfile"): "codebooks of this package",
    ("models/weights.py", "safe_open"): "behind check_header",
    ("pairs/catalog.py", "read_text"): "names of this package",
    ("estimate/forecast.py", "read_text"): "sheets of this package",
    ("server/thread_port.py", "open"): "4 MiB at most of files that loading has read",
    ("server/about.py", "read_bytes"): "pages of this package",
    ("core/process.py", "read_bytes"): "numbers of the kernel, in /proc and control groups",
    ("outrider_lab/train/checkpoint.py", "safe_open"): "behind check_header",
    ("outrider_lab/train/losses.py", "memmap"): "made by this run",
    ("outrider_lab/train/data.py", "read_text"): "what a package says it has",
    ("outrider_lab/train/tokens.py", "memmap"): "made by this run",
    ("outrider_lab/train/session.py", "memmap"): "made by this run",
}
READERS = {
    *("read_text", "read_bytes", "safe_open", "load_file", "from_file"),
    *("memmap", "fromfile", "loadtxt", "genfromtxt"),
}
LIBRARIES = {"os", "io", "codecs", "gzip", "lzma", "bz2", "zipfile", "tarfile"}


def _readers(nodes_of: Iterable[ast.AST]) -> list[str]:
    """The name of every call that may read a file."""
    found: list[str] = []
    for node in nodes_of:
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in {"open", *READERS}:
            if ast.unparse(node.func) in ("read_text", "read_bytes"):
                continue  # ours
            found.append(called.id)
        elif isinstance(called, ast.Attribute) and called.attr in READERS:
            found.append(called.attr)
        elif isinstance(called, ast.Attribute) and called.attr in ("open", "fdopen"):
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            modes = [word for word in words if isinstance(word, str)]
            owner = ast.unparse(called.value)
            in_library = owner in LIBRARIES and "devnull" not in ast.unparse(node)
            if any("r" in mode for mode in modes) or (in_library and not modes):
                found.append("open")
    return found


def test_nobody_else_reads_files() -> None:
    found = {
        (name_of(path), name)
        for path, nodes_of in nodes().items()
        if path != PACKAGE / "core" / "files.py"
        for name in _readers(nodes_of)
    }
    assert found - EXCEPTIONS.keys() == set()
    assert EXCEPTIONS.keys() - found == set(), "an exception that nobody needs"


# The only modules that may write to a stream around the gate, or draw with rich.
BEHIND = {"cli/gate.py", "cli/output.py"}
# Whose stdout is a pipe to the process that started them.
PIPES = {
    "api/helper.py",
    "plugins/parallel/ranks.py",
    "outrider_lab/bench/peers/sides.py",
}
DRAWING = {"print", "Console", "Live", "Status", "Prompt", "TextColumn", "Text", "Markdown"}
AROUND = {"write", "writev", "buffer", "__stdout__", "__stderr__"}
STREAMS = ("sys.stdout", "sys.stderr", "sys.__std")


def _around(nodes_of: Iterable[ast.AST]) -> list[str]:
    found: list[str] = []
    for node in nodes_of:
        if isinstance(node, ast.Attribute) and node.attr in AROUND:
            written = ast.unparse(node)
            if written in ("os.write", "os.writev") or written.startswith(STREAMS):
                found.append(written)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
            names = {alias.name for alias in node.names}
            found += sorted(names & DRAWING)
        if isinstance(node, ast.ImportFrom) and node.module == "outrider.cli.gate":
            found += sorted({"behind", "Gate"} & {alias.name for alias in node.names})
    return found


def test_nobody_writes_around_the_gate() -> None:
    found = {
        f"{name}: {call}"
        for path, nodes_of in nodes().items()
        if (name := name_of(path)) not in BEHIND | PIPES
        for call in _around(nodes_of)
    }
    assert found == set()
