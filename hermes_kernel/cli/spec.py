"""``hermes-kernel spec``: the kernel specs, put where a Jupyter front end looks for them, and taken away."""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from jupyter_client.kernelspec import KernelSpecManager

from ..errors import ConfigError
from ..process.published import SPEC as LIVE
from .printable import printable

NAME = "hermes"
PROVISIONER = "hermes-provisioner"
LIVE_PROVISIONER = "hermes-attach"
SOURCES = Path(__file__).with_name("kernels")

# Jupyter allows a name like "..", and it removes the directory of that name.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True)
class Place:
    """Where a spec lies: in the user's data directory (no prefix) or below a prefix.

    ``is_own``: the prefix is that of this interpreter.
    """

    name: str
    prefix: Path | None = None
    is_own: bool = False
    is_live: bool = False

    @classmethod
    def chosen(
        cls, name: str | None, *, live: bool, user: bool, sys_prefix: bool, prefix: Path | None
    ) -> "Place":
        """Return what the options say; raises a usage error if they contradict each other."""
        if live and name is not None:
            raise click.UsageError("--live and --name exclude each other: front ends look for that one name")
        if name == LIVE:
            raise click.UsageError(f"{LIVE!r} is the spec of live sessions: install it with --live")
        name = LIVE if live else name or NAME
        if user + sys_prefix + (prefix is not None) > 1:
            raise click.UsageError("--user, --sys-prefix and --prefix exclude each other; give one of them")
        if sys_prefix:
            return cls(name, Path(sys.prefix), is_own=True, is_live=live)
        if prefix is None:
            return cls(name, is_live=live)
        if not prefix.is_dir():
            raise click.BadParameter(
                f"there is no directory {str(prefix)!r}; make it first", param_hint="'--prefix'"
            )
        return cls(name, prefix.absolute(), is_live=live)

    @property
    def provisioner(self) -> str:
        """The provisioner of a spec of ours of this kind."""
        return LIVE_PROVISIONER if self.is_live else PROVISIONER

    @property
    def kernels(self) -> Path:
        """The directory that holds this spec's own."""
        if self.prefix is None:
            return Path(KernelSpecManager().user_kernel_dir)
        return self.prefix / "share" / "jupyter" / "kernels"

    @property
    def directory(self) -> Path:
        """The spec's own directory."""
        return self.kernels / self.name

    def manager(self) -> KernelSpecManager:
        """Return a manager that knows this place and no other."""
        return KernelSpecManager(kernel_dirs=[str(self.kernels)], ensure_native_kernel=False)


def _checked_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    name = value.lower()  # as Jupyter does
    if not _NAME.fullmatch(name):
        raise click.BadParameter(
            f"{value!r} cannot name a kernel spec; use letters, digits and, not first, '.', '_' or '-'"
        )
    return name


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--user", is_flag=True, help="In your own Jupyter data directory.  [default]"),
    click.option("--sys-prefix", is_flag=True, help="In this interpreter's environment."),
    click.option(
        "--prefix", type=click.Path(path_type=Path), metavar="PATH", help="In PATH/share/jupyter/kernels."
    ),
    click.option(
        "--name", callback=_checked_name, metavar="NAME", help=f"The kernel spec's name.  [default: {NAME}]"
    ),
    click.option(
        "--live", is_flag=True, help="The spec under which live sessions are shown; it starts nothing."
    ),
)


def _with_place(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group(short_help="Install or remove the kernel spec for Jupyter.")
def spec() -> None:
    """Install or remove the kernel specs for JupyterLab and others: to start our kernels, to show live ones.

    Exit codes: 0 done, 2 it cannot be done.
    """


@spec.command()
@_with_place
def install(*, user: bool, sys_prefix: bool, prefix: Path | None, name: str | None, live: bool) -> None:
    """Install the kernel spec.

    With --user and --prefix it names this interpreter: the kernels run here, whichever Jupyter starts them.
    With --sys-prefix they run in the environment of the Jupyter that finds it, which is this one.

    The Jupyter server itself needs hermes_kernel in its own environment. Without it JupyterLab does not offer
    the kernel, and the server's log says that it cannot find the provisioner 'hermes-provisioner'.

    A spec of ours that has this name is replaced.

    Exit codes: 0 installed, 2 it cannot be installed.
    """
    place = Place.chosen(name, live=live, user=user, sys_prefix=sys_prefix, prefix=prefix)
    _check_ours(place, "remove it" if live else "choose another --name")
    try:
        with tempfile.TemporaryDirectory(prefix="hermes-spec-") as source:
            _write(Path(source), place)
            where = place.manager().install_kernel_spec(
                source,
                place.name,
                user=place.prefix is None,
                prefix=None if place.prefix is None else str(place.prefix),
            )
    except OSError as error:
        raise ConfigError(_refused("installed", place, error)) from error
    click.echo(printable(f"Installed the kernel spec {place.name!r} in {where}"))
    if str(place.kernels) not in KernelSpecManager().kernel_dirs:
        click.echo(f"Jupyter does not look there yet; add {place.kernels.parent} to JUPYTER_PATH", err=True)


@spec.command()
@_with_place
def remove(*, user: bool, sys_prefix: bool, prefix: Path | None, name: str | None, live: bool) -> None:
    """Remove the kernel spec that `install` with the same options has installed.

    Exit codes: 0 removed, 2 there is none, or it cannot be removed.
    """
    place = Place.chosen(name, live=live, user=user, sys_prefix=sys_prefix, prefix=prefix)
    _check_ours(place, "`jupyter kernelspec remove` removes any")
    try:
        where = place.manager().remove_kernel_spec(place.name)
    except KeyError:
        raise ConfigError(
            f"there is no kernel spec {place.name!r} in {place.kernels}; `jupyter kernelspec list` lists all"
        ) from None
    except OSError as error:
        raise ConfigError(_refused("removed", place, error)) from error
    click.echo(printable(f"Removed the kernel spec {place.name!r} from {where}"))


def _write(directory: Path, place: Place) -> None:
    """Write the spec as it is to be at *place*."""
    source = SOURCES / (LIVE if place.is_live else NAME)
    content = json.loads((source / "kernel.json").read_text(encoding="utf-8"))
    if not place.is_own:
        if not sys.executable:
            raise ConfigError("this interpreter does not know its own path; use --sys-prefix")
        content["argv"][0] = sys.executable
    if place.name not in (NAME, LIVE):
        content["display_name"] = f"Hermes ({place.name})"
    (directory / "kernel.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for logo in source.glob("logo-*"):
        (directory / logo.name).write_bytes(logo.read_bytes())


def _check_ours(place: Place, next_step: str) -> None:
    """Refuse to replace or remove what is somebody else's."""
    try:
        found = place.manager().find_kernel_specs().get(place.name)
        if found is None:
            return
        content = json.loads((Path(found) / "kernel.json").read_text(encoding="utf-8"))
        is_ours = content["metadata"]["kernel_provisioner"]["provisioner_name"] == place.provisioner
    except OSError as error:
        raise ConfigError(_refused("read", place, error)) from error
    except (ValueError, KeyError, TypeError):  # no JSON, or none of ours
        is_ours = False
    if not is_ours:
        raise ConfigError(f"the kernel spec in {found} is not one of hermes_kernel; {next_step}")


def _refused(done: str, place: Place, error: OSError) -> str:
    reason = error.strerror or str(error)
    return (
        f"the kernel spec cannot be {done} in {place.directory}: {reason}; "
        "choose another place with --user, --sys-prefix or --prefix"
    )
