"""Benchmarks of `outrider bench`, and the pages of their results: they measure what users get.

Every study is made of the same pieces of `outrider_lab/measure`: a sample (`frame.py`) is what a
contestant did with a piece of work in its turn (`machine.py`), stored in a file that a later run
continues (`store.py`), and summed up in groups and paired ratios (`frame.py`).
`studies/pages/benchmarks.md` has the question of each study. Nothing here reaches into the engine:
models run through `outrider.api` and `outrider_lab.models`.
"""
