"""Run by an interpreter to say what it has: one JSON object on standard output. Any Python 3."""

import sys

sys.path.pop(0)  # this file's own directory: nothing in it may stand in for a module of the interpreter

import json


def main() -> None:
    """Print the version of Python and of ipykernel (null: there is none)."""
    try:
        from importlib.metadata import PackageNotFoundError, version
    except ImportError:  # Python before 3.8, which is too old anyway
        found = None
    else:
        try:
            found = version("ipykernel")
        except PackageNotFoundError:
            found = None
    print(json.dumps({"version": list(sys.version_info[:2]), "ipykernel": found}))


main()
