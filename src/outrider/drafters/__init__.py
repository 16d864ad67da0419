"""Drafters propose tokens and never decide; each implements `Drafter` (core/protocols.py).

Open ngram.py first (prompt lookup): it shows how small a drafter is. Look-ups: prediction.py,
suffix.py, recycling.py, portfolio.py (several at once). Models: model.py (a draft model), bridge.py
(another tokenizer), self_draft.py (the target itself). Heads on hidden states: hidden.py with
eagle/ and mtp/; medusa.py, block.py. growth.py chooses tokens and grows chains and trees; native.py
does so in one C++ call. plugins/lanes/ drafts in another process and ahead of verdicts.
"""
