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
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from doubles.command_line import Command
from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import ask
from outrider.cli.options import complete
from outrider.cli.verb_options import ServeOptions
from outrider.server.access import PUBLIC, DoorRules
from outrider.server.site import Limits

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KEY = "k" * 32
SYSTEMD_KEYS = "%d/keys"
CONTAINER_KEYS = "/run/secrets/outrider-keys"
complete(ServeOptions)
DEFAULTS = ServeOptions()
PORT = DEFAULTS.port
# Of several servers on one machine, behind what listens at PORT or 443.
REPLICAS = (8001, 8002)
# What ending takes besides the requests: engines that close, the last words, connections.
ENDING_SECONDS = 17


def text(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


def unit(name: str, file: str = "outrider.service") -> str:
    """The last value of a setting of the unit, its lines joined."""
    joined = text(file).replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", joined, re.MULTILINE)[-1]


def image(instruction: str) -> str:
    """The last of these instructions of the Containerfile, its lines joined."""
    joined = text("Containerfile").replace("\\\n", " ")
    return re.findall(rf"^{instruction} (.*)$", joined, re.MULTILINE)[-1]


def service() -> dict[str, Any]:
    return yaml.safe_load(text("compose.yaml"))["services"]["outrider"]


TEMPLATE = "outrider@.service"


def kubernetes() -> dict[str, Any]:
    """Objects by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(text("kubernetes.yaml"))}


def pod() -> dict[str, Any]:
    return kubernetes()["Deployment"]["spec"]["template"]["spec"]


def proxied() -> list[str]:
    """The flags that the proxies' files say the server needs."""
    names = ("nginx.conf", "nginx-replicas.conf", "Caddyfile")
    said = [text(name).replace("\n# ", " ") for name in names]
    found = {re.findall(r"`outrider serve ([^`]*)`", words)[0] for words in said}
    assert len(found) == 1
    return shlex.split(found.pop())


def commands() -> Iterator[tuple[str, list[str]]]:
    yield "unit", shlex.split(unit("ExecStart"))[1:]
    yield "template", shlex.split(unit("ExecStart", TEMPLATE).replace("%i", str(PORT)))[1:]
    entry = json.loads(image("ENTRYPOINT"))[1:]
    yield "image", [*entry, *json.loads(image("CMD"))]
    yield "compose", [*entry, *service()["command"]]
    yield "kubernetes", [*entry, *pod()["containers"][0]["args"]]


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
    assert ports == {PORT, *REPLICAS}
    assert service()["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


def test_gateways_know_where_the_servers_of_the_template_are() -> None:
    urls = re.findall(r"http://127.0.0.1:(\d+)", unit("ExecStart", "smg.service"))
    servers = re.findall(r"^ *server 127.0.0.1:(\d+) ", text("nginx-replicas.conf"), re.M)
    units = re.findall(r"outrider@(\d+)\.service", unit("Wants", "smg.service"))
    told = re.findall(r"outrider@(\d+)", text(TEMPLATE))
    for found in (urls, servers, units, told):
        assert tuple(map(int, found)) == REPLICAS
    words = shlex.split(unit("ExecStart", "smg.service"))
    flags = dict(pairwise(words))
    assert int(flags["--max-payload-size"]) == Limits().body_bytes
    assert int(flags["--port"]) == PORT
    assert flags["--health-check-endpoint"] in PUBLIC
    assert int(unit("TimeoutStopSec", "smg.service")) > int(flags["--shutdown-grace-period-secs"])


def test_the_template_is_the_unit_but_for_its_port_and_user() -> None:
    other = text(TEMPLATE).replace(" --port %i", "").replace(", at port %i", "")
    own = [line for line in other.splitlines() if "%i" not in line and not line.startswith("#")]
    own.remove("User=outrider")
    plain = [line for line in text("outrider.service").splitlines() if not line.startswith("#")]
    assert own == plain


def test_whoever_ends_the_server_waits_longer_than_it_drains() -> None:
    least = DEFAULTS.drain_seconds + ENDING_SECONDS
    assert int(unit("TimeoutStopSec")) >= least
    assert int(service()["stop_grace_period"].removesuffix("s")) >= least
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    assert {int(one) for one in re.findall(r"--stop-timeout (\d+)", page)} == {60}
    waits = pod()["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] >= least + waits
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


@pytest.mark.parametrize(
    ("probe", "path"),
    [("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")],
)
def test_pods_are_asked_by_their_address_and_without_a_key(probe: str, path: str) -> None:
    (container,) = pod()["containers"]
    asked = container[probe]["httpGet"]
    assert asked == {"path": path, "port": container["ports"][0]["name"]}
    assert container["ports"][0]["containerPort"] == PORT
    rules = DoorRules(keys=(KEY,), host="0.0.0.0")
    headers = {"host": f"10.1.2.3:{PORT}"}
    got = ask(ScriptedPort(), path, method="GET", rules=rules, headers=headers)
    assert got.status == 200


def test_pods_are_found_by_their_labels_and_write_to_what_they_mount() -> None:
    found = kubernetes()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    pool = yaml.safe_load_all(text("inference-pool.yaml"))
    selectors = [
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        next(pool)["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    (container,) = pod()["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(mounts) == {one["name"] for one in pod()["volumes"]}
    assert {image("VOLUME"), "/tmp", str(Path(CONTAINER_KEYS).parent)} == set(mounts.values())
    (keys,) = (one["secret"]["secretName"] for one in pod()["volumes"] if one["name"] == "keys")
    said = text("kubernetes.yaml").replace("\n# ", " ")
    assert f"secret generic {keys} --from-file={Path(CONTAINER_KEYS).name}=keys" in said
    assert pod()["securityContext"]["runAsUser"] == int(image("USER"))


def test_who_scales_and_who_picks_reads_metrics_that_there_are() -> None:
    rules = DoorRules(keys=(KEY,), public={*PUBLIC, "/metrics"})
    told = ask(ScriptedPort(), "/metrics", method="GET", rules=rules).body.decode()
    scaled = kubernetes()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    picker = yaml.safe_load(text("endpoint-picker.yaml"))
    (extractor,) = (one for one in picker["plugins"] if one["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    names = [one["pods"]["metric"]["name"] for one in scaled]
    names += [value for name, value in engine.items() if name.endswith("Spec")]
    assert len(names) == 4
    for name in names:
        assert f"# TYPE {name} gauge" in told
    labels = kubernetes()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engine["name"]
    types = {one["type"] for one in picker["plugins"]}
    for profile in picker["schedulingProfiles"]:
        assert {one["pluginRef"] for one in profile["plugins"]} <= types


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
    caddy, limits = text("Caddyfile"), Limits()
    assert f"max_size {limits.body_bytes >> 20}MiB" in caddy
    assert "flush_interval -1" in caddy
    for words in ("read_header 10s", f"read_body {limits.body_seconds:g}s"):
        assert words in caddy
    for nginx in map(text, ("nginx.conf", "nginx-replicas.conf")):
        assert f"client_max_body_size {limits.body_bytes >> 20}m;" in nginx
        assert "proxy_buffering off;" in nginx
        assert f"client_body_timeout {limits.body_seconds:g}s;" in nginx
        zone = re.findall(r"limit_conn_zone \$binary_remote_addr zone=(\w+):\d+m;", nginx)
        assert f"limit_conn {zone[0]} " in nginx
        assert "proxy_set_header Host $host;" in nginx
        hours = int(re.findall(r"proxy_read_timeout (\d+)h;", nginx)[0])
        assert hours * 3600 > limits.ping_seconds
        # Files of batches are longer, and are not stored by the proxy.
        files = nginx[nginx.index("/v1/") :]
        assert f"client_max_body_size {ServeOptions().files_limit}m;" in files
        assert "proxy_request_buffering off;" in files
    assert f"max_size {ServeOptions().files_limit}MiB" in caddy
    # A body that went to a file would have no beginning for the map.
    assert f"client_body_buffer_size {limits.body_bytes >> 20}m;" in text("nginx-replicas.conf")


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


UNITS = {
    "outrider.service": "outrider.service",
    TEMPLATE: f"outrider@{REPLICAS[0]}.service",
    "smg.service": "smg.service",
}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.wide
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_units_and_finds_them_hardened(tmp_path: Path, name: str) -> None:
    for one in UNITS:
        program = shlex.split(unit("ExecStart", one))[0]
        (tmp_path / one).write_text(text(one).replace(program, sys.executable))
    file = tmp_path / UNITS[name]
    file.write_text((tmp_path / name).read_text())
    for check in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", "--no-pager", *check, str(file)],
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{file.name}:" not in done.stderr


NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


@pytest.mark.skipif(NGINX is None, reason="no nginx here")
@pytest.mark.wide
@pytest.mark.parametrize("name", ["nginx.conf", "nginx-replicas.conf"])
def test_nginx_takes_the_sites(tmp_path: Path, name: str) -> None:
    """But for certificates, which there are none of."""
    site = re.sub(r"^ *ssl_certificate.*\n", "", text(name).replace(" 443 ssl", " 127.0.0.1:443"))
    site = re.sub(r"^ *ssl_certificate.*\n", "", site, flags=re.MULTILINE)
    (tmp_path / "site.conf").write_text(site)
    whole = tmp_path / "nginx.conf"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {tmp_path};" for kind in kinds)
    whole.write_text(
        f"pid {tmp_path}/pid;\nevents {{}}\n"
        f"http {{ access_log off; {paths} include {tmp_path}/site.conf; }}\n"
    )
    done = subprocess.run(
        [str(NGINX), "-t", "-c", str(whole), "-g", f"error_log {tmp_path}/errors;"],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "[warn]" not in done.stderr


@pytest.mark.wide
def test_kubernetes_takes_the_objects() -> None:
    """Against its own schemas, no field that it does not know."""
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here")
    for one in yaml.safe_load_all(text("kubernetes.yaml")):
        validate.validate(one, "1.37", strict=True)
