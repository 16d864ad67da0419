"""What this rule claims, held to it by enumeration."""

from outrider.testing import RuleContract


class TestLookalike(RuleContract):
    name = "lookalike"
