"""Speculative speculation (SSD): drafts for likely verdicts while the target verifies.

Open drafter.py first. table.py caches the drafts of predicted verdicts, tree.py drafts all branches
of a batch, forecast.py predicts likely verdicts and chooses the fallback after a miss, fan_out.py
shares branches out, choices.py has the settings.
"""
