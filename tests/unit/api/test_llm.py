"""The Python API: events, results, several readers at once, limits and what goes wrong."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import CapacityError, ConfigError, VocabularyError
from outrider.models.loading import resolve
from outrider_lab.bench.workload import load_prompts

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(config=EngineConfig(k=3, batch_size=2))


@pytest.mark.weights
def test_events_add_up_to_the_result(llm: LLM) -> None:
    events = list(llm.stream(PROMPT, SamplingParams(max_tokens=30)))
    result = llm.last_result
    assert "".join(event.text for event in events) == result.text
    assert tuple(i for event in events for i in event.token_ids) == result.token_ids
    assert all(len(e.token_ids) == len(e.origins) == len(e.pieces) for e in events)
    accepted = sum(event.origins.count("accepted") for event in events)
    # A text may end at an accepted token, which then is the round's own token.
    assert 0 <= accepted - result.stats.num_accepted <= 1
    assert result.stats.num_emitted == result.stats.num_accepted + result.stats.num_rounds == 30
    assert result.finish_reason == "length"


@pytest.mark.weights
def test_streaming_and_generating_give_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30)
    streamed = "".join(event.text for event in llm.stream(PROMPT, params))
    assert llm.generate([PROMPT, "x = 1"], params)[0].text == streamed


@pytest.mark.weights
def test_plain_decoding_says_plain() -> None:
    off = LLM(config=EngineConfig(drafter="none"))
    events = list(off.stream(PROMPT, SamplingParams(max_tokens=5)))
    assert [event.origins for event in events] == [("plain",)] * 5
    assert off.last_result.stats.num_target_passes == off.last_result.stats.num_rounds == 5
    assert off.last_result.stats.k == 0


@pytest.mark.weights
def test_leaving_a_stream_early_frees_its_memory(llm: LLM) -> None:
    free = llm.free_tokens
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=50))
    next(stream)
    assert llm.free_tokens < free
    stream.close()
    assert llm.free_tokens == free
    assert llm.last_result.finish_reason is None


@pytest.mark.weights
def test_a_text_that_was_forgotten_is_not_copied() -> None:
    """With `lookup`, whose member remembers what other requests wrote."""
    params = SamplingParams(max_tokens=24)
    config = EngineConfig(drafter="lookup", k=4, watchdog="off")
    with closing(LLM(config=config)) as llm:
        first, second = (llm.generate([PROMPT], params)[0] for _ in range(2))
        llm.forget()
        third = llm.generate([PROMPT], params)[0]
        assert first.token_ids == second.token_ids == third.token_ids
        assert second.stats.num_rounds < first.stats.num_rounds == third.stats.num_rounds


@pytest.mark.weights
def test_nothing_is_forgotten_while_requests_run(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=8))
    next(iter(stream))
    with pytest.raises(ConfigError, match="requests are running"):
        llm.forget()
    stream.close()


@pytest.mark.weights
def test_two_streams_side_by_side_get_their_own_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    prompts = (PROMPT, "Question: What is 2 + 3?\nAnswer:")
    expected = [result.token_ids for result in llm.generate(prompts, params)]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    got: list[list[int]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            event = next(stream, None)
            got[index] += event.token_ids if event else ()
    assert [tuple(ids) for ids in got] == expected


@pytest.mark.weights
def test_a_stop_string_ends_text_before_it(llm: LLM) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=40))[0].text
    stop = whole[20:25]
    result = llm.generate(PROMPT, SamplingParams(max_tokens=40, stop=(stop,)))[0]
    assert result.finish_reason == "stop"
    assert result.text == whole[: whole.index(stop)]


@pytest.mark.weights
def test_a_stop_token_ends_ids_with_it() -> None:
    small = LLM(config=EngineConfig(k=4))
    results = small.generate(load_prompts("gsm8k")[:12], SamplingParams(max_tokens=128))
    ended = [result for result in results if result.finish_reason == "stop"]
    assert ended
    for result in ended:
        assert result.token_ids[-1] in small.tokenizer.stop_ids
        assert "<|endoftext|>" not in result.text


@pytest.mark.weights
def test_a_window_caps_and_says_so() -> None:
    small = LLM(config=EngineConfig(k=2, context=40))
    result = small.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))[0]
    length = len(small.tokenizer.encode(PROMPT))
    assert len(result.token_ids) == 40 - length
    assert result.finish_reason == "length"
    assert "fit the window of 40" in result.notes[0]
    with pytest.raises(ConfigError, match="does not fit a window of 40"):
        small.generate("x " * 60, SamplingParams())


def test_k_larger_than_the_window_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="leaves no space in a window of 20"):
        LLM(config=EngineConfig(k=20, context=20))


@pytest.mark.weights
def test_more_than_the_arena_holds_is_refused_up_front() -> None:
    small = LLM(config=EngineConfig(arena_tokens=64))
    with pytest.raises(CapacityError, match=r"needs \d+ arena tokens; the arena has 64"):
        small.generate(PROMPT, SamplingParams(max_tokens=100))
    assert small.generate(PROMPT, SamplingParams(max_tokens=4))[0].token_ids


@pytest.mark.weights
def test_an_arena_that_nobody_sized_holds_trees_at_the_end_of_the_window() -> None:
    config = EngineConfig(drafter="suffix", k=2, tree_nodes=40, batch_size=1, context=64)
    (result,) = LLM(config=config).generate([[5, 6] * 25], SamplingParams(max_tokens=60))
    assert "fit the window of 64" in result.notes[0]
    assert len(result.token_ids) == 64 - 50


@pytest.mark.weights
def test_more_prompts_than_the_arena_holds_take_turns() -> None:
    small = LLM(config=EngineConfig(arena_tokens=96, batch_size=4))
    params = SamplingParams(max_tokens=20)
    prompts = [f"def f{i}(x):" for i in range(7)]
    wide = LLM(config=EngineConfig(batch_size=8)).generate(prompts, params)
    assert [r.token_ids for r in small.generate(prompts, params)] == [r.token_ids for r in wide]
    assert small.free_tokens == 96


@pytest.mark.weights
@pytest.mark.parametrize("prompt", ["", [], [-1], [8192]])
def test_prompts_that_cannot_be_read(llm: LLM, prompt: str | list[int]) -> None:
    with pytest.raises(ConfigError):
        llm.stream(prompt)


def test_a_draft_with_another_vocabulary_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("draft") / "other"
    shutil.copytree(resolve("outrider/embedded-draft"), folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    vocab = data["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(VocabularyError, match="300: ") as caught:
        LLM(draft=folder)
    assert "ngram" in str(caught.value.hint)


def test_a_model_drafter_needs_a_draft_model() -> None:
    with pytest.raises(ConfigError, match="needs a draft model"):
        LLM(resolve("outrider/embedded"), config=EngineConfig(drafter="model"))


@pytest.mark.weights
def test_profile_keeps_every_trace() -> None:
    params = SamplingParams(max_tokens=9)
    result = LLM(config=EngineConfig(profile=True)).generate(PROMPT, params)[0]
    assert sum(trace.num_emitted for trace in result.rounds) == 9
    assert len(json.loads(json.dumps(result.to_dict()))["rounds"]) == len(result.rounds)
    assert "rounds" not in LLM().generate(PROMPT, params)[0].to_dict()


@pytest.mark.weights
def test_a_window_that_is_no_multiple_of_a_page_is_served_whole() -> None:
    small = LLM(config=EngineConfig(context=100, batch_size=1))
    result = small.generate("def f", SamplingParams(max_tokens=200, ignore_eos=True))[0]
    assert len(result.token_ids) > 80


@pytest.mark.weights
def test_text_that_is_not_unicode_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        llm.stream("a\udcff")


@pytest.mark.weights
def test_two_engines_share_the_weights_of_one_target() -> None:
    params = SamplingParams(max_tokens=24)
    plain = LLM(config=EngineConfig(drafter="none"))
    (alone,) = plain.generate([PROMPT], params)
    drafting = LLM(config=EngineConfig(drafter="ngram", k=4), weights_of=plain)
    own: list[Any] = [model.models["target"] for model in (plain, drafting)]
    first, second = ([part.data_ptr() for part in one.streamed] for one in own)
    assert first == second
    assert own[0].state is not own[1].state
    assert drafting.memory.keys() < plain.memory.keys()
    for model in (drafting, plain, drafting):
        assert model.generate([PROMPT], params)[0].token_ids == alone.token_ids
    # Other weights, or the same in another form or with other positions, are read anew.
    stretched = LLM(rope_scaling="linear", rope_scale=4, weights_of=plain)
    for other in (
        LLM(quantise="int8", weights_of=plain),
        LLM(weights_of=drafting, threads=1),
        stretched,
    ):
        assert "weights of the target" in other.memory
    (text,) = LLM(rope_scaling="linear", rope_scale=4).generate([PROMPT], params)
    assert stretched.generate([PROMPT], params)[0].token_ids == text.token_ids != alone.token_ids
