"""Settings: what each layer may say, who wins, and how mistakes are named."""

from __future__ import annotations

import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from outrider.core import settings
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.fields import KINDS, meta_of
from outrider.core.params import SamplingParams
from outrider.core.settings import DEFAULT, SETTINGS, Layer, Setting, resolve

# A mistake is a line or two, however long what was written; generous for a busy machine.
MOST_MESSAGE, MOST_SECONDS = 2500, 30


def test_every_field_is_a_setting_with_flag_variable_and_help() -> None:
    for config in (EngineConfig, SamplingParams, settings.ProgramConfig):
        for item in fields(config):
            if meta_of(item).per_request:
                continue
            found = SETTINGS[item.name]
            assert found.default == item.default
            assert found.flag == "--" + item.name.replace("_", "-")
            assert found.variable == "OUTRIDER_" + item.name.upper()
            assert found.meta.help.endswith(".")
            assert found.kind in KINDS


@given(st.lists(st.dictionaries(st.sampled_from(["k", "seed", "batch_size"]), st.integers(1, 64))))
def test_the_strongest_layer_that_names_a_setting_wins(values: list[dict[str, int]]) -> None:
    layers: list[Layer] = [
        {name: settings.Given(value, f"layer {index}") for name, value in layer.items()}
        for index, layer in enumerate(values)
    ]
    resolved = resolve(*layers)
    for name in ("k", "seed", "batch_size"):
        naming = [index for index, layer in enumerate(values) if name in layer]
        chosen = resolved.chosen[name]
        if naming:
            assert chosen.value == values[naming[0]][name]
            assert chosen.origin == f"layer {naming[0]}"
        else:
            assert (chosen.value, chosen.origin) == (SETTINGS[name].default, DEFAULT)


def test_flag_beats_variable_beats_file(tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text("k = 2\nseed = 2\ntop_p = 0.5\n")
    resolved = resolve(
        settings.command_line({"k": "7"}),
        settings.environment({"OUTRIDER_K": "5", "OUTRIDER_SEED": "5"}),
        settings.file(path),
    )
    origins = {name: resolved.chosen[name].origin for name in ("k", "seed", "top_p")}
    assert origins == {"k": "--k", "seed": "OUTRIDER_SEED", "top_p": f"{path}:top_p"}
    assert resolved.engine().k == 7
    assert (resolved.sampling().seed, resolved.sampling().top_p) == (5, 0.5)


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.toml"])
def test_files_of_both_kinds_say_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = {
        "toml": 'k = 3\ntemperature = 1\ndtype = "float32"\nprofile = true\nstop = ["a", "b"]\n',
        "yaml": "k: 3\ntemperature: 1\ndtype: float32\nprofile: on\nstop: [a, b]\n",
    }
    path.write_text(text["toml" if name.endswith("toml") else "yaml"])
    resolved = resolve(settings.file(path))
    engine, sampling = resolved.engine(), resolved.sampling()
    assert (engine.k, engine.dtype, engine.profile) == (3, "float32", True)
    assert (sampling.temperature, sampling.stop) == (1.0, ("a", "b"))
    assert isinstance(sampling.temperature, float)


def test_an_empty_yaml_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("# nothing yet\n")
    assert settings.file(path) == {}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (
            "stop: [1:30, 2026-01-01, no, 010, 1e3, .inf]",
            "stop",
            ("1:30", "2026-01-01", "no", "010", "1e3", ".inf"),
        ),
        ("seed: 010", "seed", 10),
        ("profile: off", "profile", False),
        ("temperature: 1e-1", "temperature", 0.1),
        ('stop: "\\n"', "stop", ("\n",)),
        ("logit_bias: {3: 1.5, 4: -2}", "logit_bias", {3: 1.5, 4: -2.0}),
        ("draft: none", "draft", "none"),
    ],
)
def test_yaml_means_what_was_written(tmp_path: Path, line: str, name: str, value: object) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(line + "\n")
    assert resolve(settings.file(path)).chosen[name].value == value


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghi")
)
HOSTILE = [
    ("run.yaml", BOMB, "anchors and aliases"),
    ("run.yaml", "stop: &x [a]\nbad_words: *x\n", "anchors and aliases"),
    ("run.yaml", "k: !!int 3\n", "tags are not read"),
    ("run.yaml", "k: !!python/object/apply:os.system [ls]\n", "tags are not read"),
    ("run.yaml", "k: 1:30\n", "must be an integer, got '1:30'"),
    ("run.yaml", "k:\n", "must be an integer, got None"),
    ("run.yaml", "k: 1\nk: 2\n", "line 2: a key that is no text, or is there twice"),
    ("run.yaml", "? [k]\n: 2\n", "a key that is no text"),
    ("run.yaml", "<<: {k: 2}\n", "unknown key '<<'"),
    ("run.yaml", "---\nk: 1\n---\nk: 2\n", "several documents"),
    ("run.yaml", "k: " + "[" * 100_000, "nested too deeply"),
    ("run.yaml", "k: " + "{a: " * 5_000, "nested too deeply"),
    ("run.yaml", "- " * 100_000, "nested too deeply"),
    ("run.yaml", "stop: [" + "a," * 100_000 + "]", "more than 20000 entries"),
    ("run.yaml", "k: 1 " * 100_000, "too many for settings"),
    ("run.yaml", 'stop: "\\UFFFFFFFF"', "run.yaml: "),
    ("run.yaml", 'stop: "\\uD800"', "run.yaml"),
    ("run.yaml", "x" * 100_000 + ": 1\n", "run.yaml"),
    ("run.yaml", "drafter: " + "x" * 100_000, "unknown value"),
    ("run.toml", "k = " + "[" * 20_000, "nested too deeply"),
    ("run.toml", "k = " + "{a = " * 20_000, "nested too deeply"),
    ("run.toml", "a." * 20_000 + "a = 1", "a key has more than 256 parts"),
    ("run.toml", "k = {" + "a." * 20_000 + "a = 1}", "a key has more than 256 parts"),
    ("run.toml", "[" + "a." * 20_000 + "a]", "a key has more than 256 parts"),
    ("run.toml", "k = 0x" + "f" * 100_000, "must be between 0 and 64"),
    ("run.toml", "temperature = 0x" + "f" * 100_000, "must be a number"),
    ("run.toml", f"k = {'9' * 100_000}", "run.toml"),
    ("run.toml", f"{'x' * 100_000} = 1", "unknown key"),
    ("run.toml", "seed = 2026-01-01", "must be an integer"),
    ("{x}.toml", "nonsense = 1", "unknown key 'nonsense'"),
]


@pytest.mark.parametrize(("name", "text", "problem"), HOSTILE)
def test_a_hostile_file_is_a_short_mistake(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        resolve(settings.file(path))
    assert problem in str(caught.value)
    assert len(str(caught.value)) + len(caught.value.hint or "") < MOST_MESSAGE + len(str(path))
    assert time.monotonic() - start < MOST_SECONDS


def test_a_deep_variable_is_a_short_mistake() -> None:
    for text in ("[" * 100_000, '["' + "x" * 100_000):
        with pytest.raises(ConfigError, match="OUTRIDER_STOP") as caught:
            resolve(settings.environment({"OUTRIDER_STOP": text}))
        assert len(str(caught.value)) < MOST_MESSAGE
    with pytest.raises(ConfigError, match="unknown variable") as caught:
        settings.environment({"OUTRIDER_" + "X" * 100_000: "1"})
    assert len(str(caught.value)) < MOST_MESSAGE


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('sampler = "typical"', "sampler"),
        ('target = "./model"', "target"),
        ('target = "somebody/model"', "target"),
        ('draft = "heads"', "draft"),
        ('suffix_corpus = "/etc"', "suffix_corpus"),
        ('drafter_home = "process"', "drafter_home"),
        ("tensor_parallel = 2", "tensor_parallel"),
    ],
)
def test_a_file_that_nobody_named_chooses_no_models_files_or_lossy_rules(
    tmp_path: Path, line: str, name: str
) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text(f"k = 2\n{line}\n")
    with pytest.raises(ConfigError, match=f"{name} = .* counts only in a file that you name") as no:
        settings.default_file(tmp_path)
    assert f"--config {path}" in str(no.value.hint)
    assert resolve(settings.file(path)).chosen[name].origin.endswith(name)


def test_a_file_that_nobody_named_may_say_what_changes_no_distribution(tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text('sampler = "coupled"\ndraft = "none"\ntarget = "outrider/embedded"\nk = 3\n')
    assert resolve(settings.default_file(tmp_path)).engine().sampler == "coupled"


def test_every_setting_that_names_something_is_guarded() -> None:
    """Texts without choices are names, but for these, which name nothing."""
    names = {item.name for item in SETTINGS.values() if item.kind is str and not item.meta.choices}
    guarded = {item.name for item in SETTINGS.values() if item.meta.harmless is not None}
    assert names - guarded == {"skip_layers", "prediction"}
    assert {"sampler", "drafter_home", "tensor_parallel"} <= guarded
    for name in guarded:
        assert SETTINGS[name].default in (SETTINGS[name].meta.harmless or ())


def bounded(tmp: Path, text: str) -> None:
    """`text` as a file of either kind is settings or one short mistake, in bounded time."""
    for name in ("fuzz.yaml", "fuzz.toml"):
        path = tmp / name
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        start = time.monotonic()
        told = ""
        try:
            resolve(settings.file(path))
        except ConfigError as error:
            told = f"{error} {error.hint}"
        assert len(told) < MOST_MESSAGE + len(str(path))
        assert time.monotonic() - start < MOST_SECONDS


@examples(200)
@given(text=st.text(max_size=300))
def test_any_text_is_settings_or_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    bounded(tmp_path_factory.getbasetemp(), text)


PIECES = st.sampled_from(
    [
        *SETTINGS,
        *"[]{}&*!|>'\"%@`,:?-#=.~\n\t \\",
        *("<<", "&a ", "*a", "!!int ", ": ", " = ", "---\n", "...\n", "null", "no", "1:30", "0x1F"),
        *("-1", "1e999", "2026-01-01", "\\UFFFFFFFF", "\u2028", "\ufeff", "\x00", "'" * 3, '"' * 3),
        *("9" * 5000, "[" * 300, "a." * 300),
    ]
)


@examples(300)
@given(text=st.lists(PIECES, max_size=40).map("".join))
def test_any_pieces_of_the_grammar_are_settings_or_a_mistake(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    bounded(tmp_path_factory.getbasetemp(), text)


def test_the_default_file_is_optional(tmp_path: Path) -> None:
    assert settings.default_file(tmp_path) == {}
    (tmp_path / "outrider.toml").write_text("k = 1\n")
    assert resolve(settings.default_file(tmp_path)).engine().k == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("yes", True), ("On", True), ("0", False), ("false", False), (" no ", False)],
)
def test_switches_read_the_usual_words(text: str, value: bool) -> None:
    resolved = resolve(settings.environment({"OUTRIDER_DETERMINISTIC": text}))
    assert resolved.engine().deterministic is value


@pytest.mark.parametrize(
    ("text", "value"),
    [("END", ("END",)), ('["a", "b"]', ("a", "b")), ("[]", ()), ("", ("",))],
)
def test_lists_read_json_or_one_entry(text: str, value: tuple[str, ...]) -> None:
    resolved = resolve(settings.environment({"OUTRIDER_STOP": text}))
    assert resolved.sampling().stop == value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("OUTRIDER_K", "four", "OUTRIDER_K must be an integer, got 'four'."),
        ("OUTRIDER_K", "1.5", "OUTRIDER_K must be an integer, got '1.5'."),
        ("OUTRIDER_K", "65", "OUTRIDER_K must be between 0 and 64, got 65."),
        ("OUTRIDER_MAX_TOKENS", "-1", "OUTRIDER_MAX_TOKENS must be at least 1, got -1."),
        ("OUTRIDER_TEMPERATURE", "hot", "OUTRIDER_TEMPERATURE must be a number, got 'hot'."),
        ("OUTRIDER_TEMPERATURE", "nan", "OUTRIDER_TEMPERATURE must be a finite number, got nan."),
        ("OUTRIDER_TOP_P", "1e999", "OUTRIDER_TOP_P must be a finite number, got inf."),
        ("OUTRIDER_PROFILE", "maybe", "OUTRIDER_PROFILE must be a switch (1 or 0), got 'maybe'."),
        ("OUTRIDER_STOP", "[1]", "OUTRIDER_STOP must be a list of texts, got '[1]'."),
        ("OUTRIDER_STOP", "[", "OUTRIDER_STOP must be a list of texts, got '['."),
        ("OUTRIDER_DRAFTER", "eagel", "OUTRIDER_DRAFTER: unknown value 'eagel'."),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(settings.environment({variable: text}))
    assert str(caught.value) == expected
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("k = true", "k", "must be an integer, got True."),
        ("k = 2.0", "k", "must be an integer, got 2.0."),
        ("temperature = []", "temperature", "must be a number, got []."),
        ("temperature = 1" + "0" * 400, "temperature", "must be a number, got 1"),
        ("dtype = 16", "dtype", "must be text, got 16."),
        ("profile = 1", "profile", "must be a switch (1 or 0), got 1."),
        ("stop = [1]", "stop", "must be a list of texts, got [1]."),
        ("top_p = 1.5", "top_p", "must be between 0 and 1, got 1.5."),
        ("top_p = nan", "top_p", "must be a finite number, got nan."),
    ],
)
def test_a_bad_key_names_file_and_key(tmp_path: Path, text: str, key: str, problem: str) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(settings.file(path))
    assert str(caught.value).startswith(f"{path}:{key} {problem}")


def test_an_overridden_mistake_is_still_found() -> None:
    with pytest.raises(ConfigError, match="OUTRIDER_K"):
        resolve(settings.command_line({"k": "3"}), settings.environment({"OUTRIDER_K": "x"}))


def test_an_unknown_variable_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="unknown variable 'OUTRIDER_DTPYE'") as caught:
        settings.environment({"OUTRIDER_DTPYE": "float32"})
    assert "did you mean 'OUTRIDER_DTYPE'?" in str(caught.value.hint)


def test_an_unknown_key_gets_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("max-tokens: 3\n")
    with pytest.raises(ConfigError, match="unknown key 'max-tokens'") as caught:
        settings.file(path)
    assert "did you mean 'max_tokens'?" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("run.json", b"{}", "ends in .toml, .yaml or .yml"),
        ("run.toml", b"k = ", "run.toml: "),
        ("run.yaml", b"k: [", "run.yaml: "),
        ("run.yaml", b"- k\n", "expected `setting: value` lines"),
        ("run.toml", b"\xff", "not UTF-8"),
        ("run.toml", None, "No such file"),
    ],
)
def test_unreadable_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        settings.file(path)
    assert name in str(caught.value)
    assert problem in str(caught.value)


@examples(30)
@given(st.sampled_from(list(SETTINGS.values())), st.text())
def test_any_text_is_a_value_or_a_named_mistake(item: Setting, text: str) -> None:
    try:
        chosen = resolve(settings.environment({item.variable: text})).chosen[item.name]
    except ConfigError as error:
        message = str(error)
    else:
        message = chosen.origin
    assert message.startswith(item.variable)
