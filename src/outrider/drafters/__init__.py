"""Drafters propose tokens and never decide: one module a drafter, found by name (core/plugins.py).

Open prediction.py first: it shows how small a drafter is. common/ has parts of several drafters
(context.py has what `build` gets). Drafters with heads on hidden states are in plugins/heads.
"""
