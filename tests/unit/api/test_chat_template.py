"""Chat templates: what transformers offers them, and that none of them can hurt us."""

from __future__ import annotations

import os
import signal
import threading
import time
from unittest.mock import Mock

import pytest

from outrider.api.chat_template import (
    RENDER_CPU_SECONDS,
    ChatTemplate,
    HelperLostError,
    begin_helper,
)
from outrider.core.errors import CheckpointError

MESSAGES = [{"role": "user", "content": "naïve \U0001f600"}]

BOMBS = {
    "endless loop": "{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "huge string": "{{ 'a' * 10 ** 10 }}",
    "huge power": "{{ 9 ** (9 ** 9) }}",
    "huge list": "{{ [1] * 10 ** 9 }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "padding": "{{ '%1000000000d' % 1 }}",
    "centred": "{{ 'a'.center(10 ** 9) }}",
    "long output": "{% for i in range(9999) %}{{ 'x' * 99 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep nesting": "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "huge range": "{{ range(10 ** 12) | list }}",
    "slow filter": "{{ ('a' * 10 ** 8) | list | sort | length }}",
    "private attribute": "{{ ''.__class__.__mro__ }}",
    "private namespace": "{{ namespace(__class__=1) }}",
    "file": "{% include '/etc/passwd' %}",
    "division": "{{ 1 / 0 }}",
    "syntax": "{% if %}",
    "refusal": "{{ raise_exception('no system role') }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_template_is_an_error_in_time(name: str) -> None:
    template = ChatTemplate(BOMBS[name], {})
    # The helper ends itself: nobody waits until its answer is late.
    with pytest.raises(CheckpointError, match=r"chat template: (?!no answer)"):
        template.render(MESSAGES)
    template.close()


def test_a_machine_that_is_busy_with_other_work_refuses_no_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.render(MESSAGES)
    process = template._helper._process  # pyright: ignore[reportPrivateUsage]
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    timer = threading.Timer(RENDER_CPU_SECONDS + 0.1, os.kill, (process.pid, signal.SIGCONT))
    timer.start()
    assert template.render(MESSAGES).text == MESSAGES[0]["content"]
    assert time.monotonic() - stopped > RENDER_CPU_SECONDS
    template.close()


def test_forms_of_a_conversation_share_their_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [{"role": "system", "content": "short"}, *MESSAGES, *MESSAGES]
    template, counts = ChatTemplate(BOMBS["refusal"], {}), list[int]()
    for seconds in ("0.01", "0.6"):
        asked: list[object] = []

        def refuse(request: object, *, max_bytes: int) -> dict[str, str]:
            asked.append((request, max_bytes))  # noqa: B023 - called within the turn
            return {"error": "no", "seconds": seconds}  # noqa: B023

        monkeypatch.setattr(template, "_helper", Mock(ask=refuse))
        with pytest.raises(CheckpointError, match="chat template: no"):
            template.render(messages)
        counts.append(len(asked))
    assert counts[0] > counts[1] == 2


def test_a_form_that_was_found_is_not_lost_with_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [{"role": "system", "content": "left out"}, *MESSAGES]
    template, replies = ChatTemplate(BOMBS["refusal"], {}), [MESSAGES[0]["content"]]

    def first_alone(request: object, *, max_bytes: int) -> dict[str, str]:
        del request, max_bytes
        if not replies:
            raise HelperLostError("it takes too much processor time")
        return {"text": replies.pop(), "seconds": "0.9"}

    monkeypatch.setattr(template, "_helper", Mock(ask=first_alone))
    found = template.render(messages)
    assert found.text == MESSAGES[0]["content"]
    assert any("leaves it out" in note for note in found.notes)


def test_the_reason_a_template_gives_reaches_the_user() -> None:
    with pytest.raises(CheckpointError, match="no system role") as caught:
        ChatTemplate(BOMBS["refusal"], {}).render(MESSAGES)
    assert "outrider generate" in str(caught.value.hint)


def test_one_helper_serves_many_renders_and_is_replaced_after_a_failure() -> None:
    template = ChatTemplate(
        "{% if messages|length > 1 %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}", {}
    )
    assert template.render(MESSAGES).text == MESSAGES[0]["content"]
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        template.render([*MESSAGES, {"role": "assistant", "content": "hello"}])
    helpers: set[object] = set()
    for _ in range(20):
        assert template.render(MESSAGES).text == MESSAGES[0]["content"]
        helpers.add(template._helper._process)  # pyright: ignore[reportPrivateUsage]
    assert len(helpers) == 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ missing }}|", "<s>|"),
        ("{% for m in messages %}\n  {{ m['role'] }}\n{% endfor %}", "  user\n"),
        ("{{ {'a': 'é', 'b': [1, none]} | tojson }}", '{"a": "é", "b": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}text{% endgeneration %}", "text"),
        ("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}", "2"),
        ("{{ dict(a=1).a }}{{ tools is none }}{{ add_generation_prompt }}", "1TrueTrue"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, expected: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES).text == expected


def test_long_conversations_may_render_long_prompts() -> None:
    messages = [{"role": "user", "content": "word " * 20_000}]
    found = ChatTemplate("{{ messages[0].content * 3 }}", {}).render(messages)
    assert len(found.text) == 300_000


def test_a_helper_that_was_started_for_an_unknown_template_serves_the_next_one() -> None:
    begin_helper()
    template = ChatTemplate("{{ messages[0].content }}", {})
    begun = template._helper._process  # pyright: ignore[reportPrivateUsage]
    assert begun is not None
    assert template.render([{"role": "user", "content": "hi"}]).text == "hi"
    assert template._helper._process is begun  # pyright: ignore[reportPrivateUsage]
    other = ChatTemplate("", {})
    assert other._helper._process is None  # pyright: ignore[reportPrivateUsage]
    template.close()


def test_a_helper_that_was_started_early_answers_the_first_request() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    helper = template._helper  # pyright: ignore[reportPrivateUsage]
    template.begin()
    started = helper._process  # pyright: ignore[reportPrivateUsage]
    assert started is not None
    assert template.render(MESSAGES).text == MESSAGES[0]["content"]
    assert helper._process is started  # pyright: ignore[reportPrivateUsage]
    template.close()
