"""instructor: pydantic models out of the server."""

from __future__ import annotations

from typing import Literal

import pytest

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Town(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=8)
    size: Literal[1, 2, 3]


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS_STRICT", "TOOLS"])
def test_a_model_comes_back(served, mode):
    raw = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(raw, mode=getattr(instructor.Mode, mode))
    found = client.chat.completions.create(
        model=served.model,
        messages=[{"role": "user", "content": "Name a town."}],
        response_model=Town,
        max_tokens=200,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(found, Town)
