"""Formulas and estimates of speculative rounds: expected tokens, costs, acceptance. No tensors.

Open acceptance.py first: it begins with closed forms of tokens per round and speed-up. It and
cost.py learn acceptance and seconds from rounds while they run, by its estimators (fading rates and
means, running medians, straight lines); cost.py has every threshold for a token's row to pay.
forecast.py has the speed-up that is expected before a drafter has run.
"""
