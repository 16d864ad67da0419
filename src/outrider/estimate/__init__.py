"""Formulas and estimates of speculative rounds: expected tokens, costs, acceptance. No tensors.

Open theory.py first: closed forms of tokens per round and speed-up. acceptance.py and cost.py learn
acceptance and seconds from rounds while they run, by estimators of acceptance.py (fading rates and
means, running medians, straight lines); cost.py has every threshold for a token's row to pay.
forecast.py has the speed-up that is expected before a drafter has run.
"""
