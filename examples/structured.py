"""A JSON answer that follows a schema whatever the model would rather write, drafts included.

python examples/structured.py
"""

import json

from outrider import LLM, SamplingParams

# A string or a list without a bound may go on until max_tokens, where its JSON is not yet whole.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "language": {"enum": ["C", "Python", "Rust"]},
        "stars": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "language", "stars"],
    "additionalProperties": False,
}

llm = LLM()
[result] = llm.generate("A library, as JSON: ", SamplingParams(max_tokens=160), schema=SCHEMA)

print(json.dumps(json.loads(result.text), indent=2))
print(result.summary())
