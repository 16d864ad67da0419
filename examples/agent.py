"""An agent with two tools, by plain HTTP: the server asks for calls, this program makes them.

Start `outrider serve MODEL`, then: python examples/agent.py http://127.0.0.1:8000 ["a question"]
"""

import json
import sys
from urllib.request import Request, urlopen

MAX_TURNS = 4
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": PARAMETERS}}
    for name in FUNCTIONS
]


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"content-type": "application/json"})) as answer:
        return json.load(answer)


base = sys.argv[1].rstrip("/")
question = sys.argv[2] if len(sys.argv) > 2 else "What is 17 times 23?"
messages = [{"role": "user", "content": question}]
body = {"model": ask(f"{base}/v1/models")["data"][0]["id"], "tools": TOOLS, "temperature": 0}
body |= {"messages": messages, "max_tokens": 100, "parallel_tool_calls": False}

for turn in range(MAX_TURNS):
    # A small model may never call a tool unless it must. After one result it may answer.
    body["tool_choice"] = "auto" if turn else "required"
    message = ask(f"{base}/v1/chat/completions", body)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        print("answer:", message["content"])
        break
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        result = str(FUNCTIONS[name](**arguments))
        print(f"call: {name}({arguments['a']}, {arguments['b']}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
else:
    print(f"no answer after {MAX_TURNS} turns")
