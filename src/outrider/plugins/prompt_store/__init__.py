"""Pages of keys and values, and recurrent states, on disk: prompts are known again after a restart.

`store.py` serves one model, behind its memory (`PageStore` in cache/pages.py); `files.py` has the
folder and the format of its files, `identity.py` what must be equal for two models to share them,
and `verbs.py` the verbs of `outrider cache`.
"""
