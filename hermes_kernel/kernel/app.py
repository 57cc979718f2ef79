"""The kernel application: builds the state, binds it to a connection file, serves, ends with a code."""

import asyncio
import ctypes
import importlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from ipykernel.control import ControlThread
from ipykernel.displayhook import ZMQDisplayHook
from ipykernel.iostream import IOPubThread
from ipykernel.kernelapp import IPKernelApp
from IPython.core.application import ENV_CONFIG_DIRS, SYSTEM_CONFIG_DIRS, BaseIPythonApplication
from IPython.core.profiledir import ProfileDir
from traitlets import Bool, Dict, Type, Unicode, observe
from traitlets.config import Config
from zmq.eventloop.zmqstream import ZMQStream

from .ipykernel_seams import PLAIN, reason_for_stock_paths
from .kernel import HermesKernel
from .latefile import LateFile
from .outputs import OrderedSocket, OutputLog
from .shell import quiet_ipython
from .streams import HermesOutStream
from .watchdog import end_with_host

if sys.platform != "win32":
    import resource

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
"""In the order of their numbers, where they are files: as in ``hermes_kernel.process.staging``."""


LOG = "kernel.log"
M_ARENA_MAX = -8  # of malloc.h
CONTROL_TIMEOUT = 0.3  # seconds for the control thread to end; its host waits 1 for the whole process


class NoShellChannelThread:
    """In the place of the shell channel's thread: there is none, and cells run where they arrive."""

    def __init__(self) -> None:
        self.parent_thread = threading.current_thread()

    def __bool__(self) -> bool:
        return False


class EmptyProfileDir(ProfileDir):
    """A profile with nothing in it, which may move. What is written there makes its directory itself."""

    def check_dirs(self, change: Any = None) -> None:
        """Make none of the directories that a profile may have."""

    check_log_dir = check_startup_dir = check_security_dir = check_pid_dir = check_static_dir = check_dirs

    @observe("location")
    def _location_changed(self, change: Any) -> None:
        os.makedirs(change["new"], exist_ok=True)  # IPython finds a profile by its directory
        for kind in ("security", "log", "startup", "pid", "static"):
            name = getattr(self, f"{kind}_dir_name")
            setattr(self, f"{kind}_dir", os.path.join(change["new"], name))


class HermesKernelApp(IPKernelApp):
    """One kernel process.

    The state (application, kernel, shell) is built without socket, thread or file descriptor; ``bind`` gives
    it a connection. On stock paths ipykernel's own ``initialize`` does both in its order.
    """

    name = "hermes-kernel"
    kernel_class = Type(HermesKernel)

    debugger = Bool(False, help="Whether a debugger can attach (costs start-up time).").tag(config=True)
    allow_magics = Bool(True, help="Whether %magics, !commands and help? work.").tag(config=True)
    degraded = Unicode(None, allow_none=True, help="Why the kernel runs on stock paths, if it does.")
    options = Dict(help="What the host has written into the private connection file.")
    stdio: Any = None
    profile_dir: Any
    displayhook: Any = None
    control_port: int
    iopub_port: int

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._directory: Path | None = None
        self._log_file: LateFile | None = None
        self._modules_at_start: set[str] = set()
        self._may_publish = threading.Event()
        self._make_streams()

    def initialize(self, argv: Any = None) -> None:
        """Build the kernel and bind it to the connection file of the command line."""
        if self.degraded is None:
            self.build(argv)
            self.init_connection_file()
            self.bind()
            self.take_over()
        else:
            keep_room_for_cells()
            super().initialize(argv)
            self.kernel.bind()
            self._configure_kernel()

    def build(self, argv: Any = None) -> None:
        """Make the state: everything that needs no connection, and nothing that a fork would break."""
        BaseIPythonApplication.initialize(self, argv)
        self.profile_dir = EmptyProfileDir(location=self.profile_dir.location)
        self.log.setLevel(self.log_level)  # it makes a record of everything, for handlers that want nothing
        self.configure_tornado_logger()
        self.init_pdb()
        self.init_blackhole()
        self.displayhook = ZMQDisplayHook(self.session, None)
        self.use_streams()
        self.patch_io()
        self.kernel = self.kernel_class.instance(
            parent=self,
            session=self.session,
            log=self.log,
            profile_dir=self.profile_dir,
            user_ns=self.user_ns,
        )
        self.displayhook.get_execution_count = lambda: self.kernel.execution_count
        self.init_path()
        self.init_shell()
        self.init_extensions()
        self._modules_at_start = set(sys.modules)

    def bind(self) -> None:
        """Open the sockets that the connection file names, and start the threads that serve them."""
        keep_room_for_cells()
        self.session.session = str(uuid.uuid4())
        self.session.pid = os.getpid()
        self.kernel.ident = str(uuid.uuid4())
        self.init_sockets()
        self.init_heartbeat()
        self.init_io()
        self.init_signal()
        self._bind_kernel()

    def bind_in(self, place: Path, directory: Path, *, waits: bool) -> None:
        """Open the sockets as ``place-1`` to ``place-5``, before there is a connection file.

        What the kernel leaves stands in *directory*, which may have another name when the kernel begins, as
        that of the sockets may; nothing that is open minds. *waits*: nobody knows of the kernel yet, so
        nobody connects.
        """
        self.transport, self.ip = "ipc", str(place)
        for number, channel in enumerate(CHANNELS, start=1):
            setattr(self, f"{channel}_port", number)
        self.session.key = os.urandom(32)  # nobody's, until the connection file is there
        self._directory = directory
        self.bind()
        if waits:
            self.kernel.get_ready()  # it says so, and nobody hears it
            # Whoever subscribes is greeted, with a signature: that must wait until the key is there.
            self.iopub_thread.io_loop.add_callback(self._may_publish.wait)
            self.iopub_thread.start()

    def greet(self) -> None:
        """Greet whoever subscribes: its first cell is on its way when the kernel is ready for it."""
        self._may_publish.set()
        if not self.iopub_thread.thread.is_alive():
            self.iopub_thread.start()
        time.sleep(0)  # that thread can have its turn

    def take_over(self) -> None:
        """Take the state over into this process and its environment, and do what was asked for."""
        self.greet()
        self._bind_to_process()
        self.init_poller()
        if not self.is_guarded:  # who has made the file knows what is in it
            self.write_connection_file()
            self.log_connection_info()
        self._configure_kernel()
        self.init_code()

    def end_control(self) -> None:
        """Let the control thread end before the IOPub thread does, with which the end of the process begins.

        What it says goes through that thread; where nobody reads, ipykernel's sending waits for ever.
        """
        thread = self.control_thread
        if thread is not None and thread.is_alive():
            thread.stop()
            thread.join(CONTROL_TIMEOUT)

    def _bind_to_process(self) -> None:
        here = os.environ.get("IPYTHONDIR")
        if here is not None and self.ipython_dir != here:  # type: ignore[has-type]
            self.ipython_dir = self.kernel.shell.ipython_dir = here
            self.profile_dir.location = os.path.join(here, "profile_default")
        if self._log_file is not None:  # its directory may have another name by now
            self._log_file.path = Path(self.abs_connection_file).with_name(LOG)
        self.kernel.bind()
        self.init_gui_pylab()

    def init_connection_file(self) -> None:
        """Load the connection file and what the host has added to it."""
        try:
            with open(self.abs_connection_file, encoding="utf-8") as file:
                info = json.load(file)
        except FileNotFoundError:  # started by hand: ipykernel makes one
            info = {}
        if "hermes" not in info:
            super().init_connection_file()
            return
        self.options = info["hermes"]
        self.load_connection_info(info)

    @property
    def is_guarded(self) -> bool:
        """Whether a warden of ours has started the kernel, and ends it."""
        return bool(self.options.get("guarded"))

    def init_path(self) -> None:
        """Leave the path as it is: a file in the working directory must not take part in the start."""

    def init_code(self) -> None:
        """Run start-up files, and what the command line says.

        As IPython does, but for its list of all modules: it was made with the state. Looking at each of
        their names would make the memory where they stand this process's own.
        """
        if self.degraded is not None:
            super().init_code()
            return
        self._run_startup_files()
        self._run_exec_lines()
        self._run_exec_files()
        if self.hide_initial_ns:
            self.shell.user_ns_hidden.update(self.shell.user_ns)
        self._run_cmd_line_code()
        self._run_module()
        for stream in self.streams:  # or it would be a part of the first cell
            stream.flush()
        self.shell._sys_modules_keys = self._modules_at_start

    def _run_startup_files(self) -> None:
        """Run start-up files, where there is a place for them: IPython looks eight times into four."""
        places = (self.profile_dir.location, *ENV_CONFIG_DIRS, *SYSTEM_CONFIG_DIRS)
        if "PYTHONSTARTUP" in os.environ or any(os.path.isdir(f"{place}/startup") for place in places):
            super()._run_startup_files()

    def init_poller(self) -> None:
        """End with the parent process, unless something of ours sees to that; on Windows, hear interrupts."""
        if sys.platform == "win32":
            if self.is_guarded:
                self.parent_handle = 0
            super().init_poller()
            os.environ.pop("JPY_INTERRUPT_EVENT", None)
        elif not self.is_guarded or sys.platform == "darwin":  # where no signal comes at a warden's end
            self.parent_handle = os.getppid()
            super().init_poller()

    def init_control(self, context: Any) -> None:
        """Make the control channel; the shell channel gets no thread of its own."""
        if self.degraded is not None or self.debugger:
            super().init_control(context)
            return
        self.control_socket = context.socket(zmq.ROUTER)
        self.control_socket.linger = 1000
        self._apply_curve_server_options(self.control_socket)
        self.control_port = self._bind_socket(self.control_socket, self.control_port)
        self.control_socket.router_handover = 1
        self.control_thread = ControlThread(daemon=True)
        self.shell_channel_thread = NoShellChannelThread()

    def init_iopub(self, context: Any) -> None:
        """Make the IOPub channel, without a TCP port for forked children: they write to the descriptors.

        None of its sockets has a high-water mark. At one, what is published is dropped (output, or the idle
        status), and the thread that publishes waits for itself when it schedules the sending.
        """
        context.sndhwm = 0
        if self.degraded is not None:
            super().init_iopub(context)
            return
        self.iopub_socket = context.socket(zmq.XPUB)
        self.iopub_socket.linger = 1000
        self._apply_curve_server_options(self.iopub_socket)
        self.iopub_port = self._bind_socket(self.iopub_socket, self.iopub_port)
        self.iopub_thread = IOPubThread(self.iopub_socket, pipe=False, session=self.session)
        self.iopub_socket = OrderedSocket(self.iopub_thread, self.output_log)

    def init_io(self) -> None:
        """Let the streams and the display hook speak to the IOPub channel."""
        if self.displayhook is None:
            self.displayhook = ZMQDisplayHook(self.session, self.iopub_socket)
        self.displayhook.pub_socket = self.iopub_socket
        sys.displayhook = self.displayhook
        directory = self._directory or Path(self.abs_connection_file).parent
        self._log_to(directory)
        pipes = self.options.get("stdio") or self.stdio or [None, None]
        self.output_log.bind(self.session, self.iopub_thread, directory, self.streams, pipes)
        self.use_streams()
        if self.degraded is not None:
            self.patch_io()

    def use_streams(self) -> None:
        """Make our streams ``sys.stdout`` and ``sys.stderr``, whatever a cell has put in their place."""
        sys.stdout, sys.stderr = self.streams

    def _make_streams(self) -> None:
        self.degraded = reason_for_stock_paths()
        self.output_log = OutputLog(wait=self.degraded is not None)
        self.streams = [
            HermesOutStream(self.output_log, "stdout"),
            HermesOutStream(self.output_log, "stderr"),
        ]

    def _bind_kernel(self) -> None:
        """Give the kernel its channels and start the threads that serve them."""
        kernel, shell = self.kernel, self.kernel.shell
        loop = self.control_thread.io_loop
        kernel.control_stream = ZMQStream(self.control_socket, loop)
        if self.debugger:
            kernel.debugpy_stream = ZMQStream(self.debugpy_socket, loop)
            kernel.debug_shell_socket = self.debug_shell_socket
        self.control_thread.start()
        kernel.control_thread = self.control_thread
        kernel.shell_channel_thread = NoShellChannelThread()
        kernel.shell_stream = ZMQStream(self.shell_socket)
        kernel.stdin_socket = self.stdin_socket
        kernel.iopub_thread = self.iopub_thread
        kernel.iopub_socket = self.iopub_socket
        kernel.record_ports({f"{name}_port": port for name, port in self._ports.items()})
        for publisher in (shell.displayhook, shell.display_pub):
            publisher.session = self.session
            publisher.pub_socket = self.iopub_socket
        shell.displayhook.topic = kernel._topic("execute_result")

    def _configure_kernel(self) -> None:
        """Apply what the host has asked for."""
        if not self.options.get("allow_magics", self.allow_magics):
            self.kernel.shell.forbid_magics()
        self.kernel.ends_on_exit = bool(self.options.get("ends_on_exit", False))
        if not self.ignore_cwd:
            make_working_directory_importable()
        self.kernel.owner_secret = str(self.options.get("owner_secret", ""))
        self.kernel.tools.client.bind(str(self.options.get("bridge_token", "")))

    def _log_to(self, directory: Path) -> None:
        """Let log messages go to a file of the kernel's, not into a cell."""
        file: Any
        if (directory / "kernel.rest").exists():
            file = self._log_file = LateFile(directory / LOG)
        else:  # started by hand
            file = open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        for logger in (self.log, logging.getLogger(), logging.getLogger("tornado")):
            for handler in logger.handlers:
                if type(handler) is logging.StreamHandler:
                    handler.setStream(file)


def keep_room_for_cells() -> None:
    """Where the address space is limited, have our threads reserve less of it: 64 MiB each by default."""
    if sys.platform != "linux":
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def make_working_directory_importable() -> None:
    """Let cells import what lies in their working directory, but nothing of the standard library's from it.

    It stands where IPython puts it. IPython does not if the interpreter was started with -P; ours is, for
    the start alone.
    """
    if "" in sys.path or os.environ.get("PYTHONSAFEPATH"):
        return
    site = ("site-packages", "dist-packages")
    first = (index for index, entry in enumerate(sys.path) if os.path.basename(entry) in site)
    sys.path.insert(next(first, len(sys.path)), "")


def configuration() -> Config:
    """Return how our kernels differ from stock in ipykernel's own options."""
    config = Config()
    config.Session.packer = "hermes_kernel.wire.pack"
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0  # Out would keep every value of the conversation alive
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.xmode = "Minimal"  # ours are made by HermesShell; IPython's would only cost time
    if reason_for_stock_paths() is None:
        config.HermesKernel._execute_sleep = 0.0
    return config


def keep_debugger_out() -> None:
    """Have ipykernel believe that there is no debugpy: importing it costs a quarter of the start.

    A cell can still import it.
    """
    if "debugpy" in sys.modules:
        return
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


def make_app(argv: Sequence[str]) -> HermesKernelApp:
    """Make the application of a kernel with this command line."""
    quiet_ipython()
    if "--HermesKernelApp.debugger=True" not in argv:
        keep_debugger_out()
    app: HermesKernelApp = HermesKernelApp.instance(config=configuration())
    return app


def main(argv: list[str]) -> int:
    """Run a kernel until it is told to end; return the process's exit code."""
    end_with_host()
    app = make_app(argv)
    app.initialize(argv)
    return run(app)


def run(app: HermesKernelApp) -> int:
    """Serve until the kernel is told to end; return the process's exit code."""
    os.environ.pop(PLAIN, None)
    try:
        _serve(app)
    except Exception:
        app.log.critical("the kernel has broken down", exc_info=True)
        return 1
    finally:
        app.end_control()
    sys.stdout.flush()
    return int(app.kernel.exit_code)


def _serve(app: HermesKernelApp) -> None:
    """Serve until the kernel is to end. A cell may stop the event loop; that ends nothing."""
    serve = app.start
    while True:
        try:
            serve()
        except (KeyboardInterrupt, SystemExit) as raised:
            if app.kernel.is_child or not (isinstance(raised, KeyboardInterrupt) or _is_of_a_task(raised)):
                raise
            app.log.warning("the event loop was left, and goes on", exc_info=True)
        if app.kernel.is_child or app.kernel.is_ending or app.trio_loop:
            return
        serve = app.io_loop.start


def _is_of_a_task(raised: BaseException) -> bool:
    """Whether a task has raised it: it keeps it, for the cell that awaits the task."""
    for frame, _ in traceback.walk_tb(raised.__traceback__):
        if frame.f_code is asyncio.Handle._run.__code__:
            callback = frame.f_locals["self"]._callback
            return isinstance(getattr(callback, "__self__", None), asyncio.Task)
    return False
