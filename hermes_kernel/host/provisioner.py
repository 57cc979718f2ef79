"""The provisioner: the last of our code before a kernel process exists, whoever starts it.

It holds what must be true under every front end: a scrubbed environment, our own command line, a process
tree that ends as a whole. A manager of ours lends it its launcher; under a stock manager (JupyterLab,
nbclient with the installed kernel spec) it has one of its own.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from ..errors import ConfigError
from ..process.environment import EnvPolicy, scrub
from ..process.launch import Launched, Launcher, LaunchSpec, ProcessLimits
from ..process.local import LocalLauncher, environment_now
from .supervised import SupervisedLauncher
from .supervisor import Supervisor, SupervisorClosedError

KILL_TIMEOUT = 5.0  # seconds for a killed tree to be gone
SHUTDOWN_WAIT = 1.0  # seconds that a kernel has to end by itself when it is asked to

# What a caller may say about the launch; every other keyword would reach into the process itself.
ALLOWED = frozenset({"env", "cwd", "extra_arguments"})
# What stock front ends hand to every provisioner and what says nothing about the process.
IGNORED = frozenset({"kernel_id", "kernel_name", "transport_encryption", "cmd"})


@dataclass(frozen=True)
class LaunchTerms:
    """What a manager of ours says about its kernel; a stock manager has none.

    ``private_cwd``: where no directory is given, the kernel gets its own instead of the host's.
    ``connection`` keeps the addresses over a restart.
    """

    launcher: Launcher
    python: str
    env_policy: EnvPolicy
    options: Mapping[str, Any]
    socket_dir: str | None = None
    private_cwd: bool = False
    connection: Mapping[str, Any] | None = None
    start_timeout: float = 30.0
    process: ProcessLimits = field(default_factory=ProcessLimits)
    label: Mapping[str, Any] = field(default_factory=dict)
    publish_dir: str | None = None


class HermesProvisioner(LocalProvisioner):
    """Launches kernels through a Launcher and ends their trees."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._launched: Launched | None = None
        self._launcher: Launcher | None = None
        self._is_process_open = False
        self._own_supervisor: Supervisor | None = None

    @property
    def terms(self) -> LaunchTerms | None:
        """The terms of a manager of ours, None under a stock one."""
        terms = getattr(self.parent, "launch_terms", None)
        return terms if isinstance(terms, LaunchTerms) else None

    @property
    def _session_key(self) -> bytes:
        manager: Any = self.parent
        key: bytes = manager.session.key
        return key

    @property
    def has_process(self) -> bool:
        """Whether there is a process that has not been waited for."""
        return self._is_process_open

    @property
    def launched(self) -> Launched | None:
        """What was launched and is not cleaned up."""
        return self._launched

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Scrub the environment before the kernel spec's ``${...}`` can take anything from it.

        Raises ConfigError for a keyword that would reach into the process (``preexec_fn``, ``pass_fds``…).
        """
        kwargs = {key: value for key, value in kwargs.items() if key not in IGNORED}
        if unknown := sorted(kwargs.keys() - ALLOWED):
            raise ConfigError(
                f"unknown option {', '.join(unknown)}: a kernel takes {', '.join(sorted(ALLOWED))}"
            )
        terms, env = self.terms, kwargs.get("env")
        kwargs["env"] = _scrub(environment_now() if env is None else _checked_env(env), terms)
        if terms is None:
            return await super().pre_launch(**kwargs)
        return await KernelProvisionerBase.pre_launch(self, cmd=[], **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the process. *cmd* is not used: the command line is ours.

        Raises ConfigError for what cannot be launched, KernelStartError if the process cannot be started.
        """
        terms = self.terms or self._stock_terms()
        spec = LaunchSpec(
            kernel_id=str(self.kernel_id),
            python=terms.python,
            session_key=self._session_key.decode(),
            cwd=_cwd(kwargs.get("cwd"), private=terms.private_cwd),
            env=_scrub(kwargs["env"], terms),
            env_policy=terms.env_policy,
            options=terms.options,
            extra_arguments=tuple(kwargs.get("extra_arguments") or ()),
            connection=terms.connection,
            socket_dir=terms.socket_dir,
            label=terms.label,
            publish_dir=terms.publish_dir,
            process=terms.process,
            timeout=terms.start_timeout,
        )
        self._launcher = terms.launcher
        self.cwd = spec.cwd
        return self.adopt(terms.launcher, await terms.launcher.launch(spec))

    def adopt(self, launcher: Launcher, launched: Launched) -> KernelConnectionInfo:
        """Have this process from now on; return how to connect to it."""
        self._launcher, self._launched = launcher, launched
        self._is_process_open = True
        self.pid = launched.pid
        self.pgid = None  # signals go through the launcher, never to a group by its number
        self.connection_info = {**launched.connection, "key": self._session_key}  # type: ignore[typeddict-item]
        return self.connection_info

    def release(self) -> None:
        """Have no process any more: somebody else has ended it."""
        self._launched = None
        self._is_process_open = False

    async def poll(self) -> int | None:
        """Return None while the process runs, else its exit code."""
        if self._launched is None or self._launcher is None:
            return 0
        exit_ = self._launcher.exit_of(self._launched.handle)
        return None if exit_ is None else exit_.exit_code

    async def wait(self) -> int | None:
        """Wait for the end of the process, as an event; then there is none any more."""
        if self._launched is None or self._launcher is None:
            return 0
        exit_ = await self._launcher.ended(self._launched.handle)
        self._is_process_open = False
        return exit_.exit_code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel and its group."""
        if self._launched is not None and self._launcher is not None:
            await self._launcher.signal(self._launched.handle, signum)

    async def kill(self, restart: bool = False) -> None:
        """Kill the whole tree."""
        await self._end()

    async def terminate(self, restart: bool = False) -> None:
        """Kill the whole tree: it had its time to end by itself."""
        await self._end()

    async def cleanup(self, restart: bool = False) -> None:
        """Leave nothing behind: what the kernel's end has left of its tree goes too."""
        await self._end()
        self.release()
        await super().cleanup(restart=restart)
        supervisor = self._own_supervisor
        if supervisor is not None and not restart:
            self._own_supervisor = self._launcher = None
            await supervisor.aclose()

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Return how long a kernel has to end by itself, in seconds."""
        return SHUTDOWN_WAIT

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Refuse: another process cannot take over what it does not own."""
        raise ConfigError("a kernel of hermes_kernel belongs to the process that started it")

    def _stock_terms(self) -> LaunchTerms:
        """Under a stock manager: a supervisor of the kernel's own, and the addresses that were chosen."""
        if self._launcher is None:
            self._own_supervisor = Supervisor(f"hermes-kernel-{self.kernel_id}")
            self._launcher = SupervisedLauncher(self._own_supervisor, LocalLauncher())
        command = self.kernel_spec.argv[:1]
        return LaunchTerms(
            launcher=self._launcher,
            python=command[0] if command and os.path.isabs(command[0]) else sys.executable,
            env_policy=EnvPolicy(),
            options={},
            connection={key: _text(value) for key, value in self.connection_info.items()},
        )

    async def _end(self) -> None:
        if self._launched is None or self._launcher is None:
            return
        try:
            await self._launcher.end(self._launched.handle, timeout=KILL_TIMEOUT)
        except SupervisorClosedError:  # closing it has ended everything
            self._is_process_open = False


def _scrub(env: Mapping[str, str], terms: LaunchTerms | None) -> dict[str, str]:
    policy = EnvPolicy() if terms is None else terms.env_policy
    return scrub(env, platform=sys.platform, policy=policy)


def _cwd(given: str | os.PathLike[str] | None, *, private: bool) -> str | None:
    if given is not None:
        return os.fspath(given)
    if private:
        return None
    try:
        return os.getcwd()
    except OSError as error:
        raise ConfigError("the current directory is gone; give cwd=") from error


def _checked_env(env: object) -> Mapping[str, str]:
    if not isinstance(env, Mapping):
        raise ConfigError(f"env is a {type(env).__name__}; give a mapping of names to texts")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str) or "\0" in name + value:
            what = f"{name!r} has a {type(value).__name__}" if isinstance(name, str) else repr(name)
            raise ConfigError(f"env: {what}; give names and values as texts without NUL")
    return env


def _text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value
