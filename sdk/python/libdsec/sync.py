"""The same names as in libdsec, for programs without an event loop.

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
from . import ports as _ports
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


class Files(_Wrapper):
    """The files of one sandbox. All of it may be used concurrently."""

    def open(self, path: Name, *, offset: int = 0, size: int = 0, user: str = "") -> Stream[bytes]:
        """Give the bytes of a regular file in pieces, for ``for``. Memory holds one piece at a time."""
        return Stream(self._portal, self._portal.make(self._inner.open, path, offset=offset, size=size, user=user))

    def read(self, path: Name, *, offset: int=0, size: int=0, user: str='') -> bytes:
        """Give the bytes of a regular file, from an offset on; size 0 means to the end."""
        return self._portal.do(self._inner.read, path, offset=offset, size=size, user=user)

    def read_text(self, path: Name, *, user: str='') -> str:
        """Give a file that is UTF-8; what is not raises UnicodeDecodeError."""
        return self._portal.do(self._inner.read_text, path, user=user)

    def write(self, path: Name, data: Data, *, mode: int=0, parents: bool=False, append: bool=False, at: Optional[int]=None, user: str='') -> FileInfo:
        """Store data as a file: readers see the old content or the new, and a failed write leaves the old.

        data: bytes, text (as UTF-8), a file opened for bytes, or pieces, of any size in all.
        mode: permission bits; default 0o644, or those of the file replaced.
        parents: make missing folders above it.
        append, at: write in place instead, at the end or at an offset.

        Data of bytes and text are sent again when the connection breaks; others can be read once.
        """
        return self._portal.do(self._inner.write, path, data, mode=mode, parents=parents, append=append, at=at, user=user)

    def list(self, path: Name='.', *, depth: int=1, user: str='') -> List[FileInfo]:
        """Give what is in a folder, and in depth levels of folders: parents before children, names in byte order."""
        return self._portal.do(self._inner.list, path, depth=depth, user=user)

    def stat(self, path: Name, *, user: str='') -> FileInfo:
        """Describe a file. A last symbolic link is not followed."""
        return self._portal.do(self._inner.stat, path, user=user)

    def exists(self, path: Name, *, user: str='') -> bool:
        """Whether there is something of that name."""
        return self._portal.do(self._inner.exists, path, user=user)

    def mkdir(self, path: Name, *, mode: int=493, user: str='') -> None:
        """Make a folder and those missing above it. One that exists is success."""
        self._portal.do(self._inner.mkdir, path, mode=mode, user=user)

    def move(self, path: Name, to: Name, *, user: str='') -> None:
        """Rename to an absolute path, replacing a file there."""
        self._portal.do(self._inner.move, path, to, user=user)

    def remove(self, path: Name, *, user: str='') -> None:
        """Delete a file or a whole tree. NotFound: there is none."""
        self._portal.do(self._inner.remove, path, user=user)

    def chmod(self, path: Name, mode: int, *, user: str='') -> None:
        """Set permission bits, following symbolic links."""
        self._portal.do(self._inner.chmod, path, mode, user=user)

    def chown(self, path: Name, owner: str, *, user: str='') -> None:
        """Set the owner: ``user``, ``user:group`` or numbers. A last symbolic link is not followed."""
        self._portal.do(self._inner.chown, path, owner, user=user)

    def symlink(self, path: Name, target: Name, *, user: str='') -> None:
        """Make path a symbolic link to target."""
        self._portal.do(self._inner.symlink, path, target, user=user)

    def watch(self, path: Name, *, recursive: bool=False, user: str='') -> Stream[Event]:
        """Give changes of a folder, with all below it if recursive, until it is closed. Use it with ``for``;
        the first event is ``ready``."""
        return Stream(self._portal, self._portal.make(self._inner.watch, path, recursive=recursive, user=user))

    def pack(self, path: Name, *, user: str='') -> Stream[bytes]:
        """Give a tree as a tar, in pieces, for ``for``. Its names are relative to the path."""
        return Stream(self._portal, self._portal.make(self._inner.pack, path, user=user))

    def unpack(self, path: Name, tar: Data, *, user: str='') -> None:
        """Extract a tar (data as for write) into a folder, made if missing. Members cannot leave it."""
        self._portal.do(self._inner.unpack, path, tar, user=user)

    def upload(self, local: 'Union[str, os.PathLike[str]]', path: Name, *, user: str='') -> None:
        """Copy a file, or what is in a folder, from here into the sandbox: into path, which is made.

        Modes, times, links and empty folders are kept; owners are not: all belongs to root, or to user when the sandbox
        refuses that. Sockets and devices are left out.
        """
        self._portal.do(self._inner.upload, local, path, user=user)

    def download(self, path: Name, local: 'Union[str, os.PathLike[str]]', *, user: str='') -> None:
        """Copy a file, or what is in a folder, from the sandbox to here: to local, which is made.

        Nothing that a sandbox sends can leave the folder: names that try, and files that would be written through a
        symbolic link, are Invalid. Owners, devices, sockets, and setuid bits are left out.
        """
        self._portal.do(self._inner.download, path, local, user=user)


class Ports(_Wrapper):
    """The ports of one sandbox."""

    def dial(self, port: int) -> PortConnection:
        """Connect to a port on the sandbox's loopback; Unavailable when nothing listens."""
        return PortConnection(self._portal, *self._portal.do(self._inner.dial, port))

    def forward(self, port: int, *, local: int=0, host: str='127.0.0.1') -> Forward:
        """Listen here and lead each connection to a port of the sandbox. local 0 takes a free port.

        Close it, or leave ``with``, to end it and its connections.
        """
        return Forward(self._portal, self._portal.do(self._inner.forward, port, local=local, host=host))


class Process(_Wrapper):
    """A command that was started. ``status`` is as of the last call that told it."""

    @property
    def id(self) -> Any:
        return self._inner.id

    @property
    def status(self) -> Any:
        return self._inner.status

    def output(self, offset: int=0) -> Stream[Chunk]:
        """Give both streams in the order in which they were written, from an offset of the two together, to the end.

        Use it with ``for``. A broken connection is taken up where it broke. Afterwards ``status`` has
        how the command ended. Leaving early leaves the command running.
        """
        return Stream(self._portal, self._portal.make(self._inner.output, offset))

    def lines(self, offset: int=0) -> Stream[Tuple[str, str]]:
        """Give the output as (stream, line) pairs: text without its end of line, in which what is not UTF-8 is
        replaced. Characters and lines that are split between chunks are put together."""
        return Stream(self._portal, self._portal.make(self._inner.lines, offset))

    def read(self, stream: str='stdout', offset: int=0, size: int=MAX_OUTPUT) -> bytes:
        """Give what is kept of one stream: at most size bytes from an offset of that stream, fewer when the command has
        not written more yet. Of many megabytes, ``output`` gives all in less time."""
        return self._portal.do(self._inner.read, stream, offset, size)

    def write(self, data: Union[bytes, str]) -> None:
        """Feed standard input. It returns when the command's pipe has taken all, so it waits while the command
        does not read. Conflict: the input is closed, or the command has ended."""
        self._portal.do(self._inner.write, data)

    def close_stdin(self) -> None:
        """Tell the command that there is no more input. Doing it twice is harmless."""
        self._portal.do(self._inner.close_stdin)

    def signal(self, name: Union[str, int]) -> None:
        """Send a signal: ``"TERM"``, ``"SIGTERM"`` or 15. KILL ends the whole tree of processes, every other goes to
        the leader's process group. Conflict: the command has ended."""
        self._portal.do(self._inner.signal, name)

    def kill(self) -> None:
        """End the whole tree of processes. A command that has ended is left as it is."""
        self._portal.do(self._inner.kill)

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal. Invalid: it has none."""
        self._portal.do(self._inner.resize, rows, cols)

    def wait(self) -> Status:
        """Return the status once the command has ended, however long that takes."""
        return self._portal.do(self._inner.wait)

    def result(self) -> Result:
        """Wait, and read the beginning of both streams: at most 4 MiB of each."""
        return self._portal.do(self._inner.result)


class Operations(_Wrapper):
    """What a Sandbox and a Session of it can do: the same, under names of their own."""

    @property
    def id(self) -> Any:
        return self._inner.id

    @property
    def files(self) -> Files:
        return Files(self._portal, self._inner.files)

    @property
    def ports(self) -> Ports:
        return Ports(self._portal, self._inner.ports)

    def exec(self, command: Argv, *, input: Union[None, bytes, str]=None, env: Optional[Mapping[str, str]]=None, cwd: Name='', user: str='', timeout: Seconds=0, idle: Seconds=0, output: Size=0, step: StepName=None, check: bool=False, kill_on_cancel: bool=False) -> Result:
        """Run a command to its end.

        command: a line for the sandbox's ``/bin/sh -c``, or a program and its arguments.
        input: standard input, of any size; default none at all.
        env: variables added to the sandbox's. cwd: absolute. user: name, uid or uid:gid.
        timeout: seconds after which its whole tree of processes is killed; default none, at most 30 days.
        idle: seconds without output after which it is; default none.
        output: bytes kept of each stream, default 16 MiB, at most 1 GiB; the result has the first 4 MiB.
        step: a name for this operation instead of the session's next one.
        check: raise CommandFailed unless it exits with 0.
        kill_on_cancel: kill it when this task is cancelled. Otherwise it runs on: repeat the step, or find it with
            ``processes()``. Either way the task is cancelled at once.

        A timeout, a signal or a program that cannot be started is an outcome of the Result. Errors: Invalid for a user
        or folder that does not exist, Conflict for a sandbox that has ended, Diverged for a step of another command.
        """
        return self._portal.do(self._inner.exec, command, input=input, env=env, cwd=cwd, user=user, timeout=timeout, idle=idle, output=output, step=step, check=check, kill_on_cancel=kill_on_cancel)

    def start(self, command: Argv, *, stdin: bool=False, env: Optional[Mapping[str, str]]=None, cwd: Name='', user: str='', timeout: Seconds=0, idle: Seconds=0, output: Size=0, step: StepName=None) -> Process:
        """Start a command and return at once. It runs whether or not anybody looks.

        stdin: give it a pipe to read from, fed by ``Process.write``. The others as for exec.
        """
        return Process(self._portal, self._portal.do(self._inner.start, command, stdin=stdin, env=env, cwd=cwd, user=user, timeout=timeout, idle=idle, output=output, step=step))

    def pty(self, command: Argv='exec /bin/sh', *, rows: int=24, cols: int=80, env: Optional[Mapping[str, str]]=None, cwd: Name='', user: str='', timeout: Seconds=0, idle: Seconds=0, output: Size=0, step: StepName=None) -> Process:
        """Start a command with a terminal of so many rows and columns; default a shell.

        What it shows comes as ``stdout``; ``close_stdin`` types an end of file.
        """
        return Process(self._portal, self._portal.do(self._inner.pty, command, rows=rows, cols=cols, env=env, cwd=cwd, user=user, timeout=timeout, idle=idle, output=output, step=step))

    def process(self, id: str) -> Process:
        """Give a command that was started before, by its ID. It makes no call."""
        return Process(self._portal, self._portal.make(self._inner.process, id))

    def processes(self) -> List[Status]:
        """Give the commands that run and those still remembered, oldest first."""
        return self._portal.do(self._inner.processes)


class Screen(_Wrapper):
    """The display, keyboard and pointer of a sandbox whose kind has them; for others all is Unsupported."""

    @property
    def id(self) -> Any:
        return self._inner.id

    def screenshot(self) -> bytes:
        """Give what the display shows, as PNG."""
        return self._portal.do(self._inner.screenshot)

    def type(self, text: str) -> None:
        """Type text, on a US keyboard; Invalid for characters that it has no key for."""
        self._portal.do(self._inner.type, text)

    def press(self, *keys: str) -> None:
        """Press keys one after the other: ``ret``, ``esc``, ``f1``; those joined by ``-`` together: ``ctrl-alt-f2``."""
        self._portal.do(self._inner.press)

    def move(self, x: int, y: int) -> None:
        """Move the pointer there, in pixels from the upper left."""
        self._portal.do(self._inner.move, x, y)

    def click(self, *, at: Sequence[int]=(), button: str='left', times: int=1) -> None:
        """Press ``left``, ``middle``, ``right``, ``wheel-up`` or ``wheel-down``. at: x and y to move to first."""
        self._portal.do(self._inner.click, at=at, button=button, times=times)


class Sandbox(Operations):
    """One sandbox. ``info`` is as of the last call that told it.

    As ``with`` it is stopped at the end. Every call but a read has a step of a random session, so that a broken
    connection is no reason to fail or to do it twice; ``session`` names the steps for a trainer that may be restarted.
    """

    @property
    def info(self) -> Any:
        return self._inner.info

    @property
    def screen(self) -> Screen:
        return Screen(self._portal, self._inner.screen)

    def session(self, name: str) -> Session:
        """Give a view of this sandbox that numbers its operations 1, 2, 3 and so on, in the order in which they begin.

        A program that is restarted and makes the same calls in the same order repeats the same names: what was done is
        answered from the record, what still runs is attached to, nothing runs twice. A call that differs is Diverged. One
        Sandbox object gives one session of a name; a new one, as after a restart, counts from 1.
        """
        return Session(self._portal, self._portal.make(self._inner.session, name))

    def refresh(self) -> SandboxInfo:
        """Ask for the record."""
        return self._portal.do(self._inner.refresh)

    def extend(self, ttl: Seconds) -> SandboxInfo:
        """Move the end of its time to live to ttl seconds from now, at most 30 days."""
        return self._portal.do(self._inner.extend, ttl)

    def stop(self) -> SandboxInfo:
        """End it and everything in it; return once nothing of it is left. One that has ended is left as it is."""
        return self._portal.do(self._inner.stop)

    def wait(self) -> SandboxInfo:
        """Return the record once it has ended, however long that takes."""
        return self._portal.do(self._inner.wait)

    def commit(self, name: str) -> Image:
        """Write what changed in its root as a workspace image, ``name@version``.

        It is frozen while its files are read. Exists: the version is taken.
        """
        return self._portal.do(self._inner.commit, name)

    def pause(self) -> SandboxInfo:
        """Freeze it and give its memory back. Any use of it resumes it. Pausing a paused one is success."""
        return self._portal.do(self._inner.pause)

    def resume(self) -> SandboxInfo:
        """Let it run on. Resuming a running one is success."""
        return self._portal.do(self._inner.resume)

    def snapshot(self, *, key: Optional[str]=None) -> Snapshot:
        """Save its state: of a container its files, of a virtual machine memory and disk. It runs on.

        A Spec with ``from_snapshot`` makes a sandbox of it, also when this one has ended. key: repeating it with the same
        key gives the same snapshot. Unsupported: its kind cannot be saved.
        """
        return self._portal.do(self._inner.snapshot, key=key)

    def fork(self, count: int=1, *, ttl: Seconds=0, labels: Optional[Mapping[str, str]]=None, key: Optional[str]=None) -> List[Sandbox]:
        """Make sandboxes that begin as copies of this one as it is now: all of them, or none. It runs on.

        count: at most 64. ttl: seconds from the fork to their end; default as the parent's. labels: over those of the
        parent. key: repeating it with the same key gives the same children.
        """
        return [Sandbox(self._portal, x) for x in self._portal.do(self._inner.fork, count, ttl=ttl, labels=labels, key=key)]

    def __enter__(self) -> Sandbox:
        self._enter()
        return self


class Session(Operations):
    """A sandbox's operations under the names of one session. ``number`` is that of the last one."""

    @property
    def name(self) -> Any:
        return self._inner.name

    @property
    def number(self) -> Any:
        return self._inner.number

    @number.setter
    def number(self, n: int) -> None:
        self._inner.number = n

    @property
    def sandbox(self) -> Sandbox:
        return Sandbox(self._portal, self._inner.sandbox)


class Images(_Wrapper):
    """The images that the token's project can use."""

    def list(self, prefix: str='', *, usage: bool=False) -> List[Image]:
        """Give those whose names begin with prefix, by name, the newest version of each first.

        usage: find out what each takes.
        """
        return self._portal.do(self._inner.list, prefix, usage=usage)

    def inspect(self, name: str) -> Image:
        """Resolve ``name`` (its newest version), ``name@version`` or ``name@tag``, with usage. NotFound: there is none."""
        return self._portal.do(self._inner.inspect, name)

    def upload(self, name: str, tar: Data, *, role: str='base') -> Image:
        """Make an image from a tar: of a root file system, of "docker save", or of an OCI layout; plain, or compressed
        with gzip or zstd.

        name: ``name@version``; without a version that is the start of its digest. Exists: the version is taken.
        role: ``base``, ``workspace`` or ``toolkit``. tar: as the data of ``files.write``.
        """
        return self._portal.do(self._inner.upload, name, tar, role=role)

    def pull(self, ref: str, name: str, *, role: str='base') -> Stream[Progress]:
        """Import from an OCI registry, with progress, for ``for``; the last report has the image."""
        return Stream(self._portal, self._portal.make(self._inner.pull, ref, name, role=role))

    def adopt(self, digest: str, name: str) -> Image:
        """Name a layer that the store has already, for operators. NotFound: it has not."""
        return self._portal.do(self._inner.adopt, digest, name)

    def tag(self, name: str, tag: str) -> Image:
        """Let ``name@tag`` stand for the version that name resolves to, at once if it stood for another.

        Exists: the tag is a version, which never changes.
        """
        return self._portal.do(self._inner.tag, name, tag)

    def remove(self, name: str) -> None:
        """Forget ``name@tag``, or ``name@version`` if it has no tags. Sandboxes that use it go on."""
        self._portal.do(self._inner.remove, name)

    def export(self, base: str, workspace: str='', toolkits: Sequence[str]=()) -> Stream[bytes]:
        """Give an environment as an OCI image, in pieces, for ``for``: the tar of its layout."""
        return Stream(self._portal, self._portal.make(self._inner.export, base, workspace, toolkits))

    def collect(self, *, alone: bool=False) -> Tuple[int, int]:
        """Delete what nothing needs. Gives how many blobs and bytes that freed.

        alone: no other cluster uses the store; needed where the server cannot know.
        """
        return self._portal.do(self._inner.collect, alone=alone)


class Job(_Wrapper):
    """One job. As ``with`` it renews the lease in the background; leaving stops that and lets the lease end."""

    @property
    def id(self) -> Any:
        return self._inner.id

    @property
    def info(self) -> Any:
        return self._inner.info

    @property
    def epoch(self) -> Any:
        return self._inner.epoch

    @property
    def fenced(self) -> Any:
        return self._inner.fenced

    def renew(self) -> JobInfo:
        """Begin the lease anew. Conflict: somebody else opened the job, or it is stopped."""
        return self._portal.do(self._inner.renew)

    def keep(self) -> None:
        """Renew the lease in the background, three times as often as needed, until release or the end of the client. When the
        job has another owner, ``fenced`` says so."""
        self._portal.make(self._inner.keep)

    def release(self) -> None:
        """Stop renewing in the background."""
        self._portal.do(self._inner.release)

    def refresh(self) -> JobInfo:
        """Ask for the record."""
        return self._portal.do(self._inner.refresh)

    def create(self, spec: Spec, *, key: Optional[str]=None, timeout: Seconds=600) -> Sandbox:
        """Make a sandbox of this job; as ``client.create``."""
        return Sandbox(self._portal, self._portal.do(self._inner.create, spec, key=key, timeout=timeout))

    def create_many(self, items: Iterable[Union[Spec, Item]]) -> Stream[JobResult]:
        """Make up to 32,000 sandboxes: one result for each, in the order in which they come.

        Repeating it with the same keys makes nothing twice, so a broken connection is taken up. The rest is Conflict when the
        lease is lost meanwhile.
        """
        return Stream(self._portal, self._portal.make(self._inner.create_many, items), _result)

    def get(self, id: str) -> Sandbox:
        """Find a sandbox of this job; its calls carry the epoch."""
        return Sandbox(self._portal, self._portal.do(self._inner.get, id))

    def sandboxes(self, *, all: bool=False) -> List[Sandbox]:
        """Give its sandboxes, newest first; with those that ended if all."""
        return [Sandbox(self._portal, x) for x in self._portal.do(self._inner.sandboxes, all=all)]

    def pause(self) -> List[JobResult]:
        """Pause all sandboxes that run."""
        return [_result(self._portal, r) for r in self._portal.do(self._inner.pause)]

    def resume(self) -> List[JobResult]:
        """Let all sandboxes go on."""
        return [_result(self._portal, r) for r in self._portal.do(self._inner.resume)]

    def stop(self) -> List[JobResult]:
        """End all sandboxes and the job, which cannot be opened again."""
        return [_result(self._portal, r) for r in self._portal.do(self._inner.stop)]

    def label(self, labels: Mapping[str, str]) -> List[JobResult]:
        """Set labels of the job and of its sandboxes that have not ended; an empty value takes one away."""
        return [_result(self._portal, r) for r in self._portal.do(self._inner.label, labels)]

    def events(self, *, after: int=0, follow: bool=True) -> Stream[JobEvent]:
        """Give what happened behind event number after; follow waits for more. A broken connection is taken up."""
        return Stream(self._portal, self._portal.make(self._inner.events, after=after, follow=follow))

    def __enter__(self) -> Job:
        self._enter()
        return self


class Jobs(_Wrapper):
    """The jobs that the token's project has."""

    def create(self, id: str='', *, on_disconnect: str='pause', lease: Seconds=30, labels: Optional[Mapping[str, str]]=None, project: str='', key: Optional[str]=None) -> Job:
        """Make a job; the caller is its first owner.

        id: default one is made. on_disconnect: ``pause``, ``keep`` or ``stop``. lease: seconds, 1 s to 24 h.
        key: repeating a create with the same key gives the same job. Exists: the ID is taken.
        """
        return Job(self._portal, self._portal.do(self._inner.create, id, on_disconnect=on_disconnect, lease=lease, labels=labels, project=project, key=key))

    def open(self, id: str) -> Job:
        """Become the owner: the one before is fenced, a new lease begins. It resumes nothing: a paused sandbox wakes when it
        is used. Conflict: the job is stopped."""
        return Job(self._portal, self._portal.do(self._inner.open, id))

    def attach(self, id: str) -> Job:
        """Give a job without owning it, as an operator or a watcher does."""
        return Job(self._portal, self._portal.do(self._inner.attach, id))

    def get(self, id: str) -> JobInfo:
        """Give the record of one."""
        return self._portal.do(self._inner.get, id)

    def list(self) -> List[JobInfo]:
        """Give all, newest first."""
        return self._portal.do(self._inner.list)


class DSecContainer(_Wrapper):
    """A container. ``sandbox`` is the same as a Sandbox, with all that it can do."""

    @property
    def id(self) -> Any:
        return self._inner.id

    @property
    def sandbox(self) -> Sandbox:
        return Sandbox(self._portal, self._inner.sandbox)

    def run_shell(self, cmd: Argv, timeout: Seconds=0) -> Result:
        """Run a line of shell to its end; killed after timeout seconds, whose outcome is ``timeout``."""
        return self._portal.do(self._inner.run_shell, cmd, timeout)

    def stop(self) -> SandboxInfo:
        """End it and everything in it."""
        return self._portal.do(self._inner.stop)

    def __enter__(self) -> DSecContainer:
        self._enter()
        return self


class Forward(_Wrapper):
    """A local port that leads into a sandbox. host and port say where it is."""

    @property
    def host(self) -> Any:
        return self._inner.host

    @property
    def port(self) -> Any:
        return self._inner.port

    def close(self) -> None:
        """Stop listening and end the connections. Doing it twice is harmless."""
        self._portal.do(self._inner.aclose)

    def __enter__(self) -> Forward:
        self._enter()
        return self


class Functions(_Wrapper):
    """Judges, compilers, graders: what needs no state."""

    def call(self, source: Union[bytes, str], *, runtime: str='python3', image: str='', spec: Optional[Spec]=None, args: Sequence[str]=(), input: Union[None, bytes, str]=None, files: Optional[Mapping[str, Union[bytes, str]]]=None, env: Optional[Mapping[str, str]]=None, user: str='', preload: Sequence[str]=(), limits: Limits=Limits()) -> FunctionResult:
        """Run a program once, where it finds nothing but its images and what it is given.

        source: the program. runtime: ``python3``, ``bash``, ``sh``, ``c``, ``c++``, ``go`` or ``node``, as far as the image has it.
        image, or spec for an environment of more than that; of a spec nothing but the environment and project counts.
        files: contents by path below the working folder, ``/work``. preload: Python modules that are imported before the call.

        Errors: Unsupported for a runtime that the image lacks, Invalid for a bad call, Exhausted when there is no room. How the
        program ended is no error. A call is repeated when there was no answer: it has no effect outside of itself.
        """
        return self._portal.do(self._inner.call, source, runtime=runtime, image=image, spec=spec, args=args, input=input, files=files, env=env, user=user, preload=preload, limits=limits)

    def batch(self, cases: Iterable[Case], *, source: Union[bytes, str]=b'', runtime: str='python3', image: str='', spec: Optional[Spec]=None, args: Sequence[str]=(), files: Optional[Mapping[str, Union[bytes, str]]]=None, env: Optional[Mapping[str, str]]=None, user: str='', preload: Sequence[str]=(), limits: Limits=Limits(), at_a_time: int=0) -> Stream[FunctionItem]:
        """Run a program on many inputs, each as ``call`` does; a source is built once.

        at_a_time: cases that run at once, at most 64; default what the node finds good.
        """
        return Stream(self._portal, self._portal.make(self._inner.batch, cases, source=source, runtime=runtime, image=image, spec=spec, args=args, files=files, env=env, user=user, preload=preload, limits=limits, at_a_time=at_a_time))

    def run(self, command: Argv, *, image: str='', spec: Optional[Spec]=None, input: Union[None, bytes, str]=None, files: Optional[Mapping[str, Union[bytes, str]]]=None, env: Optional[Mapping[str, str]]=None, cwd: Name='', user: str='', timeout: Seconds=60, check: bool=False) -> Result:
        """Run a command in a sandbox that nobody used before.

        image, or spec for more than that; a spec that names no kind is of kind ``fncall``, or ``container`` where there are
        files, which sandboxes of that kind have not. files: contents by path, written before. The others as for
        ``Sandbox.exec``; timeout is 60 seconds unless it is given. For many short programs, ``call`` is faster.
        """
        return self._portal.do(self._inner.run, command, image=image, spec=spec, input=input, files=files, env=env, cwd=cwd, user=user, timeout=timeout, check=check)


class Snapshots(_Wrapper):
    """The saved states of the token's project and those below. ``Sandbox.snapshot`` makes one; a Spec's ``from_snapshot``
    names the one that a new sandbox begins with."""

    def list(self) -> List[Snapshot]:
        """Give all, newest first."""
        return self._portal.do(self._inner.list)

    def get(self, id: str) -> Snapshot:
        """Find one. NotFound: there is none, or only another project's."""
        return self._portal.do(self._inner.get, id)

    def remove(self, id: str) -> None:
        """Delete one. Sandboxes that were made from it are not touched."""
        self._portal.do(self._inner.remove, id)


class DSecClient(_Wrapper):
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

    def __init__(self, url: Optional[str]=None, token: Optional[str]=None, *, timeout: float=60.0, retry: float=5.0, retry_on: Iterable[str]=('unavailable',), connections: int=4096, ssl: Optional[ssl_module.SSLContext]=None) -> None:
        portal = _Portal()
        try:
            inner = portal.make(_client.DSecClient, url, token, timeout=timeout, retry=retry, retry_on=retry_on, connections=connections, ssl=ssl)
        except BaseException:
            portal.close()
            raise
        super().__init__(portal, inner)

    @property
    def url(self) -> Any:
        return self._inner.url

    @property
    def images(self) -> Images:
        return Images(self._portal, self._inner.images)

    @property
    def jobs(self) -> Jobs:
        return Jobs(self._portal, self._inner.jobs)

    @property
    def fn(self) -> Functions:
        return Functions(self._portal, self._inner.fn)

    @property
    def snapshots(self) -> Snapshots:
        return Snapshots(self._portal, self._inner.snapshots)

    def create(self, spec: Spec, *, key: Optional[str]=None, timeout: Seconds=CREATE) -> Sandbox:
        """Make a sandbox; return it when it runs.

        key: repeating a create with the same key gives the same sandbox, ended or not; with another spec it is Conflict. At
            most 256 bytes; default a random one, which makes a broken call safe to repeat.
        timeout: seconds for all of it.

        Errors: Invalid for a bad spec, NotFound for an image that does not exist, Unsupported for a kind that the server
        lacks, Exhausted at once when there is no room. A create that fails or is cancelled leaves nothing behind; but with
        a key of the caller's own, what may have been made stays for whoever repeats it.
        """
        return Sandbox(self._portal, self._portal.do(self._inner.create, spec, key=key, timeout=timeout))

    def get(self, id: str) -> Sandbox:
        """Find a sandbox by its ID. NotFound: it was never given out, or ended more than 24 h ago; Lost: it is gone with
        its node."""
        return Sandbox(self._portal, self._portal.do(self._inner.get, id))

    def list(self, *, all: bool=False, job: str='', labels: Optional[Mapping[str, str]]=None, state: str='', limit: int=0, after: str='') -> List[SandboxInfo]:
        """Give the records of sandboxes, newest first.

        all: also ended ones, which are kept for 24 h. job, labels (all must match), state: which ones.
        limit: at most so many. after: continue after the sandbox of this ID.
        """
        return self._portal.do(self._inner.list, all=all, job=job, labels=labels, state=state, limit=limit, after=after)

    def run_container(self, args: DSecContainerRunArgs, timeout: Seconds=CREATE) -> DSecContainer:
        """Make a sandbox of kind container. timeout: seconds for that."""
        return DSecContainer(self._portal, self._portal.do(self._inner.run_container, args, timeout))

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
