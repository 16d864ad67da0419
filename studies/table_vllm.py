"""vLLM's side of `run.py table`, run by the Python that has vLLM: answers JSON lines as a Peer."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from time import perf_counter
from typing import Any

# Answers go to the pipe, all that libraries print to the log.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


class Side:
    """A model in bfloat16 that runs up to `most` sequences at once."""

    def __init__(self, folder: str, context: int, most: int) -> None:
        vllm: Any = import_module("vllm")
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            folder,
            dtype="bfloat16",
            max_model_len=context,
            max_num_seqs=most,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )

    def seconds(self, count: int, length: int, written: int) -> float:
        """Seconds in which `count` prompts of `length` tokens get `written` tokens each."""
        prompts = [
            {"prompt_token_ids": [5 + index, *(20 + i % 400 for i in range(length - 1))]}
            for index in range(count)
        ]
        params = self._params(
            max_tokens=written, temperature=0.0, ignore_eos=True, detokenize=False
        )
        started = perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return perf_counter() - started


def main() -> None:
    side = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request.pop("do") == "load":
                side, answer = Side(**request), {}
            else:
                assert side is not None
                answer = {"seconds": side.seconds(**request)}
        except Exception as error:  # noqa: BLE001 - the driver says it
            answer = {"refused": repr(error)}
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
