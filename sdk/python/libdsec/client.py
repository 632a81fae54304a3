"""The client: finds a server, makes sandboxes and finds them again."""

from __future__ import annotations

import json
import os
import ssl as ssl_module
import threading
from types import TracebackType
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Type

from . import _check
from ._rpc import Channel
from .errors import KINDS, Invalid
from .fn import Functions
from .images import Images
from .jobs import Jobs
from .published import DSecContainer, DSecContainerRunArgs, Opening
from .records import Seconds, SandboxInfo, Spec, drop
from .sandbox import Sandbox, create
from .snapshots import Snapshots

DEFAULT_URL = "http://127.0.0.1:7070"
CREATE = 600.0
OP = "libdsec.DSecClient"


def context_file() -> str:
    """Say where "dsec up" leaves what its clients on the same host need."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):
        folder = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(folder, "dsec", "context.json")


def find(url: Optional[str], token: Optional[str]) -> Tuple[str, str]:
    """Give server and token: as said, else of DSEC_URL and DSEC_TOKEN, else of the context file.

    The context's token goes to the context's server only.
    """
    context: Dict[str, Any] = {}
    try:
        with open(context_file(), encoding="utf-8") as f:
            context = json.load(f)
        if not isinstance(context, dict):
            raise ValueError
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as e:
        raise Invalid(f"read context {context_file()}: {e}") from e
    url = url or os.environ.get("DSEC_URL") or context.get("url") or DEFAULT_URL
    token = token or os.environ.get("DSEC_TOKEN") or (context.get("token") if url == context.get("url") else "")
    return url, token or ""


@_check.typed
class DSecClient:
    """A client of one server, for one process and one event loop. Making it makes no call.

    url: ``http://host:port`` or ``https://host``; default DSEC_URL, else what ``dsec up`` left on this host, else
        port 7070 here.
    token: default DSEC_TOKEN, else the one of ``dsec up``.
    timeout: seconds within which the server begins to answer a call that is short by nature; above 0.
    retry: seconds for which a call is repeated while there is no answer, where repeating is harmless; what was under way,
        such as a command, is waited for fifteen times as long. 0 means never.
    retry_on: kinds of error that are repeated, as ``DSecError.kind`` names them.
    connections: most connections at a time, at least 1, also bounded by the limit of open files; a command that runs holds one.
        Calls beyond that wait.
    ssl: how to trust the server; default as Python does.

    Invalid: one of these is not what it may be.
    """

    @_check.checked
    def __init__(self, url: Optional[str] = None, token: Optional[str] = None, *, timeout: float = 60.0, retry: float = 5.0,
                 retry_on: Iterable[str] = ("unavailable",), connections: int = 4096,
                 ssl: Optional[ssl_module.SSLContext] = None) -> None:
        _check.number("timeout", timeout, least=0, most=threading.TIMEOUT_MAX, above=True, op=OP)
        _check.number("retry", retry, least=0, op=OP)
        retry_on = tuple(retry_on)
        for kind in retry_on:
            if not isinstance(kind, str) or kind not in KINDS:
                raise _check.invalid("retry_on", kind, "kinds of error: " + ", ".join(KINDS), OP)
        url, token = find(url, token)
        self._channel = Channel(url, token, retry=retry, retry_on=retry_on, timeout=timeout, connections=connections, ssl=ssl)
        self.url = url
        self.images = Images(self._channel)
        self.jobs = Jobs(self._channel)
        self.fn = Functions(self)
        self.snapshots = Snapshots(self._channel)

    async def create(self, spec: Spec, *, key: Optional[str] = None, timeout: Seconds = CREATE) -> Sandbox:
        """Make a sandbox; return it when it runs.

        key: repeating a create with the same key gives the same sandbox, ended or not; with another spec it is Conflict. At
            most 256 bytes; default a random one, which makes a broken call safe to repeat.
        timeout: seconds for all of it.

        Errors: Invalid for a bad spec, NotFound for an image that does not exist, Unsupported for a kind that the server
        lacks, Exhausted at once when there is no room. A create that fails or is cancelled leaves nothing behind; but with
        a key of the caller's own, what may have been made stays for whoever repeats it.
        """
        return await create(self._channel, spec, key, timeout)

    async def get(self, id: str) -> Sandbox:
        """Find a sandbox by its ID. NotFound: it was never given out, or ended more than 24 h ago; Lost: it is gone with
        its node."""
        a = await self._channel.unary("Sandboxes/Get", {}, op="libdsec.get", sandbox=id or "-", safe=True)
        return Sandbox(self._channel, SandboxInfo.from_wire(a))

    async def list(self, *, all: bool = False, job: str = "", labels: Optional[Mapping[str, str]] = None, state: str = "",
                   limit: int = 0, after: str = "") -> List[SandboxInfo]:
        """Give the records of sandboxes, newest first.

        all: also ended ones, which are kept for 24 h. job, labels (all must match), state: which ones.
        limit: at most so many. after: continue after the sandbox of this ID.
        """
        m = drop({"all": all, "job": job, "labels": dict(labels or {}), "state": state, "limit": limit, "after": after})
        a = await self._channel.unary("Sandboxes/List", m, op="libdsec.list", safe=True)
        return [SandboxInfo.from_wire(w) for w in a.get("sandboxes") or ()]

    async def aclose(self) -> None:
        """Close the connections. Sandboxes and commands run on."""
        await self._channel.close()

    async def __aenter__(self) -> DSecClient:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self.aclose()

    # What follows are the names of the original's published interface.

    @classmethod
    def open(cls, url: Optional[str] = None, token: Optional[str] = None, **how: Any) -> Opening:
        """Make a client, as ``await DSecClient.open()`` or ``async with DSecClient.open() as client``."""
        return Opening(cls(url, token, **how))

    async def run_container(self, args: DSecContainerRunArgs, timeout: Seconds = CREATE) -> DSecContainer:
        """Make a sandbox of kind container. timeout: seconds for that."""
        return DSecContainer(await self.create(args.spec(), timeout=timeout))


def connect(url: Optional[str] = None, token: Optional[str] = None, **how: Any) -> DSecClient:
    """Make a client; the arguments are those of DSecClient. Use it with ``async with``."""
    return DSecClient(url, token, **how)

