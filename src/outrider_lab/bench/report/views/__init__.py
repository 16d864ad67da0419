"""Readers of `outrider report`: from a results file of each kind to the parts that show it."""
