"""Stream a completion of the embedded pair and say what it cost.

python examples/stream.py ["a prompt"]
"""

import sys

from outrider import LLM, SamplingParams

prompt = sys.argv[1] if len(sys.argv) > 1 else "def quicksort(items):"
llm = LLM()

print(prompt, end="")
for event in llm.stream(prompt, SamplingParams(max_tokens=96)):
    print(event.text, end="", flush=True)
print()
print(llm.last_result.summary())
