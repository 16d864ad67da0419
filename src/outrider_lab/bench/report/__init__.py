"""`outrider report`: one page of what results files say; build.py says who reads which kind.

A view (views/) reads a file of its kind, tolerantly, into parts (parts.py), whose figures are
charts. The summary is made of the claims of all parts; page.py writes all of it.
"""
