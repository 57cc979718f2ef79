"""The command line for ``python -m hermes_kernel.cli``."""

from .commands import main

main()
