"""Two turns through the checkpoint's own chat template.

python examples/chat.py
"""

from outrider import LLM, SamplingParams

TURNS = [
    "Tom has 5 apples and buys 8 more. How many apples does he have?",
    "He gives 3 away. How many are left?",
]

llm = LLM()
messages: list[dict[str, str]] = []

for question in TURNS:
    messages.append({"role": "user", "content": question})
    print(f"you: {question}\nmodel: ", end="")
    reply = ""
    for event in llm.chat(messages, SamplingParams(max_tokens=60)):
        print(event.text, end="", flush=True)
        reply += event.text
    print()
    messages.append({"role": "assistant", "content": reply.strip()})
