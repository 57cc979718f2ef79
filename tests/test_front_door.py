import json
import subprocess
import sys

import pytest

import hermes_kernel

# What the kernel's side may load of our package (design.md 2); the rest is the host's.
KERNEL_SIDE = ("hermes_kernel.kernel", "hermes_kernel.sidecar", "hermes_kernel.errors", "hermes_kernel.wire")
HOST_LIBRARIES = {"nbformat", "nbclient", "click", "rich"}  # platformdirs and psutil: ipykernel's own


def loaded_by(statement: str) -> set[str]:
    """Names of the modules that a new interpreter has after *statement*, and had not before."""
    code = f"import sys; before = {{*sys.modules}}; {statement}; import json; " + (
        "print('\\n' + json.dumps(sorted({*sys.modules} - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", hermes_kernel.__all__)
def test_every_public_name_loads_and_is_itself(name: str) -> None:
    value = getattr(hermes_kernel, name)
    assert value is getattr(hermes_kernel, name)
    assert getattr(value, "__name__", name) == name
    assert name in dir(hermes_kernel)


def test_the_promised_names_are_public() -> None:
    assert set(hermes_kernel.__all__) >= {
        "BlockingRegistry", "KernelRegistry", "HermesKernelManager", "Limits", "UNSET", "Owner", "CellResult",
        "CellStatus", "CellError", "KernelInfo", "KernelReport", "Loss", "HermesKernelError", "ConfigError",
        "KernelStartError", "ToolError", "ToolBudgetExceeded",
    }  # fmt: skip


def test_a_star_import_brings_exactly_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from hermes_kernel import *", names)
    del names["__builtins__"]
    assert names.keys() == set(hermes_kernel.__all__)


@pytest.mark.parametrize("name", ["Regisry", "blocking", "_nothing", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error_that_names_it(name: str) -> None:
    with pytest.raises(AttributeError, match=f"hermes_kernel.*{name}"):
        getattr(hermes_kernel, name)


def test_an_unknown_name_cannot_be_imported() -> None:
    with pytest.raises(ImportError):
        exec("from hermes_kernel import Regisry")


def test_importing_the_package_loads_nothing_else_of_it() -> None:
    loaded = loaded_by("import hermes_kernel")
    assert {name for name in loaded if name.startswith("hermes_kernel")} == {"hermes_kernel"}
    assert not {name.split(".")[0] for name in loaded} & {"zmq", "jupyter_client", "traitlets", "asyncio"}


def test_a_kernel_process_loads_nothing_of_the_host_side() -> None:
    loaded = loaded_by("import hermes_kernel.kernel.app")
    ours = {name for name in loaded if name.startswith("hermes_kernel")}
    assert "hermes_kernel.kernel.app" in ours
    assert {name for name in ours if name != "hermes_kernel" and not name.startswith(KERNEL_SIDE)} == set()
    assert {name.split(".")[0] for name in loaded} & HOST_LIBRARIES == set()


def test_the_error_classes_load_without_the_host_side() -> None:
    loaded = loaded_by("from hermes_kernel import ToolError")
    assert {name for name in loaded if name.startswith("hermes_kernel")} == {
        "hermes_kernel",
        "hermes_kernel.errors",
    }
