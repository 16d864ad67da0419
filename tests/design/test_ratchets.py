"""Ratchets: numbers that may fall and must not rise. ratchets.toml has the limits."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType

import pytest

from checks import sources
from checks.documents import PAGES
from checks.sources import PACKAGE
from doubles.asgi_client import Client
from doubles.scripted_site import app_of
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.config import CoreSettings
from outrider.models.loading import resolve
from outrider.server.engine_process import EngineProcess
from outrider.server.port import Load
from outrider.server.process_port import ProcessPort
from outrider.server.site import Site
from outrider_lab.models.gguf_export import GgufOptions, export

pytestmark = pytest.mark.filterwarnings("default:ratchets.toml")
ROOT = Path(__file__).parents[2]
LIMITS: dict[str, dict[str, int]] = tomllib.loads(
    Path(__file__).with_name("ratchets.toml").read_text(encoding="utf-8")
)
# A number this far below its limit leaves space that no change was meant to have.
FAR_BELOW = 0.9
# Words of a dialect of our own. "In place" is the field's.
PRIVATE = r"\b(told|beside|foreseen|foretold|places?|room|nobody|whoever|laws?|reckon\w*)\b"
IN_PLACE = r"\bin[- ]place\b"
# First words after which a docstring has no noun to say what the thing is.
NOUNLESS = (
    r"(What|Of|Those|That|By|As|How|Who|Whether|Where|In|From|To|For|With|Beside|Which|Not|Nothing"
    r"|All)\b"
)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_the_source_stays_within_its_limits() -> None:
    trees = {module_name(path): tree for path, tree in sources.trees().items() if tree.body}
    paths = {module_name(path): path for path in sources.trees()}
    texts = {name: paths[name].read_text(encoding="utf-8") for name in trees}
    check("source", circles=len(circles_of(imports_of(trees))))
    homes: dict[str, list[str]] = {"core": [], "plugins": [], "lab": []}
    for name in trees:
        homes[home_of(name)].append(name)
    for home, names in homes.items():
        check(
            home,
            files=len(names),
            lines=sum(texts[name].count("\n") for name in names),
            private_words=sum(num_private_words(texts[name]) for name in names),
            nounless_docstrings=sum(num_nounless(trees[name]) for name in names),
        )


def test_every_engine_has_few_settings() -> None:
    check("core", settings=len(fields(CoreSettings)))


def home_of(name: str) -> str:
    if name.startswith("outrider_lab"):
        return "lab"
    return "plugins" if name.startswith("outrider.plugins") else "core"


def test_the_table_shows_these_limits() -> None:
    script = ROOT / "scripts" / "house_table.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False, timeout=240)
    assert done.returncode == 0, "run `python scripts/house_table.py`"


def test_tracked_files_stay_within_their_limit() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout: the files that belong to it are not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    # One that is deleted and not yet committed is listed.
    check("tree", bytes=sum(path.lstat().st_size for path in paths if path.exists()))


def test_pages_for_users_stay_within_their_limit() -> None:
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
    check("docs", words=sum(len(page.read_text(encoding="utf-8").split()) for page in pages))


def test_imports_within_functions_and_for_types_make_circles() -> None:
    sources = {
        "a": "def f():\n    from b import x\n",
        "b": "if TYPE_CHECKING:\n    import c.d\n",
        "c.d": "try:\n    pass\nfinally:\n    import a\n",
        "e": "import a, f\nfrom c import d\n",
        "f": "import os\n",
        "g": "import h",
        "h": "import a, g",
    }
    imports = imports_of({name: ast.parse(text) for name, text in sources.items()})
    assert imports["e"] == {"a", "f", "c.d"}
    assert sorted(map(sorted, circles_of(imports))) == [["a", "b", "c.d"], ["g", "h"]]


def test_words_and_docstrings_are_counted() -> None:
    assert num_private_words("# Told in place of a place, beside places; toldly") == 4
    source = (
        'class A:\n    """What it is."""\n    def f():\n        """Whatever it is."""\n\n'
        'async def g():\n    """Of it."""\n'
    )
    assert num_nounless(ast.parse(source)) == 2


def check(table: str, **numbers: int) -> None:
    """Numbers against their limits; one that is far below its limit is worth a warning."""
    limits = LIMITS[table]
    assert {name for name in numbers if numbers[name] > limits[name]} == set(), (
        f"tests/design/ratchets.toml, [{table}]: {numbers} exceed {limits}: make it smaller"
    )
    for name, number in numbers.items():
        if number < FAR_BELOW * limits[name]:
            warnings.warn(f"ratchets.toml: {name} = {number} is possible now", stacklevel=2)


def num_private_words(text: str) -> int:
    text = re.sub(IN_PLACE, "", text, flags=re.IGNORECASE)
    return len(re.findall(PRIVATE, text, re.IGNORECASE))


def num_nounless(tree: ast.Module) -> int:
    """Docstrings of functions and classes that start without a noun."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    docstrings = [ast.get_docstring(node) for node in statements(tree) if isinstance(node, kinds)]
    return sum(bool(re.match(NOUNLESS, text)) for text in docstrings if text)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements at any depth, expressions left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def imports_of(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """The modules that each module imports anywhere: in functions and for types as well."""
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        targets: set[str] = set()
        for node in statements(tree):
            match node:
                case ast.Import(names=aliases):
                    targets |= {alias.name for alias in aliases}
                case ast.ImportFrom(module=str(module), names=aliases):
                    inner = {f"{module}.{alias.name}" for alias in aliases}
                    targets |= (inner & trees.keys()) or {module}
                case _:
                    pass
        found[name] = (targets & trees.keys()) - {name}
    return found


def circles_of(imports: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules of which each reaches each."""
    left = dict(imports)
    # What imports nothing that is left is in no circle.
    while outer := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in outer}
    reached = {name: reach(name, left) for name in left}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in left
        if name in reached[name]
    }
    return [set(group) for group in groups]


def reach(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = (imports[waiting.pop()] & imports.keys()) - found
        found |= new
        waiting += new
    return found


@dataclass(slots=True)
class Recorder:
    """Files of which a function is called in any thread while `on`."""

    on: bool = False
    files: set[str] = field(default_factory=set[str])

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and frame.f_code.co_name != "<module>":
            self.files.add(frame.f_code.co_filename)

    @property
    def num_files(self) -> int:
        return sum(file.startswith(f"{PACKAGE}{os.sep}") for file in self.files)

    @contextmanager
    def recording(self) -> Generator[None]:
        self.files, self.on = set(), True
        try:
            yield
        finally:
            self.on = False


@pytest.fixture
def recorder() -> Generator[Recorder]:
    """Heard by this thread and by those that are started from now on."""
    found = Recorder()
    before = sys.getprofile()
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        yield found
    finally:
        threading.setprofile(None)
        sys.setprofile(before)


GREEDY = SamplingParams(max_tokens=12)
PROMPT = "Once upon a time there was"


@pytest.mark.weights
@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(("name", "fused"), [("native_round", True), ("stages", False)])
def test_a_request_runs_through_few_files(name: str, fused: bool, recorder: Recorder) -> None:
    with LLM(config=EngineConfig(threads=1, fused_round=fused)) as llm:
        llm.generate(PROMPT, GREEDY)
        with recorder.recording():
            llm.generate(PROMPT, GREEDY)
    check("run", **{name: recorder.num_files})


@pytest.mark.weights
@pytest.mark.usefixtures("native_library")
def test_a_gguf_file_is_loaded_by_few_files(tmp_path: Path, recorder: Recorder) -> None:
    path = tmp_path / "draft.gguf"
    for _ in export(resolve("outrider/embedded-draft"), path, GgufOptions("q8_0", "gpt-2")):
        pass
    for _ in range(2):
        with recorder.recording():
            llm = LLM(path, config=EngineConfig(threads=1, drafter="ngram"))
        llm.close()
    check("run", gguf_load=recorder.num_files)


@pytest.mark.weights
@pytest.mark.usefixtures("native_library")
def test_an_http_request_runs_through_few_files(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    """The server's files and those of the engine's process, which runs here."""
    monkeypatch.setattr("outrider.server.engine_child.create_subprocess_exec", engine_here)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}

    async def run() -> None:
        port = ProcessPort(Load("outrider/embedded", None, EngineConfig(threads=1), 8))
        await port.start()
        app = app_of(Site(port=port, names=("embedded",)))
        for _ in range(2):
            with recorder.recording():
                got = await Client(app).ask("/v1/chat/completions", body)
            assert got.json()["usage"]["completion_tokens"] == 12
        await port.aclose()

    asyncio.run(run())
    check("run", http_request=recorder.num_files)


class Here:
    """A child process that is a task of this one: its number is never signalled."""

    pid, returncode = 0, 0

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    async def wait(self) -> int:
        await asyncio.wait([self._task])
        return self.returncode


async def engine_here(*words: str, **_: object) -> Here:
    """Runs the engine of a server's child process in this event loop."""
    end = socket.socket(fileno=os.dup(int(words[3])))
    reader, writer = await asyncio.open_connection(sock=end)

    async def run() -> None:
        with suppress(EOFError), closing(writer):
            await EngineProcess(reader, writer).run()

    return Here(asyncio.ensure_future(run()))
