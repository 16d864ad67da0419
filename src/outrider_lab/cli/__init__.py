"""The verbs of the lab: one module a verb, named by a row of outrider/cli's tables."""
