"""The server as a process of its own with the embedded pair, and Debian's chromium at its pages.

`scripts/browser_tests` runs these in an environment that has Playwright; elsewhere they skip.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
OWN_PYTHON = ROOT / ".venv" / "bin" / "python"
START_SECONDS = 120
WAIT_MS = 60_000
KEY = "a-key-for-the-browser-tests"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def serving(*options: str) -> AbstractContextManager[str]:
    """The address of a server that is ready, of the embedded pair."""
    port = _free_port()
    words = ("-m", "outrider", "serve", "--port", str(port), "--threads", "1", *options)
    return _running(port, *words)


@contextmanager
def _running(port: int, *words: str) -> Generator[str]:
    python = str(OWN_PYTHON if OWN_PYTHON.exists() else sys.executable)
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([python, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_SECONDS
        while not _is_ready(url):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not become ready"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        # Within a container chromium has no sandbox of its own.
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def server(browser: Any) -> Iterator[str]:
    del browser  # Where there is none, no server is started.
    with serving() as url:
        yield url


@pytest.fixture(scope="session")
def other_server(browser: Any) -> Iterator[str]:
    """Whose controller chooses the draft length, and which wants a key."""
    del browser
    with serving("--api-key", KEY, "--controller", "goodput") as url:
        yield url


@pytest.fixture(scope="session")
def portfolio_server(browser: Any) -> Iterator[str]:
    del browser
    with serving("--drafter", "portfolio") as url:
        yield url


@pytest.fixture(scope="session")
def hostile_server(browser: Any) -> Iterator[str]:
    del browser
    port = _free_port()
    script = "tests/browser/hostile_server.py"
    with _running(port, script, str(port)) as url:
        yield url


OpenPage = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, server: str) -> Iterator[OpenPage]:
    """Opens a page of the server. At the end of the test no error was told to its console, and
    nobody else's machine was asked for anything."""
    contexts: list[Any] = []
    errors: list[str] = []
    dialogs: list[str] = []
    hosts: set[str] = set()

    def failed(error: object) -> None:
        errors.append(str(error))

    def asked(request: Any) -> None:
        hosts.add(urlsplit(str(request.url)).hostname or "")

    def spoke(dialog: Any) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    def told(message: Any) -> None:
        if message.type == "error":
            errors.append(message.text)

    def open_page(
        path: str = "/#laboratory",
        *,
        width: int = 1280,
        dark: bool = False,
        at: str = "",
        script: str = "",
    ) -> Any:
        size = {"width": width, "height": 900}
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", failed)
        page.on("request", asked)
        page.on("console", told)
        page.on("dialog", spoke)
        if script:
            page.add_init_script(script)
        page.goto((at or server) + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A refusal for want of a key is told to the console by the browser itself.
    assert [error for error in errors if "401" not in error] == []
    assert dialogs == []
    assert hosts <= {"127.0.0.1", ""}
