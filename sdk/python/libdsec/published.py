"""The names that the original DSec published, as thin aliases of this package's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Generator, Mapping, Optional, Type

from . import _check
from .errors import Unsupported
from .records import Result, SandboxInfo, Seconds, Spec
from .sandbox import Argv, Sandbox

if TYPE_CHECKING:
    from .client import DSecClient


@dataclass
class DSecContainerRunArgs:
    """What container is wanted.

    container_image: ``name`` or ``name@version``.
    memory_limit_mb: MiB; default 1024. cpu_cores_limit: cores; default 1.
    ttl_running_stop: seconds without use until its end; default none.
    network_rules: which mirrors it may reach, by name. No server offers any yet, so a true one is Unsupported.
    init_user: of commands that name none; default the image's.
    """

    container_image: str = ""
    memory_limit_mb: int = 0
    cpu_cores_limit: float = 0
    ttl_running_stop: Seconds = 0
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    init_user: str = ""

    def __post_init__(self) -> None:
        _check.fields(self)

    def spec(self) -> Spec:
        """Give the same as a Spec."""
        _check.fields(self)  # it may have been changed
        wanted = sorted(name for name, on in self.network_rules.items() if on)
        if wanted:
            raise Unsupported(f"network rule {wanted[0]!r}: sandboxes have no network but their loopback")
        return Spec(image=self.container_image, kind="container", memory=self.memory_limit_mb << 20, cpu=self.cpu_cores_limit,
                    idle=self.ttl_running_stop, user=self.init_user)


@_check.typed
class DSecContainer:
    """A container. ``sandbox`` is the same as a Sandbox, with all that it can do."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.id = sandbox.id

    async def run_shell(self, cmd: Argv, timeout: Seconds = 0) -> Result:
        """Run a line of shell to its end; killed after timeout seconds, whose outcome is ``timeout``."""
        return await self.sandbox.exec(cmd, timeout=timeout)

    async def stop(self) -> SandboxInfo:
        """End it and everything in it."""
        return await self.sandbox.stop()

    async def __aenter__(self) -> DSecContainer:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self.sandbox.__aexit__(kind, e, tb)


class Opening:
    """A client that is being opened: await it, or use it with ``async with``."""

    def __init__(self, client: DSecClient) -> None:
        self._client = client

    def __await__(self) -> Generator[None, None, DSecClient]:
        return self._client
        yield

    async def __aenter__(self) -> DSecClient:
        return self._client

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self._client.aclose()
