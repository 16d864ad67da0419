"""Drafters propose tokens and never decide; each implements `Drafter` (core/protocols.py).

Open ngram.py first (prompt lookup) to see how small a drafter is. Look-ups: prediction.py, suffix/,
recycling.py, portfolio.py (several at once). Models: model.py (a draft model), bridge.py (another
tokenizer), self_draft.py (the target itself), process/ (in another process), ahead/ (speculative
speculation). Heads on the target's hidden states: eagle/, mtp/, medusa.py and block.py, with the
loops hidden.py, hidden_tree.py and parallel_heads.py. growth.py grows trees, native.py calls C++.
"""
