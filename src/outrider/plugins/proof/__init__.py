"""The certificate of `outrider verify`: exactness by enumeration, by chi-square tests, by parity.

Open certificate.py first, against.py for the audit of a server. docs/algorithms/certificate.md says
what each part shows, and which planted bugs the checks must find.
"""
