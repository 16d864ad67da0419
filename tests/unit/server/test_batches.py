"""Files and batches of OpenAI's API: what is answered, who sees it, and what a new server goes on
with."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from doubles.asgi_client import Client, Got
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import QUICK, ask, run
from outrider.core.errors import ConfigError
from outrider.plugins.batches import batches as batches_module
from outrider.plugins.batches.batches import BATCH_BODIES, Batches, Lines, batch_routes
from outrider.plugins.batches.files import Files
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server.access import DoorRules
from outrider.server.app import FILE_ANSWERS, all_routes, document, make_app, routed, text_routes
from outrider.server.site import BATCH, Admission, Site

MIB = 1 << 20
KEYS = ("first-key-of-two-keys", "second-key-of-two-keys")
OVER = ("completed", "failed", "cancelled", "expired")


def chat(name: str, text: str = "x", **more: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}]} | more
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def form(data: bytes, name: str = "in.jsonl", purpose: str = "batch", border: str = "b0") -> bytes:
    start = f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
    start += f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    start += "Content-Type: application/octet-stream\r\n\r\n"
    return start.encode() + data + f"\r\n--{border}--\r\n".encode()


class Server:
    """A server with files in `folder`, until the end of the block."""

    def __init__(
        self,
        folder: Path,
        port: ScriptedPort | None = None,
        *,
        keyed: bool = False,
        most: int = 4,
        size: int = MIB,
    ) -> None:
        self.port, self.keyed = port or ScriptedPort(), keyed
        limits = replace(QUICK, file_bytes=size)
        self.site = Site(port=self.port, names=("scripted",), limits=limits)
        self.files = Files(folder, limits.file_bytes)
        inner = routed(text_routes(self.site))
        self.batches = Batches(
            self.site, self.files, Lines(inner, self.site.traffic.admission, most)
        )
        metrics = Metrics(lambda: {"scripted": self.port.status})
        routes = all_routes(
            self.site, [*metric_routes(metrics), *batch_routes(self.batches)], BATCH_BODIES
        )
        rules = DoorRules(keys=KEYS if keyed else ())
        self.app: ASGIApp = make_app(self.site, rules, routes)

    async def __aenter__(self) -> Server:
        self.running = asyncio.ensure_future(self.batches.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        with suppress(asyncio.CancelledError):
            await self.running

    def close(self) -> None:
        self.files.close()

    async def ask(self, path: str, body: object = None, *, key: int = 0, **more: Any) -> Got:
        headers = more.pop("headers", {})
        if self.keyed:
            headers = headers | {"authorization": f"Bearer {KEYS[key]}"}
        return await Client(self.app).ask(path, body, headers=headers, **more)

    async def upload(self, data: bytes, *, key: int = 0, pieces: Sequence[bytes] = ()) -> Got:
        headers = {"content-type": "multipart/form-data; boundary=b0"}
        sent = list(pieces) or [form(data)]
        return await self.ask("/v1/files", key=key, headers=headers, pieces=sent)

    async def begin(self, data: bytes, url: str = "/v1/chat/completions", *, key: int = 0) -> str:
        name = (await self.upload(data, key=key)).json()["id"]
        body = {"input_file_id": name, "endpoint": url, "completion_window": "24h"}
        got = await self.ask("/v1/batches", body, key=key)
        assert got.status == 200, got.body
        return got.json()["id"]

    async def until(self, name: str, *states: str, key: int = 0) -> dict[str, Any]:
        while True:
            found = (await self.ask(f"/v1/batches/{name}", key=key)).json()
            if found["status"] in states:
                return found
            assert found["status"] not in OVER, found
            await asyncio.sleep(0.001)

    async def content(self, name: str | None, key: int = 0) -> dict[str, Any]:
        """Lines by their custom_id."""
        got = await self.ask(f"/v1/files/{name}/content", key=key)
        assert got.status == 200
        return {one["custom_id"]: one for one in map(json.loads, got.body.splitlines())}


def test_every_line_of_a_batch_is_answered_as_a_client_would_be(tmp_path: Path) -> None:
    async def work() -> None:
        async with Server(tmp_path) as server:
            tool = {"type": "function", "function": {"name": "f"}}
            asked = [
                chat("plain"),
                chat("tools", tools=[tool], tool_choice="none"),
                chat("two", n=2, seed=7),
                chat("wrong", temperature=-1),
                chat("elsewhere", model="another"),
            ]
            done = await server.until(await server.begin(lines(*asked)), "completed")
            assert done["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
            assert done["object"] == "batch"
            assert done["completed_at"] >= done["in_progress_at"] >= done["created_at"]
            good = await server.content(done["output_file_id"])
            bad = await server.content(done["error_file_id"])
            assert set(good) == {"plain", "tools", "two"}
            body = good["plain"]["response"]["body"]
            assert body["choices"][0]["message"]["content"] == "Hello"
            assert body["metrics"]["speculative_decoding"]
            assert len(good["two"]["response"]["body"]["choices"]) == 2
            statuses = {name: one["response"]["status_code"] for name, one in bad.items()}
            assert statuses == {"wrong": 400, "elsewhere": 404}
            assert bad["wrong"]["response"]["body"]["error"]["param"] == "temperature"
            listed = (await server.ask("/v1/files?purpose=batch_output")).json()["data"]
            assert {one["id"] for one in listed} == {done["output_file_id"], done["error_file_id"]}

    run(work())


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/responses", {"input": "a"})],
)
def test_each_endpoint_has_batches(tmp_path: Path, url: str, body: dict[str, Any]) -> None:
    async def work() -> None:
        async with Server(tmp_path) as server:
            line = chat("a") | {"url": url, "body": body}
            done = await server.until(await server.begin(lines(line), url), "completed")
            assert done["error_file_id"] is None
            (answer,) = (await server.content(done["output_file_id"])).values()
            assert "Hello" in json.dumps(answer["response"]["body"])

    run(work())


def test_a_form_may_come_in_any_pieces(tmp_path: Path) -> None:
    async def work() -> None:
        server, numbers = Server(tmp_path), random.Random(5)
        # With what looks like a border, and is none.
        data = b"\r\n--b\r\n--b0x".replace(b"b0x", b"bx") + bytes(range(256)) + b"\r\n--"
        whole = form(data)
        for _ in range(20):
            cuts = sorted(numbers.sample(range(1, len(whole)), numbers.randrange(1, 40)))
            ends = [*cuts, len(whole)]
            pieces = [whole[i:j] for i, j in zip([0, *cuts], ends, strict=True)]
            got = await server.upload(b"", pieces=pieces)
            assert got.status == 200, got.body
            record = got.json()
            assert (record["bytes"], record["filename"]) == (len(data), "in.jsonl")
            back = await server.ask(f"/v1/files/{record['id']}/content")
            assert back.body == data
            gone = await server.ask(f"/v1/files/{record['id']}", method="DELETE")
            assert gone.json() == {"id": record["id"], "object": "file", "deleted": True}
        assert (await server.ask("/v1/files")).json()["data"] == []

    run(work())


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (form(b"x")[:-8], "breaks off"),
        (b"", "empty"),
        (b"\r\n", "no border"),
        (form(b"x", purpose="fine-tune"), "purpose"),
        (form(b"x", name="a\tb"), "file"),
        (form(b"x", name="a" * 300), "file"),
        (form(b"x").replace(b'name="file"', b'name="fail"'), "file"),
        (form(b"x").replace(b'name="purpose"', b"x=y"), "no name"),
        (form(b"x").replace(b"--b0\r\n", b"--b0x\r\n", 1), "border"),
        (form(b"x").replace(b'"purpose"', b'"expires_after[anchor]"'), "purpose"),
        (form(b"x").replace(b"name=", b"x" * 5000 + b"; name="), "breaks off"),
    ],
    ids=range(11),
)
def test_what_is_no_form_is_refused_and_leaves_nothing(
    tmp_path: Path, body: bytes, word: str
) -> None:
    async def work() -> None:
        server = Server(tmp_path)
        got = await server.upload(b"", pieces=[body])
        assert (got.status, word in got.json()["error"]["message"]) == (400, True), got.body
        assert not list(tmp_path.glob("*/*"))

    run(work())


def test_a_key_has_so_many_bytes_and_no_more(tmp_path: Path) -> None:
    async def work() -> None:
        server = Server(tmp_path, keyed=True)
        half = b"x" * (MIB // 2)
        first = (await server.upload(half)).json()["id"]
        got = await server.upload(half + b"x")
        assert (got.status, got.json()["error"]["code"]) == (413, "storage_limit")
        assert (await server.upload(half + b"x", key=1)).status == 200
        assert (await server.ask(f"/v1/files/{first}", method="DELETE")).status == 200
        assert (await server.upload(half + b"x")).status == 200
        assert not list(tmp_path.glob("*/*.part"))

    run(work())


def test_no_key_sees_what_is_another_ones(tmp_path: Path) -> None:
    async def work() -> None:
        async with Server(tmp_path, keyed=True) as server:
            batch = await server.begin(lines(chat("a")))
            done = await server.until(batch, "completed")
            names = (done["input_file_id"], done["output_file_id"])
            paths = [f"/v1/files/{name}{end}" for name in names for end in ("", "/content")]
            for path in (*paths, f"/v1/batches/{batch}"):
                assert (await server.ask(path)).status == 200
                assert (await server.ask(path, key=1)).status == 404
            for path in ("/v1/files", "/v1/batches"):
                assert (await server.ask(path)).json()["data"]
                assert (await server.ask(path, key=1)).json()["data"] == []
            got = await server.ask(f"/v1/files/{names[0]}", method="DELETE", key=1)
            assert got.status == 404
            got = await server.ask(f"/v1/batches/{batch}/cancel", method="POST", key=1)
            assert got.status == 404
            body = {"input_file_id": names[0], "endpoint": "/v1/completions"}
            got = await server.ask("/v1/batches", body | {"completion_window": "24h"}, key=1)
            assert got.status == 404
            # Prompts of a batch are read for its own key, too.
            owner = server.port.requests[0]
            assert owner.key == BATCH + owner.cache_salt
            assert owner.cache_salt

    run(work())


@pytest.mark.parametrize(
    "name",
    ["../lock", "..%2flock", "file-x", "lock", "file-" + "0" * 24, "file-" + "A" * 24, "%00"],
)
def test_names_that_are_none_lead_nowhere(tmp_path: Path, name: str) -> None:
    async def work() -> None:
        server = Server(tmp_path)
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
            assert (await server.ask(path)).status == 404
        assert (await server.ask(f"/v1/files/{name}", method="DELETE")).status == 404
        assert (tmp_path / "lock").exists()

    run(work())


MISTAKES = [
    (b"", "empty_file", None),
    (b"{", "invalid_json_line", 1),
    (lines(chat("a"), chat("a")), "duplicate_custom_id", 2),
    (lines(chat("a") | {"url": "/v1/completions"}), "invalid_request", 1),
    (lines(chat("a") | {"method": "GET"}), "invalid_request", 1),
    (lines({"custom_id": "a"}), "invalid_request", 1),
    (lines(chat("a") | {"body": 1}), "invalid_request", 1),
    (lines(chat("a"), chat("b", stream=True)), "invalid_request", 2),
    (lines(chat("a", text="\ud800")), "invalid_json_line", 1),
]


@pytest.mark.parametrize(("data", "code", "line"), MISTAKES, ids=[code for _, code, _ in MISTAKES])
def test_a_file_with_a_mistake_fails_before_a_line_is_asked(
    tmp_path: Path, data: bytes, code: str, line: int | None
) -> None:
    async def work() -> None:
        async with Server(tmp_path) as server:
            found = await server.until(await server.begin(data), "failed")
            (mistake,) = found["errors"]["data"]
            assert (mistake["code"], mistake["line"]) == (code, line)
            assert found["output_file_id"] is found["error_file_id"] is None
            assert not server.port.requests

    run(work())


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"endpoint": "/v1/embeddings"}, 400),
        ({"completion_window": "1h"}, 400),
        ({"metadata": {"a" * 65: "b"}}, 400),
        ({"metadata": {"a": 1}}, 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400),
        ({"input_file_id": "file-" + "0" * 24}, 404),
        ({"input_file_id": "../lock"}, 404),
    ],
    ids=str,
)
def test_what_a_batch_cannot_be_is_refused(
    tmp_path: Path, changed: dict[str, Any], status: int
) -> None:
    async def work() -> None:
        async with Server(tmp_path) as server:
            name = (await server.upload(lines(chat("a")))).json()["id"]
            body = {"input_file_id": name, "endpoint": "/v1/chat/completions"}
            got = await server.ask("/v1/batches", body | {"completion_window": "24h"} | changed)
            assert got.status == status

    run(work())


def held(port: ScriptedPort) -> ScriptedPort:
    port.pause = asyncio.Event()
    return port


def test_a_batch_goes_on_where_an_earlier_server_ended(tmp_path: Path) -> None:
    asked = [chat(f"line {i}", text=f"{i}") for i in range(40)]

    async def first() -> str:
        port = ScriptedPort()
        async with Server(tmp_path, port) as server:
            batch = await server.begin(lines(*asked))
            while (await server.ask(f"/v1/batches/{batch}")).json()["request_counts"][
                "completed"
            ] < 10:
                await asyncio.sleep(0)
            port.pause = asyncio.Event()
        assert all(stream.is_over for stream in port.streams)
        server.close()
        return batch

    async def second(batch: str) -> None:
        async with Server(tmp_path) as server:
            done = await server.until(batch, "completed")
            assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
            # What had its answer is not asked again.
            assert len(server.port.requests) <= 30
            got = await server.ask(f"/v1/files/{done['output_file_id']}/content")
            names = [json.loads(line)["custom_id"] for line in got.body.splitlines()]
            assert sorted(names) == sorted(one["custom_id"] for one in asked)
        server.close()

    async def third(batch: str) -> None:
        async with Server(tmp_path) as server:
            assert (await server.until(batch, "completed"))["request_counts"]["completed"] == 40
            assert not server.port.requests

    batch = run(first())
    run(second(batch))
    run(third(batch))


def test_a_server_that_ends_waits_for_no_batch(tmp_path: Path) -> None:
    async def work() -> None:
        server = Server(tmp_path, held(ScriptedPort()))
        async with server:
            batch = await server.begin(lines(chat("a")))
            while not server.port.streams:
                await asyncio.sleep(0)
            server.site.traffic.ending = True
            await server.running
            assert not server.site.traffic.num_running
            assert server.batches.get("", batch).status == "in_progress"

    run(work())


def test_a_batch_that_is_cancelled_ends_and_keeps_what_it_has(tmp_path: Path) -> None:
    async def work() -> None:
        port = ScriptedPort()
        async with Server(tmp_path, port, most=1) as server:
            batch = await server.begin(lines(*(chat(f"{i}") for i in range(20))))
            while len(port.streams) < 3:
                await asyncio.sleep(0)
            port.pause = asyncio.Event()
            found = (await server.ask(f"/v1/batches/{batch}")).json()
            got = await server.ask(f"/v1/files/{found['input_file_id']}", method="DELETE")
            assert got.status == 409
            path = f"/v1/batches/{batch}/cancel"
            got = await server.ask(path, method="POST", headers={"content-type": ""})
            assert got.json()["status"] == "cancelling"
            done = await server.until(batch, "cancelled")
            assert done["cancelled_at"] >= done["cancelling_at"]
            answers = await server.content(done["output_file_id"])
            assert len(answers) == done["request_counts"]["completed"] < 20
            await check_unanswered(server, done, "batch_cancelled")
            assert all(stream.is_over for stream in port.streams)
            assert (await server.ask(path, method="POST")).status == 409
            got = await server.ask(f"/v1/files/{found['input_file_id']}", method="DELETE")
            assert got.status == 200

    run(work())


def test_a_batch_that_had_no_time_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        port = ScriptedPort()
        async with Server(tmp_path, port, most=1) as server:
            batch = await server.begin(lines(*(chat(f"{i}") for i in range(5))))
            while len(port.streams) < 3:
                await asyncio.sleep(0)
            port.pause = asyncio.Event()
            monkeypatch.setattr("outrider.plugins.batches.batches.time.time", lambda: 1e12)
            done = await server.until(batch, "expired")
            good = await server.content(done["output_file_id"])
            assert len(good) == done["request_counts"]["completed"] < 5
            await check_unanswered(server, done, "batch_expired")
            assert done["expired_at"] == 10**12

    run(work())


async def check_unanswered(server: Server, done: dict[str, Any], code: str) -> None:
    """Each line has an answer, or an error of this kind."""
    good, bad = [await server.content(done[f"{kind}_file_id"]) for kind in ("output", "error")]
    counts = done["request_counts"]
    assert counts == {"total": len(good) + len(bad), "completed": len(good), "failed": len(bad)}
    assert sorted([*good, *bad], key=int) == [str(i) for i in range(counts["total"])]
    assert {(one["response"], one["error"]["code"]) for one in bad.values()} == {(None, code)}
    assert all(one["error"]["message"].endswith(".") for one in bad.values())


def test_batches_leave_the_server_to_who_waits(tmp_path: Path) -> None:
    async def work() -> None:
        port = held(ScriptedPort())
        async with Server(tmp_path, port, most=16) as server:
            say = {"messages": [{"role": "user", "content": "now"}]}
            waiting = asyncio.ensure_future(server.ask("/v1/chat/completions", say))
            while not port.streams:
                await asyncio.sleep(0)
            batch = await server.begin(lines(*(chat(f"{i}") for i in range(64))))
            while len(port.streams) < 3:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            # An eighth of what runs where nobody else asks.
            weights = [request.weight for request in port.requests]
            assert weights == [1.0, 1 / 64, 1 / 64]
            # One more finds a slot at once.
            more = asyncio.ensure_future(server.ask("/v1/chat/completions", say))
            while len(port.streams) < 4:
                await asyncio.sleep(0)
            assert port.requests[-1].weight == 1.0
            given, port.pause = port.pause, None
            assert given is not None
            given.set()
            assert {(await waiting).status, (await more).status} == {200}
            await server.until(batch, "completed")

    run(work())


def test_more_lines_run_where_nobody_else_asks(tmp_path: Path) -> None:
    async def work() -> None:
        port = held(ScriptedPort())
        async with Server(tmp_path, port, most=16) as server:
            await server.begin(lines(*(chat(f"{i}") for i in range(64))))
            while len(port.streams) < 16:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            assert len(port.streams) == 16

    run(work())


def test_the_share_of_a_key_holds_among_batches() -> None:
    admission = Admission(weights={"a": 4.0})
    assert admission.weight("a") == 64 * admission.weight(BATCH + "a") == 4 * admission.weight("b")


def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr("outrider.plugins.batches.batches._RETRY_SECONDS", 0.01)
        port = ScriptedPort(most=0)
        async with Server(tmp_path, port) as server:
            batch = await server.begin(lines(chat("a")))
            await asyncio.sleep(0.05)
            assert server.batches.get("", batch).status == "in_progress"
            port.most = 4
            done = await server.until(batch, "completed")
            assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    run(work())


def test_answers_count_against_the_bytes_of_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        monkeypatch.setattr(batches_module, "_LINES_A_LOOK", 2)
        async with Server(tmp_path, most=1, size=12_000) as server:
            batch = await server.begin(lines(*(chat(f"{i}") for i in range(20))))
            done = await server.until(batch, "failed")
            assert done["errors"]["data"][0]["code"] == "storage_limit"
            assert 0 < len(await server.content(done["output_file_id"])) < 20

    run(work())


def test_pages_of_a_list(tmp_path: Path) -> None:
    async def work() -> None:
        async with Server(tmp_path) as server:
            names = [await server.begin(lines(chat("a"))) for _ in range(5)]
            found, after = list[str](), ""
            while True:
                got = (await server.ask(f"/v1/batches?limit=2{after}")).json()
                found += [one["id"] for one in got["data"]]
                if not got["has_more"]:
                    break
                after = f"&after={found[-1]}"
            assert found == names[::-1]
            got = (await server.ask(f"/v1/batches?order=asc&limit=2&after={names[1]}")).json()
            assert [one["id"] for one in got["data"]] == names[2:4]
            assert (got["first_id"], got["last_id"], got["has_more"]) == (*names[2:4], True)
            oldest = (await server.ask("/v1/files?order=asc&purpose=batch")).json()["data"]
            assert oldest == (await server.ask("/v1/files?purpose=batch")).json()["data"][::-1]
            files = (await server.ask("/v1/files?purpose=batch")).json()["data"]
            assert len(files) == 5
            for query in ("limit=0", "limit=x", "limit=1000", "after=x", "order=up"):
                assert (await server.ask(f"/v1/batches?{query}")).status == 400

    run(work())


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/v1/files/file-1/content"])
def test_without_a_folder_it_is_told_how_to_have_one(path: str) -> None:
    got = ask(ScriptedPort(), path)
    assert (got.status, got.headers["x-should-retry"]) == (501, "false")
    assert "--files" in got.json()["error"]["message"]
    assert path not in ask(ScriptedPort(), "/openapi.json").json()["paths"]


def test_a_folder_is_of_one_server(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with pytest.raises(ConfigError, match="another server uses it"):
        Server(tmp_path)
    server.close()
    Server(tmp_path).close()


def test_what_an_upload_left_is_removed_and_all_else_is_there(tmp_path: Path) -> None:
    async def work() -> str:
        server = Server(tmp_path)
        name = (await server.upload(b"x")).json()["id"]
        for left in (f".file-{'2' * 24}.3.part", f"file-{'4' * 24}.part"):
            (tmp_path / "open" / left).write_bytes(b"x")
        server.close()
        Server(tmp_path).close()
        return name

    name = run(work())
    assert {path.name for path in (tmp_path / "open").iterdir()} == {name, f"{name}.json"}


def test_what_is_sent_to_other_paths_is_bounded_as_before(tmp_path: Path) -> None:
    async def work() -> None:
        server = Server(tmp_path)
        much = {"content-length": str(5 * MIB)}
        assert (await server.ask("/v1/batches", b"{}", headers=much)).status == 413
        kind = {"content-type": "multipart/form-data; boundary=b0"}
        assert (await server.ask("/v1/batches", b"{}", headers=kind)).status == 415
        assert (await server.ask("/v1/files", b"{}")).status == 415
        assert (await server.ask("/v1/files", b"", headers=kind | much)).status == 400
        more = {"content-length": str(6 * MIB)}
        assert (await server.ask("/v1/files", b"", headers=kind | more)).status == 413

    run(work())


def test_the_document_says_what_is_answered(tmp_path: Path) -> None:
    server = Server(tmp_path)
    routes = all_routes(server.site, [*metric_routes(Metrics(dict)), *batch_routes(server.batches)])
    told = json.loads(document(routes, BATCH_BODIES))["paths"]
    for name in FILE_ANSWERS:
        method, _, path = name.rpartition(" ")
        methods = [method.lower()] if method else list(told[path])
        assert all("200" in told[path][one]["responses"] for one in methods)
    assert set(told["/v1/files"]) == {"get", "post"}
    assert "multipart/form-data" in told["/v1/files"]["post"]["requestBody"]["content"]
    assert set(told["/v1/files/{file_id}"]) == {"get", "delete"}
