"""The tests of the session once more, over a launcher that is far away and slow."""

from collections.abc import Iterator

import pytest

from hermes_kernel import BlockingRegistry, Limits

from ..fakes import FakeLauncher, Script
from ..remote import RemoteLauncher
from . import test_session
from .test_session import FAST, Run

globals().update({name: test for name, test in vars(test_session).items() if name.startswith("test_")})


@pytest.fixture
def scripted(leaves_nothing: None) -> Iterator[Run]:
    made: list[BlockingRegistry] = []

    def make(script: Script, limits: Limits = FAST) -> tuple[BlockingRegistry, FakeLauncher]:
        node = FakeLauncher(script)
        registry = BlockingRegistry(limits=limits, _launcher=RemoteLauncher(node, delay=0.01))
        made.append(registry)
        return registry, node

    yield make
    for registry in made:
        registry.close()
