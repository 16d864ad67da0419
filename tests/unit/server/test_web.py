"""The browser's pages: what they load, how large it is, and that nothing comes from elsewhere."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from doubles.scripted_port import ScriptedPort
from doubles.scripted_site import site_with
from outrider.plugins.metrics import Metrics, metric_routes
from outrider.server import about
from outrider.server.access import DoorRules
from outrider.server.app import make_app
from outrider.server.port import EngineStatus

WEB = Path(about.__file__).parent / "web"
ASSETS = WEB.parents[1] / "api" / "assets"
VENDOR = WEB / "vendor"
MOST_BYTES = 92_000
# Colours of code, fetched with the first block in a language.
LANGUAGES = {f"/web/vendor/{path.name}" for path in VENDOR.glob("highlight-*.js")}
MOST_LANGUAGE_BYTES = 13_000
# Not a keyword in quotes, which grammars of languages have.
_IMPORTED = re.compile(r"(?<![\"'])(?:from|import) ?\"([^\"]+)\"")


@pytest.fixture(scope="module")
def client() -> TestClient:
    metrics = Metrics(lambda: {"tiny": EngineStatus(state="ready")})
    routes = [*about.web_routes(), *metric_routes(metrics)]
    app = make_app(site_with(ScriptedPort()), DoorRules(), routes)
    return TestClient(app, base_url="http://localhost")


def loaded(client: TestClient, path: str) -> dict[str, bytes]:
    """All that a browser fetches for the page at `path`, by its path."""
    found = {path: client.get(path).content}
    page = found[path].decode()
    waiting = [f"/{name}" for name in re.findall(r'(?:src|href)="(web/[^"]+)"', page)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        answer = client.get(name)
        assert answer.status_code == 200, name
        found[name] = answer.content
        if name.endswith(".js"):
            for imported in _IMPORTED.findall(answer.text):
                assert imported.startswith("./"), f"{name} imports {imported}"
                waiting.append(f"{name.rpartition('/')[0]}/{imported[2:]}")
    return found


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_page_and_all_that_it_loads_is_below_92_kilobytes(client: TestClient, path: str) -> None:
    sizes = {name: len(gzip.compress(data, 9)) for name, data in loaded(client, path).items()}
    assert len(sizes) > 8
    assert not LANGUAGES & set(sizes)
    assert sum(sizes.values()) < MOST_BYTES, sizes


def test_the_languages_that_the_page_fetches_later_are_served_and_small(client: TestClient) -> None:
    listed = re.search(r"const NAMES = \{(.*?)\};", (WEB / "markdown.js").read_text(), re.DOTALL)
    assert listed is not None
    names = re.findall(r"(\w+): \"", listed[1])
    assert {f"/web/vendor/highlight-{name}.js" for name in names} == LANGUAGES
    found = [client.get(path) for path in sorted(LANGUAGES)]
    assert {answer.status_code for answer in found} == {200}
    assert sum(len(gzip.compress(one.content, 9)) for one in found) < MOST_LANGUAGE_BYTES


def test_both_pages_together_load_every_file(client: TestClient) -> None:
    served = {route.path for route in about.web_routes()}
    # Saved pages of runs have these as well.
    also = {"/web/rounds/page.js", "/web/rounds/style.css"}
    assert {*loaded(client, "/"), *loaded(client, "/dashboard")} | also | LANGUAGES == served


def test_vendored_files_are_those_of_the_manifest() -> None:
    manifest = json.loads((VENDOR / "manifest.json").read_text("utf-8"))
    known = {name: entry["sha256"] for name, entry in manifest.items()}
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.iterdir()
        if path.suffix in (".js", ".css")
    }
    assert found == known
    licences = (VENDOR / "LICENSES.txt").read_text("utf-8")
    assert all(entry["package"] in licences for entry in manifest.values())


def test_no_page_names_a_foreign_address() -> None:
    ours = [*WEB.glob("*.*"), *ASSETS.glob("*.*")]
    found: set[str] = set()
    for path in [*ours, *VENDOR.glob("*.js"), *VENDOR.glob("*.css")]:
        text = re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)
        found |= set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"'`)]*", text))
    # Names of XML's languages, and addresses within messages: no script fetches them.
    named = ("//www.w3.org/", "//github.com/markedjs/marked.", "//github.com/highlightjs/")
    assert [address for address in found if not any(name in address for name in named)] == []


def test_our_scripts_make_no_markup_of_text() -> None:
    words = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc"
    )
    assert [
        p.name for p in [*WEB.glob("*.js"), *ASSETS.glob("*.js")] if words.search(p.read_text())
    ] == []


def test_pages_have_no_script_or_style_of_their_own(client: TestClient) -> None:
    for path in ("/", "/dashboard"):
        text = client.get(path).text
        assert not re.search(r"<style|\sstyle=|\son\w+=", text)
        assert re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL) == [""]


def test_the_policy_lets_nothing_in_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/")
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/web/style.css")
    again = client.get("/web/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    other = client.get("/web/style.css", headers={"if-none-match": '"other", W/"more"'})
    assert (other.status_code, other.content) == (200, first.content)


@pytest.mark.parametrize(
    "path",
    [
        "/web/",
        "/web/vendor/manifest.json",
        "/web/../web.py",
        "/web/%2e%2e/web.py",
        "/web/rounds/../../web.py",
        "/web//etc/passwd",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("since", ["", "x", "-1", "1e9", "9" * 40, "٣"])
def test_history_of_a_broken_number_begins_at_the_first_step(
    client: TestClient, since: str
) -> None:
    answer = client.get("/outrider/v1/history", params={"since": since})
    assert answer.status_code == 200
    assert answer.json()["first"] == 0


def test_metrics_are_in_the_text_format_of_prometheus(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b"# TYPE outrider_num_requests_running gauge" in answer.content
