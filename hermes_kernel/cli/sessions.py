"""``hermes-kernel ps`` and ``kill``: the live kernels of this user, whoever has started them."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import psutil

from ..errors import ConfigError
from ..process.sessions import Session, end_session, live_sessions
from .printable import printable

KILL_TIMEOUT = 8.0  # seconds for one tree to be gone
NOT_ENDED = 1
NONE_FOUND = 2
ID_SHOWN = 12  # characters of a kernel's id: enough to tell it from others

_HEADINGS = ("OWNER", "KERNEL", "PID", "AGE", "MEMORY", "START", "ISOLATION", "EXPOSED", "HOST", "CWD")


@click.command(short_help="Show the live kernels.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def ps(*, as_json: bool) -> None:
    """Show the live kernels of this user: those of every process, and of whoever has started them.

    MEMORY is what the kernel's process has in memory (RSS), without its children. EXPOSED: whether people can
    look into it, with `attach`, `vars` and `lab`.
    """
    now = time.time()
    sessions = live_sessions()
    if as_json:
        click.echo(json.dumps([_told(session, now) for session in sessions]))
        return
    if not sessions:
        click.echo("There is no live kernel.")
        return
    print_table([_HEADINGS, *(_row(session, now) for session in sessions)])


@click.command(short_help="End live kernels.")
@click.argument("names", nargs=-1, metavar="[OWNER|KERNEL]...")
@click.option("--all", "every", is_flag=True, help="End all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@click.pass_context
def kill(ctx: click.Context, names: Sequence[str], *, every: bool, as_json: bool) -> None:
    """End kernels with all the processes that they have started.

    A kernel is named by its owner or by the start of its id (4 characters or more); `hermes-kernel ps` shows
    both. Its owner is told at the next call that the state is lost.

    Exit codes: 0 all are gone, 1 one is not, 2 there is none of that name.
    """
    if bool(names) == every:
        raise click.UsageError("give owners or kernel ids, or --all")
    sessions = live_sessions()
    chosen = sessions if every else called(sessions, names)
    now = time.time()
    outcomes = [(session, end_session(session, timeout=KILL_TIMEOUT)) for session in chosen]
    if as_json:
        click.echo(json.dumps([{**_told(session, now), "ended": ended} for session, ended in outcomes]))
    else:
        for session, ended in outcomes:
            what = "ended" if ended else "could not be ended: its warden does not answer"
            click.echo(printable(f"{session.owner}  {session.kernel_id[:ID_SHOWN]}  {what}"))
        if not outcomes:
            click.echo("There is no live kernel.")
    ctx.exit(0 if all(ended for _, ended in outcomes) else NOT_ENDED)


def exposed_session(name: str) -> tuple[Session, Path]:
    """Return the one live session that a person means, and its connection file; raises ConfigError."""
    chosen = called(live_sessions(), [name])
    exposed = [session for session in chosen if session.published is not None]
    if not exposed:
        raise ConfigError(
            f"the session {name!r} is not exposed: its host must be started with expose=True for people to "
            "look into it"
        )
    if len(exposed) > 1:
        ids = ", ".join(session.kernel_id[:ID_SHOWN] for session in exposed)
        raise ConfigError(f"{name!r} has {len(exposed)} kernels: give the id of one of them: {ids}")
    (session,) = exposed
    assert session.published is not None
    return session, session.published


def called(sessions: Sequence[Session], names: Sequence[str]) -> list[Session]:
    """Return the sessions that are called so; raises ConfigError for a name of none."""
    chosen: dict[str, Session] = {}
    for name in names:
        found = {session.kernel_id: session for session in sessions if session.is_called(name)}
        if not found:
            raise ConfigError(f"no live kernel is called {name!r}; `hermes-kernel ps` shows those there are")
        chosen |= found
    return list(chosen.values())


def _told(session: Session, now: float) -> dict[str, Any]:
    told = asdict(session)
    del told["lease_file"], told["published"]
    return {
        **told,
        "connection_file": None if session.published is None else str(session.published),
        "owner": session.owner,
        "age": round(now - session.started, 1),
        "memory": _memory(session),
    }


def _row(session: Session, now: float) -> tuple[str, ...]:
    memory = _memory(session)
    return (
        session.owner,
        session.kernel_id[:ID_SHOWN],
        str(session.pid),
        _age(now - session.started),
        "-" if memory is None else f"{memory / 2**20:.0f} MiB",
        session.start_method,
        session.isolation,
        "no" if session.published is None else "yes",
        str(session.host),
        session.cwd,
    )


def _memory(session: Session) -> int | None:
    """Return the resident memory of the kernel's process in bytes, None if it is gone."""
    try:
        return int(psutil.Process(session.pid).memory_info().rss)
    except psutil.Error:
        return None


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns, the first of them as a heading."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for number, row in enumerate(rows):
        *cells, last = row
        line = "  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), last])
        click.echo(click.style(line, bold=True) if number == 0 else line)
