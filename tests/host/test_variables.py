"""What the host makes of a kernel that tells its variables wrongly. The kernel is a script."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.session import Session

from hermes_kernel import BlockingRegistry, CellResult, CellStatus, ConfigError, HermesKernelError, Limits
from hermes_kernel.cell.masks import Masks
from hermes_kernel.cell.variables import REPLY, REQUEST, Variable
from hermes_kernel.host import kernels, session
from hermes_kernel.host.variables import read_variables
from hermes_kernel.process.published import SPEC

from ..fakes import DELIMITER, FakeKernel, FakeLauncher

Request = dict[str, Any]
Answer = Callable[[FakeKernel, Request], None]

TOLD = {"status": "ok", "variables": [{"name": "x", "type": "int", "size": 28, "text": "1"}]}
X = Variable("x", "int", 28, "1")
WAIT = 10
MASKS = Masks()


def tell(kernel: FakeKernel, asked: Request, content: Any = TOLD) -> None:
    kernel.signed("control", asked, REPLY, content)


class Conversation:
    """An owner whose kernel looks for one question during each cell, and answers as the test says."""

    def __init__(self) -> None:
        self.registry = BlockingRegistry(
            limits=Limits(timeout=30, idle_grace=0.2), _launcher=FakeLauncher(self._run)
        )
        self.over = threading.Event()
        self.cell_ends = True
        self._answer: Answer = tell
        self._running = threading.Event()

    def ask(self, answer: Answer) -> tuple[CellResult, tuple[Variable, ...] | HermesKernelError]:
        """Ask while a cell runs; return the cell's result and what came of the question."""
        self._answer = answer
        self.over.clear()
        self._running.clear()
        results: list[CellResult] = []
        cell = threading.Thread(target=lambda: results.append(self.registry.execute("x", owner="a")))
        cell.start()
        told: tuple[Variable, ...] | HermesKernelError
        try:
            assert self._running.wait(WAIT)
            told = self.registry.variables("a")
        except HermesKernelError as error:
            told = error
        finally:
            self.over.set()
            cell.join(30)
        return results[0], told

    def _run(self, kernel: FakeKernel, request: Request) -> None:
        kernel.busy(request)
        self._running.set()
        asked = kernel.receive("control")
        assert asked["msg_type"] == REQUEST
        self._answer(kernel, asked)
        if self.cell_ends:
            kernel.reply(request)
            kernel.idle(request)


@pytest.fixture
def conversation(leaves_nothing: None) -> Iterator[Conversation]:
    conversation = Conversation()
    yield conversation
    conversation.registry.close()


def test_variables_are_told_while_a_cell_runs(conversation: Conversation) -> None:
    result, told = conversation.ask(tell)
    assert (result.status, told) == (CellStatus.OK, (X,))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"variables": "x"},
        {"variables": [3]},
        {"variables": [{"name": 3, "type": "int", "size": 1, "text": ""}]},
        {"status": "error", "ename": "E", "evalue": "v", "traceback": []},
    ],
)
def test_an_answer_that_is_none_is_an_error_and_costs_nothing(
    conversation: Conversation, content: dict[str, Any]
) -> None:
    result, told = conversation.ask(lambda kernel, asked: tell(kernel, asked, content))
    assert "is no list of variables" in str(told)
    assert (result.status, result.kernel.ended) == (CellStatus.OK, False)
    result, told = conversation.ask(tell)
    assert (result.kernel.reused, told) == (True, (X,))


def test_the_first_of_two_answers_counts(conversation: Conversation) -> None:
    def twice(kernel: FakeKernel, asked: Request) -> None:
        tell(kernel, asked)
        tell(kernel, asked, {"variables": []})

    for _ in range(3):
        result, told = conversation.ask(twice)
        assert (result.status, told) == (CellStatus.OK, (X,))


def test_what_is_no_message_is_passed_over(conversation: Conversation) -> None:
    def noise(kernel: FakeKernel, asked: Request) -> None:
        kernel.raw("control", asked, b"")
        kernel.raw("control", asked, DELIMITER, b"0" * 64, b"{}", b"{}", b"{}", b"{}")
        tell(kernel, asked, [])
        tell(kernel, asked)

    result, told = conversation.ask(noise)
    assert (result.status, told) == (CellStatus.OK, (X,))


def test_answers_to_nobodys_question_are_passed_over_until_they_are_too_many(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_ANOMALIES", 10)
    number = 5

    def forged(kernel: FakeKernel, asked: Request) -> None:
        forgery = {**asked, "header": {**asked["header"], "msg_id": "of-somebody-else"}}
        for _ in range(number):
            tell(kernel, forgery, {"variables": []})
        tell(kernel, asked)

    result, told = conversation.ask(forged)
    assert (result.status, told) == (CellStatus.OK, (X,))
    number, conversation.cell_ends = 20, False
    result, _ = conversation.ask(forged)
    assert (result.status, result.kernel.ended) == (CellStatus.DIED, True)


def test_without_an_answer_it_is_an_error_and_a_late_one_is_no_fault(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(kernel: FakeKernel, asked: Request) -> None:
        assert conversation.over.wait(WAIT)
        tell(kernel, asked)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "VARIABLES_TIMEOUT", 0.2)
        result, told = conversation.ask(late)
    assert "did not answer within 0.2 s" in str(told)
    assert (result.status, result.kernel.ended) == (CellStatus.OK, False)
    result, told = conversation.ask(tell)
    assert (result.kernel.reused, told) == (True, (X,))
    assert caplog.text == ""


def test_a_kernel_that_ends_instead_of_answering_has_no_variables(conversation: Conversation) -> None:
    conversation.cell_ends = False
    result, told = conversation.ask(lambda kernel, asked: kernel.die(3))
    assert (result.status, told) == (CellStatus.DIED, ())


class Published:
    """The control channel of a kernel of another process, with its connection file."""

    def __init__(self, place: Path) -> None:
        self.session = Session(key=b"key", copy_threshold=10**9)
        self.file = place / "published.json"
        ports = {f"{name}_port": n for n, name in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)}
        info = {"transport": "ipc", "ip": "k", "key": "key", "signature_scheme": "hmac-sha256", **ports}
        self.info = {**info, "kernel_name": SPEC}
        self.file.write_text(json.dumps(self.info))

    def ask(self, answer: Callable[[Any, Request], None], timeout: float = WAIT) -> tuple[Variable, ...]:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind("ipc://k-4")

        def serve() -> None:
            assert socket.poll(WAIT * 1000)
            idents, parts = self.session.feed_identities(socket.recv_multipart())
            answer(socket, {**self.session.deserialize(parts), "idents": idents})

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return read_variables(self.file, MASKS, timeout=timeout)
        finally:
            thread.join(WAIT)
            context.destroy(linger=0)

    def reply(self, socket: Any, asked: Request, content: Any, kind: str = REPLY) -> None:
        self.session.send(socket, kind, content, parent=asked, ident=asked["idents"])


@pytest.fixture
def published(leaves_nothing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.chdir(tmp_path)  # for a socket whose address is short
    return Published(tmp_path)


def test_a_kernel_of_another_process_tells_its_variables_by_its_connection_file(published: Published) -> None:
    assert published.ask(lambda socket, asked: published.reply(socket, asked, TOLD)) == (X,)


def test_from_another_process_the_first_right_answer_counts(published: Published) -> None:
    def noise(socket: Any, asked: Request) -> None:
        other = {**asked, "header": {**asked["header"], "msg_id": "other"}}
        published.reply(socket, other, {"variables": []})
        published.reply(socket, asked, {"variables": []}, kind="comm_info_reply")
        socket.send_multipart([*asked["idents"], b""])
        socket.send_multipart([*asked["idents"], DELIMITER, b"forged", b"{}", b"{}", b"{}", b"{}"])
        header = json.dumps(published.session.msg_header(REPLY), default=str).encode()
        parent = json.dumps(asked["header"], default=str).encode()
        for broken in (
            [b"[]", b"3", b"{}", b"{}"],
            [header, b"[]", b"{}", b"{}"],
            [header, parent, b"{}", b"[]"],
            [b"{}", parent, b"{}", b"{}"],
        ):
            socket.send_multipart([*asked["idents"], DELIMITER, published.session.sign(broken), *broken])
        published.reply(socket, asked, TOLD)

    assert published.ask(noise) == (X,)


@pytest.mark.parametrize("content", [{}, {"variables": 3}, {"variables": [None]}])
def test_from_another_process_an_answer_that_is_none_is_an_error(published: Published, content: Any) -> None:
    with pytest.raises(HermesKernelError, match="is no list of variables"):
        published.ask(lambda socket, asked: published.reply(socket, asked, content))


def test_from_another_process_no_answer_is_an_error_in_time(published: Published) -> None:
    with pytest.raises(HermesKernelError, match=r"did not answer within 0\.3 s.*try again later"):
        published.ask(lambda socket, asked: None, timeout=0.3)


@pytest.mark.parametrize(
    "change",
    [
        {"shell_port": "x"},
        {"transport": "nope"},
        {"signature_scheme": "foo"},
        {"transport": "tcp", "ip": "no such"},
        {"key": 5},
    ],
)
def test_a_file_that_no_client_can_use_is_a_mistake_with_a_next_step(
    published: Published, change: dict[str, object]
) -> None:
    published.file.write_text(json.dumps({**published.info, **change}))
    with pytest.raises(ConfigError, match="has the session ended"):
        read_variables(published.file, MASKS, timeout=0.3)


def test_a_link_in_the_place_of_the_file_is_not_followed(published: Published, tmp_path: Path) -> None:
    published.file.rename(tmp_path / "elsewhere.json")
    published.file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ConfigError, match="has the session ended"):
        read_variables(published.file, MASKS, timeout=0.3)


@pytest.mark.parametrize("content", [None, "", "[]", '{"kernel_name": "hermes-live"}'])
def test_a_file_that_is_no_connection_file_is_a_mistake_with_a_next_step(
    published: Published, content: str | None
) -> None:
    published.file.unlink()
    if content is not None:
        published.file.write_text(content)
    with pytest.raises(ConfigError, match="has the session ended"):
        read_variables(published.file, MASKS, timeout=0.3)
