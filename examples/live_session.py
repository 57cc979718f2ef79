"""A session that people can look into: you type what an agent would send.

    python examples/live_session.py [NAME]

Each line is one call of execute_code on the same live kernel. In another terminal, while this runs:

    hermes-kernel ps
    hermes-kernel vars NAME
    hermes-kernel attach NAME
    hermes-kernel lab

The session is kept as NAME.ipynb in the current directory. Ctrl-D ends it.
"""

import sys
from pathlib import Path

from hermes_kernel import BlockingRegistry, CellResult


def show(result: CellResult) -> None:
    """Print what a model would read."""
    print(result.text, end="" if result.text.endswith("\n") else "\n" if result.text else "")
    if result.warning is not None:
        print(f"[{result.warning}]")


def main(name: str) -> None:
    """Run what is typed, one line a cell, in the current directory."""
    here = Path.cwd()
    with BlockingRegistry(expose=True, transcript=f"{name}.ipynb") as registry:
        show(registry.execute("print('The session is live.')", owner=name, cwd=here))
        while True:
            try:
                code = input("agent> ")
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if code.strip():
                show(registry.execute(code, owner=name, cwd=here))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tutorial")
