"""The IPython shell of a kernel: plain tracebacks, no colour, and an end that is an end."""

import contextlib
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import page
from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError
from IPython.utils.text import LSString, SList
from traitlets import Instance, Type

from .displays import CellDisplays, HermesDisplayHook, HermesDisplayPublisher
from .figures import OpenFigures
from .programs import Outlet, run

AWAIT_INSTEAD = (
    "A cell already runs in an event loop: write `await ...` at the top level of the cell instead."
)

# Both as IPython declares magics that are loaded when they are used.
STOCK_SCRIPTS = "IPython.core.magics.script:ScriptMagics"
SCRIPTS = f"{__package__}.scripts:HermesScriptMagics"

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|.\x08")
"""Colour, and bold as pydoc makes it: a letter, a backspace, the letter again."""

LONGEST = 1_000_000  # characters of an exception that are shown: of its name, its text, its traceback

_ROOM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class CellCompiler(CachingCompiler):
    """Names each cell after its number, so that a traceback says where to look.

    The name does not depend on the source, which need not be encodable.
    """

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the file name of a cell."""
        return f"<cell {number}>"


class EndOfKernel:
    """``exit`` and ``quit``: raise SystemExit, as they do in any Python.

    In a kernel that a stock manager has started, and in the cell of a person who looks in, they do what they
    do in any Jupyter kernel: they ask the front end to leave. They are no names of a syntax of their own:
    ``exit = 3`` is an assignment.
    """

    def __init__(self, shell: "HermesShell") -> None:
        self._shell = shell

    def __call__(self, code: object = None) -> None:
        """End the kernel with *code*."""
        kernel = self._shell.kernel
        if kernel.has_owner and not kernel.cell_is_foreign:
            raise SystemExit(code)
        self._shell.keepkernel_on_exit = bool(code)
        self._shell.ask_exit()

    def _ipython_display_(self) -> None:
        """``exit`` alone on the last line of a cell."""
        self()


class _Forgetful(dict[int, list[Any]]):
    """In the place of the outputs of all cells: takes them and has none."""

    def __missing__(self, key: int) -> list[Any]:
        return []


class HermesShell(ZMQInteractiveShell):
    """The shell in which the cells run."""

    display_pub_class = Type(HermesDisplayPublisher)
    displayhook_class = Type(HermesDisplayHook)
    displays = Instance(CellDisplays, ())

    exit_code: int | None = None
    """What the last cell ended with if it raised SystemExit; None if it did not."""

    _transformed: tuple[str, str] | None = None

    def init_environment(self) -> None:
        """Tell programs that nobody watches: no pager, no colour."""
        for name, value in (("PAGER", "cat"), ("GIT_PAGER", "cat"), ("NO_COLOR", "1")):
            os.environ.setdefault(name, value)

    def init_history(self) -> None:
        """Keep no copy of what cells write and show: IPython keeps all, as long as the kernel lives."""
        super().init_history()
        self.history_manager.outputs = _Forgetful()

    def _tee(self, channel: str) -> "contextlib.AbstractContextManager[None]":
        """Let the streams be: IPython would copy what is written, which takes as long as writing it."""
        return contextlib.nullcontext()

    def init_hooks(self) -> None:
        """Have what IPython would put into a pager shown where the cell prints."""
        super().init_hooks()
        self.set_hook("show_in_pager", page.as_hook(self.show_page), 0)

    def init_magics(self) -> None:
        """Put our magics for scripts in the place of IPython's, which load when one is used."""
        super().init_magics()
        manager = self.magics_manager
        declared = [
            (name, kind)
            for kind, magics in manager.magics.items()
            for name, magic in magics.items()
            if getattr(magic, "spec", None) == STOCK_SCRIPTS
        ]
        for name, kind in declared:
            manager.register_lazy(name, SCRIPTS, kind)
        if not declared:  # an IPython that has loaded them
            module, _, name = SCRIPTS.partition(":")
            self.register_magics(getattr(importlib.import_module(module), name))

    def init_display_formatter(self) -> None:
        """Show figures too."""
        super().init_display_formatter()
        OpenFigures(self)

    def init_user_ns(self) -> None:
        """Put ``exit`` and ``quit`` of our own into the namespace."""
        super().init_user_ns()
        end = EndOfKernel(self)
        self.user_ns.update(exit=end, quit=end)
        self.user_ns_hidden.update(exit=end, quit=end)

    def forbid_magics(self) -> None:
        """Take cells as plain Python: ``%``, ``!`` and ``?`` are syntax errors."""
        self.automagic = False
        manager = self.input_transformer_manager
        magic = {"cell_magic"}
        manager.cleanup_transforms = [
            t for t in manager.cleanup_transforms if getattr(t, "__name__", "") not in magic
        ]
        manager.line_transforms = [
            t for t in manager.line_transforms if getattr(t, "__name__", "") not in magic
        ]
        manager.token_transformers = []

    def system(self, cmd: str) -> None:
        """``!cmd``: run it as any child: it has no terminal and no input, and ends when its shell ends.

        A child that it leaves in the background does not hold up the cell.
        """
        command = self.var_expand(cmd, depth=1)
        self._ended(cmd, run(command, out=self.outlet("stdout"), err=self.outlet("stderr")))

    system_piped = system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """``x = !cmd``: return what it writes to both streams until its shell ends."""
        command = self.var_expand(cmd, depth=depth + 1)
        texts: list[str] = []
        shell = os.environ.get("SHELL") if os.name == "posix" else None
        self._ended(cmd, run(command, out=texts.append, err=subprocess.STDOUT, shell=shell))
        text = "".join(texts)
        return SList(text.splitlines()) if split else LSString(text)

    def _ended(self, cmd: str, code: int) -> None:
        self.user_ns["_exit_code"] = code
        if code and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(code, cmd)

    def outlet(self, name: str) -> Outlet | None:
        """Return what a program's stdout or stderr must be passed to; None if it may have our descriptor.

        That is where prints go, so it stands in order with them, unless the cell has redirected them.
        """
        stream: Any = getattr(sys, name, None)
        if any(stream is own and own.name == name for own in self.kernel.parent.streams):
            return None
        write: Outlet | None = getattr(stream, "write", None)
        return write

    def show_page(self, strg: Any, start: int = 0, **options: Any) -> None:
        """Print what IPython has for a pager, from line *start* on."""
        text = strg.get("text/plain") if isinstance(strg, dict) else strg
        if text is None:
            self.display_pub.publish(strg)
            return
        print("\n".join(_CONTROL.sub("", text).splitlines()[max(start, 0) :]))

    # ipykernel looks at the parameters: what it gives to a cell depends on the version of IPython.
    @functools.wraps(ZMQInteractiveShell.run_cell_async)
    async def run_cell_async(self, *args: Any, **kwargs: Any) -> Any:
        """Run a cell; forget how the one before ended."""
        self.exit_code = None
        return await super().run_cell_async(*args, **kwargs)

    # It looks with every cell, and to find out takes its time.
    run_cell_async.__signature__ = inspect.signature(run_cell_async)  # type: ignore[attr-defined]

    def transform_cell(self, raw_cell: str) -> str:
        """Make Python of a cell; once, though ipykernel asks for it and then IPython does."""
        known, self._transformed = self._transformed, None
        if known is not None and known[0] is raw_cell:
            return known[1]
        python: str = super().transform_cell(raw_cell)
        self._transformed = raw_cell, python
        return python

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> Any:
        """Run a part of a cell; note how it ended, and let no exception break the cell's own report."""
        failed = await super().run_code(code_obj, result, async_=async_)
        error = None if result is None else result.error_in_exec
        if isinstance(error, SystemExit):
            self.exit_code = exit_code_of(error)
        if error is not None:
            result.error_in_exec = printable(error)
        return failed

    def showtraceback(
        self,
        exc_tuple: Any = None,
        filename: str | None = None,
        tb_offset: int | None = None,
        exception_only: bool = False,
        running_compiled_code: bool = False,
    ) -> None:
        """Show the current exception as Python does, without our frames and IPython's."""
        etype, value, tb = self._get_exc_info(exc_tuple)
        if isinstance(value, SystemExit) and self._ends_process():
            if value.code is not None and not isinstance(value.code, int):
                print(safe_str(value.code), file=sys.stderr)
            return
        if isinstance(value, UsageError):
            self._showtraceback(etype, value, [f"UsageError: {safe_str(value)}"])
            return
        self._showtraceback(etype, value, plain_traceback(value, tb))

    def showsyntaxerror(self, filename: str | None = None, running_compiled_code: bool = False) -> None:
        """Show the current SyntaxError; it has no frames of the cell's."""
        etype, value, _ = self._get_exc_info(None)
        self._showtraceback(etype, value, plain_traceback(value, None))

    def ask_exit(self) -> None:
        """End the kernel and its front end; if it is another client's cell that asks, the front end alone."""
        if self.kernel.cell_is_foreign:
            print("This kernel belongs to an agent's session: it goes on.", file=sys.stderr)
            self.keepkernel_on_exit = True
        elif self.kernel.has_owner:
            self.exit_code = 0  # at the end of the cell, which goes on as it does in any Jupyter kernel
            return
        super().ask_exit()

    def _showtraceback(self, etype: type, evalue: BaseException, stb: list[str]) -> None:
        stb = shortened("\n".join(stb)).split("\n")
        app = self.kernel.parent
        if self.kernel.is_child:
            self._last_traceback = stb
            print("\n".join(stb), file=app.streams[1])
            return
        # The cell may have put anything in the place of the streams; ipykernel flushes what it finds there.
        with redirect_stdout(app.streams[0]), redirect_stderr(app.streams[1]):
            super()._showtraceback(etype, printable(evalue), stb)

    def _ends_process(self) -> bool:
        return bool(self.kernel.is_child or self.kernel.cell_may_end_kernel)


def exit_code_of(end: SystemExit) -> int:
    """Return the exit code with which a process of Python's would end."""
    code = end.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    if not -(2**31) <= code < 2**31:
        return 255
    return int(code) & (0xFFFF_FFFF if sys.platform == "win32" else 0xFF)


def safe_str(value: object) -> str:
    """Return ``str(value)``, or a sentence if that raises."""
    try:
        return str(value)
    except BaseException:  # noqa: BLE001  # code of the cell's: it may raise anything, SystemExit too
        return f"<str() of {type(value).__name__} failed>"


def printable(error: BaseException) -> BaseException:
    """Return *error*, or one of the same name with a text that can be shown if its own cannot."""
    name = type(error).__name__
    if len(name) <= LONGEST and _has_text(error):
        return error
    stand_in = type(shortened(name), (Exception,), {"__module__": type(error).__module__})
    return stand_in(shortened(safe_str(error)))  # type: ignore[no-any-return]


def _has_text(error: BaseException) -> bool:
    try:
        return len(str(error)) <= LONGEST
    except BaseException:  # noqa: BLE001  # code of the cell's: it may raise anything, SystemExit too
        return False


def shortened(text: str) -> str:
    """Return *text*, or its beginning and end if it is too long for a message."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are missing ...]\n{text[-half:]}"


def plain_traceback(error: BaseException, tb: Any) -> list[str]:
    """Return the traceback as lines: as Python prints it, without the frames that run the cell for us."""
    report = traceback.TracebackException(type(error), error, tb, compact=True)
    lines = "".join(_formatted(report)).rstrip("\n").split("\n")
    if isinstance(error, RuntimeError) and _is_about_a_running_loop(safe_str(error)):
        lines.append(AWAIT_INSTEAD)
    return lines


def _formatted(report: "traceback.TracebackException") -> Iterator[str]:
    pending: list[Any] = [report]
    while pending:
        part = pending.pop()
        _leave_cell_frames(part.stack)
        linked = (part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ()))
        pending.extend(link for link in linked if link is not None)
    return report.format()


def _is_about_a_running_loop(message: str) -> bool:
    return "event loop" in message and ("running" in message or "another loop" in message)


def _leave_cell_frames(stack: "traceback.StackSummary") -> None:
    while stack and _is_machinery(stack[0].filename):
        del stack[0]
    if stack and _is_kernel(stack[-1].filename):
        while stack and _is_machinery(stack[-1].filename):
            del stack[-1]
    stack[:] = [frame for frame in stack if not frame.filename.startswith(_ROOM)]


def _is_kernel(filename: str) -> bool:
    return filename.startswith(_OWN) or f"{os.sep}ipykernel{os.sep}" in filename


def _is_machinery(filename: str) -> bool:
    return _is_kernel(filename) or f"{os.sep}IPython{os.sep}" in filename


def quiet_ipython() -> None:
    """Silence the advice for people at a prompt, and warnings about what we do: threads, showing figures."""
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit', or Ctrl-D.")
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".* is non-interactive, and thus cannot be shown")
