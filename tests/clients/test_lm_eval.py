"""lm-evaluation-harness by `local-completions`: its scores are those of the program itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

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


TASK = """\
task: small
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: loglikelihood
test_split: train
doc_to_text: "{{{{before}}}}"
doc_to_target: "{{{{after}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
"""


def test_the_example_scores_a_task(served, ours, tmp_path):
    """Of a task of our own, for that of the example is downloaded."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"before": a, "after": b}) + "\n" for a, b in PAIRS))
    (tmp_path / "small.yaml").write_text(TASK.format(data=data))
    example = Path(__file__).parents[2] / "examples" / "lm_eval.sh"
    place = tmp_path / "results"
    folders = ["--include_path", str(tmp_path), "--output_path", str(place)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # noqa: TID251 - a child's
    homes = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": path}
    done = subprocess.run(
        ["sh", str(example), served.url, served.model, "small", *folders],
        env=os.environ | homes,  # noqa: TID251
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file,) = place.rglob("results_*.json")
    found = json.loads(file.read_text("utf-8"))["results"]["small"]["perplexity,none"]
    sums = ours(OURS.format(pairs=PAIRS))
    assert found == pytest.approx(math.exp(-sum(sums) / len(sums)), rel=1e-3)
