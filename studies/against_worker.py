"""One side of `scripts/against`: runs what it is told, a line of JSON in and one out.

It runs on the code of either commit, so it uses only what all of them have: `LLM`, `EngineConfig`,
`SamplingParams`, and for single passes `step` and `state` of a model. What a side cannot run is
answered with a line that has `refused`; the other lines that go out have what was asked for.

    {"do": "open", "cell": {...}}             the models of a cell      {"kernels": [...]}
    {"do": "run", "piece": 3, "times": 1}     one turn, timed here      {"seconds": ..., "ids": ...}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any

from outrider import LLM, EngineConfig, SamplingParams

CHUNK = 128
# Above those that requests get.
_SEQ_IDS = count(1_000_000)

Run = Callable[[int, int], dict[str, Any]]


def main() -> None:
    """Answer on the pipe that standard output was; what anybody prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    side = Side()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = side.answer(asked)
        except Exception as error:  # noqa: BLE001 - the other side may well be able to do it
            answer = {"refused": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Side:
    """Holds the models of one cell at a time."""

    def __init__(self) -> None:
        self._key = ""
        self._llm: LLM | None = None
        self._run: Run | None = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["do"] == "open":
            return self._open(asked["cell"])
        assert self._run is not None, "nothing is open"
        return self._run(asked["piece"], asked["times"])

    def _open(self, cell: dict[str, Any]) -> dict[str, Any]:
        self._run = None
        llm = self._loaded(cell["model"], cell["draft"], cell["config"])
        make = {"text": texts, "pass": passes, "prompt": prompts}[cell["kind"]]
        self._run = make(llm, cell)
        return {"kernels": [f"{c.op}: {c.name} {c.kind}".strip() for c in llm.kernels.choices]}

    def _loaded(self, model: str, draft: str | None, config: dict[str, Any]) -> LLM:
        key = json.dumps([model, draft, config], sort_keys=True)
        if self._llm is None or self._key != key:
            if self._llm is not None:
                self._llm.close()
            self._key, self._llm = "", None
            self._llm = LLM(model, draft=draft, config=EngineConfig(**config))
            self._key = key
        return self._llm


def texts(llm: LLM, cell: dict[str, Any]) -> Run:
    """A turn writes after `at_once` prompts, `times` times over."""
    texts, at_once = cell["texts"], cell["at_once"]
    params = SamplingParams(**cell["params"])

    def run(piece: int, times: int) -> dict[str, Any]:
        batch = [texts[(piece * at_once + i) % len(texts)] for i in range(at_once)]
        seconds = 0.0
        ids: list[list[int]] = []
        for _ in range(times):
            llm.forget()
            started = perf_counter()
            results = llm.generate(batch, params)
            seconds += perf_counter() - started
            ids = [list(result.token_ids) for result in results]
        return {"seconds": seconds, "ids": ids}

    return run


def prompts(llm: LLM, cell: dict[str, Any]) -> Run:
    """A turn reads a prompt that nothing in memory begins like, and writes one token."""
    size, params = llm.spec.vocab_size, SamplingParams(max_tokens=1)
    turns = count()

    def run(piece: int, times: int) -> dict[str, Any]:
        del piece
        seconds = 0.0
        ids: list[list[int]] = []
        for _ in range(times):
            turn = next(turns)
            prompt = [(7 * i + 13 * turn) % size for i in range(cell["rows"])]
            started = perf_counter()
            result = llm.generate([prompt], params)[0]
            seconds += perf_counter() - started
            ids.append(list(result.token_ids))
        return {"seconds": seconds, "ids": ids}

    return run


def passes(llm: LLM, cell: dict[str, Any]) -> Run:
    """A turn is `times` passes of so many rows over a text of `context` tokens; none is kept."""
    from outrider.core.protocols import DraftNeeds, StepRow

    model: Any = llm.models[cell["role"]]
    size, needs = model.spec.vocab_size, DraftNeeds()
    seq_id = next(_SEQ_IDS)
    model.state.open(seq_id, ())
    for start in range(0, cell["context"], CHUNK):
        part = [(7 * i) % size for i in range(start, start + CHUNK)]
        model.step([StepRow.chain(seq_id, part, logits_from=len(part))], needs)
        model.state.commit({seq_id: range(len(part))})
    row = StepRow.chain(seq_id, [(11 * i) % size for i in range(cell["rows"])])

    def run(piece: int, times: int) -> dict[str, Any]:
        del piece
        out: Any = None
        started = perf_counter()
        for _ in range(times):
            out = model.step([row], needs)
            model.state.commit({seq_id: ()})
        seconds = perf_counter() - started
        return {"seconds": seconds, "ids": [out.logits_MV.argmax(dim=-1).tolist()]}

    return run


if __name__ == "__main__":
    main()
