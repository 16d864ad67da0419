"""Run several prompts at once: one target pass a round serves them all, whatever their lengths.

python examples/batch.py
"""

from outrider import LLM, EngineConfig, SamplingParams

PROMPTS = [
    "def mean(values):",
    "class Stack:\n    def __init__(self):",
    "Question: A box holds 12 eggs. How many eggs do 7 boxes hold?\nAnswer:",
    "import json\n\ndef load(path):",
]

llm = LLM(config=EngineConfig(batch_size=4))

results = llm.generate(PROMPTS, SamplingParams(max_tokens=40))

for prompt, result in zip(PROMPTS, results, strict=True):
    print(f"--- {prompt!r}, {result.finish_reason}, {len(result.token_ids)} tokens")
    print(result.text)
