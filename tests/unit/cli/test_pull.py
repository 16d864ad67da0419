"""`outrider models pull` against a hub on this machine: what comes, what goes on, what fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants

from doubles import json_server as hub_server
from doubles.command_line import Command
from doubles.gguf_writer import small_llama
from doubles.json_server import HubServer, Repo, blob, serving_hub
from outrider.models.names import HUB_FILES
from outrider.pairs.catalog import get_pair

pytestmark = pytest.mark.wide

SMALL = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "generation_config.json": b"{ }"}
WEIGHTS = bytes(range(256)) * 20
UNREAD = {
    "README.md": b"words",
    "modeling_x.py": b"import os",
    "pytorch_model.bin": b"\x80\x02" * 9,
    "onnx/model.onnx": b"o",
    "consolidated.safetensors": b"twice",
}
WHOLE = Repo(SMALL | UNREAD | {"model.safetensors": WEIGHTS, "chat_template.jinja": b"{{ x }}"})
READ = {*SMALL, "model.safetensors", "chat_template.jinja"}
PAIR = get_pair("qwen3")
ALONE = ("--draft", "none")


class Hub(NamedTuple):
    server: HubServer
    cache: Path

    def files(self, repo: str, commit: str = WHOLE.commit) -> set[str]:
        folder = self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / commit
        return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    repos = {"org/m": WHOLE, PAIR.target_model_id: WHOLE, PAIR.draft_model_id: WHOLE}
    with serving_hub(repos) as server:
        cache = tmp_path / "hub"
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield Hub(server, cache)


def record(outrider: Command, *words: str) -> dict[str, Any]:
    shown = outrider("models", "pull", *words, "--json")
    assert shown.code == 0, shown.err
    return json.loads(shown.out)


def test_what_we_read_is_fetched_and_nothing_else(outrider: Command, hub: Hub) -> None:
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert shown.code == 0, shown.err
    assert hub.files("org/m") == READ
    assert "target org/m: 5 of 5 files to fetch, 5 kB" in shown.err
    assert "that are free" in shown.err
    assert "100 %" in shown.err
    assert "\noutrider generate --target org/m PROMPT\n" in shown.out
    asked = {line.split()[1] for line in hub.server.asked}
    assert not [path for path in asked if path.endswith((".py", ".bin", ".onnx", ".md"))]


@pytest.mark.usefixtures("hub")
def test_weights_arrive_whole(outrider: Command) -> None:
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    folder = Path(model["folder"])
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == SMALL
    assert model["state"] == "fetched"
    assert model["fetched_bytes"] == sum(len(WHOLE.files[name]) for name in READ)


def test_the_known_draft_comes_too(outrider: Command, hub: Hub) -> None:
    shown = outrider("models", "pull", PAIR.target_model_id)
    assert hub.files(PAIR.target_model_id) == hub.files(PAIR.draft_model_id) == READ
    sides = f"--target {PAIR.target_model_id} --draft {PAIR.draft_model_id}"
    assert f"outrider generate {sides} PROMPT" in shown.out


def test_another_draft_may_be_named_or_none(outrider: Command, hub: Hub) -> None:
    found = record(outrider, PAIR.target_model_id, "--draft", "org/m")
    assert [model["name"] for model in found["models"]] == [PAIR.target_model_id, "org/m"]
    assert hub.files(PAIR.draft_model_id) == set()
    assert len(record(outrider, PAIR.target_model_id, *ALONE)["models"]) == 1


def test_what_is_here_is_not_fetched_again(outrider: Command, hub: Hub) -> None:
    record(outrider, "org/m", *ALONE)
    hub.server.asked.clear()
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert "target org/m: is here already" in shown.out
    assert (len(hub.server.asked), shown.err) == (1, "")


def test_a_newer_commit_is_fetched_and_the_same_weights_are_not(
    outrider: Command, hub: Hub
) -> None:
    record(outrider, "org/m", *ALONE)
    newer = Repo({**WHOLE.files, "config.json": b'{"b": 2}'}, commit="2" * 40)
    hub.server.repos["org/m"] = newer
    hub.server.asked.clear()
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert model["fetched_bytes"] == len(b'{"b": 2}')
    assert hub.files("org/m", newer.commit) == READ
    assert hub.server.fetched("model.safetensors") == []


def test_a_revision_is_fetched_under_its_name(outrider: Command, hub: Hub) -> None:
    found = record(outrider, "org/m", "--revision", WHOLE.commit, *ALONE)
    assert found["command"] == f"outrider generate --target org/m@{WHOLE.commit} PROMPT"
    assert hub.files("org/m") == READ
    # The same files by another name: only the name is written down.
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert model["fetched_bytes"] == 0
    assert (hub.cache / "models--org--m" / "refs" / "main").read_text() == WHOLE.commit


def test_what_ships_and_folders_need_no_fetching(
    outrider: Command, hub: Hub, tmp_path: Path
) -> None:
    shown = outrider("models", "pull", "outrider/embedded", *ALONE)
    assert "ships with outrider" in shown.out
    (tmp_path / "my own").mkdir()
    shown = outrider("models", "pull", "my own", *ALONE)
    assert "is a folder on this machine" in shown.out
    assert "outrider generate --target 'my own' PROMPT" in shown.out
    assert hub.server.asked == []


class Stop:
    """Of the bar: the user's Ctrl-C when enough came."""

    def __init__(self, limit: int) -> None:
        self.limit, self.done = limit, 0

    def __call__(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.done > self.limit:
            raise KeyboardInterrupt


def stop_after(outrider: Command, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.cli.models.PullBar.came", Stop(limit))
        shown = outrider("models", "pull", "org/m", *ALONE)
    assert shown.code == 130
    assert "run the same command again" in shown.err


def test_a_stopped_download_goes_on_where_it_was(
    outrider: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(outrider, 2500, monkeypatch)
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert hub.server.fetched("model.safetensors")[1:] == [
        f"GET /org/m/resolve/{WHOLE.commit}/model.safetensors bytes=2000-"
    ]
    assert model["fetched_bytes"] == sum(len(WHOLE.files[name]) for name in READ) - 2000
    assert (Path(model["folder"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_sends_all_again_is_understood(
    outrider: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(outrider, 2500, monkeypatch)
    hub.server.ranges = False
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert (Path(model["folder"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_more_than_there_is_begins_again(outrider: Command, hub: Hub) -> None:
    part = hub.cache / "models--org--m" / "blobs" / f"{blob('x.safetensors', WEIGHTS)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(WEIGHTS + b"more")
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert (Path(model["folder"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_damaged_weights_are_noticed_and_fetched_again(outrider: Command, hub: Hub) -> None:
    hub.server.damaged.add("model.safetensors")
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert shown.code == 3
    assert "came damaged" in shown.err
    hub.server.damaged.clear()
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert (Path(model["folder"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_name_that_means_another_commit_meanwhile_is_noticed(
    outrider: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = Repo({**WHOLE.files, "config.json": b'{"b": 2}'}, commit="2" * 40)

    def push(bar: object, num_bytes: int) -> None:
        del bar, num_bytes
        hub.server.repos["org/m"] = newer

    with monkeypatch.context() as patch:
        patch.setattr("outrider.cli.models.PullBar.came", push)
        shown = outrider("models", "pull", "org/m", *ALONE)
    assert (shown.code, shown.out) == (3, "")
    assert "org/m changed on the hub while it was fetched" in shown.err
    (model,) = record(outrider, "org/m", *ALONE)["models"]
    assert Path(model["folder"]).name == newer.commit
    assert hub.files("org/m", newer.commit) == READ


def test_what_the_client_is_content_with_is_looked_through(
    outrider: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that is not heard of again: it gives what the cache has of that commit."""
    folder = hub.cache / "models--org--m" / "snapshots" / WHOLE.commit

    def from_cache(*names: str, **options: object) -> str:
        del names, options
        return str(folder)

    monkeypatch.setattr("outrider.models.hub.snapshot_download", from_cache)
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert (shown.code, shown.out) == (3, "")
    assert "did not come as a whole" in shown.err
    assert "and 4 more" in shown.err


@pytest.mark.parametrize("told", ["../../../escaped", "", "0" * 63, "g" * 64])
def test_a_hash_that_is_none_is_no_name_of_a_file(
    outrider: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    def named(name: str, content: bytes) -> str:
        del name, content
        return told

    monkeypatch.setattr(hub_server, "blob", named)
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert (shown.code, shown.out) == (3, "")
    assert "gives no SHA-256 for model.safetensors" in shown.err
    assert not hub.cache.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_more_is_written_than_was_announced(outrider: Command, hub: Hub, name: str) -> None:
    hub.server.longer.add(name)
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert (shown.code, shown.out) == (3, "")
    assert "bytes that it announced" in shown.err
    assert not list(hub.cache.rglob("*.incomplete"))
    held = [path for path in hub.cache.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in held) < hub_server.MUCH // 8
    hub.server.longer.clear()
    assert outrider("models", "pull", "org/m", *ALONE).code == 0


@pytest.mark.parametrize(
    "facts",
    [
        {"siblings": 5},
        {"siblings": [{"name": "x"}]},
        {"siblings": [{"rfilename": "a.safetensors", "size": -1, "blobId": "0"}]},
        {"siblings": [{"rfilename": "a.safetensors", "size": "many", "blobId": "0"}]},
        {"sha": ["x"]},
        {"lastModified": "yesterday"},
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_is_the_hubs(
    outrider: Command, hub: Hub, facts: dict[str, Any]
) -> None:
    hub.server.repos["org/x"] = Repo(WHOLE.files, facts=facts)
    shown = outrider("models", "pull", "org/x", *ALONE)
    assert shown.code == 3
    assert "defect" not in shown.err
    assert "try: " in shown.err


def test_a_name_that_leads_out_of_the_cache_is_refused(outrider: Command, hub: Hub) -> None:
    hub.server.repos["org/x"] = Repo({**WHOLE.files, "../evil.json": b"{}", "a\\..\\b.json": b"{}"})
    shown = outrider("models", "pull", "org/x", *ALONE)
    assert "defect" not in shown.err
    assert not list(hub.cache.parent.rglob("evil.json"))


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (errno.ECONNRESET, "broke off"),
        (errno.EPIPE, "broke off"),
        (errno.ENETUNREACH, "cannot be reached"),
        (errno.ENOSPC, "cannot be written"),
        (errno.EACCES, "cannot be written"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_a_line_that_breaks_is_not_taken_for_a_disk(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, kind: int, problem: str
) -> None:
    def fail(*words: object, **options: object) -> None:
        del words, options
        raise OSError(kind, os.strerror(kind))

    monkeypatch.setattr("outrider.models.hub.http_get", fail)
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert shown.code == 3
    prose = " ".join(shown.err.split())
    assert problem in prose
    assert ("cannot be written" in prose) == (problem == "cannot be written")


PICKLE = Repo({"config.json": b"{}", "pytorch_model.bin": b"\x80"})
FAILURES: list[tuple[str, Repo | None, str, str]] = [
    ("unknown", None, "knows no model org/x", "hf auth login"),
    ("gated", Repo(WHOLE.files, gated=True), "org/x is gated", "accept its licence"),
    ("pickle", PICKLE, "pickle files, such as pytorch_model.bin", "--revision refs/pr/1"),
    ("empty", Repo({}), "there are no files", "outrider models pairs"),
    ("down", Repo({}, status=503), "cannot answer about org/x now (503)", "later"),
    ("token", Repo({}, status=403), "does not give org/x to the token", "hf auth login"),
]


@pytest.mark.parametrize(
    ("repo", "problem", "hint"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES]
)
def test_what_cannot_be_had_says_why_and_what_to_try(
    outrider: Command, hub: Hub, repo: Repo | None, problem: str, hint: str
) -> None:
    if repo is not None:
        hub.server.repos["org/x"] = repo
    shown = outrider("models", "pull", "org/x", *ALONE)
    assert (shown.code, shown.out) == (3, "")
    assert problem in shown.err
    assert hint in shown.err.partition("try:")[2]
    assert "to fetch" not in shown.err
    assert hub.files("org/x") == set()


@pytest.mark.usefixtures("hub")
def test_a_revision_that_is_not_there(outrider: Command) -> None:
    shown = outrider("models", "pull", "org/m", "--revision", "v9")
    assert shown.code == 3
    assert "org/m has no revision 'v9'" in shown.err


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", ""])
@pytest.mark.usefixtures("hub")
def test_what_is_no_id(outrider: Command, name: str) -> None:
    shown = outrider("models", "pull", name)
    assert shown.code == 3
    assert "is no hub id" in shown.err


@pytest.mark.usefixtures("hub")
def test_a_short_name_is_told_what_it_may_mean(outrider: Command) -> None:
    shown = outrider("pull", "smollm2")
    assert shown.code == 3
    assert "`outrider pull HuggingFaceTB/SmolLM2-135M-Instruct`" in shown.err


@pytest.mark.usefixtures("hub")
def test_two_revisions_are_refused(outrider: Command) -> None:
    assert outrider("models", "pull", "org/m@a", "--revision", "b").code == 2


def test_a_known_draft_that_cannot_be_had_may_be_left_out(outrider: Command, hub: Hub) -> None:
    del hub.server.repos[PAIR.draft_model_id]
    shown = outrider("models", "pull", PAIR.target_model_id)
    assert shown.code == 3
    assert "--draft none" in shown.err
    assert hub.files(PAIR.target_model_id) == set()


def no_sleep(seconds: float) -> None:
    raise AssertionError(f"sleeps {seconds} s")


@pytest.mark.parametrize("way", ["no network", "offline"])
@pytest.mark.usefixtures("hub")
def test_without_a_hub_it_says_so_at_once_or_finds_what_is_here(
    outrider: Command, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    record(outrider, "org/m", *ALONE)
    monkeypatch.setattr("time.sleep", no_sleep)
    if way == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert shown.code == 0
    assert "is here; the hub could not be asked" in shown.out
    shown = outrider("models", "pull", PAIR.target_model_id)
    assert shown.code == 3
    reason = "HF_HUB_OFFLINE" if way == "offline" else "cannot be reached"
    assert reason in shown.err
    assert "outrider models list" in shown.err


@pytest.mark.usefixtures("hub")
def test_half_a_model_is_not_taken_for_a_whole_one(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(outrider, 2500, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert outrider("models", "pull", "org/m", *ALONE).code == 3


def test_a_model_that_lacks_a_shard_is_not_whole(
    outrider: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other programs left in the cache, without a list of what there should be."""
    store = hub.cache / "models--org--m"
    folder = store / "snapshots" / WHOLE.commit
    for path, text in {
        store / "refs" / "main": WHOLE.commit,
        folder / "config.json": "{}",
        folder / "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}',
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert outrider("models", "pull", "org/m", *ALONE).code == 3
    (folder / "1.safetensors").write_bytes(b"")
    assert outrider("models", "pull", "org/m", *ALONE).code == 0


class Disk(NamedTuple):
    """Of every folder."""

    free: int

    def __call__(self, _: Path) -> Disk:
        return self


@pytest.mark.usefixtures("hub")
def test_a_full_disk_is_noticed_before(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(len(WHOLE.files[name]) for name in READ)
    for free, code in ((total - 1, 3), (total, 0)):
        monkeypatch.setattr(shutil, "disk_usage", Disk(free))
        shown = outrider("models", "pull", "org/m", *ALONE)
        assert shown.code == code, shown.err
        assert ("HF_HOME" in shown.err) == (code == 3)


def test_a_cache_that_cannot_be_written(outrider: Command, hub: Hub) -> None:
    hub.cache.write_text("a file where the folder should be")
    shown = outrider("models", "pull", "org/m", *ALONE)
    assert shown.code == 3
    assert "cannot be written" in shown.err
    assert "HF_HOME" in shown.err


def test_nothing_that_runs_code_is_among_what_is_fetched() -> None:
    assert not {"*", "*.py", "*.bin", "*.pt", "*.pkl"} & set(HUB_FILES)


def test_a_model_that_is_not_here_is_fetched_where_it_is_used(outrider: Command, hub: Hub) -> None:
    shown = outrider("generate", "hi", "--target", "org/m")
    assert shown.code == 3  # what came is no model that loads
    assert hub.files("org/m") == READ
    assert "model org/m: 5 of 5 files to fetch, 5 kB" in shown.err
    assert "100 %" in shown.err
    assert "to fetch" not in outrider("generate", "hi", "--target", "org/m").err


def quantised(*names: str) -> dict[str, bytes]:
    return {name: f"GGUF of {name}".encode() * 90 for name in names}


QUANTISED = Repo(
    {"README.md": b"words", "config.json": b"{}"}
    | quantised(
        "m-8B-Q8_0.gguf",
        "m-8B-Q4_K_M.gguf",
        "m-8B-UD-Q4_K_XL.gguf",
        "m-8B-Q4_K.gguf",
        "mmproj-F16.gguf",
        "BF16/m-8B-BF16-00001-of-00002.gguf",
        "BF16/m-8B-BF16-00002-of-00002.gguf",
        "m-8B-IQ2_XXS-00001-of-00002.gguf",
    )
)


@pytest.mark.parametrize(
    ("name", "files", "found"),
    [
        ("org/m-GGUF", {"m-8B-Q4_K_M.gguf"}, "org/m-GGUF:Q4_K_M"),
        ("org/m-GGUF:q8_0", {"m-8B-Q8_0.gguf"}, "org/m-GGUF:Q8_0"),
        ("org/m-GGUF:Q4_K", {"m-8B-Q4_K.gguf"}, "org/m-GGUF:Q4_K"),
        ("hf.co/org/m-GGUF:UD-Q4_K_XL", {"m-8B-UD-Q4_K_XL.gguf"}, "org/m-GGUF:UD-Q4_K_XL"),
        (
            "org/m-GGUF:BF16",
            {"m-8B-BF16-00001-of-00002.gguf", "m-8B-BF16-00002-of-00002.gguf"},
            "org/m-GGUF:BF16",
        ),
    ],
)
def test_one_gguf_file_of_many_is_fetched(
    outrider: Command, hub: Hub, name: str, files: set[str], found: str
) -> None:
    """The named quantisation with all of its parts, or the usual one."""
    hub.server.repos["org/m-GGUF"] = QUANTISED
    answer = record(outrider, name, *ALONE)
    assert hub.files("org/m-GGUF") == files
    assert answer["command"] == f"outrider generate --target {found} PROMPT"
    first = Path(answer["models"][0]["folder"])
    assert first.name == min(files)
    (stored,) = [file for file in QUANTISED.files if file.endswith(first.name)]
    assert first.read_bytes() == QUANTISED.files[stored]
    hub.server.asked.clear()
    again = outrider("models", "pull", name, *ALONE)
    assert "is here already" in again.out
    assert len(hub.server.asked) == 1


def test_what_a_repository_has_not_is_said_with_what_it_has(outrider: Command, hub: Hub) -> None:
    hub.server.repos["org/m-GGUF"] = QUANTISED
    shown = outrider("models", "pull", "org/m-GGUF:Q5_K_M", *ALONE)
    assert shown.code == 3
    assert "has no file quantised to Q5_K_M" in shown.err
    assert "it has BF16, IQ2_XXS, Q4_K, Q4_K_M, Q8_0, UD-Q4_K_XL" in shown.err
    shown = outrider("models", "pull", "org/m-GGUF:IQ2_XXS", *ALONE)
    assert (shown.code, hub.files("org/m-GGUF")) == (3, set())
    assert "has 1 of the 2 parts of m-8B-IQ2_XXS-00001-of-00002.gguf" in shown.err
    shown = outrider("models", "pull", "org/m:Q4_K_M", *ALONE)
    assert "org/m has no file quantised to Q4_K_M" in shown.err
    assert "it has no GGUF files" in shown.err


def test_size_and_memory_are_stated_before_a_byte_comes(outrider: Command, hub: Hub) -> None:
    hub.server.repos["org/m-GGUF"] = QUANTISED
    shown = outrider("models", "pull", "org/m-GGUF:BF16", *ALONE)
    assert "2 of 2 files to fetch, 8 kB; in memory about 8 kB" in shown.err


def test_the_draft_of_the_original_comes_with_a_gguf_file(outrider: Command, hub: Hub) -> None:
    _, _, model = PAIR.target_model_id.rpartition("/")
    hub.server.repos[f"any/{model}-GGUF"] = QUANTISED
    answer = record(outrider, f"any/{model}-GGUF:Q8_0")
    assert [one["name"] for one in answer["models"]] == [
        f"any/{model}-GGUF:Q8_0", PAIR.draft_model_id,
    ]  # fmt: skip


def test_a_gguf_model_runs_by_one_word_and_then_without_a_network(
    outrider: Command, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small_llama().write(tmp_path / "a.gguf")
    hub.server.repos["org/tiny-GGUF"] = Repo({"tiny-Q8_0.gguf": file.read_bytes()})
    words = ("generate", "ab", "--max-tokens", "2", "--drafter", "none", "--quiet")
    by_path = outrider(*words, "--target", str(file))
    assert by_path.code == 0, by_path.err
    by_name = outrider(*words, "-hf", "org/tiny-GGUF:Q8_0")
    assert (by_name.code, by_name.out) == (0, by_path.out)
    assert "1 of 1 files to fetch" in by_name.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("org/tiny-GGUF:Q8_0", "org/tiny-GGUF", "hf.co/org/tiny-GGUF:q8_0"):
        again = outrider(*words, "--hf-repo", name)
        assert (again.code, again.out) == (0, by_path.out), again.err
