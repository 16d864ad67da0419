"""Benchmarks of `outrider bench`, and the pages of their results: they measure what users get.

A folder or a file here is one kind of study; docs/benchmarks.md says what each one asks, and how a
ratio is taken. Nothing here reaches into the engine: models run through api/ and lab/.
"""
