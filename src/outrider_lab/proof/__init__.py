"""Evidence that speculation changes nothing: the certificate and the audit of `outrider verify`.

Open certificate.py first, against.py for the audit of a server. The enumeration that the parts
share is in outrider/plugins/proof, whose contracts other packages test themselves by.
docs/algorithms/certificate.md says what each part shows, and which planted bugs it must find.
"""
