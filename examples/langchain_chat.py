"""LangChain over a running server: a text as it is written, an answer of a form, a tool's call.

Needs `pip install langchain-openai`. Start `outrider serve MODEL`, then:
python examples/langchain_chat.py http://127.0.0.1:8000
"""

import json
import sys
from typing import Literal
from urllib.request import urlopen

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Town(BaseModel):
    """A town and how many people live there."""

    name: str = Field(max_length=12)
    size: Literal["small", "middle", "large"]


@tool
def weather(days: Literal[1, 2, 3], unit: Literal["C", "F"]) -> str:
    """The weather of the next days."""
    return f"{days} days of sun, 20 {unit}"


base = sys.argv[1].rstrip("/")
with urlopen(f"{base}/v1/models") as answer:
    name = json.load(answer)["data"][0]["id"]
model = ChatOpenAI(base_url=f"{base}/v1", model=name, api_key="none", temperature=0, max_tokens=100)

for chunk in model.stream("Say hello."):
    print(chunk.text, end="", flush=True)
print()

town = model.with_structured_output(Town, method="json_schema").invoke("Name a town.")
print("town:", town)

for call in model.bind_tools([weather], tool_choice="any").invoke("The weather?").tool_calls:
    print("call:", call["name"], call["args"], "=", weather.invoke(call["args"]))
