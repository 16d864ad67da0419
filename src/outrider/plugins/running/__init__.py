"""Servers that run: the verbs `ps`, `stop` and `top` (verbs.py), and an HTTP client."""
