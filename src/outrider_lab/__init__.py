"""Benches, studies of plans, training and models made for measuring: what `outrider` needs not to
write text.

Nothing in `outrider` imports this package but the rows of its command line, by name.
"""
