"""Where a kernel finds the pipes for its output. The host tells it, so this can be imported everywhere."""

STREAMS = ((3, 4), (5, 6))
"""The two ends of what is to become its standard output, and those of its standard error."""
