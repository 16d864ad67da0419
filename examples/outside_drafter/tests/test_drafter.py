"""The contract that Outrider's own drafters keep to, and what this one drafts."""

from outside_drafter.drafter import BigramDrafter

from outrider.testing import DrafterContract, fresh_draft


class TestBigram(DrafterContract):
    name = "bigram"

    def make(self) -> BigramDrafter:
        return BigramDrafter()

    def test_it_goes_on_as_last_time(self) -> None:
        draft = fresh_draft(self.make, (1, 2, 3, 1, 4, 1), 3)
        assert draft.tokens == (4, 1, 4)
