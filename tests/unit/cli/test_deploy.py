"""What deploy/ has is true of the server: flags, ports, paths, sizes, and who waits for whom."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from doubles.command_line import Command
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask
from outrider.cli.options import complete
from outrider.cli.serve_options import ServeOptions
from outrider.server.door import PUBLIC, DoorRules
from outrider.server.site import Limits

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KEY = "k" * 32
SYSTEMD_KEYS = "%d/keys"
CONTAINER_KEYS = "/run/secrets/outrider-keys"
complete(ServeOptions)
DEFAULTS = ServeOptions()
PORT = DEFAULTS.port
# What ending takes besides the requests: engines that close, the last words, connections.
ENDING_SECONDS = 17


def text(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


def unit(name: str) -> str:
    """The last value of a setting of the unit."""
    return re.findall(rf"^{name}=(.*)$", text("outrider.service"), re.MULTILINE)[-1]


def image(instruction: str) -> str:
    """The last of these instructions of the Containerfile, its lines joined."""
    joined = text("Containerfile").replace("\\\n", " ")
    return re.findall(rf"^{instruction} (.*)$", joined, re.MULTILINE)[-1]


def service() -> dict[str, Any]:
    return yaml.safe_load(text("compose.yaml"))["services"]["outrider"]


def proxied() -> list[str]:
    """The flags that the proxies' files say the server needs."""
    said = [text(name).replace("\n# ", " ") for name in ("nginx.conf", "Caddyfile")]
    found = {re.findall(r"`outrider serve ([^`]*)`", words)[0] for words in said}
    assert len(found) == 1
    return shlex.split(found.pop())


def commands() -> Iterator[tuple[str, list[str]]]:
    yield "unit", shlex.split(unit("ExecStart"))[1:]
    entry = json.loads(image("ENTRYPOINT"))[1:]
    yield "image", [*entry, *json.loads(image("CMD"))]
    yield "compose", [*entry, *service()["command"]]


COMMANDS = dict(commands())


@pytest.mark.weights
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_one_that_asks_for_a_key(
    outrider: Command, tmp_path: Path, name: str
) -> None:
    """It runs as far as `--check` goes, with a file of keys where it expects one."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    words = [str(keys) if one in (SYSTEMD_KEYS, CONTAINER_KEYS) else one for one in COMMANDS[name]]
    assert words != COMMANDS[name]
    shown = outrider(*words, "--check", "--json")
    assert shown.code == 0, shown.err
    record = json.loads(shown.out)
    assert record["asks_for_key"]
    assert record["url"] == f"http://127.0.0.1:{PORT}"


def test_keys_are_where_commands_look_for_them() -> None:
    assert unit("LoadCredential").partition(":")[0] == SYSTEMD_KEYS.removeprefix("%d/")
    assert service()["secrets"] == [Path(CONTAINER_KEYS).name]
    assert yaml.safe_load(text("compose.yaml"))["secrets"].keys() == {Path(CONTAINER_KEYS).name}


def test_keys_get_into_no_commit_and_no_package() -> None:
    file = yaml.safe_load(text("compose.yaml"))["secrets"][Path(CONTAINER_KEYS).name]["file"]
    assert f"/deploy/{file}" in (ROOT / ".gitignore").read_text("utf-8").splitlines()
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()
    assert manifest.index(f"exclude deploy/{file}") > manifest.index("graft deploy")
    # The image takes what it names, and nothing of this folder.
    assert not re.search(r"^COPY (\.|deploy)[ /]", text("Containerfile"), re.MULTILINE)


def test_there_is_one_port() -> None:
    files = [text(path.name) for path in DEPLOY.iterdir()] + [image("EXPOSE")]
    ports = {int(port) for file in files for port in re.findall(r"(?:1:|^)(\d{2,5})\b", file)}
    assert ports == {PORT}
    assert service()["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


def test_whoever_ends_the_server_waits_longer_than_it_drains() -> None:
    least = DEFAULTS.drain_seconds + ENDING_SECONDS
    assert int(unit("TimeoutStopSec")) >= least
    assert int(service()["stop_grace_period"].removesuffix("s")) >= least
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    assert {int(one) for one in re.findall(r"--stop-timeout (\d+)", page)} == {60}
    # Engines are ended by the server, once their requests are.
    assert unit("KillMode") == "mixed"


def test_systemd_waits_until_it_is_ready() -> None:
    """Without a bound: models are downloaded (tests/server has what the server tells)."""
    assert (unit("Type"), unit("TimeoutStartSec")) == ("notify", "infinity")


def test_the_health_check_asks_what_is_open_and_answers() -> None:
    test = service()["healthcheck"]["test"]
    path = re.findall(rf":{PORT}(/\w*)", test[-1])[0]
    assert path in PUBLIC
    rules = DoorRules(keys=(KEY,))
    assert ask(ScriptedPort(), path, method="GET", rules=rules).status == 200
    assert test[:3] == ["CMD", "python", "-c"]
    compile(test[3], "healthcheck", "exec")


@pytest.mark.parametrize("flags", [True, False], ids=["as the files say", "without"])
def test_pages_and_clients_come_in_behind_the_proxies(flags: bool) -> None:
    words = proxied() if flags else []
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    rules = DoorRules(
        keys=(KEY,),
        hosts={one for name, one in pairs.items() if name == "--allowed-host"},
        origins={one for name, one in pairs.items() if name == "--allowed-origin"},
    )
    site = re.findall(r"^server_name (\S+);$", text("nginx.conf").replace("    ", ""), re.M)[0]
    assert f"\n{site} {{" in text("Caddyfile")
    headers = {"host": site, "origin": f"https://{site}", "x-api-key": KEY}
    body = {"prompt": "ab", "temperature": 0}
    got = ask(ScriptedPort(), "/v1/completions", body, rules=rules, headers=headers)
    assert got.status == (200 if flags else 403)


def test_proxies_let_streams_and_bodies_through() -> None:
    nginx, caddy, limits = text("nginx.conf"), text("Caddyfile"), Limits()
    assert f"client_max_body_size {limits.body_bytes >> 20}m;" in nginx
    assert f"max_size {limits.body_bytes >> 20}MiB" in caddy
    assert "proxy_buffering off;" in nginx
    assert "flush_interval -1" in caddy
    assert "proxy_set_header Host $host;" in nginx
    hours = int(re.findall(r"proxy_read_timeout (\d+)h;", nginx)[0])
    assert hours * 3600 > limits.ping_seconds


def test_the_image_is_made_of_what_there_is() -> None:
    file = text("Containerfile")
    for line in re.findall(r"^COPY (.*) \S+$", file, re.MULTILINE):
        assert [name for name in line.split() if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = re.findall(r"whl\)\[([\w,]+)\]", file)[0]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    minor = int(re.findall(r"python:3\.(\d+)-", file)[0])
    assert f"Programming Language :: Python :: 3.{minor}" in project["classifiers"]
    kinds = re.findall(r"AS torch-(\w+)", file)
    given = yaml.safe_load(text("compose.cuda.yaml"))["services"]["outrider"]["build"]["args"]
    assert [service()["build"]["args"]["KIND"], given["KIND"]] == kinds
    # PyTorch is installed in the stages of its kinds, and nowhere again.
    assert file.count("/versions.txt torch") == len(kinds)


def test_only_folders_that_may_be_written_are() -> None:
    kept = image("VOLUME")
    assert service()["volumes"] == [f"outrider:{kept}"]
    assert service()["read_only"]
    assert int(image("USER")) > 0
    for home in image("ENV").split():
        assert home.partition("=")[2].startswith(f"{kept}/")
    folder = f"%C/{unit('CacheDirectory')}"
    for home in unit("Environment").split():
        assert home.partition("=")[2].startswith(folder)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.wide
def test_systemd_takes_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    file = tmp_path / "outrider.service"
    program = shlex.split(unit("ExecStart"))[0]
    file.write_text(text(file.name).replace(program, sys.executable))
    for check in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", *check, str(file)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "outrider.service:" not in done.stderr
