"""The language of the project: values and protocols, nothing that runs a model.

Open protocols.py first: it has the interfaces of models, KV caches, drafters, rules and
controllers. draft.py has `Draft`, `Verdict` and `Outcome`. Sampling is sampling.py (distributions,
and the nodes of greedy draft trees), logits.py (logits processors) and rng.py (keyed random
numbers, over philox.py); tree.py has shapes of draft trees. The settings of a user are config.py,
params.py and fields.py, from which settings.py derives flags, variables and file keys; plugins.py
finds the plugins of other packages. env.py alone reads the environment, files.py alone opens files,
and errors.py has the errors that users can cause.
"""
