"""The verb `outrider doctor`: what this machine can run, and what is missing."""
