"""Suffix decoding: drafts from suffix automata of all texts so far and of a corpus.

Open drafter.py first; automaton.py is the data structure.
"""
