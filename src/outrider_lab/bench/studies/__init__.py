"""Studies: each gives contestants, the work that they do in turns, and a view of the samples."""
