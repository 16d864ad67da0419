"""The same prompt with every drafter: equal tokens, fewer target passes.

python examples/compare_drafters.py
"""

from outrider import LLM, EngineConfig, SamplingParams

PROMPT = "def quicksort(items):"
PARAMS = SamplingParams(max_tokens=96)

plain = LLM(config=EngineConfig(drafter="none")).generate(PROMPT, PARAMS)[0]
print(f"{'drafter':8} {'k':>2} {'passes':>7} {'drafted':>8} {'accepted':>9} {'equal':>6}")

for drafter, k in [("none", 0), ("model", 2), ("model", 4), ("ngram", 4), ("ngram", 8)]:
    result = LLM(config=EngineConfig(drafter=drafter, k=k)).generate(PROMPT, PARAMS)[0]
    stats, equal = result.stats, result.token_ids == plain.token_ids
    print(
        f"{drafter:8} {k:2} {stats.num_target_passes:7} {stats.num_drafted:8} "
        f"{stats.num_accepted:9} {equal!s:>6}"
    )
