"""The files of a sandbox.

A path is absolute, or relative to the sandbox's working directory. ``user`` says
whose rights apply and who owns what is made; default the sandbox's user. Errors:
NotFound, Exists, Denied (the user's rights), Invalid (not a folder, not empty, a bad
path), Exhausted (disk full).
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, AsyncIterable, AsyncIterator, Iterable, List, Optional, Type, Union

from . import _check, _tree
from ._rpc import STALL, Channel, Message, Messages, Steps, from_bytes
from .errors import DSecError, NotFound
from .records import Event, FileInfo, Name, get_name, put_name

Data = Union[bytes, bytearray, memoryview, str, Iterable[bytes], AsyncIterable[bytes], Any]


@_check.typed
class Files:
    """The files of one sandbox. All of it may be used concurrently."""

    def __init__(self, channel: Channel, sandbox: str, steps: Steps) -> None:
        self._channel, self._sandbox, self._steps = channel, sandbox, steps

    async def read(self, path: Name, *, offset: int = 0, size: int = 0, user: str = "") -> bytes:
        """Give the bytes of a regular file, from an offset on; size 0 means to the end."""
        async with self.open(path, offset=offset, size=size, user=user) as data:
            return b"".join([piece async for piece in data])

    async def read_text(self, path: Name, *, user: str = "") -> str:
        """Give a file that is UTF-8; what is not raises UnicodeDecodeError."""
        return (await self.read(path, user=user)).decode()

    def open(self, path: Name, *, offset: int = 0, size: int = 0, user: str = "") -> Pieces:
        """Give the bytes of a regular file in pieces, for ``async for``. Memory holds one piece at a time."""
        m: Message = {"file": _file(path, user)}
        if offset:
            m["offset"] = str(offset)
        if size:
            m["length"] = str(size)
        return Pieces(self._channel, "Files/Read", m, "libdsec.files.read", self._sandbox)

    async def write(self, path: Name, data: Data, *, mode: int = 0, parents: bool = False, append: bool = False,
                    at: Optional[int] = None, user: str = "") -> FileInfo:
        """Store data as a file: readers see the old content or the new, and a failed write leaves the old.

        data: bytes, text (as UTF-8), a file opened for bytes, or pieces, of any size in all.
        mode: permission bits; default 0o644, or those of the file replaced.
        parents: make missing folders above it.
        append, at: write in place instead, at the end or at an offset.

        Data of bytes and text are sent again when the connection breaks; others can be read once.
        """
        m: Message = {"file": _file(path, user)}
        if mode:
            m["mode"] = mode
        if parents:
            m["parents"] = True
        if append:
            m["append"] = True
        if at is not None:
            m["at"] = str(at)
        return FileInfo.from_wire(await self._upload("Files/Write", m, data, "libdsec.files.write"))

    async def list(self, path: Name = ".", *, depth: int = 1, user: str = "") -> List[FileInfo]:
        """Give what is in a folder, and in depth levels of folders: parents before children, names in byte order."""
        m = {"file": _file(path, user), "depth": depth}
        out: List[FileInfo] = []
        async with Stream(self._channel, "Files/List", m, "libdsec.files.list", self._sandbox, STALL) as messages:
            async for a in messages:
                out += [FileInfo.from_wire(f) for f in a.get("files") or ()]
        return out

    async def stat(self, path: Name, *, user: str = "") -> FileInfo:
        """Describe a file. A last symbolic link is not followed."""
        return FileInfo.from_wire(await self._unary("Files/Stat", {"file": _file(path, user)}, "libdsec.files.stat", safe=True))

    async def exists(self, path: Name, *, user: str = "") -> bool:
        """Whether there is something of that name."""
        try:
            await self.stat(path, user=user)
        except NotFound:
            return False
        return True

    async def mkdir(self, path: Name, *, mode: int = 0o755, user: str = "") -> None:
        """Make a folder and those missing above it. One that exists is success."""
        await self._change("Mkdir", path, user, mode=mode)

    async def move(self, path: Name, to: Name, *, user: str = "") -> None:
        """Rename to an absolute path, replacing a file there."""
        m: Message = {}
        put_name(m, "to", to)
        await self._change("Move", path, user, **m)

    async def remove(self, path: Name, *, user: str = "") -> None:
        """Delete a file or a whole tree. NotFound: there is none."""
        await self._change("Remove", path, user)

    async def chmod(self, path: Name, mode: int, *, user: str = "") -> None:
        """Set permission bits, following symbolic links."""
        await self._change("Chmod", path, user, mode=mode)

    async def chown(self, path: Name, owner: str, *, user: str = "") -> None:
        """Set the owner: ``user``, ``user:group`` or numbers. A last symbolic link is not followed."""
        await self._change("Chown", path, user, owner=owner)

    async def symlink(self, path: Name, target: Name, *, user: str = "") -> None:
        """Make path a symbolic link to target."""
        m: Message = {}
        put_name(m, "target", target)
        await self._change("Symlink", path, user, **m)

    def watch(self, path: Name, *, recursive: bool = False, user: str = "") -> Watch:
        """Give changes of a folder, with all below it if recursive, until it is closed. Use it with ``async for``;
        the first event is ``ready``."""
        m: Message = {"file": _file(path, user)}
        if recursive:
            m["recursive"] = True
        return Watch(self._channel, "Files/Watch", m, "libdsec.files.watch", self._sandbox, None)

    def pack(self, path: Name, *, user: str = "") -> Pieces:
        """Give a tree as a tar, in pieces, for ``async for``. Its names are relative to the path."""
        return Pieces(self._channel, "Files/Pack", {"file": _file(path, user)}, "libdsec.files.pack", self._sandbox)

    async def unpack(self, path: Name, tar: Data, *, user: str = "") -> None:
        """Extract a tar (data as for write) into a folder, made if missing. Members cannot leave it."""
        await self._upload("Files/Unpack", {"file": _file(path, user)}, tar, "libdsec.files.unpack")

    async def upload(self, local: "Union[str, os.PathLike[str]]", path: Name, *, user: str = "") -> None:
        """Copy a file, or what is in a folder, from here into the sandbox: into path, which is made.

        Modes, times, links and empty folders are kept; owners are not: all belongs to root, or to user when the sandbox
        refuses that. Sockets and devices are left out.
        """
        if not os.path.isdir(local):
            with open(local, "rb") as f:
                await self.write(path, f, mode=os.fstat(f.fileno()).st_mode & 0o7777, parents=True, user=user)
            return
        async with _tree.Packed(local) as tar:
            await self.unpack(path, tar, user=user)

    async def download(self, path: Name, local: "Union[str, os.PathLike[str]]", *, user: str = "") -> None:
        """Copy a file, or what is in a folder, from the sandbox to here: to local, which is made.

        Nothing that a sandbox sends can leave the folder: names that try, and files that would be written through a
        symbolic link, are Invalid. Owners, devices, sockets, and setuid bits are left out.
        """
        info = await self.stat(path, user=user)
        if info.type == "dir":
            async with self.pack(path, user=user) as tar:
                await _tree.unpack(tar, local)
            return
        async with self.open(path, user=user) as data:
            await _tree.store(data, local, info.mode)

    async def _unary(self, method: str, m: Message, op: str, *, step: str = "", safe: bool = False) -> Message:
        return await self._channel.unary(method, m, op=op, sandbox=self._sandbox, step=step, safe=safe)

    async def _change(self, verb: str, path: Name, user: str, **m: Any) -> None:
        m["file"] = _file(path, user)
        await self._unary("Files/" + verb, m, "libdsec.files." + verb.lower(), step=self._steps.take())

    async def _upload(self, method: str, first: Message, data: Data, op: str) -> Message:
        step = self._steps.take()
        again = isinstance(data, (bytes, bytearray, memoryview, str))
        patience = self._channel.patience(again)
        while True:
            try:
                return await self._channel.upload(method, first, _tree.pieces(data), op=op, sandbox=self._sandbox, step=step)
            except DSecError as e:
                e._not_sent = e._not_sent and again
                await patience.again(e)


def _file(path: Name, user: str) -> Message:
    f: Message = {}
    put_name(f, "path", path)
    if user:
        f["user"] = user
    return f


class Stream:
    """The messages of a read-only server stream, for ``async for``. It is opened by the first use, and opened again
    only as long as nothing was received."""

    def __init__(self, channel: Channel, method: str, m: Message, op: str, sandbox: str, stall: Optional[float]) -> None:
        self._channel, self._open = channel, lambda: channel.stream(method, m, op=op, sandbox=sandbox, stall=stall)
        self._messages: Optional[Messages] = None
        self._ended = False

    async def _next(self) -> Optional[Message]:
        if self._ended:
            return None
        if self._messages is not None:
            m = await self._messages.next()
        else:
            m = await self._begin()
        if m is None:
            await self.aclose()
        return m

    async def _begin(self) -> Optional[Message]:
        patience = self._channel.patience(True)
        while True:
            try:
                messages = await self._open()
                try:
                    m = await messages.next()
                except BaseException:
                    messages.close()
                    raise
                self._messages = messages
                return m
            except DSecError as e:
                try:
                    await patience.again(e)
                except BaseException:
                    self._ended = True
                    raise

    async def aclose(self) -> None:
        """End it early. Doing it twice is harmless."""
        self._ended = True
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        m = await self._next()
        if m is None:
            raise StopAsyncIteration
        return m

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # "break" in a loop leaves nobody who closes it.
        if self._messages is not None and self._channel._loop is not None:
            try:
                self._channel._loop.call_soon_threadsafe(self._messages.close)
            except RuntimeError:  # the loop has ended, and with it the connection
                pass


class Pieces(Stream):
    """Bytes that come in pieces, for ``async for``. Close it, or leave ``async with``, to stop early."""

    def __init__(self, channel: Channel, method: str, m: Message, op: str, sandbox: str) -> None:
        super().__init__(channel, method, m, op, sandbox, STALL)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while True:
            m = await self._next()
            if m is None:
                raise StopAsyncIteration
            data = from_bytes(m.get("data"))
            if data:
                return data

    async def __aenter__(self) -> Pieces:
        return self


class Watch(Stream):
    """Changes of a folder, for ``async for``. Close it, or leave ``async with``, to stop."""

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        m = await self._next()
        if m is None:
            raise StopAsyncIteration
        return Event(m.get("op", ""), get_name(m, "path"), get_name(m, "to"))

    async def __aenter__(self) -> Watch:
        return self
