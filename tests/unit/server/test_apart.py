"""Keys that share nothing are not drafted for from each other's texts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from doubles.scripted_port import ScriptedPort
from outrider.core.errors import ConfigError
from outrider.core.plugins import KINDS
from outrider.server.chat import CompletionBody
from outrider.server.errors import ApiError
from outrider.server.params import params_of
from outrider.server.port import EngineCard
from outrider.server.site import Site, check_apart

LEARNS_OF_ALL = ("suffix", "portfolio", "lookup", "recycling")


def test_drafters_say_whether_they_learn_of_all() -> None:
    learns = [name for name, kind in KINDS.items() if not kind.keeps_apart]
    assert tuple(learns) == LEARNS_OF_ALL


class Learning(ScriptedPort):
    """Its requests may choose any drafter that learns."""

    own = "ngram"

    @property
    def card(self) -> EngineCard:
        drafters = (self.own, *LEARNS_OF_ALL)
        return msgspec.structs.replace(super().card, drafter=self.own, drafters=drafters)


def body(drafter: str, **more: object) -> CompletionBody:
    asked = {"prompt": "x", "speculative": more or {"drafter": drafter}}
    return msgspec.convert(asked, CompletionBody)


@pytest.mark.parametrize("drafter", LEARNS_OF_ALL)
def test_what_learns_of_all_is_refused_where_keys_are_apart(drafter: str) -> None:
    site = Site(port=Learning(), names=("m",), keeps_apart=True)
    with pytest.raises(ApiError, match="--shared-prefixes"):
        params_of(site, body(drafter), max_tokens=4)
    with pytest.raises(ApiError, match="--shared-prefixes"):
        params_of(site, body("", drafters=["ngram", drafter]), max_tokens=4)
    params_of(replace(site, keeps_apart=False), body(drafter), max_tokens=4)


def test_a_server_whose_own_drafter_learns_of_all_does_not_start() -> None:
    port = Learning()
    port.own = "suffix"
    with pytest.raises(ConfigError, match="several keys"):
        check_apart(Site(port=port, names=("m",), keeps_apart=True), "suffix")
    check_apart(Site(port=port, names=("m",)), "suffix")
    check_apart(Site(port=port, names=("m",), keeps_apart=True), "ngram")


def test_a_drafter_of_another_package_may_learn_of_all() -> None:
    with pytest.raises(ConfigError, match="several keys, and the drafter bigram"):
        check_apart(Site(port=Learning(), names=("m",), keeps_apart=True), "bigram")
