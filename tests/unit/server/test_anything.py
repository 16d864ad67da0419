"""Whatever a client sends in whatever field, the answer is a text or names what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask
from outrider.server.chat import ChatBody, CompletionBody

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**40])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["none", "auto", "text", "content", "type", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
HELLO = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
# Of engines that are no double: which messages make a conversation.
_OWN = {"messages"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody)]
)
@given(data=st.data())
def test_nothing_is_a_defect(
    path: str, kind: type[ChatBody] | type[CompletionBody], data: st.DataObject
) -> None:
    names = sorted(set(kind.__struct_encode_fields__) - _OWN)
    drawn = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=4))
    given_prompt = {name: HELLO[name] for name in HELLO if name in kind.__struct_encode_fields__}
    got = ask(ScriptedPort(), path, given_prompt | drawn)
    assert got.status in (200, 400, 404), got.body
    if got.status != 200:
        error = got.json()["error"]
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
