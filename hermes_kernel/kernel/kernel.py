"""The kernel: ipykernel's, with a reply for every cell, exit codes and an interrupt that wakes an await."""

import hmac
import os
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import datetime
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from IPython.core.error import StdinNotImplementedError
from traitlets import Bool, Instance, Type, Unicode, default
from zmq.eventloop.zmqstream import ZMQStream

from .context import CELL, Cell, carry_cell_into_threads
from .leftovers import Leftovers
from .outputs import OutputLog
from .shell import CellCompiler, HermesShell, safe_str, shortened
from .tools import NAME, HermesTools
from .variables import variables

NOBODY = (
    "nobody can answer: this code runs for a program, without a terminal. "
    "Put what you would type into the code."
)


NOT_YOURS = "this kernel belongs to an agent's session: only its owner may end or interrupt it"
ABORT_TIME = 0.1  # seconds in which what was queued behind a stranger's failed cell is looked at
BYTE_ORDER_MARK = "\ufeff"


class HermesKernel(IPythonKernel):
    """The kernel of one owner."""

    implementation = "hermes_kernel"
    shell_class = Type(HermesShell)
    compiler_class = Type(CellCompiler)
    control_msg_types = [*IPythonKernel.control_msg_types, "hermes_variables_request"]  # noqa: RUF012

    ends_on_exit = Bool(False, help="Whether SystemExit in a cell ends the kernel.").tag(config=True)
    owner_secret = Unicode(help="What a request that may end the kernel carries; empty: all may.")
    output_log = Instance(OutputLog)

    exit_code = 0
    """What the process is to end with."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._pid = 0
        self._is_ready = False
        self._exits = False
        self._runs_for_owner = True
        self._leftovers = Leftovers()
        self._left_out = 0
        self.tools = HermesTools()
        self._cell_ended_at = 0.0
        self._failed_at: dict[str, float] = {}
        sys.breakpointhook = self.breakpoint

    @default("output_log")
    def _default_output_log(self) -> OutputLog:
        log: OutputLog = self.parent.output_log
        return log

    @property
    def _supports_kernel_subshells(self) -> bool:
        return bool(self.shell_channel_thread)

    @property
    def kernel_info(self) -> dict[str, Any]:
        """What a client is told; the host learns from it how the kernel runs."""
        info: dict[str, Any] = super().kernel_info
        return {**info, "hermes": {"degraded": self.parent.degraded}}

    def bind(self) -> None:
        """Be the kernel of this process."""
        self._pid = os.getpid()
        self.shell.init_environment()

    def get_ready(self) -> None:
        """Do what has to be done before requests are served, once."""
        if not self._is_ready:
            self._is_ready = True
            # Without a debugger ipykernel warns at every start, in every log, that there is none.
            self.log.disabled = self.debugpy_stream is None
            try:
                super().start()
            finally:
                self.log.disabled = False
            carry_cell_into_threads()
            self.shell.user_ns_hidden[NAME] = self.tools.module
            self._wake_on_signals()

    def start(self) -> None:
        """Begin to serve."""
        self.get_ready()
        self._leftovers.begin()

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run one cell on whole output descriptors, and say first that it has begun."""
        self.output_log.repair()
        self.output_log.begin_cell(parent["header"]["msg_id"])
        self._runs_for_owner = self.is_owner(parent)
        hermes = parent["metadata"].get("hermes")
        if isinstance(hermes, dict) and hermes.get("tell_start") and self.session:
            # Before anything of the cell's runs: it may keep the GIL, and the busy status with it. And not
            # through the stream, which would keep it for later.
            place = stream.socket if isinstance(stream, ZMQStream) else stream
            self.session.send(place, "hermes_cell_started", {}, parent=parent, ident=ident)
        token = CELL.set(self._cell_of(parent))
        shown = self.shell.ast_node_interactivity
        hides_value = isinstance(hermes, dict) and hermes.get("show_value") is False
        if hides_value:
            self.shell.ast_node_interactivity = "none"
        try:
            await super().execute_request(stream, ident, parent)
        finally:
            if hides_value and self.shell.ast_node_interactivity == "none":  # a cell may have chosen another
                self.shell.ast_node_interactivity = shown
            CELL.reset(token)

    def _cell_of(self, parent: dict[str, Any]) -> Cell | None:
        """Return what the cell may call, None for nothing; only the owner's cells may call tools."""
        if not self.has_owner or self.cell_is_foreign or parent["content"].get("silent"):
            return None
        hermes = parent["metadata"].get("hermes")
        given = hermes.get("tools") if isinstance(hermes, dict) else None
        try:
            return self.tools.enter(given, self.shell.user_ns)
        except Exception:  # whatever a cell has made of the module; the cell itself must have its reply
            self.log.error("the cell runs without tools", exc_info=True)
            return None

    async def do_execute(self, code: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the code. Whatever it does there is a reply, and a forked child of it never comes back here."""
        code = code.removeprefix(BYTE_ORDER_MARK)
        # IPython shows a cell's metadata to all clients when a callback of an event fails: ours has secrets.
        if isinstance(meta := kwargs.get("cell_meta"), dict):
            kwargs["cell_meta"] = {key: value for key, value in meta.items() if key != "hermes"}
        self.shell.displays.begin()
        try:
            reply: dict[str, Any] = await super().do_execute(code, *args, **kwargs)
        except Exception as error:  # the edge of a cell: without a reply its caller waits for ever
            self.log.error("a cell broke its own report", exc_info=True)
            reply = _broken_report(error, self.execution_count)
        self._end_streams()
        if self.is_child:
            self.output_log.flush()
            os._exit(self._exit_code_of_child(reply))
        self.parent.use_streams()
        self.output_log.repair()
        self._left_out = self.shell.displays.finish()["displays"]
        if reply["status"] == "error" and not reply.get("traceback"):
            reply["traceback"] = [f"{reply['ename']}: {reply['evalue']}"]
        if reply["status"] == "error":
            _shorten(reply)
        if self.shell.exit_code is not None and self.cell_may_end_kernel:
            self.exit_code = self.shell.exit_code
            self._exits = True
            # Nothing is awaited until the reply and the idle status are on their way.
            self.io_loop.add_callback(self.io_loop.stop)
        return reply

    def _end_streams(self) -> None:
        """Let nothing of the cell's stay in a buffer: of its own streams, or half a character of ours."""
        for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
            if stream is not None and not any(stream is own for own in self.parent.streams):
                self._flush(stream)
        for own in self.parent.streams:
            own.end_character()

    def _flush(self, stream: Any) -> None:
        try:
            stream.flush()
        except BaseException as error:  # noqa: BLE001  # code of the cell's: it may raise anything, SystemExit too
            self.log.info("a stream of the cell's own cannot be flushed: %s", safe_str(error))

    def _exit_code_of_child(self, reply: dict[str, Any]) -> int:
        if self.shell.exit_code is not None:
            return int(self.shell.exit_code)
        return 1 if reply["status"] == "error" else 0

    def finish_metadata(self, parent: Any, metadata: dict[str, Any], reply_content: Any) -> dict[str, Any]:
        """Add how much the cell has written, and the exit code if it ends the kernel."""
        metadata = super().finish_metadata(parent, metadata, reply_content)
        self._cell_ended_at = time.time()
        metadata["hermes"] = {"written": self.output_log.finish(parent["header"]["msg_id"])}
        if self._left_out:
            metadata["hermes"]["left_out"] = self._left_out
        if left := self._leftovers.since():
            metadata["hermes"]["leftovers"] = left
        if self.shell.exit_code is not None and self.cell_may_end_kernel:
            metadata["hermes"]["exit_code"] = self.shell.exit_code
        return metadata

    def is_owner(self, parent: dict[str, Any]) -> bool:
        """Whether a request comes from the host, or from anybody where the kernel has no owner."""
        if not self.owner_secret:
            return True
        hermes = parent.get("metadata", {}).get("hermes")
        given = hermes.get("owner_secret") if isinstance(hermes, dict) else None
        return isinstance(given, str) and hmac.compare_digest(given.encode(), self.owner_secret.encode())

    @property
    def is_child(self) -> bool:
        """Whether this process is not the kernel's, but one that a cell has forked."""
        return self._pid not in (0, os.getpid())

    @property
    def is_ending(self) -> bool:
        """Whether the process is to end: a cell that may has ended it, or somebody has asked for it."""
        return self._exits or bool(self.shell.exit_now)

    @property
    def has_owner(self) -> bool:
        """Whether a host of ours has started the kernel."""
        return bool(self.ends_on_exit or self.owner_secret)

    @property
    def cell_may_end_kernel(self) -> bool:
        """Whether SystemExit in the cell that runs now ends the kernel."""
        return bool(self.ends_on_exit) and self._runs_for_owner

    @property
    def cell_is_foreign(self) -> bool:
        """Whether the cell that runs now is another client's than the owner's."""
        return not self._runs_for_owner

    async def shutdown_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """End the kernel for its owner; anybody else gets an error."""
        if self._refuse(stream, ident, parent, "shutdown_reply", restart=parent["content"].get("restart")):
            return
        await super().shutdown_request(stream, ident, parent)

    async def interrupt_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Interrupt the cell that runs; a stranger gets an error if it is the owner's."""
        if not self.cell_is_foreign and self._refuse(stream, ident, parent, "interrupt_reply"):
            return
        await super().interrupt_request(stream, ident, parent)

    async def create_subshell_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Make a subshell where there are any; a stranger gets none beside the owner's cells."""
        if not self._refuse(stream, ident, parent, "create_subshell_reply"):
            await super().create_subshell_request(stream, ident, parent)

    async def hermes_variables_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Tell what variables there are, also while a cell runs; nothing of theirs is called."""
        told = variables(self.shell.user_ns, self.shell.user_ns_hidden)
        self.session.send(stream, "hermes_variables_reply", told, parent, ident=ident)

    def should_handle(self, stream: Any, msg: dict[str, Any], idents: Any) -> bool:
        """Abort the queued cells of a stranger whose cell has failed, and nobody else's."""
        failed_at = self._failed_at.get(msg["header"].get("session"))
        is_cell = msg["header"]["msg_type"] == "execute_request"
        if is_cell and failed_at is not None and _sent_at(msg) <= failed_at:
            self._send_abort_reply(stream, msg, idents)
            return False
        return bool(super().should_handle(stream, msg, idents))

    def _abort_queues(self, subshell_id: str | None = None) -> None:
        if self._runs_for_owner:
            super()._abort_queues(subshell_id)
            return
        session = self.get_parent("shell")["header"].get("session")
        failed_at = self._failed_at[session] = self._cell_ended_at

        def forget() -> None:
            if self._failed_at.get(session) == failed_at:
                del self._failed_at[session]

        # As long as what had been sent by then takes to be looked at.
        self.io_loop.call_later(ABORT_TIME, forget)

    def _refuse(self, stream: Any, ident: Any, parent: dict[str, Any], reply: str, **content: Any) -> bool:
        """Answer a stranger with an error; return whether it was one."""
        if self.is_owner(parent):
            return False
        content = {"status": "error", "ename": "NotTheOwner", "evalue": NOT_YOURS, "traceback": [], **content}
        self.session.send(stream, reply, content, parent, ident=ident)
        return True

    def raw_input(self, prompt: object = "") -> str:
        """Ask the client, or say at once that nobody is there."""
        if not self._allow_stdin:
            raise StdinNotImplementedError(f"input() was called, but {NOBODY}")
        answer: str = super().raw_input(safe_str(prompt))
        return answer

    def getpass(self, prompt: str = "", stream: Any = None, **kwargs: Any) -> str:
        """Ask the client for a password, or say at once that nobody is there."""
        if not self._allow_stdin:
            raise StdinNotImplementedError(f"getpass() was called, but {NOBODY}")
        answer: str = super().getpass(prompt, stream, **kwargs)
        return answer

    def breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """``breakpoint()``: a debugger for a client that answers, or say at once that nobody is there."""
        if not self._allow_stdin and "PYTHONBREAKPOINT" not in os.environ:
            raise StdinNotImplementedError(f"breakpoint() was called, but {NOBODY}")
        return sys.__breakpointhook__(*args, **kwargs)

    def _wake_on_signals(self) -> None:
        """Have a signal wake the event loop, so that an interrupt reaches a cell that awaits.

        ipykernel's handler schedules the cancellation without waking the loop, which then sleeps on.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self.io_loop.add_handler(self._wake_reader.fileno(), self._on_wake, self.io_loop.READ)

    def _on_wake(self, descriptor: Any, events: Any) -> None:
        try:
            self._wake_reader.recv(4096)
        except BlockingIOError:  # somebody has read it already
            pass


def _sent_at(msg: dict[str, Any]) -> float:
    """Return when a message was sent, by its sender's clock, in seconds; 0 if it is not said."""
    date = msg["header"].get("date")
    return date.timestamp() if isinstance(date, datetime) else 0.0


def _shorten(reply: dict[str, Any]) -> None:
    reply["ename"], reply["evalue"] = shortened(reply["ename"]), shortened(reply["evalue"])
    reply["traceback"] = shortened("\n".join(reply["traceback"])).split("\n")


def _broken_report(error: Exception, execution_count: int | None) -> dict[str, Any]:
    return {
        "status": "error",
        "ename": type(error).__name__,
        "evalue": safe_str(error),
        "traceback": traceback.format_exception_only(type(error), error),
        "execution_count": (execution_count or 1) - 1,
        "user_expressions": {},
        "payload": [],
    }
