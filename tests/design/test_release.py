"""What a release says of itself: one version, files that an sdist has, forms that ask."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from checks.documents import PAGES
from outrider import __version__
from outrider.cli.verbs import VERBS, names

ROOT = Path(__file__).parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
FILES = (
    "SECURITY.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "CHANGELOG.md",
    "bill-of-materials.json",
    "requirements.lock",
    "deploy/Containerfile",
    "scripts/release_check",
    *(f".github/workflows/{name}.yml" for name in ("check", "release", "site")),
    *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "slow", "text-differs", "config")),
)


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    return script("release_check", monkeypatch)


@pytest.mark.parametrize("name", ["check", "release", "site"])
def test_a_workflow_pins_what_it_runs_and_may_do_little(name: str) -> None:
    source = text(f".github/workflows/{name}.yml")
    for uses in re.findall(r"uses: (.*)", source):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", uses), uses
    for image in re.findall(r"image: (.*)", source):
        assert re.fullmatch(r"[\w./-]+@sha256:[0-9a-f]{64}", image), image
    flow: dict[str, Any] = yaml.safe_load(source)
    assert flow["permissions"] == {}
    assert "secrets." not in source
    for job in flow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
        for command in re.findall(r"(?:scripts|\.ci)/\w+", str(job["steps"])):
            assert (ROOT / command).is_file()


def test_the_base_is_35_packages_at_most() -> None:
    """On Linux, with PyTorch and the program itself, and without what the server alone needs."""
    base = text("requirements.lock").partition("# For development")[0]
    pins = re.findall(r"^([a-z0-9-]+)==\S+(?: ; (.*?))? \\$", base, re.MULTILINE)
    names = {name for name, marker in pins if "win32" not in marker}
    assert {"numpy", "tokenizers", "cyclopts"} <= names
    extras = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    of_server = {re.split(r"[>=<]", line)[0].replace("_", "-") for line in extras["server"]}
    assert of_server <= names
    assert len((names - of_server) | {"torch", "outrider"}) <= 35


def test_the_index_for_cpus_is_the_same_wherever_it_is_named() -> None:
    project = tomllib.loads(text("pyproject.toml"))
    (index,) = project["tool"]["uv"]["index"]
    assert index["explicit"]
    assert [one["index"] for one in project["tool"]["uv"]["sources"]["torch"]] == [index["name"]]
    assert f"--extra-index-url {index['url']}" in text("scripts/lib.sh")
    (torch,) = (one for one in project["project"]["dependencies"] if one.startswith("torch>"))
    newest = torch.rpartition("<=")[2]
    for name in ("README.md", "docs/install.md", "docs/deploy.md"):
        # Another index for all packages is asked for each of them, which takes minutes without it.
        assert f"pip install torch=={newest} --index-url {index['url']}" in text(name), name
        assert "--extra-index-url https" not in text(name), name


def test_links_of_an_uploaded_readme_lead_to_the_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("![a](b/c.svg) [d](e.md#f) [g](#h) [i](https://j.example)")
    (tmp_path / "pyproject.toml").write_text(text("pyproject.toml"))
    script("wheel", monkeypatch).addressed(tmp_path, "https://host.example/o/r")
    base = "https://host.example/o/r"
    assert (tmp_path / "README.md").read_text() == (
        f"![a]({base}/raw/v{__version__}/b/c.svg) [d]({base}/blob/v{__version__}/e.md#f) "
        "[g](#h) [i](https://j.example)"
    )
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == base


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        ("CHANGELOG.md", r"^## (\d[\w.]*)"),
        ("docs/index.md", r"^  version = \{(.+)\},$"),
        ("docs/install.md", r"^pip install outrider-(.+?)-py3-none-"),
        ("deploy/kubernetes.yaml", r"image: registry.example/outrider:(\S+)$"),
    ],
)
def test_the_version_is_the_packages_wherever_it_is_told(name: str, pattern: str) -> None:
    found = re.findall(pattern, text(name), re.MULTILINE)
    assert found[:1] == [__version__]


# A package that is named, and not by a file, a folder or an address.
BY_NAME = re.compile(
    r"outrider\[|\b(?:pipx?|uv) (?:[^\n`]* )?(?:install|add) (?:[^\n`]* )?[\"']?outrider"
    r"(?![\w./-])|\buvx (?!--from )[^\n`]*outrider"
)


def test_no_page_installs_by_name_what_no_index_has() -> None:
    """Until there is a release."""
    for line in ("pip install 'outrider[hf]'", "uv pip install -U outrider", "uvx outrider chat"):
        assert BY_NAME.search(line), line
    for line in (
        "pip install '.[hf]'",
        "pip install outrider-0.1.0-py3-none-any.whl",
        "outrider list",
    ):
        assert not BY_NAME.search(line), line
    pages = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "deploy").iterdir()]
    pages += (ROOT / "examples").rglob("*.*")
    texts = {path: path.read_text("utf-8", "replace") for path in pages if path.is_file()}
    assert len(texts) > 100
    told = {path: found[0] for path, text in texts.items() if (found := BY_NAME.search(text))}
    # It says what these lines become with a release.
    assert {path.name for path in told} <= {"releasing.md"}


def test_pyproject_takes_the_version_from_the_package() -> None:
    assert 'version = { attr = "outrider.__version__" }' in text("pyproject.toml")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_readers_look_for_exists_and_is_in_the_sdist(name: str) -> None:
    """By the lines of MANIFEST.in; that an sdist has the whole checkout is a wide test."""
    assert (ROOT / name).is_file()
    lines = [line.split() for line in text("MANIFEST.in").splitlines() if line[:1] not in ("", "#")]
    grafted = [folder for word, *rest in lines if word == "graft" for folder in rest]
    included = [pattern for word, *rest in lines if word == "include" for pattern in rest]
    if "/" in name:
        assert any(name.startswith(f"{folder}/") for folder in grafted)
    else:
        assert any(fnmatch(name, pattern) for pattern in included)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("bug", "outrider doctor --json"),
        ("slow", "outrider doctor --json"),
        ("text-differs", "outrider verify"),
    ],
)
def test_a_form_requires_the_output_that_shows_the_cause(name: str, command: str) -> None:
    form: dict[str, Any] = yaml.safe_load((FORMS / f"{name}.yml").read_text("utf-8"))
    fields: list[dict[str, Any]] = [one for one in form["body"] if one["type"] != "markdown"]
    asked = [one for one in fields if f"`{command}" in one["attributes"]["label"]]
    assert [one["validations"]["required"] for one in asked] == [True]
    assert len({one["id"] for one in fields}) == len(fields)
    assert set(re.findall(r"`outrider (\S+)", str(form))) <= set(names(VERBS))


def wheel(folder: Path, version: str, *, listed: bool = True) -> Path:
    """The least that is a wheel of Outrider."""
    path = folder / f"outrider-{__version__}-py3-none-any.whl"
    info = f"outrider-{__version__}.dist-info"
    about = "\n".join(
        [
            "Metadata-Version: 2.4",
            "Name: outrider",
            f"Version: {version}",
            "Description-Content-Type: text/markdown",
            "",
            "# Outrider",
        ]
    )
    content = {"outrider/__init__.py": "", f"{info}/METADATA": about}
    told = [*content] if listed else [f"{info}/METADATA"]
    record = "".join(f"{name},sha256=x,{len(content[name])}\n" for name in told)
    content[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def test_the_check_takes_a_true_wheel_and_refuses_what_is_none(tmp_path: Path, check: Any) -> None:
    check.check_metadata(wheel(tmp_path, __version__))
    with pytest.raises(check.ReleaseError, match="says that it is outrider 9"):
        check.check_metadata(wheel(tmp_path, "9"))
    with pytest.raises(check.ReleaseError, match="RECORD"):
        check.check_metadata(wheel(tmp_path, __version__, listed=False))
    with pytest.raises(check.ReleaseError, match="'no version' is invalid for 'version'"):
        check.check_metadata(wheel(tmp_path, "no version"))


def test_weights_that_only_tests_need_stay_out_of_wheels() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    excluded = tool["packages"]["find"]["exclude"]
    weights = (path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.safetensors"))
    folders = {path: ".".join(path.parent.parts) for path in weights}
    shipped = [
        ROOT / "src" / path
        for path, name in folders.items()
        if not any(fnmatch(name, one) for one in excluded)
    ]
    assert {path.parent.name for path in shipped} == {"target", "draft", "eagle", "mtp", "medusa"}
    assert sum(path.stat().st_size for path in shipped) < 24_000_000
