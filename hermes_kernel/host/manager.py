"""The kernel manager: directory, transport, client and interpreter of one kernel, for every Jupyter tool."""

import concurrent.futures
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import zmq.asyncio
from jupyter_client.connect import KernelConnectionInfo, port_names
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.session import Session, new_id
from traitlets import Any as AnyTrait
from traitlets import Bool, Dict, Float, Instance, Type, Unicode, default

from ..cell.tools import ToolSet
from ..errors import ConfigError, HermesKernelError, KernelStartError
from ..limits import Limits, checked_call_limit
from ..process import interpreter
from ..process.environment import EnvPolicy
from ..process.launch import Launched, Launcher, ProcessLimits
from ..process.local import LocalLauncher
from ..process.published import publish_dir
from ..wire import PACKER, UNPACKER
from .bridge import KernelBridge
from .client import HermesKernelClient, OwnerSession, client_context
from .clientcells import ClientCells
from .grant import CellTools
from .handlers import HandlerLoop
from .identity import KernelIdentity, kernel_options, new_secret
from .provisioner import HermesProvisioner, LaunchTerms
from .supervised import SupervisedLauncher
from .supervisor import Supervisor

KERNEL_NAME = "hermes"
NOT_UP = "the kernel did not come up, or was closed before: the call that it was started for has the reason"


class HermesKernelManager(AsyncKernelManager):
    """An AsyncKernelManager whose kernels are ours: scrubbed, private, ended as a whole tree.

    Needs no installed kernel spec and ignores the kernel name that a notebook asks for; ``python`` chooses
    the interpreter (a path or a name; default: this one). Nothing that it promises runs on the caller's event
    loop, so it may be started under one ``asyncio.run`` and used under another.

    ``tools`` (see ``ToolSet.of``) can be called by the cells of its clients, ``max_tool_calls`` times a cell
    (None = no limit).

    Raises ConfigError for an interpreter that cannot run a kernel, KernelStartError if the kernel does not
    come up; then nothing is left of it.
    """

    python = Unicode(help="The interpreter of the kernel, a path or a name.").tag(config=True)
    allow_magics = Bool(True, help="Whether %magics, !commands and help? work.").tag(config=True)
    socket_dir = Unicode(None, allow_none=True, help="Where the sockets are to stand.").tag(config=True)
    env_policy = Instance(EnvPolicy, ())
    launcher = AnyTrait(None, help="A Launcher; None = one of its own.")
    private_cwd = Bool(False, help="Whether a kernel without a directory gets one of its own.")
    start_timeout = Float(30.0, help="Seconds for the launch to be done.").tag(config=True)
    bridge_token = Unicode(help="What proves to the tool bridge that a connection comes from the kernel.")
    process_limits = Instance(ProcessLimits, ())
    label = Dict(help="What people are told about the session.")
    options = Dict(help="More of what the kernel is told in its private connection file.")
    expose = Bool(False, help="Whether people find the kernel in their Jupyter front ends.").tag(config=True)

    client_factory = Type(HermesKernelClient)
    autorestart = Bool(False, help="Never: a lost state must be said, not replaced.")
    context = Instance(zmq.asyncio.Context)

    def __init__(self, **kwargs: Any) -> None:
        # A notebook's own kernel name says how it was written, not who runs it now.
        kwargs.pop("kernel_name", None)
        python = kwargs.pop("python", None)
        tools = ToolSet.of(kwargs.pop("tools", ()))
        calls = checked_call_limit("max_tool_calls", kwargs.pop("max_tool_calls", Limits().max_tool_calls))
        super().__init__(**kwargs)
        self.kernel_name = KERNEL_NAME
        self.python = interpreter.resolve(python or self.python or None)
        self._own_supervisor: Supervisor | None = None
        self._own_launcher: Launcher | None = None
        self._kept_connection: dict[str, Any] | None = None
        self._handlers = HandlerLoop()
        self._tools = CellTools(tools, calls, loop=self._handlers.get) if tools.tools else None
        self._bridge: KernelBridge | None = None
        self._launched_by_registry: concurrent.futures.Future[None] | None = None

    @classmethod
    def of_registry(
        cls, identity: KernelIdentity, launcher: Launcher, *, python: str, **traits: Any
    ) -> "HermesKernelManager":
        """Return a manager of a kernel that a registry launches; it says so by ``adopt`` and ``release``.

        *python* is a path that has been looked at; *traits* are those with which it is launched.
        """
        session = OwnerSession(
            key=identity.session_key.encode(),
            packer=PACKER,
            unpacker=UNPACKER,
            owner_secret=identity.owner_secret,
        )
        manager = cls(
            kernel_id=identity.kernel_id,
            launcher=launcher,
            session=session,
            bridge_token=identity.bridge_token,
            **traits,
        )
        manager.python = python
        manager.provisioner = manager._new_provisioner()
        manager._attempted_start = True
        # Where it is shut down meanwhile jupyter_client puts a future of its own in the place of this one.
        manager._ready = manager._launched_by_registry = concurrent.futures.Future()
        return manager

    def adopt(self, launched: Launched) -> None:
        """Have the process that a registry has launched, from now on.

        Raises KernelStartError if the manager has been shut down meanwhile.
        """
        if self.shutting_down:
            raise KernelStartError("the kernel's manager was shut down while it started; call again")
        provisioner = self.provisioner
        assert isinstance(provisioner, HermesProvisioner)
        self._reconcile_connection_info(provisioner.adopt(self._use_launcher(), launched))
        if self._launched_by_registry is not None and not self._launched_by_registry.done():
            self._launched_by_registry.set_result(None)

    def release(self) -> None:
        """Have no process any more: the registry has ended it, or it has never come up.

        Sockets that were made with this manager are their maker's: to close them here, on another thread,
        could take for ever.
        """
        if isinstance(self.provisioner, HermesProvisioner):
            self.provisioner.release()
        if self._launched_by_registry is not None and not self._launched_by_registry.done():
            self._launched_by_registry.set_exception(KernelStartError(NOT_UP))

    @default("transport")
    def _default_transport(self) -> str:
        return "ipc" if sys.platform != "win32" else "tcp"

    @default("context")
    def _default_context(self) -> zmq.asyncio.Context:
        self._created_context = True
        return client_context()

    @default("cache_ports")
    def _default_cache_ports(self) -> bool:
        return False

    @default("bridge_token")
    def _default_bridge_token(self) -> str:
        return new_secret()

    @default("session")
    def _default_session(self) -> Session:
        return OwnerSession(parent=self, packer=PACKER, unpacker=UNPACKER, owner_secret=new_secret())

    @property
    def kernel_spec(self) -> KernelSpec:
        """The kernel spec, built here: nothing has to be installed."""
        return KernelSpec(
            argv=[self.python],
            display_name="Hermes (Python 3)",
            language="python",
            interrupt_mode="signal",
            metadata={"supported_encryption": ["curve"]},
        )

    @property
    def launch_terms(self) -> LaunchTerms:
        """What the provisioner needs to know."""
        return LaunchTerms(
            launcher=self._use_launcher(),
            python=self.python,
            env_policy=self.env_policy,
            options=kernel_options(
                owner_secret=self.owner_secret, bridge_token=self.bridge_token, allow_magics=self.allow_magics
            )
            | self.options,
            socket_dir=self.socket_dir,
            private_cwd=self.private_cwd,
            connection=self._kept_connection,
            start_timeout=self.start_timeout,
            process=self.process_limits,
            label=self.label,
            publish_dir=str(publish_dir()) if self.expose else None,
        )

    @property
    def owner_secret(self) -> str:
        """What the requests of the owner carry; never in a connection file that others read."""
        return str(getattr(self.session, "owner_secret", ""))

    @property
    def launched(self) -> Launched | None:
        """The process that was launched, None if there is none."""
        return self.provisioner.launched if isinstance(self.provisioner, HermesProvisioner) else None

    def client(self, **kwargs: Any) -> HermesKernelClient:  # type: ignore[override]
        """Return a client with a session of its own.

        The kernel routes replies by session: two clients that shared one would take each other's.
        """
        if "session" not in kwargs:
            session = self.session.clone()
            session.session = new_id()
            if self._tools is not None and isinstance(session, OwnerSession):
                session.cells = ClientCells(self._tools, lambda: self._bridge)
            kwargs["session"] = session
        return super().client(**kwargs)  # type: ignore[return-value]

    async def _async_pre_start_kernel(self, **kwargs: Any) -> Any:
        if self.provisioner is None:
            self.kernel_id = self.kernel_id or kwargs.pop("kernel_id", None) or os.urandom(16).hex()
            self.provisioner = self._new_provisioner()
        elif not isinstance(self.provisioner, HermesProvisioner):
            raise ConfigError(
                f"provisioner {type(self.provisioner).__name__}: kernels of this manager are launched by "
                "HermesProvisioner; leave the provisioner out"
            )
        return await super()._async_pre_start_kernel(**kwargs)

    async def _async_start_kernel(self, **kwargs: Any) -> None:
        """Start the kernel; if that fails nothing is left of it.

        Raises ConfigError if it is a registry's, KernelStartError if it does not come up.
        """
        self._check_is_own()
        self._attempted_start = True
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ready = ready
        try:
            command, launch = await self._async_pre_start_kernel(**kwargs)
            await self._async_launch_kernel(command, **launch)
            await self._async_post_start_kernel(**launch)
            await self._open_bridge()
        except BaseException as error:
            ready.set_exception(error)
            await self._async_cleanup_resources()
            if isinstance(error, HermesKernelError) or not isinstance(error, Exception):
                raise
            raise KernelStartError(f"the kernel did not start: {error}") from error
        ready.set_result(None)

    async def _async_post_start_kernel(self, **kwargs: Any) -> None:
        """Nothing else to do: the control channel is connected when it is needed."""

    def _reconcile_connection_info(self, info: KernelConnectionInfo) -> None:
        """Take the connection from the launch: the keys are ours, the addresses were made there."""
        for name in port_names:
            setattr(self, name, 0)
        self.ip = str(info["ip"])
        self.load_connection_info(info)
        launched = self.launched
        if launched is not None:
            self.connection_file = launched.connection_file

    async def _async_wait(self, pollinterval: float = 0.1) -> None:
        """Wait for the end of the process, as an event."""
        if self.provisioner is not None and self.has_kernel:
            await self.provisioner.wait()

    async def _async_cleanup_resources(self, restart: bool = False) -> None:
        await self._close_bridge()
        launched = self.launched
        self._kept_connection = dict(launched.connection) if restart and launched is not None else None
        await super()._async_cleanup_resources(restart=restart)
        if not restart:
            await self._close_launcher()

    async def _async_restart_kernel(self, now: bool = False, newports: bool = False, **kwargs: Any) -> None:
        """Restart the kernel; raises ConfigError if it belongs to a registry, which would not know."""
        self._check_is_own()
        await super()._async_restart_kernel(now=now, newports=newports, **kwargs)

    def _check_is_own(self) -> None:
        if self._launched_by_registry is not None:
            raise ConfigError("this kernel belongs to a registry: call execute(..., reset=True) instead")

    def _new_provisioner(self) -> HermesProvisioner:
        return HermesProvisioner(kernel_id=self.kernel_id, kernel_spec=self.kernel_spec, parent=self)

    def _use_launcher(self) -> Launcher:
        if self.launcher is not None:
            launcher: Launcher = self.launcher
            return launcher
        if self._own_launcher is None:
            self._own_launcher = SupervisedLauncher(self._use_supervisor(), LocalLauncher())
        return self._own_launcher

    def _use_supervisor(self) -> Supervisor:
        if self._own_supervisor is None:
            self._own_supervisor = Supervisor("hermes-kernel-manager")
        return self._own_supervisor

    async def _open_bridge(self) -> None:
        """Listen for the tool calls of the kernel's cells, if they have tools."""
        launched = self.launched
        if self._tools is None or launched is None:
            return
        supervisor = self._use_supervisor()
        bridge = KernelBridge(
            supervisor, launched.bridge, token=self.bridge_token, kernel_id=str(self.kernel_id)
        )
        await supervisor.run(_called(bridge.open))
        self._bridge = bridge

    async def _close_bridge(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is not None and self._own_supervisor is not None and not self._own_supervisor.closed:
            await self._own_supervisor.run(_called(bridge.close))

    async def _close_launcher(self) -> None:
        await self._handlers.close()
        supervisor, self._own_supervisor, self._own_launcher = self._own_supervisor, None, None
        if supervisor is not None:
            await supervisor.aclose()

    # AsyncKernelManager binds its public names when the class is made, so the overridden ones are bound anew.
    start_kernel = _async_start_kernel
    pre_start_kernel = _async_pre_start_kernel
    post_start_kernel = _async_post_start_kernel
    cleanup_resources = _async_cleanup_resources
    restart_kernel = _async_restart_kernel

    def __del__(self) -> None:
        supervisor = getattr(self, "_own_supervisor", None)  # absent if the arguments were refused
        if supervisor is not None and not supervisor.closed:
            warnings.warn("a kernel was not shut down", ResourceWarning, stacklevel=2)
            supervisor.abandon()
        super().__del__()


async def _called(function: Callable[[], object]) -> None:
    function()
