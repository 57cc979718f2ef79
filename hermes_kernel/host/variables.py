"""Asks a live kernel of another process for its variables, through its published connection file."""

from pathlib import Path
from queue import Empty
from time import monotonic
from typing import Any, cast

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import KernelConnectionInfo

from ..cell.message import MalformedMessage
from ..cell.shown import Cleaner
from ..cell.variables import REPLY, REQUEST, Variable, variables_of
from ..errors import ConfigError, HermesKernelError
from ..process.published import read_published

NO_ANSWER = (
    "the kernel did not answer within {0:g} s: its cell may keep the interpreter to itself; try again later"
)


def read_variables(connection_file: Path, cleaner: Cleaner, *, timeout: float) -> tuple[Variable, ...]:
    """Return the variables of the kernel behind a connection file.

    Raises ConfigError if the file is none, HermesKernelError if the kernel does not answer within *timeout*
    seconds or what it answers is no list of variables.
    """
    info = read_published(connection_file)
    if info is None:
        raise ConfigError(
            f"{connection_file} is no connection file of a live session; has the session ended?"
        )
    client = BlockingKernelClient()
    client.load_connection_info(cast(KernelConnectionInfo, info))
    client.start_channels(shell=False, iopub=False, stdin=False, hb=False)
    try:
        request = client.session.msg(REQUEST, {})
        client.control_channel.send(request)
        deadline = monotonic() + timeout
        while True:
            try:
                reply = client.get_control_msg(timeout=max(deadline - monotonic(), 0))
            except Empty:
                raise HermesKernelError(NO_ANSWER.format(timeout)) from None
            except (ValueError, TypeError, KeyError, AttributeError):  # it is no message
                continue
            if _answers(reply, request):
                return variables_of(reply["content"], cleaner)
    except MalformedMessage as error:
        raise HermesKernelError(f"the kernel's answer is no list of variables: {error}") from error
    finally:
        client.stop_channels()


def _answers(reply: Any, request: Any) -> bool:
    """Whether a message is the answer to a request; its signature says nothing of its shape."""
    parent, content = reply["parent_header"], reply["content"]
    if not isinstance(parent, dict) or not isinstance(content, dict):
        return False
    of_it = parent.get("msg_id") == request["header"]["msg_id"]
    return bool(of_it and reply["header"].get("msg_type") == REPLY)
