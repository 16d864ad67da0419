"""Who serves requests to a GGUF file: variants of ours, of llama.cpp, and transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from common import real_folder
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.cli.models import read_spec
from outrider.core.errors import ConfigError, OutriderError
from outrider_lab.bench.peers.contestants import LLAMA, TRANSFORMERS, command_of
from outrider_lab.bench.peers.process import Peer, PeerError
from outrider_lab.bench.peers.sides import Setup

OURS, PLAIN = "ours", "none"
CONTEXT = 1024
_NUM_WARM = 16
OUR_VARIANTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("none", {}),
    ("ngram", {"k": 4}),
    ("ngram", {"k": 8}),
    ("suffix", {}),
    ("quantised-self", {"k": 3, "self_quantise": "int4"}),
    ("quantised-self", {"k": 6, "self_quantise": "int4"}),
    ("quantised-self", {"k": 4, "self_quantise": "int4", "tree_nodes": 12}),
    ("auto", {}),
)
# Drafter, K, and options of llama.cpp's side. Its draft model is the file itself in q4_0.
THEIR_VARIANTS: Sequence[tuple[str, int, Mapping[str, Any]]] = (
    ("none", 0, {}),
    ("ngram", 4, {"kind": "ngram-simple"}),
    ("ngram", 8, {"kind": "ngram-simple"}),
    ("ngram", 0, {"kind": "ngram-simple"}),
    ("ngram", 8, {"kind": "ngram-map-k"}),
    ("ngram", 8, {"kind": "ngram-map-k4v"}),
    ("ngram", 16, {"kind": "ngram-mod", "size": 6}),
    ("ngram", 0, {"kind": "ngram-mod"}),
    ("ngram", 0, {"kind": "ngram-cache"}),
    ("model", 3, {}),
    ("model", 8, {"p_min": 0.5}),
    ("model", 6, {"p_min": 0.5, "kind": "ngram-map-k"}),
)
# Drafter, K and dtype of transformers' side: which dtype is faster depends on the CPU.
REFERENCE_VARIANTS: Sequence[tuple[str, int, str]] = (
    ("none", 0, "bfloat16"),
    ("none", 0, "float32"),
    *(("ngram", k, dtype) for dtype in ("bfloat16", "float32") for k in (4, 8)),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A text, the seconds of its request, and those before its first token, if they are known."""

    ids: tuple[int, ...]
    seconds: float
    read_seconds: float | None = None

    @property
    def per_token(self) -> float:
        return self.seconds / len(self.ids)

    @property
    def per_later_token(self) -> float | None:
        if self.read_seconds is None:
            return None
        return (self.seconds - self.read_seconds) / (len(self.ids) - 1)


# Writes so many tokens after a prompt.
Side = Callable[[Sequence[int], int], Turn]


@contextmanager
def sides_of(
    file: Path, threads: int, options: Options, *, every: bool
) -> Generator[tuple[LLM, dict[str, Side]]]:
    """By name plain decoding of both, with `every` all variants; and what decodes plainly here."""
    number = (2 if options.quick else None) if every else 1
    config = EngineConfig(
        tokenizer=options.tokenizer, context=CONTEXT, batch_size=1, threads=threads
    )
    with ExitStack() as stack:
        plain, sides = _ours(stack, file, config, OUR_VARIANTS[:number])
        place = Path(stack.enter_context(TemporaryDirectory()))
        llama = stack.enter_context(peer_of(LLAMA, options.peers, place))
        draft = _draft(plain, file, place, Path(options.peers)) if every else ""
        for drafter, k, more in THEIR_VARIANTS[:number]:
            if drafter == "model" and not draft:
                continue
            kept = {"context": CONTEXT, **more}
            name = " ".join([LLAMA, drafter, *([f"k={k}"] if k else []), *map(str, more.values())])
            setup = Setup(name, str(file), draft, "gguf", drafter, k, threads, kept)
            sides |= _loaded(llama, setup)
        real = real_folder(options.real)
        if _are_like(plain, real):
            library = stack.enter_context(peer_of(TRANSFORMERS, options.peers, place))
            for drafter, k, dtype in REFERENCE_VARIANTS:
                if drafter == PLAIN or every:
                    name = " ".join([TRANSFORMERS, drafter, *([f"k={k}"] if k else []), dtype])
                    kept = {"dtype": dtype}
                    setup = Setup(name, str(real), "", "bf16", drafter, k, threads, kept)
                    sides |= _loaded(library, setup)
        for side in sides.values():
            side([5, 6, 7], _NUM_WARM)
        yield plain, sides


@contextmanager
def peer_of(name: str, folder: str, logs: Path) -> Generator[Peer]:
    """`folder` is where scripts/peers builds."""
    command = command_of(name, Path(folder).resolve(), Path())
    if command is None:
        raise ConfigError(f"there is no {name}.", hint="scripts/peers FOLDER builds llama.cpp")
    peer = Peer(name, command, logs / f"{name}.log")
    try:
        yield peer
    finally:
        peer.close()


def _ours(
    stack: ExitStack,
    file: Path,
    config: EngineConfig,
    variants: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[LLM, dict[str, Side]]:
    (drafter, _), *others = variants
    plain = stack.enter_context(closing(LLM(file, config=config, drafter=drafter)))
    sides: dict[str, Side] = {f"{OURS} {drafter}": partial(_write, plain)}
    for drafter, more in others:
        name = " ".join([OURS, drafter, *(f"{key}={value}" for key, value in more.items())])
        try:
            llm = LLM(file, config=replace(config, drafter=drafter, **more), weights_of=plain)
        except OutriderError as error:
            print(f"{name} cannot run: {error}", file=sys.stderr)
        else:
            sides[name] = partial(_write, stack.enter_context(closing(llm)))
    return plain, sides


def _write(llm: LLM, ids: Sequence[int], max_tokens: int) -> Turn:
    llm.forget()
    started = perf_counter()
    (result,) = llm.generate([ids], SamplingParams(max_tokens=max_tokens))
    return Turn(result.token_ids, perf_counter() - started, result.token_seconds[0])


def _are_like(llm: LLM, folder: Path) -> bool:
    """Whether the folder has the model that runs, whose weights are in bfloat16."""
    # Norms of a file in bfloat16 are in float32.
    if round(llm.spec.weight_bytes / llm.spec.num_parameters, 2) != 2.0 or not folder.is_dir():
        return False
    return read_spec(str(folder)).num_parameters == llm.spec.num_parameters


def _draft(llm: LLM, file: Path, place: Path, peers: Path) -> str:
    """The file in four bits; none of one that has hardly more."""
    if llm.spec.weight_bytes < llm.spec.num_parameters:
        return ""
    program = peers / "llama.cpp" / "build" / "bin" / "llama-quantize"
    draft = place / "draft-q4_0.gguf"
    words = [program, "--allow-requantize", file, draft, "Q4_0"]
    subprocess.run(words, capture_output=True, check=True)
    return str(draft)


def _loaded(peer: Peer, setup: Setup) -> dict[str, Side]:
    """The side by its name; none where the peer refuses."""
    try:
        notes = peer.ask("load", setup=asdict(setup))["notes"]
    except PeerError as error:
        print(f"{setup.name} cannot run: {error}", file=sys.stderr)
        return {}
    for told in notes:
        print(f"{setup.name}: {told}", file=sys.stderr)
    return {setup.name: partial(_asked, peer, setup.name)}


def _asked(peer: Peer, name: str, ids: Sequence[int], max_tokens: int) -> Turn:
    asked = {"ids": list(ids), "text": "", "max_tokens": max_tokens, "temperature": 0.0, "seed": 0}
    told = peer.ask("run", name=name, **asked)
    return Turn(tuple(told["ids"]), told["seconds"], told.get("read_seconds"))
