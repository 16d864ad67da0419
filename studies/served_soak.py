"""Careless clients of the server: `run.py served_soak [--output FILE]`."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import TARGET, Report, first_prompts, note, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams

NUM_TOKENS = 32
AT_ONCE = 16
# A mistake each, with what it should be answered.
MISTAKES = (
    b"{",
    b"[]",
    b'{"prompt": 3}',
    b'{"prompt": "x", "max_tokens": -5}',
    b'{"prompt": "x", "temperature": 1e9}',
    b'{"prompt": "x", "stop": ""}',
    b'{"prompt": "x", "speculative": {"drafter": "no such"}}',
    b'{"prompt": "' + b"word " * 4_000 + b'"}',
)
MOST_GROWTH = 1 << 20
_KINDS = ("greedy", "seeded", "plain", "left", "slow", "mistake", "tool", "schema", "thought")
_WEIGHTS = (6, 4, 2, 3, 1, 2, 2, 2, 2)
# A chat template with tools, and one field that opens thoughts.
TEMPLATE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
For each call: <tool_call>{"name": NAME, "arguments": {}}</tool_call>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
CHATS: dict[str, dict[str, Any]] = {
    "tool": {"tools": [FUNCTION], "tool_choice": "required"},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True},
        }
    },
    "thought": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget_tokens": 8},
}


@dataclass(slots=True)
class Tally:
    kinds: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    num_refused: int = 0
    num_kills: int = 0
    accepted: list[float] = field(default_factory=list[float])


@study(target=TARGET, requests=100_000, kill_every=10_000, seed=1)
def served_soak(options: Options, report: Report) -> bool:
    """Does the server keep its promises under careless clients?

    Sixteen clients at a time request greedy and seeded texts, calls of tools, texts of a schema and
    thoughts with a budget, leave in the midst of a stream, read slowly, and send what is wrong; the
    engine's process is killed now and then. Every text that is read to its end must be that of
    `LLM`, and every chat that of the server without speculation; every mistake must be answered as
    such, nothing may be left
    running, and memory may grow by 1 MiB in 10,000 requests. The share of drafts that is accepted
    must be in the last tenth what it was in the first, within 2 %.
    """
    num = 200 if options.quick else options.requests
    tally = Tally()
    prompts = first_prompts(8)[:8]
    expected = _expected(options.target, prompts)
    with _served(options.target) as (process, url):
        memory = asyncio.run(_soak(url, process.pid, num, options, expected, tally))
    tenth = max(1, len(tally.accepted) // 10)
    first, last = (sum(part) / tenth for part in (tally.accepted[:tenth], tally.accepted[-tenth:]))
    growth = (memory["end"] - memory["warm"]) / max(1, num) * 10_000
    note(
        report,
        requests=num,
        kinds=dict(tally.kinds),
        kills=tally.num_kills,
        refused_while_restarting=tally.num_refused,
        wrong=tally.wrong[:20],
        num_wrong=len(tally.wrong),
        left_running=memory["running"],
        kv_usage=memory["kv_usage"],
        growth_per_10000_bytes=round(growth),
        accepted_first=round(first, 4),
        accepted_last=round(last, 4),
    )
    same = abs(first - last) <= 0.02 * first
    flat = growth <= MOST_GROWTH or num < 2_000
    return not tally.wrong and not memory["running"] and flat and (same or num < 2_000)


def _expected(target: str, prompts: list[str]) -> dict[tuple[str, str], str]:
    """The texts of the call, by prompt and kind."""
    greedy = SamplingParams(max_tokens=NUM_TOKENS)
    drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3)
    with closing(LLM(target, config=EngineConfig(threads=1, sampler="coupled"))) as llm:
        return {
            (prompt, kind): result.text
            for kind, params in (("greedy", greedy), ("seeded", drawn))
            for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True)
        }


async def _soak(
    url: str,
    server: int,
    num: int,
    options: Options,
    expected: dict[tuple[str, str], str],
    tally: Tally,
) -> dict[str, Any]:
    rng = random.Random(options.seed)
    places, memory = asyncio.Semaphore(AT_ONCE), dict[str, Any]()
    prompts = sorted({prompt for prompt, _ in expected})
    tasks: set[asyncio.Task[None]] = set()
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for prompt, kind in itertools.product(prompts, CHATS):
            expected[prompt, kind] = await _chat(client, kind, prompt, tally, speculative=False)
        for number in range(num):
            await places.acquire()
            kind = rng.choices(_KINDS, _WEIGHTS)[0]
            task = asyncio.ensure_future(
                _one(client, kind, rng.choice(prompts), rng.random(), expected, tally)
            )
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(lambda _: places.release())
            if number % options.kill_every == options.kill_every // 2:
                _kill_engine(server)
                tally.num_kills += 1
            if number == num // 10:
                memory["warm"] = _resident(server)
            if number % 5_000 == 4_999:
                print(f"{number + 1} requests, {len(tally.wrong)} wrong", flush=True)
        await asyncio.gather(*tasks)
        await asyncio.sleep(2)
        memory["end"] = _resident(server)
        told = (await client.get("/metrics")).text.splitlines()
    memory["running"] = _gauge(told, "num_requests_running") + _gauge(told, "num_requests_waiting")
    memory["kv_usage"] = _gauge(told, "kv_cache_usage_perc")
    return memory


async def _one(
    client: httpx.AsyncClient,
    kind: str,
    prompt: str,
    share: float,
    expected: dict[tuple[str, str], str],
    tally: Tally,
) -> None:
    tally.kinds[kind] += 1
    try:
        if kind == "mistake":
            body = MISTAKES[int(share * len(MISTAKES))]
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            if answer.status_code not in (400, 422, 503) or not answer.json()["error"]["message"]:
                tally.wrong.append(f"mistake {body[:60]!r} was answered {answer.status_code}")
            return
        if kind in CHATS:
            message = await _chat(client, kind, prompt, tally, speculative=True)
            if message != expected[prompt, kind]:
                tally.wrong.append(f"{kind}: {prompt[:40]!r} became {message[:200]!r}")
            return
        await _text(client, kind, prompt, share, expected, tally)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is what this looks for
        tally.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])


async def _chat(
    client: httpx.AsyncClient, kind: str, prompt: str, tally: Tally, *, speculative: bool
) -> str:
    """The message that answers `prompt`, without ids, as JSON."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 2 * NUM_TOKENS}
    body |= {"temperature": 0, "speculative": speculative, **CHATS[kind]}
    while True:
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 503:
            break
        tally.num_refused += 1
        await asyncio.sleep(0.2)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    message = choice["message"]
    if kind == "thought":
        if not message.get("reasoning"):
            raise RuntimeError(f"no thoughts: {message}")
    elif choice["finish_reason"] != "length":
        calls = message.get("tool_calls") or [{"function": {"arguments": message["content"]}}]
        if json.loads(calls[0]["function"]["arguments"])["city"] not in ("Oslo", "Rome"):
            raise RuntimeError(f"no answer of the schema: {message}")
    for call in message.get("tool_calls") or []:
        del call["id"]
    return json.dumps(message)


async def _text(
    client: httpx.AsyncClient,
    kind: str,
    prompt: str,
    share: float,
    expected: dict[tuple[str, str], str],
    tally: Tally,
) -> None:
    law = "seeded" if kind == "seeded" else "greedy"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": NUM_TOKENS, "stream": True}
    body |= {"temperature": 0.8, "seed": 3} if law == "seeded" else {"temperature": 0}
    if kind == "plain":
        body["speculative"] = False
    reader = Reader(kind, int(share * 6), tally)
    while True:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 503:
                answer.raise_for_status()
                is_whole = await reader.read(answer)
                break
        tally.num_refused += 1
        await asyncio.sleep(0.2)
    if is_whole and reader.text != expected[prompt, law]:
        tally.wrong.append(f"{kind}: {prompt[:40]!r} became {reader.text[:80]!r}")


@dataclass(slots=True)
class Reader:
    """Of a stream, in the manner of its `kind`."""

    kind: str
    leaves_after: int
    tally: Tally
    text: str = ""

    async def read(self, answer: httpx.Response) -> bool:
        """Whether it was read to its end. Raises RuntimeError for an error in the midst of it."""
        num = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            num += 1
            self._take(json.loads(line[6:]))
            if self.kind == "left" and num > self.leaves_after:
                return False
            if self.kind == "slow":
                await asyncio.sleep(0.02)
        return True

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        self.text += "".join(choice["text"] for choice in chunk["choices"])
        told = (chunk.get("metrics") or {}).get("speculative_decoding")
        if told and told["num_draft_tokens"]:
            self.tally.accepted.append(told["draft_acceptance_rate"])


def _gauge(lines: list[str], name: str) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((f"outrider_{name}", f"outrider:{name}"))
    )


def _children(number: int) -> list[int]:
    found = list[int]()
    for task in Path(f"/proc/{number}/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text("utf-8").split())
    return found


def _kill_engine(server: int) -> None:
    for child in _children(server):
        with suppress(OSError):
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)


def _resident(server: int) -> int:
    """Of the server; the engine's process is a new one after each kill."""
    return 4096 * int(Path(f"/proc/{server}/statm").read_text("utf-8").split()[1])


@contextmanager
def _served(target: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "outrider", "serve", target, "--port", "0", "--json"]
    command += ["--threads", "1", "--max-queued", "64"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        template = Path(folder, "chat.jinja")
        template.write_text(TEMPLATE, encoding="utf-8")
        command += ["--chat-template", str(template)]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        try:
            if process.stdout is None:
                raise RuntimeError("the server has no output")
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            started = time.perf_counter()
            process.terminate()
            process.wait(60)
            print(f"the server ended in {time.perf_counter() - started:.1f} s", flush=True)
