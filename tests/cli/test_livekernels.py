"""The kernels of ``hermes-kernel lab``, without its server and its page."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_kernel import BlockingRegistry
from hermes_kernel.process.sessions import live_sessions

pytest.importorskip("jupyter_server", reason="the extra `lab` is not installed")

from hermes_kernel.cli import livekernels

Make = Callable[..., BlockingRegistry]

FORGED: list[Any] = [
    [],
    {"kernel_name": "hermes-live", "shell_port": "x"},
    {"transport": "nope"},
    {"signature_scheme": "foo"},
    {"transport": "tcp", "ip": "no such"},
    {"key": 5},
]


def listed() -> list[str]:
    """The owners of what is listed, as a server lists it."""

    async def main() -> list[str]:
        kernels = livekernels.LiveKernels()
        try:
            return sorted(kernel["id"] for kernel in kernels.list_kernels())
        finally:
            for kernel_id in list(kernels._kernels):
                kernels.remove_kernel(kernel_id)
            kernels.context.destroy(linger=0)

    return asyncio.run(main())


@pytest.mark.parametrize("forged", FORGED, ids=range(len(FORGED)))
@pytest.mark.parametrize("place", ["in its place", "behind a link"])
def test_a_session_whose_file_is_forged_meanwhile_is_left_out_and_the_others_are_listed(
    make_registry: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forged: Any, place: str
) -> None:
    """Whoever looks for the sessions has looked at the file, too: what counts is what is read of it."""
    registry = make_registry(expose=True)
    for owner in ("a", "b"):
        registry.execute("1", owner=owner)
    sessions = live_sessions()
    monkeypatch.setattr(livekernels, "live_sessions", lambda: sessions)
    assert listed() == sorted(livekernels._id_of(session) for session in sessions)
    file = sessions[0].published
    assert file is not None
    if isinstance(forged, dict):
        forged = {**json.loads(file.read_text()), **forged}
    if place == "behind a link":
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere.json")
        file = tmp_path / "elsewhere.json"
    file.write_text(json.dumps(forged))
    assert listed() == [livekernels._id_of(sessions[1])]
