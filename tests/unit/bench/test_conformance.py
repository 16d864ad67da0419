"""Counts of conformance suites, and what they compare, without the peers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast

from conformance import chat
from conformance.client import PeerClient
from conformance.counts import Suite
from conformance.vocabularies import documented, random_text, tokenizer_in, with_rule

from doubles.gguf_writer import LLAMA, Gguf
from outrider.models.gguf.reader import read_header


def test_a_suite_counts_what_is_right_wrong_documented_and_refused() -> None:
    suite = Suite("texts")
    suite.count("a", True, "")
    for at in range(9):
        suite.count("a", False, f"text {at}")
    suite.count("b", False, "x", "NFC")
    suite.refuse("c", "no such type", count=3)
    record = suite.record()
    assert [record[key] for key in ("right", "wrong", "refused")] == [1, 9, 3]
    assert record["documented"] == {"b: NFC": 1}
    assert record["examples"] == {"a": [f"text {at}" for at in range(5)]}
    assert suite.line() == "texts: 1 right, 9 wrong, 3 refused, 1 documented differences"
    assert "WRONG a: 'text 0'" in suite.details()


def test_random_texts_are_of_their_seed() -> None:
    texts = [random_text(Random(seed), ["<|end|>"]) for seed in range(40)]
    assert texts == [random_text(Random(seed), ["<|end|>"]) for seed in range(40)]
    assert any("<|end|>" in text for text in texts)
    assert {ord(char) > 0x3000 for text in texts for char in text} == {True, False}


def test_a_file_can_name_another_rule(tmp_path: Path) -> None:
    data = Gguf(dict(LLAMA)).write(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    path.write_bytes(with_rule(data, "qwen2"))
    assert read_header(path).metadata["tokenizer.ggml.pre"] == "qwen2"
    assert tokenizer_in(path, tmp_path).encode("e\u0301") == tokenizer_in(path, tmp_path).encode(
        "é"
    )


def test_a_difference_is_documented_only_where_its_reason_holds() -> None:
    class Peer:
        """A peer that does not normalise."""

        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[*map(ord, text)] for text in texts]

    def reason(name: str, text: str, ours: list[int]) -> str | None:
        peer = cast("PeerClient", cast("Any", Peer()))
        return documented(peer, name, frozenset({"<|end|>"}), text, ours)

    assert str(reason("qwen2", "e\u0301", [233])).startswith("NFC")
    assert reason("qwen2", "e\u0301", [101]) is None
    assert reason("llama-bpe", "e\u0301", [233]) is None
    assert str(reason("qwen2", "a</s>", [])).startswith("</s>")
    assert str(reason("gpt-4o", "Éa", [])).startswith("words by case")
    assert reason("gpt-4o", "Ea", []) is None
    assert str(reason("phi", "<|end|>\u3000", [])).startswith("blanks")


CHAT = r"""
static common_chat_tool now_tool{ /* .name = */ "now", "the time", R"({"type": "object"})" };
const common_chat_msg message_call = simple_assist_msg("", "so", "now", "{}");
static void test_lfm2_parser(const std::string & template_path, bool debug) {
    auto tst = peg_tester(template_path, debug);
    tst.test("a" "b\n").expect_content("ab\n").run();
}
static void test_template_output_peg_parsers(bool debug) {
    if (debug) { int i = 1; }
    for (const char * tmpl : { "models/templates/one.jinja" }) {
        test_lfm2_parser(tmpl, debug);
    }
    {
        auto tst = peg_tester("models/templates/two.jinja", debug);
        const std::string text = "<think>so</think>" + std::string("x");
        common_chat_msg user; user.role = "user"; user.content = "hi";
        tst.test(text + "\"\u00e9")
            .messages({ user })
            .tools({ now_tool })
            .enable_thinking(true)
            .expect(message_call)
            .expect_tool_calls({ { "now", R"({"a": 1})", {} } })
            .run();
    }
    {
        auto tst = peg_tester("models/templates/three.jinja", debug);
        tst.test("<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": ")
            .tools({ now_tool })
            .is_partial(true)
            .expect_tool_calls({ { "now", "{\"a\": ", {} } })
            .run();
        common_chat_msg begun; begun.role = "assistant"; begun.content = "So ";
        tst.test("it is.")
            .messages({ { "user", "hi", {}, {}, "", "", "" }, begun })
            .continue_final_message(COMMON_CHAT_CONTINUATION_CONTENT)
            .expect_content("So it is.")
            .run();
        tst.test("it is.")
            .messages({ { "user", "hi", {}, {}, "", "", "" }, begun })
            .continue_final_message(COMMON_CHAT_CONTINUATION_REASONING)
            .expect_content("So it is.")
            .run();
    }
}
"""


def test_chat_cases_are_read_from_their_source() -> None:
    one, two, cut, *more = chat.cases(CHAT)
    assert cut.text == '<tool_call>{"name": "now", "arguments": {"a": '
    assert [case.given["messages"][1]["content"] for case in more] == ["So ", "So "]
    assert (one.template, one.text) == ("models/templates/one.jinja", "ab\n")
    assert one.given == {"expect_content": "ab\n", "run": None}
    assert (two.template, two.text) == ("models/templates/two.jinja", '<think>so</think>x"é')
    assert two.given["tools"] == [["now", "the time", '{"type": "object"}']]
    assert two.given["messages"] == [{"role": "user", "content": "hi"}]
    assert two.given["expect_tool_calls"] == [["now", '{"a": 1}', []]]
    assert two.given["expect"]["tool_calls"] == [["now", "{}", ""]]


def test_chat_cases_are_counted(tmp_path: Path) -> None:
    said = "{% for one in messages %}{{ one.content }}{% endfor %}"
    three = f"{{{{ tools }}}} <tool_call> arguments {said}"
    templates = (("one", "{{ tools }}"), ("two", "{{ tools }} </think>"), ("three", three))
    for name, text in templates:
        path = tmp_path / "models" / "templates" / f"{name}.jinja"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test-chat.cpp").write_text(CHAT)
    (suite,) = chat.suites(tmp_path)
    record = suite.record()
    # The second calls, which is a family that is not read; the last goes on amid thoughts.
    assert [record[key] for key in ("right", "wrong", "refused")] == [3, 0, 2]
