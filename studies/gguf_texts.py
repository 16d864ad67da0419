"""Greedy texts of GGUF files beside llama.cpp: `run.py gguf_texts --files FILE...`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import Report, cells_before, note, study
from gguf_sides import CONTEXT, peer_of
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import ConfigError
from outrider_lab.bench.peers.contestants import LLAMA
from outrider_lab.bench.peers.sides import Setup
from outrider_lab.bench.workload import builtin_texts
from outrider_lab.measure.machine import in_turns
from outrider_lab.measure.store import write_json

DOMAINS = ("code", "maths", "conversation", "translation")
NUM_TOKENS, THREADS = 64, 1
# Of so many of the likeliest tokens log-probs are compared.
NUM_TOP = 5
EQUAL_TEXTS = 0.95
# Of a text that has ended.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens until an end or the limit, and at every position the log-probs of the likeliest."""

    ids: Sequence[int]
    top: Sequence[Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Split:
    """Where two texts first differ. A margin is how much likelier a side holds its own token than
    the other side's, in log-probs; None where that one is not among its likeliest."""

    prompt: int
    place: int
    tokens: tuple[int, int]
    margins: tuple[float | None, float | None]

    @property
    def swing(self) -> float | None:
        """How much the margin differs between the two sides."""
        one, other = self.margins
        return None if one is None or other is None else one + other


@study(files=[], peers="", tokenizer="", num_prompts=100)
def gguf_texts(options: Options, report: Report) -> bool | None:
    """Does a GGUF file write here what it writes in llama.cpp, or else what its numbers write?

    64 greedy tokens of each prompt, by both, keys and values of llama.cpp in float32. Of a file in
    float32 both must write the same, but for near-ties: at the first difference of two texts the
    log-probs of both candidates are compared, on both sides, and the difference of their margins
    must be one that equal positions have as well. Of any other file each is compared with the text
    of the same numbers in float32, which ours writes. Files that --output has are not run again.
    """
    if not options.files:
        raise ConfigError("no file is named.", hint="--files MODEL.gguf")
    report["cells"] = cells_before(options.output)
    done = {cell["file"] for cell in report["cells"]}
    for file in map(Path, options.files):
        if file.name not in done:
            note(report, file=file.name, **_agreement(file, options))
        if options.output:
            write_json(options.output, report)
    return all(cell["holds"] for cell in report["cells"])


def _agreement(file: Path, options: Options) -> dict[str, Any]:
    config = EngineConfig(
        drafter="none", tokenizer=options.tokenizer, context=CONTEXT, threads=THREADS
    )
    with closing(LLM(file, config=config)) as llm:
        prompts = _prompts(llm, 2 if options.quick else options.num_prompts)
        ours = _ours(llm, prompts)
        is_float = llm.spec.weight_bytes == 4 * llm.spec.num_parameters
    theirs = _theirs(file, prompts, options.peers)
    found: dict[str, Any] = {"num_prompts": len(prompts), "num_tokens": NUM_TOKENS}
    if is_float:
        both = beside(ours, theirs)
        equal = both["num_equal"] >= EQUAL_TEXTS * len(prompts)
        holds = equal and both["num_explained"] == len(both["splits"])
        return found | {"dtype": "float32", "holds": holds, "llama.cpp": both}
    with closing(LLM(file, config=config, dtype="float32")) as llm:
        exact = _ours(llm, prompts)
    own, other = beside(exact, ours), beside(exact, theirs)
    holds = own["num_equal"] >= other["num_equal"]
    return found | {"holds": holds, "ours": own, "llama.cpp": other, "each": beside(ours, theirs)}


def _prompts(llm: LLM, number: int) -> list[list[int]]:
    texts = in_turns([builtin_texts(domain) for domain in DOMAINS])[:number]
    return [list(ids) for ids in llm.tokenizer.encode_batch(texts)]


def _ours(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Text]:
    params = SamplingParams(max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=NUM_TOP)
    return [
        Text(result.token_ids, [dict(one.top) for one in result.logprobs])
        for result in llm.generate(prompts, params)
    ]


def _theirs(file: Path, prompts: Sequence[Sequence[int]], folder: str) -> list[Text]:
    options = {"cache": "f32", "num_probs": NUM_TOP, "context": CONTEXT}
    setup = Setup("plain", str(file), "", "gguf", "none", 0, THREADS, options)
    asked = {"name": setup.name, "text": "", "max_tokens": NUM_TOKENS, "temperature": 0.0}
    with TemporaryDirectory() as logs, peer_of(LLAMA, folder, Path(logs)) as peer:
        peer.ask("load", setup=asdict(setup))
        told = (peer.ask("run", ids=ids, seed=0, **asked) for ids in prompts)
        return [Text(one["ids"], [dict(top) for top in one["probs"]]) for one in told]


def beside(ours: Sequence[Text], theirs: Sequence[Text]) -> dict[str, Any]:
    """How far the texts are the same, and why not further."""
    pairs = list(zip(ours, theirs, strict=True))
    splits = [
        split
        for prompt, (one, other) in enumerate(pairs)
        if (split := _split(prompt, one, other)) is not None
    ]
    places = {prompt: len(one.ids) for prompt, (one, _) in enumerate(pairs)}
    places |= {split.prompt: split.place for split in splits}
    noise = sorted(
        abs(difference)
        for prompt, (one, other) in enumerate(pairs)
        for difference in _margins_apart(one, other, places[prompt])
    )
    most = noise[-1] if noise else 0.0
    explained = [split.swing is not None and split.swing <= most for split in splits]
    return {
        "num_equal": len(pairs) - len(splits),
        "mean_equal_tokens": statistics.fmean(places.values()),
        "mean_tokens": statistics.fmean(len(one.ids) for one in ours),
        "num_explained": sum(explained),
        "margins_apart": {
            "num": len(noise),
            "median": statistics.median(noise or [0.0]),
            "p99": noise[int(0.99 * len(noise))] if noise else 0.0,
            "most": most,
        },
        "splits": [
            asdict(split) | {"swing": split.swing, "explained": why}
            for split, why in zip(splits, explained, strict=True)
        ],
    }


def _split(prompt: int, one: Text, other: Text) -> Split | None:
    for place, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)):
        if a != b:
            margins = _margin(one.top[place], a, b), _margin(other.top[place], b, a)
            return Split(prompt, place, (a, b), margins)
    place = min(len(one.ids), len(other.ids))
    # llama.cpp may keep the token that ends a text to itself.
    if max(len(one.ids), len(other.ids)) > place + 1:
        return Split(prompt, place, (NO_TOKEN, NO_TOKEN), (None, None))
    return None


def _margin(top: Mapping[int, float], over: int, under: int) -> float | None:
    return top[over] - top[under] if over in top and under in top else None


def _margins_apart(one: Text, other: Text, most: int) -> Iterator[float]:
    """At each of the first positions, where the texts are equal: by how much the two sides differ
    in the margin of the likeliest token over the next one."""
    for a, b in zip(one.top[:most], other.top[:most], strict=False):
        first, second = sorted(a, key=lambda token: -a[token])[:2]
        if (theirs := _margin(b, first, second)) is not None:
            yield a[first] - a[second] - theirs
