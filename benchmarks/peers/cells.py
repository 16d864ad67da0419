"""Who takes part, and in which variants: for each peer, drafter and number format a small sweep.

The best variant of each is chosen on prompts that are not counted, by the same procedure for all.
Number formats are those of the weights: `int8` is our int8 and GGUF's q8_0, `int4` our int4 and
q4_0. In `bf16` transformers may also compute in float32, and readers of GGUF may have f16, which
holds these weights as well and is faster where the processor knows no bf16.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMS = {"f32": ("f32",), "bf16": ("bf16", "f16"), "int8": ("q8_0",), "int4": ("q4_0",)}
DRAFTERS = ("none", "model", "ngram")
PEERS = ("transformers", "llama.cpp", "openvino")
OURS = "outrider"
HERE = Path(__file__).parent
BUILD = "scripts/peers"


@dataclass(frozen=True, slots=True)
class Weights:
    """One tier: checkpoint folders, and the same weights as GGUF files by their number format."""

    target: Path
    draft: Path
    target_gguf: dict[str, Path]
    draft_gguf: dict[str, Path]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A variant of a peer: `options` are the peer's own."""

    peer: str
    drafter: str
    form: str
    k: int = 0
    options: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @property
    def name(self) -> str:
        said = [f"k={self.k}"] if self.k else []
        said += [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([self.peer, self.drafter, self.form, *said])

    @property
    def group(self) -> tuple[str, str, str]:
        """Those among whom the best is chosen."""
        return self.peer, self.drafter, self.form

    def cell(self, weights: Weights, threads: int) -> dict[str, Any]:
        """What the peer is told to load."""
        reads_gguf = self.peer in ("llama.cpp", "openvino")
        gguf = self.options.get("gguf", FORMS[self.form][0])
        target = weights.target_gguf[gguf] if reads_gguf else weights.target
        draft = weights.draft_gguf[gguf] if reads_gguf else weights.draft
        told = asdict(self)
        del told["peer"]
        return {**told, "name": self.name, "target": str(target), "draft": str(draft)} | {
            "threads": threads,
            "options": self.options | (GENAI if self.peer == "openvino" else {}),
        }


# What the embedded vocabulary means to a library that is given nothing but ids.
GENAI = {"stop_id": 0, "vocab_size": 8192}


def variants(peer: str, form: str, drafters: tuple[str, ...]) -> Iterator[Contestant]:
    """Everything that `peer` has to offer in this format; empty where it has none."""
    makers = {
        OURS: _ours,
        "transformers": _transformers,
        "llama.cpp": _llama,
        "openvino": _openvino,
    }
    for found in makers[peer](form):
        if found.drafter in drafters:
            yield found


def _ours(form: str) -> Iterator[Contestant]:
    yield Contestant(OURS, "none", form)
    for k in (2, 4, 8):
        yield Contestant(OURS, "model", form, k)
    yield Contestant(OURS, "model", form, 8, {"controller": "band"})
    for k in (4, 8):
        yield Contestant(OURS, "ngram", form, k)


def _transformers(form: str) -> Iterator[Contestant]:
    """It has no 8 or 4 bits without further libraries."""
    dtypes = {"f32": ("float32",), "bf16": ("bfloat16", "float32")}.get(form, ())
    for dtype in dtypes:
        options = {"dtype": dtype}
        yield Contestant("transformers", "none", form, 0, options)
        for k in (0, 4):
            yield Contestant("transformers", "model", form, k, options)
        for k in (4, 8):
            yield Contestant("transformers", "ngram", form, k, options)


def _llama(form: str) -> Iterator[Contestant]:
    for gguf in FORMS[form]:
        options = {"gguf": gguf}
        yield Contestant("llama.cpp", "none", form, 0, options)
        for k in (2, 4, 8):
            yield Contestant("llama.cpp", "model", form, k, options)
        yield Contestant("llama.cpp", "model", form, 8, {**options, "p_min": 0.5})
        for k in (4, 8):
            yield Contestant("llama.cpp", "ngram", form, k, {**options, "kind": "ngram-simple"})
        for kind in ("ngram-map-k", "ngram-cache"):
            yield Contestant("llama.cpp", "ngram", form, 8, {**options, "kind": kind})


def _openvino(form: str) -> Iterator[Contestant]:
    """It reads neither f32 nor bf16 from GGUF; of the latter the f16 file serves."""
    options = {"gguf": FORMS[form][-1]}
    yield Contestant("openvino", "none", form, 0, options)
    for k in (2, 4):
        yield Contestant("openvino", "model", form, k, options)
    for k in (4, 8):
        yield Contestant("openvino", "ngram", form, k, options)


def command_of(peer: str, folder: Path) -> list[str] | None:
    """How to start `peer`; None if it has not been built in `folder`."""
    if peer in (OURS, "transformers"):
        return [sys.executable, str(HERE / f"side_{peer}.py")]
    if peer == "openvino":
        python = folder / "openvino" / "bin" / "python"
        return [str(python), str(HERE / "side_openvino.py")] if python.exists() else None
    binaries = folder / "llama.cpp" / "build" / "bin"
    if shutil.which("llama-server", path=binaries) is None:
        return None
    return [sys.executable, str(HERE / "side_llama.py"), str(binaries)]
