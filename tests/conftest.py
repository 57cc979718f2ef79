import dataclasses
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from jupyter_core.utils import ensure_event_loop

from hermes_kernel import BlockingRegistry, Limits

from . import traces

START_METHOD = os.environ.get("HERMES_TEST_START_METHOD", "")
DEGRADED = "HERMES_KERNEL_PLAIN=1" if os.environ.get("HERMES_KERNEL_PLAIN") == "1" else None
"""Why kernels are not as they were asked for, where all of them run on stock paths."""

"""How the kernels of a test's registry are made where the test does not say it."""

# A busy machine is no failure of ours: no example has a time limit.
hypothesis.settings.register_profile(
    "hermes", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("hermes")


@pytest.fixture(scope="session", autouse=True)
def runtime() -> Iterator[Path]:
    """A runtime directory of this run's own, short enough for sockets."""
    # A shell ignores SIGINT for what runs in its background, nohup SIGHUP: so would the tests' processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # jupyter_client's blocking calls keep one event loop for each thread, for good: it is not a leak of ours.
    ensure_event_loop()
    # What is there before the first test stays: each test's look for leaks need not go through it.
    gc.collect()
    gc.freeze()
    directory = Path(tempfile.mkdtemp(prefix="hkt-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(directory / "jupyter"))
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        patch.setenv("PIP_CACHE_DIR", os.environ.get("PIP_CACHE_DIR") or os.path.join(cache, "pip"))
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield directory
    shutil.rmtree(directory)


@pytest.fixture
def leaves_nothing(runtime: Path) -> Iterator[None]:
    """After the test: no process of a kernel, no zombie, no directory, no descriptor, no thread."""
    gc.collect()
    fds, threads, sockets = traces.descriptors(), traces.threads(), traces.short_socket_directories()
    yield
    gc.collect()
    assert traces.eventually(lambda: not traces.marked_processes(str(runtime)))
    assert traces.zombies() == []
    # Where the host was killed, the warden removes the files when the processes are gone.
    assert traces.eventually(lambda: not traces.kernels_of(runtime), within=2), traces.kernels_of(runtime)
    assert traces.short_socket_directories() <= sockets
    assert traces.eventually(lambda: traces.threads() <= threads), traces.threads() - threads
    assert traces.eventually(lambda: traces.descriptors() <= fds), "file descriptors were left open"


@pytest.fixture
def make_registry(leaves_nothing: None) -> Iterator[Callable[..., BlockingRegistry]]:
    """Make registries that are closed after the test; then nothing of them is left."""
    made: list[BlockingRegistry] = []

    def make(**arguments: object) -> BlockingRegistry:
        limits = arguments.get("limits") or Limits()
        if START_METHOD and isinstance(limits, Limits) and limits.start_method == "auto":
            arguments["limits"] = dataclasses.replace(limits, start_method=START_METHOD)
        registry = BlockingRegistry(**arguments)  # type: ignore[arg-type]
        made.append(registry)
        return registry

    yield make
    for registry in made:
        registry.close()


@pytest.fixture
def registry(make_registry: Callable[..., BlockingRegistry]) -> BlockingRegistry:
    return make_registry()
