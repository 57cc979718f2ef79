"""Where a kernel's output goes: its pipes, and the file that outlives it. Both sides import this."""

STREAMS = ((3, 4), (5, 6))
"""The two ends of what is to become its standard output, and those of its standard error."""

STREAM_NAMES = ("stdout", "stderr")
"""Whose they are; and whose regions stand in the file, in this order."""

REST_REGION = 24 + (256 + 64) * 1024
"""Bytes of a region: three numbers, a ring, and one read."""

MARK_SIZE = 256
"""Bytes behind the regions, which name the cell that began last."""
