"""Sample with a seed. With the match rule the text is the seed's, with any drafter or none.

python examples/sampled.py
"""

from outrider import LLM, EngineConfig, SamplingParams

PROMPT = "Question: A train travels 60 miles in 2 hours. How fast is it?\nAnswer:"


def sample(seed: int, drafter: str, sampler: str) -> str:
    llm = LLM(config=EngineConfig(drafter=drafter, sampler=sampler))
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=seed)
    return llm.generate(PROMPT, params)[0].text


for seed in (1, 2):
    print(f"seed {seed}:{sample(seed, 'model', 'block')}")

texts = {drafter: sample(1, drafter, "match") for drafter in ("none", "model", "ngram")}
print("match rule, one text for all drafters:", len(set(texts.values())) == 1)
