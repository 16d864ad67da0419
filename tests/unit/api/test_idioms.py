"""Calls as users of other libraries write them: keywords, arrays, one text, a failure beside
others, a context manager."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.request import RequestMaker
from outrider.api.result import GenerationResult
from outrider.core.errors import CapacityError, ConfigError, MachineError
from outrider.core.options import EngineOptions, SamplingOptions
from outrider.metrics import summarise

pytestmark = pytest.mark.weights

PROMPT = "def quicksort(items):"
FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    np.array,
    torch.tensor,
    iter,
    lambda ids: list(np.array(ids)),
    lambda ids: np.array(ids, dtype=np.int32),
    lambda ids: np.array([ids]),
    lambda ids: torch.tensor([ids]),
    lambda ids: [torch.tensor(ids)],
]
# Each with what its hint says.
WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda llm: llm.generate("x", max_new_tokens=4), "max_tokens"),
    (lambda llm: llm.generate("x", temprature=1), "temperature"),
    (lambda llm: llm.generate("x", {"max_tokens": 4}), "keywords"),
    (lambda llm: llm.stream("x", n_predict=4), "max_tokens"),
    (lambda llm: llm.generate("x", num_predict=4), "max_tokens"),
    (lambda llm: llm.generate("x", response_format={}), "schema"),
    (lambda llm: llm.generate("x", guided_json={}), "schema"),
    (lambda llm: llm.generate("x", guided_regex="a"), "regex"),
    (lambda llm: llm.generate("x", guided_choice=["a"]), "choices"),
    (lambda llm: llm.generate("x", guided_grammar="a"), "grammar"),
    (lambda llm: llm.generate("x", eos_token_id=4), "stop_token_ids"),
    (lambda llm: llm.generate("x", context=64), "LLM(model, ...) takes context"),
    (lambda llm: llm.chat([1, 2]), "role"),
    (lambda llm: type(llm)(n_ctx=4), "context"),
    (lambda llm: type(llm)(temperature=1), "llm.generate(prompt, ...) takes temperature"),
    (lambda llm: type(llm)(num_speculative_tokens=4), "k"),
    (lambda llm: type(llm)(config={"k": 4}), "keywords"),
    (lambda llm: type(llm)(7), "folder"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(drafter="ngram", k=3, context=256) as made:
        yield made


def ids_of(llm: LLM, *prompts: Any, **options: Any) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(*prompts, **options)]


def test_fields_of_the_configuration_are_keywords(llm: LLM) -> None:
    assert llm.config == EngineConfig(drafter="ngram", k=3, context=256)
    plain = EngineConfig(k=2, drafter="ngram", context=256)
    given = LLM(config=plain, k=5, controller="band").config
    assert (given.k, given.drafter, given.controller) == (5, "ngram", "band")


def test_sampling_parameters_are_keywords(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, stop=("\n\n",))
    asked = {"max_tokens": 9, "temperature": 0.8, "seed": 3, "stop": "\n\n"}
    wanted = ids_of(llm, PROMPT, params)
    assert ids_of(llm, PROMPT, **asked) == wanted
    assert ids_of(llm, PROMPT, SamplingParams(max_tokens=2, stop="x"), **asked) == wanted
    stream = llm.stream(PROMPT, **asked)  # pyright: ignore[reportArgumentType]
    assert [id for event in stream for id in event.token_ids] == list(wanted[0])


@pytest.mark.parametrize("stop", ["\n\n", ["\n\n"], ("\n\n",)])
def test_stop_is_a_text_or_any_sequence(stop: Any) -> None:
    assert SamplingParams(stop=stop) == SamplingParams(stop=("\n\n",))
    assert SamplingParams(bad_words=stop).bad_words == ("\n\n",)


def test_every_field_is_a_keyword_of_the_same_type_that_help_explains() -> None:
    for options, kind in ((EngineOptions, EngineConfig), (SamplingOptions, SamplingParams)):
        wanted = get_type_hints(kind)
        if kind is EngineConfig:
            # LLM's own parameter, which may be an object too.
            del wanted["controller"]
        assert get_type_hints(options) == wanted
        for item in fields(kind):
            assert f"{item.name} = {item.default!r}: " in (kind.__doc__ or "")


@pytest.mark.parametrize("form", FORMS)
def test_ids_come_in_any_container(form: Callable[[list[int]], Any], llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    assert ids_of(llm, form(ids), max_tokens=4) == ids_of(llm, PROMPT, max_tokens=4)


def test_rows_and_generators_are_several_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    assert len(llm.generate(torch.tensor([ids, ids[::-1]]), max_tokens=2)) == 2
    assert len(llm.generate((text for text in ("a", "b", "c")), max_tokens=2)) == 3  # pyright: ignore[reportArgumentType]
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompts", [None, 5, 2.5, True, b"text", {"prompt": "x"}, [1.5], [None], [[]], np.ones(3)]
)
def test_what_is_no_prompt_is_an_error_that_says_so(prompts: Any, llm: LLM) -> None:
    with pytest.raises(ConfigError) as raised:
        llm.generate(prompts)
    assert raised.value.hint
    with pytest.raises(ConfigError):
        llm.stream(prompts)
    with pytest.raises(ConfigError):
        llm.submit(prompts)


@pytest.mark.parametrize(("call", "hint"), WRONG)
def test_a_wrong_keyword_or_type_is_an_error_with_the_right_one(
    call: Callable[[Any], object], hint: str, llm: LLM
) -> None:
    with pytest.raises(ConfigError) as raised:
        call(llm)
    assert hint in str(raised.value.hint)


def test_a_traceback_ends_with_the_hint(llm: LLM) -> None:
    with pytest.raises(ConfigError) as raised:
        llm.generate("x", max_token=4)  # pyright: ignore[reportCallIssue]
    *_, words, hint = traceback.format_exception(raised.value)
    assert words == "outrider.core.errors.ConfigError: unknown option 'max_token'.\n"
    assert hint == "try: did you mean 'max_tokens'? help(SamplingParams) lists all options.\n"
    assert copy.copy(raised.value).__notes__ == raised.value.__notes__


def test_an_llm_says_why_it_cannot_be_copied(llm: LLM) -> None:
    for held in (llm, llm.stream(PROMPT), [llm.submit(PROMPT, max_tokens=1)]):
        with pytest.raises(MachineError, match="cannot be copied or sent to another process") as no:
            copy.deepcopy(held)
        assert "make the LLM in the process that uses it" in str(no.value.hint)
    while llm.has_work:
        llm.advance()


def test_a_stream_has_the_whole_text(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, max_tokens=4)
    stream = llm.stream(PROMPT, max_tokens=4)
    assert ".text" in repr(stream)
    assert stream.text == stream.text == str(whole) == whole.text


def test_a_notebook_shows_the_text() -> None:
    stats = summarise((), drafter="none", k=0, total_seconds=0.0)
    result = GenerationResult("a < b\n", (1,), "stop", stats)
    assert in_notebook(result).startswith('<pre style="white-space: pre-wrap">a &lt; b\n</pre>')


def in_notebook(result: GenerationResult) -> str:
    return result._repr_html_()  # pyright: ignore[reportPrivateUsage]


def test_a_notebook_shows_where_each_token_came_from(llm: LLM) -> None:
    (result,) = llm.generate("x = 1\nx = 1\nx = 1\n", max_tokens=24)
    assert "".join(text for _, text in result.runs) == result.text
    assert "accepted" in {origin for origin, _ in result.runs}
    shown = in_notebook(result)
    assert shown.count('<span title="accepted"') == 1 + sum(
        origin == "accepted" for origin, _ in result.runs
    )
    assert result.summary() in shown
    streamed = llm.stream("x = 1\nx = 1\nx = 1\n", max_tokens=24).result()
    assert streamed.runs == result.runs
    failed = GenerationResult.failed(ConfigError("no <such>"), drafter="none", k=0)
    assert "no &lt;such&gt;" in in_notebook(failed)
    assert "runs" not in result.to_dict()


def test_memory_that_ends_is_an_error_of_ours(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("outrider.api.loading.plan_pair", full)
        with pytest.raises(CapacityError, match="memory ended while loading"):
            LLM()
    free, wanted = llm.free_tokens, ids_of(llm, PROMPT, max_tokens=4)
    for place in ("ids_of_all", "group", "constraint"):
        with monkeypatch.context() as patch:
            patch.setattr(RequestMaker, place, full)
            with pytest.raises(CapacityError, match="memory ended while answering"):
                llm.generate(PROMPT, max_tokens=4)
    assert llm.free_tokens == free
    assert ids_of(llm, PROMPT, max_tokens=4) == wanted


def test_a_prompt_that_cannot_be_run_fails_alone(llm: LLM) -> None:
    long = "x " * 2000
    good, bad, other = llm.generate([PROMPT, long, PROMPT], max_tokens=4, n=2)[::2]
    assert good.token_ids == other.token_ids
    assert (good.error, good.finish_reason) == (None, "length")
    assert bad.finish_reason == "error"
    assert "does not fit a window" in str(bad.error)
    assert bad.from_dict(bad.to_dict()) == bad
    with pytest.raises(ConfigError, match="does not fit a window"):
        llm.generate([long, long])
    with pytest.raises(ConfigError, match="does not fit a window"):
        llm.generate(long)


def test_a_mask_that_raises_ends_its_own_request(llm: LLM) -> None:
    first = llm.tokenizer.encode(PROMPT)[0]
    calls: list[int] = []

    def mask(text: Any) -> None:
        calls.append(len(text))
        if len(calls) == 1:
            raise ZeroDivisionError(first)

    results = llm.generate([PROMPT, PROMPT], max_tokens=4, allowed=mask)
    assert sorted(result.finish_reason or "" for result in results) == ["error", "length"]
    assert llm.free_tokens > 0


def test_without_a_seed_each_request_draws_one_and_names_it(llm: LLM) -> None:
    asked: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12}
    results = [llm.generate(PROMPT, **asked)[0] for _ in range(3)]
    seeds = [result.seed for result in results]
    assert None not in seeds
    assert len(set(seeds)) == 3
    for result, seed in zip(results, seeds, strict=True):
        assert llm.generate(PROMPT, seed=seed, **asked)[0].token_ids == result.token_ids
    both = llm.generate(PROMPT, n=2, **asked)
    assert both[0].seed == both[1].seed
    assert both[0].token_ids != both[1].token_ids
    assert llm.generate(PROMPT, max_tokens=2)[0].seed is None


def test_chat_takes_one_text_and_its_result_is_the_whole_turn(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert llm.chat("hello", max_tokens=6).result().token_ids == (
        llm.chat(messages, max_tokens=6).result().token_ids
    )
    stream = llm.stream(PROMPT, max_tokens=6)
    assert next(stream).token_ids
    assert stream.result().num_tokens == 6
    assert stream.result() == stream.result()


def test_a_chat_without_a_stream_is_its_result(llm: LLM) -> None:
    result = llm.chat("hello", max_tokens=6, stream=False)
    assert isinstance(result, GenerationResult)
    assert str(result) == result.text == llm.chat("hello", max_tokens=6).text


@pytest.mark.parametrize("form", [list, tuple, set, np.array, torch.tensor])
def test_a_text_ends_at_ids_that_are_named(form: Callable[[list[int]], Any], llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, max_tokens=12)
    at = next(i for i in range(4, 12) if whole.token_ids[i] not in whole.token_ids[:i])
    end, before = whole.token_ids[at], llm.tokenizer.decode(whole.token_ids[:at])
    for more in ({}, {"ignore_eos": True}, {"skip_special_tokens": False}):
        asked: dict[str, Any] = {"max_tokens": 12, "stop_token_ids": form([end]), **more}
        (result,) = llm.generate(PROMPT, **asked)
        assert (result.token_ids, result.finish_reason) == (whole.token_ids[: at + 1], "stop")
        assert result.text == before == llm.stream(PROMPT, **asked).text
    later = llm.generate(PROMPT, max_tokens=12, stop_token_ids=[end], min_tokens=at + 2)[0]
    assert end not in later.token_ids[: at + 2]


@pytest.mark.parametrize("ids", [["4"], [-1], [1.5], [True], 2**31, [10**6]])
def test_an_id_that_is_none_is_refused_by_name(ids: Any, llm: LLM) -> None:
    with pytest.raises(ConfigError, match="stop_token_ids"):
        llm.generate(PROMPT, stop_token_ids=ids)


def test_it_is_a_context_manager_and_says_what_it_is() -> None:
    with LLM(drafter="suffix", context=128) as llm:
        text = repr(llm)
    assert all(word in text for word in ("outrider/embedded", "suffix", "MB"))
    result = llm.generate(PROMPT, max_tokens=3)[0]
    assert repr(result.text) in repr(result)
    assert "token_seconds" not in repr(result)


def test_no_stop_strings_is_also_said_by_none() -> None:
    assert SamplingParams(stop=None) == SamplingParams()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="a text or a list of texts"):
        SamplingParams(stop=5)  # pyright: ignore[reportArgumentType]
