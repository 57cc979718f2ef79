"""Starts a kernel: ``python launcher.py NAME ARGUMENT...`` runs ``main(ARGUMENTS)`` of the module NAME.

It is run by absolute path, by whatever interpreter the cells are to have. That interpreter need not have our
package: it is loaded from where this file lies and from nowhere else, so that nothing of the host's
site-packages becomes importable. Standard library only, Python 3.10.
"""

import sys

# The directory of this file (Python put it there) or, with -m, the working directory: a file of the user's
# that is named like a module of ours must not be found in our place.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import importlib.util
import os

DEFAULT = "hermes_kernel.kernel.app"


def load_package() -> None:
    """Make ``hermes_kernel`` importable from the directory in which this file lies."""
    if "hermes_kernel" in sys.modules:
        return
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "hermes_kernel", os.path.join(home, "__init__.py"), submodule_search_locations=[home]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"hermes_kernel: no package in {home}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["hermes_kernel"] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Load the package and hand over to the module that the command line names."""
    load_package()
    arguments = sys.argv[1:]
    name = DEFAULT if not arguments or arguments[0].startswith("-") else arguments.pop(0)
    sys.exit(importlib.import_module(name).main(arguments))


if __name__ == "__main__":
    main()
