"""Peers that are servers: llama.cpp, ik_llama.cpp and vLLM, which are started here, and any that
speaks OpenAI's API.

This process waits while a server works, so it does not disturb it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import OutriderError
from outrider.plugins.running.clients import Server
from outrider_lab.bench.peers.clients import OpenAIClient, Piece
from outrider_lab.bench.peers.sides import MAX_NGRAM, Ask, RefusedError, Setup, serve

# Servers that are started here and read over HTTP: their command lines for a setup of a peer.
#
# vLLM compiles a model before it serves it.
START_SECONDS, COMPILE_SECONDS = 180.0, 800.0


def _no_variables(_setup: Setup, _folder: Path) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Program:
    """A server as it is started: `words` is its command line after the program, for a setup and a
    port, and `variables` its environment, as NAME=VALUE, for a setup and the program's folder; a
    request has `more` members; `version` is a command of that folder that prints which one it is.
    """

    words: Callable[[Setup, int], list[str]]
    version: tuple[str, ...]
    more: Mapping[str, object]
    variables: Callable[[Setup, Path], list[str]] = _no_variables
    start_seconds: float = START_SECONDS


def _ik_words(setup: Setup, port: int) -> list[str]:
    """Flags of ik_llama.cpp, whose server has other names for speculation than llama.cpp's."""
    threads, kind = str(setup.threads), setup.options.get("kind")
    words = ["-m", setup.target, "-t", threads, "-tb", threads, "-np", "1"]
    words += ["-c", str(setup.options.get("context", 2048)), "--cache-ram", "0"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    if setup.drafter == "model":
        words += ["-md", setup.draft, "--draft-max", str(setup.k)]
        words += ["--draft-p-min", str(setup.options.get("p_min", 0.0))]
    elif kind:
        words += ["--spec-type", kind, "--draft-max", str(setup.k)]
        words += ["--spec-ngram-size-n", str(MAX_NGRAM), "--spec-ngram-size-m", str(setup.k)]
    return [*words, *(["--spec-autotune"] if setup.options.get("autotune") else [])]


def _vllm_words(setup: Setup, port: int) -> list[str]:
    words = ["serve", setup.target, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", "float32" if setup.form == "f32" else "bfloat16", "--max-num-seqs", "1"]
    words += ["--max-model-len", str(setup.options.get("context", 2048))]
    # Prompts are read anew, and sampling is what a request says.
    words += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
    drafts: dict[str, dict[str, object]] = {
        "model": {"method": "draft_model", "model": setup.draft},
        "ngram": {"method": "ngram", "prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": 1},
    }
    if setup.drafter != "none":
        config = {**drafts[setup.drafter], "num_speculative_tokens": setup.k}
        words += ["--speculative-config", json.dumps(config)]
    return words


def _vllm_variables(setup: Setup, folder: Path) -> list[str]:
    """Keys and values in one GiB, so many threads, the OpenMP that it is fastest with, and nothing
    asked of the network."""
    threads = f"VLLM_CPU_OMP_THREADS_BIND=0-{setup.threads - 1}"
    found = ["VLLM_CPU_KVCACHE_SPACE=1", threads, "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1"]
    library = folder.parent / "lib" / "libiomp5.so"
    return [*found, *([f"LD_PRELOAD={library}"] if library.exists() else [])]


PROGRAMS: Mapping[str, Program] = {
    "ik_llama.cpp": Program(
        words=_ik_words,
        version=("llama-server", "--version"),
        more={"cache_prompt": False, "top_k": 0, "min_p": 0.0},
    ),
    "vllm-cpu": Program(
        words=_vllm_words,
        version=(
            "python",
            "-c",
            "from importlib.metadata import version; print(version('vllm-cpu'))",
        ),
        more={},
        variables=_vllm_variables,
        start_seconds=COMPILE_SECONDS,
    ),
}


ANSWER_SECONDS = 600.0
# llama.cpp has as long as a big model takes.
LLAMA_SECONDS = 1800.0
_END_SECONDS = 20.0


class HttpSide:
    """A server that speaks OpenAI's completions, as vLLM, SGLang, llama.cpp and Ollama do.

    A setup's target is its address; how it speculates is its own affair. It gets the prompt as text
    and streams its answer. Tokens are counted as everybody's are: the ids that our tokenizer makes
    of the text (`count`); the server's own count is kept beside it. Seconds go from sending the
    request to its last piece, so the way over HTTP is in them. Pieces arrive as the server sends
    them, several tokens at once where it speculates; each piece's tokens share its moment."""

    def __init__(self, count: Callable[[str], Sequence[int]]) -> None:
        self._count = count
        self._loaded: dict[str, tuple[OpenAIClient, str]] = {}

    def about(self) -> dict[str, Any]:
        return {"versions": {}}

    def load(self, setup: Setup) -> list[str]:
        """Asks which models there are; the first one if none is named."""
        try:
            client = OpenAIClient(Server(url=setup.target, timeout_seconds=ANSWER_SECONDS))
            served = client.models()
        except OutriderError as error:
            raise RefusedError(_told(error)) from error
        model = str(setup.options.get("model") or next(iter(served), ""))
        if model not in served:
            there = ", ".join(served) or "none"
            raise RefusedError(f"{setup.target} has no model {model!r}; it serves: {there}")
        self._loaded[setup.name] = client, model
        return [f"{setup.target} serves {model}"]

    def run(self, ask: Ask) -> dict[str, Any]:
        return self._run(ask, ask.text, {})

    def _run(self, ask: Ask, prompt: str | list[int], more: Mapping[str, object]) -> dict[str, Any]:
        client, model = self._loaded[ask.name]
        try:
            pieces = list(
                client.stream(
                    model,
                    prompt,
                    more=more,
                    max_tokens=ask.max_tokens,
                    temperature=ask.temperature,
                    seed=ask.seed,
                )
            )
        except OutriderError as error:
            raise RefusedError(_told(error)) from error
        if not pieces:
            raise RefusedError(f"{model} answered with nothing")
        found: dict[str, Any] = {
            "ids": list(self._count("".join(piece.text for piece in pieces))),
            "seconds": pieces[-1].seconds,
            "arrivals": arrivals(pieces, self._count),
        }
        usage = [piece.num_tokens for piece in pieces if piece.num_tokens is not None]
        return found | ({"usage": usage[-1]} if usage else {})

    def drop(self, name: str) -> None:
        del self._loaded[name]


def arrivals(pieces: Iterable[Piece], count: Callable[[str], Sequence[int]]) -> list[float]:
    """When each token of the text so far was there, in seconds. A later piece may join tokens of an
    earlier one; a token that has arrived stays so."""
    text, found = "", list[float]()
    for piece in pieces:
        text += piece.text
        found += [piece.seconds] * (len(count(text)) - len(found))
    return found[: len(count(text))]


def _told(error: OutriderError) -> str:
    return f"{error} {error.hint}" if error.hint else str(error)


class StartedSide(HttpSide):
    """A server of `program` that is started here, one process a setup, and asked over HTTP as any
    other. Prompts travel as ids, and it keeps none of them from one request to the next."""

    def __init__(
        self, name: str, program: Path, kind: Program, count: Callable[[str], Sequence[int]]
    ) -> None:
        super().__init__(count)
        self._name, self._program, self._kind = name, program, kind
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def about(self) -> dict[str, Any]:
        first, *words = self._kind.version
        command = [str(self._program.parent / first), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"versions": {self._name: " ".join((done.stdout + done.stderr).split())[:300]}}

    def load(self, setup: Setup) -> list[str]:
        port = _free_port()
        self._processes[setup.name] = _started(
            [str(self._program), *self._kind.words(setup, port)],
            port,
            self._kind.start_seconds,
            self._kind.variables(setup, self._program.parent),
        )
        try:
            super().load(replace(setup, target=f"http://127.0.0.1:{port}"))
        except RefusedError:
            self._end(setup.name)
            raise
        return []

    def run(self, ask: Ask) -> dict[str, Any]:
        return self._run(ask, ask.ids, self._kind.more)

    def drop(self, name: str) -> None:
        super().drop(name)
        self._end(name)

    def close(self) -> None:
        for name in list(self._processes):
            self._end(name)

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class LlamaSide:
    """llama.cpp's own server of `folder`, one process a setup: weights, draft and settings are its
    flags.

    Seconds are the server's own count for a request, reading the prompt and writing the tokens, so
    the way over HTTP is not in them; `read_seconds` are those before the first token. The prompt is
    read anew each time, as everybody's is. Options of a setup: `cache` is the number format of keys
    and values, then without flash attention; `parallel` is how many requests it answers at once,
    each in a context of its own; with `num_probs` an answer has so many of the likeliest tokens and
    their log-probs at every position; `words` are more flags.

    Quantised weights are repacked for matrix instructions where there are some. On some virtual
    machines that crashes; then, and only then, the server runs with `--no-repack`, and says so."""

    def __init__(self, folder: Path) -> None:
        self._binary = folder / "llama-server"
        self._loaded: dict[str, tuple[subprocess.Popen[bytes], int, Setup]] = {}

    def about(self) -> dict[str, Any]:
        done = subprocess.run(
            [self._binary, "--version"], capture_output=True, text=True, check=True
        )
        return {"versions": {"llama.cpp": " ".join((done.stdout + done.stderr).split())[:300]}}

    def load(self, setup: Setup) -> list[str]:
        try:
            self._loaded[setup.name] = *self._started(setup, []), setup
        except RefusedError:
            if setup.form in ("f32", "bf16"):
                raise
            self._loaded[setup.name] = *self._started(setup, ["--no-repack"]), setup
            return ["runs with --no-repack: the server does not start without"]
        return []

    def run(self, ask: Ask) -> dict[str, Any]:
        _, port, setup = self._loaded[ask.name]
        # Greedy is the best one of one; else the whole distribution, without the usual cuts.
        how = {"samplers": ["temperature"], "temperature": ask.temperature}
        greedy = {"samplers": ["top_k"], "top_k": 1, "temperature": 0.0}
        body = {
            "prompt": ask.ids,
            "n_predict": ask.max_tokens,
            "seed": ask.seed,
            "return_tokens": True,
            "cache_prompt": False,
            "n_probs": int(setup.options.get("num_probs", 0)),
            **(how if ask.temperature else greedy),
        }
        answer = _http(port, "POST", "/completion", body)
        times = answer["timings"]
        seconds = (times["prompt_ms"] + times["predicted_ms"]) / 1e3
        counts = {"drafted": times.get("draft_n", 0), "accepted": times.get("draft_n_accepted", 0)}
        found = {"ids": answer["tokens"], "seconds": seconds, **counts}
        found["read_seconds"] = times["prompt_ms"] / 1e3
        if "completion_probabilities" in answer:
            found["probs"] = [
                [(one["id"], one["logprob"]) for one in position["top_logprobs"]]
                for position in answer["completion_probabilities"]
            ]
        return found

    def url(self, name: str) -> str:
        _, port, _ = self._loaded[name]
        return f"http://127.0.0.1:{port}"

    def drop(self, name: str) -> None:
        process, *_ = self._loaded.pop(name)
        process.terminate()
        process.wait()

    def close(self) -> None:
        for name in list(self._loaded):
            self.drop(name)

    def _started(self, setup: Setup, extra: list[str]) -> tuple[subprocess.Popen[bytes], int]:
        port = _free_port()
        command = [str(self._binary), *_flags(setup, port), *extra]
        return _started(command, port, START_SECONDS), port


def _started(
    command: list[str], port: int, seconds: float, variables: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """A server that is ready. Raises RefusedError where it ends or takes too long."""
    name = Path(command[0]).name
    process = subprocess.Popen(["env", *variables, *command], stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            flags = " ".join(command[1:])
            raise RefusedError(f"{name} ended with {process.returncode}: {flags}")
        if _is_ready(port):
            return process
        time.sleep(0.05)
    process.kill()
    process.wait()
    raise RefusedError(f"{name} did not start in {seconds:g} s")


def _is_ready(port: int) -> bool:
    with closing(HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


def _flags(setup: Setup, port: int) -> list[str]:
    threads = str(setup.threads)
    parallel = int(setup.options.get("parallel", 1))
    context = str(parallel * int(setup.options.get("context", 2048)))
    flags = ["-m", setup.target, "-t", threads, "-tb", threads, "-c", context]
    flags += ["-np", str(parallel)]
    flags += ["--host", "127.0.0.1", "--port", str(port), "--no-ui", "--cache-ram", "0"]
    cache = setup.options.get("cache")
    flags += ["-fa", "off", "-ctk", cache, "-ctv", cache] if cache else []
    return [*flags, *_speculation(setup), *setup.options.get("words", [])]


def _speculation(setup: Setup) -> list[str]:
    """A draft model, a lookup of its `kind`, or both."""
    if setup.drafter == "none":
        return []
    kinds, flags = list[str](), list[str]()
    if setup.drafter == "model":
        kinds.append("draft-simple")
        doubt = str(setup.options.get("p_min", 0.0))
        flags += ["-md", setup.draft, "--spec-draft-n-max", str(setup.k)]
        flags += ["--spec-draft-p-min", doubt]
    if kind := setup.options.get("kind"):
        kinds.append(kind)
        flags += _lookup(kind, setup)
    return ["--spec-type", ",".join(kinds), *flags]


def _lookup(kind: str, setup: Setup) -> list[str]:
    """With K = 0 its lengths are the library's own."""
    if kind == "ngram-cache" or not setup.k:
        return []
    size, most = str(setup.options.get("size", MAX_NGRAM)), str(setup.k)
    if kind == "ngram-mod":
        lengths = ["--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", most]
        return ["--spec-ngram-mod-n-match", size, *lengths]
    return [f"--spec-{kind}-size-n", size, f"--spec-{kind}-size-m", most]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _http(port: int, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=LLAMA_SECONDS)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    if response.status >= 400:
        raise RefusedError(f"llama-server: {answer}")
    return answer


def main(name: str, counter: Path, program: Path | None = None) -> None:
    """The tokenizer at `counter` counts a server's tokens; `program` is what is started."""
    if name == "llama.cpp" and program is not None:
        with closing(LlamaSide(program.parent)) as llama:
            serve(llama)
        return
    tokenizer = Tokenizer.load(counter)

    def count(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special=False)

    if program is None:
        serve(HttpSide(count))
        return
    with closing(StartedSide(name, program, PROGRAMS[name], count)) as side:
        serve(side)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
