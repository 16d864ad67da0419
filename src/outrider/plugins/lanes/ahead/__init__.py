"""Speculative speculation (SSD): drafts for likely verdicts while the target verifies.

Open drafter.py first. table.py keeps the drafts of foreseen verdicts, tree.py drafts all branches
of a batch, forecast.py says which verdicts are likely and what follows a miss, choices.py has the
settings.
"""
