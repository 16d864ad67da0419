"""Known pairs of target and draft model, and the embedded pair.

catalog.py has pairs that fit, with sizes and licences; tiny/ is package data: the embedded pair,
its draft heads and a hybrid, each with a model card.
"""
