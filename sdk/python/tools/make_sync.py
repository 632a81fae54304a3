"""Writes libdsec/sync.py, the face without an event loop, from the asynchronous one.

    python3 tools/make_sync.py            writes it
    python3 tools/make_sync.py --check    fails if it is not up to date

Each method is written out with its signature and docstring, so that editors and
type checkers see what there is.
"""

import ast
import os
import sys

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.join(HERE, "libdsec")

# Class, its module, its base here, plain properties, properties that are wrapped.
CLASSES = [
    ("Files", "files", None, (), {}),
    ("Ports", "ports", None, (), {}),
    ("Process", "process", None, ("id", "status"), {}),
    ("Operations", "sandbox", None, ("id",), {"files": "Files", "ports": "Ports"}),
    ("Screen", "snapshots", None, ("id",), {}),
    ("Sandbox", "sandbox", "Operations", ("info",), {"screen": "Screen"}),
    ("Session", "sandbox", "Operations", ("name", "number"), {"sandbox": "Sandbox"}),
    ("Images", "images", None, (), {}),
    ("Job", "jobs", None, ("id", "info", "epoch", "fenced"), {}),
    ("Jobs", "jobs", None, (), {}),
    ("DSecContainer", "published", None, ("id",), {"sandbox": "Sandbox"}),
    ("Forward", "ports", None, ("host", "port"), {}),
    ("Functions", "fn", None, (), {}),
    ("Snapshots", "snapshots", None, (), {}),
]
WRAPPED = {name for name, *_ in CLASSES}
STREAMS = {"Output": "Chunk", "Pieces": "bytes", "Watch": "Event", "Pull": "Progress", "Results": "JobResult", "Events": "JobEvent", "Batch": "FunctionItem",
           "AsyncIterator[Tuple[str, str]]": "Tuple[str, str]"}
# Properties and what is written by hand in HEAD.
SKIP = {"dial", "open", "aclose"}
CLIENT = ("DSecClient", "client", None, ("url",), {"images": "Images", "jobs": "Jobs", "fn": "Functions", "snapshots": "Snapshots"})

HEAD = '''"""The same names as in libdsec, for programs without an event loop.

    with libdsec.sync.connect() as client:
        with client.create(Spec(image="debian")) as sandbox:
            print(sandbox.exec("make test", timeout=600).out)

Each client runs an event loop in a thread of its own. A call may come from any thread, and Ctrl-C cancels it; from several
threads they run at once. A client does not survive a fork: connect again in the child.
"""

# Written by tools/make_sync.py from the asynchronous modules; change those.

from __future__ import annotations

import asyncio
import os
import ssl as ssl_module
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, Generic, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union

from . import client as _client
from . import jobs as _jobs
from . import ports as _ports
from . import sandbox as _sandbox
from .files import Data
from .fn import Case, FunctionItem, FunctionResult, Limits
from .jobs import Item, JobEvent, JobInfo, JobResult
from .process import MAX_OUTPUT
from .client import CREATE
from .errors import Misused
from .published import DSecContainerRunArgs
from .records import Chunk, Event, FileInfo, Image, Name, Progress, Result, SandboxInfo, Seconds, Size, Snapshot, Spec, Status
from .sandbox import Argv, StepName

T = TypeVar("T")
W = TypeVar("W", bound="_Wrapper")


class _Portal:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="libdsec", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def do(self, f: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Call f in the loop and wait for what it awaits."""

        async def work() -> T:
            return await f(*args, **kwargs)

        if self._pid != os.getpid():
            raise Misused("a client does not survive a fork: connect again in the child")
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            raise Misused("the client is closed, or was called from its own thread")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C above all; a call that has ended is not harmed
            future.cancel()
            raise

    def make(self, f: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call f in the loop."""

        async def work() -> T:
            return f(*args, **kwargs)

        return self.do(work)

    def close(self) -> None:
        if self._pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Wrapper:
    def __init__(self, portal: _Portal, inner: Any) -> None:
        self._portal, self._inner = portal, inner

    def __repr__(self) -> str:
        return repr(self._inner)

    def _enter(self) -> None:
        self._portal.do(self._inner.__aenter__)

    def __exit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self._portal.do(self._inner.__aexit__, kind, e, tb)


class Stream(Generic[T]):
    """What comes piece by piece, for ``for``. Close it, or leave ``with``, to stop early."""

    def __init__(self, portal: _Portal, inner: Any, wrap: Optional[Callable[[_Portal, Any], Any]] = None) -> None:
        self._portal, self._inner, self._wrap = portal, inner, wrap

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._portal.do(self._next)
        if item is None:
            raise StopIteration
        return self._wrap(self._portal, item) if self._wrap else item

    async def _next(self) -> Any:
        try:
            return await self._inner.__anext__()
        except StopAsyncIteration:
            return None

    def close(self) -> None:
        """Stop. Doing it twice is harmless."""
        self._portal.do(self._inner.aclose)

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PortConnection:
    """A connection to a port of a sandbox."""

    def __init__(self, portal: _Portal, reader: asyncio.StreamReader, writer: _ports.PortWriter) -> None:
        self._portal, self._reader, self._writer = portal, reader, writer

    def recv(self, size: int = 65536) -> bytes:
        """Give at most size bytes as soon as there are some; b"" when the port has closed its side."""
        return self._portal.do(self._reader.read, size)

    def sendall(self, data: bytes) -> None:
        """Send all of data."""
        self._portal.make(self._writer.write, data)
        self._portal.do(self._writer.drain)

    def shutdown(self) -> None:
        """Say that no more will be sent. The other side can go on."""
        self._portal.make(self._writer.write_eof)
        self._portal.do(self._writer.drain)

    def close(self) -> None:
        """End the connection. Doing it twice is harmless."""
        self._portal.make(self._writer.close)
        self._portal.do(self._writer.wait_closed)

    def __enter__(self) -> PortConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _result(portal: _Portal, r: JobResult) -> JobResult:
    return replace(r, sandbox=Sandbox(portal, r.sandbox)) if r.sandbox is not None else r  # type: ignore[arg-type]
'''

DIAL = '''    def dial(self, port: int) -> PortConnection:
        """Connect to a port on the sandbox's loopback; Unavailable when nothing listens."""
        return PortConnection(self._portal, *self._portal.do(self._inner.dial, port))
'''

OPEN = '''    def open(self, path: Name, *, offset: int = 0, size: int = 0, user: str = "") -> Stream[bytes]:
        """Give the bytes of a regular file in pieces, for ``for``. Memory holds one piece at a time."""
        return Stream(self._portal, self._portal.make(self._inner.open, path, offset=offset, size=size, user=user))
'''

CLOSE = '''    def close(self) -> None:
        """Stop listening and end the connections. Doing it twice is harmless."""
        self._portal.do(self._inner.aclose)
'''

TAIL = '''
    @classmethod
    def open(cls, url: Optional[str] = None, token: Optional[str] = None, **how: Any) -> DSecClient:
        """Make a client."""
        return cls(url, token, **how)

    def close(self) -> None:
        """Close the connections. Sandboxes and commands run on. Doing it twice is harmless."""
        if self._portal._thread.is_alive():
            self._portal.do(self._inner.aclose)
        self._portal.close()

    def __enter__(self) -> DSecClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(url: Optional[str] = None, token: Optional[str] = None, **how: Any) -> DSecClient:
    """Make a client; the arguments are those of DSecClient. Use it with ``with``."""
    return DSecClient(url, token, **how)
'''


def find(module, name):
    with open(os.path.join(PACKAGE, module + ".py"), encoding="utf-8") as f:
        tree = ast.parse(f.read())
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


def method(f):
    """Write one method, or nothing for what is not public."""
    returns = ast.unparse(f.returns) if f.returns else "None"
    is_async = isinstance(f, ast.AsyncFunctionDef)
    a = f.args
    pass_on = [x.arg for x in a.args[1:]] + [f"{x.arg}={x.arg}" for x in a.kwonlyargs]
    call = ", ".join([f"self._inner.{f.name}"] + pass_on)
    do = f"self._portal.{'do' if is_async else 'make'}({call})"
    hint = returns
    if returns == "Results" and f.name != "create_many":
        # Done by the call itself: nobody expects of stop() that it waits for somebody who asks for its results.
        hint = "List[JobResult]"
        body = f"return [_result(self._portal, r) for r in {do.replace('.make(', '.do(')}]"
    elif returns in STREAMS:
        item = STREAMS[returns]
        hint = f"Stream[{item}]"
        do = f"self._portal.make({call})"
        body = f"return Stream(self._portal, {do}{', _result' if item == 'JobResult' else ''})"
    elif returns in WRAPPED:
        body = f"return {returns}(self._portal, {do})"
    elif returns.startswith("List[") and returns[5:-1] in WRAPPED:
        body = f"return [{returns[5:-1]}(self._portal, x) for x in {do}]"
    else:
        body = f"return {do}" if returns != "None" else do
    out = [f"    def {f.name}({ast.unparse(a)}) -> {hint}:"]
    doc = ast.get_docstring(f, clean=False)
    if doc:
        doc = doc.replace("``async for``", "``for``").replace("``async with``", "``with``").replace("\\", "\\\\")
        out.append(f'        """{doc}"""')
    out.append(f"        {body}")
    return "\n".join(out) + "\n"


def write_class(name, module, base, plain, wrapped):
    node = find(module, name)
    doc = (ast.get_docstring(node, clean=False) or "").replace("``async with``", "``with``").replace("``async for``", "``for``")
    out = [f"class {name}({base or '_Wrapper'}):", f'    """{doc}"""', ""]
    for p in plain:
        out += ["    @property", f"    def {p}(self) -> Any:", f"        return self._inner.{p}", ""]
    if "number" in plain:
        out += ["    @number.setter", "    def number(self, n: int) -> None:", "        self._inner.number = n", ""]
    for p, cls in wrapped.items():
        out += ["    @property", f"    def {p}(self) -> {cls}:", f"        return {cls}(self._portal, self._inner.{p})", ""]
    methods, enters = [], False
    for f in node.body:
        if not isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        enters = enters or f.name == "__aenter__"
        if f.name.startswith("_") or f.name in SKIP and (name, f.name) != ("Jobs", "open") or any(f.decorator_list):
            continue
        methods.append(method(f))
    if name == "Ports":
        methods.insert(0, DIAL)
    if name == "Files":
        methods.insert(0, OPEN)
    if name == "Forward":
        methods.append(CLOSE)
    if enters and name != "DSecClient":
        methods.append(f"    def __enter__(self) -> {name}:\n        self._enter()\n        return self\n")
    return "\n".join(out + methods).rstrip() + "\n"


def client():
    node = find("client", "DSecClient")
    init = next(n for n in node.body if getattr(n, "name", "") == "__init__")
    text = write_class(*CLIENT)
    args = ", ".join(["_client.DSecClient", "url", "token"] + [f"{x.arg}={x.arg}" for x in init.args.kwonlyargs])
    ctor = (f"    def __init__({ast.unparse(init.args)}) -> None:\n        portal = _Portal()\n        try:\n"
            f"            inner = portal.make({args})\n        except BaseException:\n            portal.close()\n            raise\n"
            "        super().__init__(portal, inner)\n\n")
    at = text.index("    @property")
    return text[:at] + ctor + text[at:].rstrip() + "\n" + TAIL


def generate():
    parts = [HEAD] + [write_class(*c) for c in CLASSES] + [client()]
    text = "\n\n".join(p.strip("\n") + "\n" for p in parts)
    return text.replace("from . import jobs as _jobs\n", "").replace("from . import sandbox as _sandbox\n", "")


def main():
    path = os.path.join(PACKAGE, "sync.py")
    text = generate()
    if "--check" in sys.argv:
        with open(path, encoding="utf-8") as f:
            if f.read() != text:
                sys.exit("libdsec/sync.py is not up to date: run tools/make_sync.py")
        return
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


if __name__ == "__main__":
    main()
