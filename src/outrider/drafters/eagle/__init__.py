"""EAGLE draft heads, versions 1 to 3, and eagle-lite, which has no weights.

Open net.py first: the layer and its formulas. weights.py reads published heads.
"""
