"""lm-evaluation-harness by `local-completions`: its scores are those of the program itself."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PAIRS = [
    ("def quicksort(items):", " return items"),
    ("Once upon a time", " there was"),
    ("The answer is", " no"),
]
OURS = """
import json
from outrider import LLM
llm = LLM(threads=1)
out = []
for before, after in {pairs!r}:
    whole, first = llm.encode(before + after), llm.encode(before)
    found = llm.generate([whole], max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs
    rest = found[len(first):]
    out.append(sum(one.logprob for one in rest))
print(json.dumps(out))
"""


def test_log_likelihoods_are_our_own(served, ours):
    model = LocalCompletionsAPI(
        model=served.model,
        base_url=f"{served.url}/v1/completions",
        tokenizer_backend="remote",
        tokenized_requests=True,
        max_length=2048,
        seed=1,
    )
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(PAIRS)
    ]
    found = model.loglikelihood(requests)
    expected = ours(OURS.format(pairs=PAIRS))
    assert [value for value, _ in found] == pytest.approx(expected, abs=1e-4)
