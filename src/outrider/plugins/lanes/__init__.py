"""Lanes: drafting ahead of verdicts (ahead/) and a drafter in a process of its own (process/)."""
