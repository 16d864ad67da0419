"""What a client of a version asked, kept as a file: tests/server/test_recorded.py asks it again.

`scripts/client_tests --record NAME` makes it anew. Long texts are cut, for they are their authors'
and say nothing of the protocol; paths of the machine and ids of its user are replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clients.tap import Exchange

HERE = Path(__file__).parent
_MOST_CHARS = 160
_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "user-agent")
_IDS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{64}\b")


def write_recording(name: str, kept: Iterable[Exchange], home: str) -> None:
    """A request that was asked several times alike is kept once."""
    requests: list[dict[str, Any]] = []
    for one in kept:
        headers = {key: one.headers[key] for key in _HEADERS if key in one.headers}
        body = _scrubbed(one.asked, home) if one.body else None
        request = {"method": one.method, "path": one.path, "headers": headers, "body": body}
        if request not in requests:
            requests.append(request)
    told = {"client": _locked(name), "cut": f"texts of more than {_MOST_CHARS} characters, ids"}
    file = HERE / "recorded" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        json.dumps(told | {"requests": requests}, separators=(",", ":")) + "\n", "utf-8"
    )


def _locked(name: str) -> str:
    """The package and its version, as they are locked."""
    folder = HERE / "locks" / name
    if folder.is_dir():
        packages = json.loads((folder / "package.json").read_text("utf-8"))["dependencies"]
        return " ".join(f"{package} {version}" for package, version in packages.items())
    lines = folder.with_suffix(".txt").read_text("utf-8").splitlines()
    wanted = re.compile(name.replace("_", "-") + r"(-\w+)?==")
    return next(line for line in lines if wanted.match(line)).replace("==", " ")


def _scrubbed(value: Any, home: str) -> Any:
    if isinstance(value, dict):
        return {key: _scrubbed(inner, home) for key, inner in value.items()}
    if isinstance(value, list):
        return [_scrubbed(inner, home) for inner in value]
    if not isinstance(value, str):
        return value
    text = _IDS.sub("0", value.replace(home, "/home/user"))
    if len(text) <= _MOST_CHARS:
        return text
    return text[:40] + f" ({len(text) - 40} characters were cut)"
