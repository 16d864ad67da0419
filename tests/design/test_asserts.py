"""Nothing that matters is checked by an assertion: `python -O` leaves them out.

What a user, a file, a drafter, a mask or another process can cause is one of the errors of
core/errors.py; what only our own code can is a ContractError. The table counts the assertions that
are left, where nobody outside comes near them; a number in it may only fall.
"""

from __future__ import annotations

import ast

import pytest

from checks.sources import files, name_of, nodes

# Whatever comes from outside passes through these.
BOUNDARY = (
    "api",
    "cli",
    "control",
    "core",
    "drafters",
    "engine/drafting.py",
    "models",
    "cache",
    "verify",
)
LEFT = {
    "plugins/gpu/kernels/delta_ops.py": 3,
    "plugins/gpu/kernels/launchers.py": 7,
    "plugins/gpu/kernels/ops.py": 6,
    "plugins/gpu/kernels/scratch.py": 1,
}
FILES = {name_of(path): path for path in files()}


def num_asserts(path: str) -> int:
    return sum(isinstance(node, ast.Assert) for node in nodes()[FILES[path]])


def test_assertions_only_become_fewer() -> None:
    found = {path: count for path in FILES if (count := num_asserts(path))}
    more = {path: count for path, count in found.items() if count > LEFT.get(path, 0)}
    assert not more, "raise ContractError, or an error of the user's, instead"
    fewer = {path: found.get(path, 0) for path in LEFT if found.get(path, 0) < LEFT[path]}
    assert not fewer, "lower the numbers of the table"


@pytest.mark.parametrize("place", BOUNDARY)
def test_none_is_where_others_bring_something(place: str) -> None:
    inside = [path for path in FILES if path == place or path.startswith(f"{place}/")]
    assert inside
    assert not [path for path in inside if num_asserts(path)]
