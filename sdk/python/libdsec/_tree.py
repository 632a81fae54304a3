"""Files and trees of this host, on their way into a sandbox and out of it.

Reading and writing files blocks, so it is done in threads. What comes out of a
sandbox is hostile: it is written relative to descriptors of folders that were
opened without following links, and links are made last.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
import tarfile
import tempfile
from types import TracebackType
from typing import Any, AsyncIterator, Callable, Dict, Iterator, List, Optional, Tuple, Type, Union

from . import _check
from ._rpc import CHUNK
from .errors import Invalid, Unavailable

Path = Union[str, os.PathLike[str]]


def pieces(data: Any) -> AsyncIterator[bytes]:
    """Give the pieces of whatever has bytes. A file is read from where it stands."""
    if not isinstance(data, (str, bytes, bytearray, memoryview)) and not any(hasattr(data, a) for a in ("read", "__aiter__", "__iter__")):
        raise _check.invalid("data", data, f"bytes, text, a file, or pieces of bytes, not {type(data).__name__}")
    return _pieces(data)


async def _pieces(data: Any) -> AsyncIterator[bytes]:
    if isinstance(data, str):
        yield data.encode()
    elif isinstance(data, (bytes, bytearray, memoryview)):
        if len(data):
            yield data  # type: ignore[misc]
    elif hasattr(data, "read"):
        loop = asyncio.get_running_loop()
        while True:
            piece = await loop.run_in_executor(None, data.read, CHUNK)
            if not piece:
                return
            yield piece if not isinstance(piece, str) else _refuse("the file is opened for text, not for bytes")
    elif hasattr(data, "__aiter__"):
        async for piece in data:
            yield piece
    else:
        for piece in data:
            yield piece if isinstance(piece, (bytes, bytearray, memoryview)) else _refuse("the data are not pieces of bytes")


def _refuse(text: str) -> bytes:
    raise Invalid(text)


class Packed:
    """A folder as a tar, in pieces: parents before children, names in order, so that the same tree gives the same bytes."""

    def __init__(self, folder: Path) -> None:
        self._pieces = _pack(os.fspath(folder))

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self._all()

    async def _all(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while True:
            piece = await loop.run_in_executor(None, next, self._pieces, b"")
            if not piece:
                return
            yield piece

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        try:
            self._pieces.close()
        except ValueError:  # a thread is in it still, and ends it
            pass


def _pack(folder: str) -> Any:
    out = bytearray()
    with tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT) as t:
        for path, name in _walk(folder, "."):
            info = t.gettarinfo(path, name)
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            out += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isreg():
                with open(path, "rb") as f:
                    left = info.size
                    while left:
                        piece = f.read(min(left, CHUNK))
                        if not piece:
                            raise Invalid(f"{path} became shorter while it was read")
                        left -= len(piece)
                        out += piece
                        if len(out) >= CHUNK:
                            yield bytes(out)
                            out.clear()
                out += bytes(-info.size % tarfile.BLOCKSIZE)
            if len(out) >= CHUNK:
                yield bytes(out)
                out.clear()
    out += bytes(2 * tarfile.BLOCKSIZE)
    yield bytes(out)


def _walk(path: str, name: str) -> Iterator[Tuple[str, str]]:
    yield path, name
    if os.path.isdir(path) and (name == "." or not os.path.islink(path)):
        for child in sorted(os.listdir(path), key=os.fsencode):
            yield from _walk(os.path.join(path, child), child if name == "." else f"{name}/{child}")


async def store(data: AsyncIterator[bytes], local: Path, mode: int) -> None:
    """Write a file as one: it is there whole or not at all."""
    local = os.fspath(local)
    loop = asyncio.get_running_loop()
    fd, temporary = tempfile.mkstemp(prefix=".dsec-", dir=os.path.dirname(local) or ".")
    try:
        with os.fdopen(fd, "wb") as f:
            async for piece in data:
                await loop.run_in_executor(None, f.write, piece)
        os.chmod(temporary, mode & 0o777)
        os.replace(temporary, local)
    except BaseException:
        os.unlink(temporary)
        raise


class _Reader(io.RawIOBase):
    """Pieces of an asynchronous stream as a file, for a thread."""

    def __init__(self, data: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._data, self._loop, self._rest = data, loop, b""

    def readable(self) -> bool:
        return True

    def readinto(self, b: Any) -> int:
        if not self._rest:
            self._rest = asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
        n = min(len(b), len(self._rest))
        b[:n], self._rest = self._rest[:n], self._rest[n:]
        return n

    async def _next(self) -> bytes:
        try:
            return await self._data.__anext__()
        except StopAsyncIteration:
            return b""


async def unpack(data: AsyncIterator[bytes], folder: Path) -> None:
    """Extract a tar that a sandbox sent."""
    loop = asyncio.get_running_loop()
    reader = io.BufferedReader(_Reader(data, loop), CHUNK)
    await loop.run_in_executor(None, _unpack, reader, os.fspath(folder))


def _unpack(reader: Any, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    x = _Extraction(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    try:
        with tarfile.open(fileobj=reader, mode="r|", encoding="utf-8", errors="surrogateescape") as t:
            for member in t:
                x.add(t, member)
        x.finish()
    except tarfile.TarError as e:
        raise Unavailable(f"the archive is malformed: {e}") from None
    finally:
        os.close(x.root)


class _Extraction:
    """One folder that is being filled."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.links: List[Tuple[List[str], str]] = []
        self.folders: Dict[Tuple[str, ...], Tuple[int, float]] = {}

    def add(self, t: tarfile.TarFile, m: tarfile.TarInfo) -> None:
        parts = _parts(m.name)
        if m.isdir():
            self.folders[tuple(parts)] = (m.mode & 0o777, m.mtime)
            if parts:
                os.close(self._folder(parts, m.name))
        elif not parts:
            raise Invalid(f"the archive has a file named {m.name!r}")
        elif m.issym():
            self.links.append((parts, m.linkname))
        elif m.islnk():
            self._in(parts, m.name, lambda at, name: self._hard(m, at, name))
        elif m.isreg():
            self._in(parts, m.name, lambda at, name: self._file(t, m, at, name))

    def _in(self, parts: List[str], shown: str, do: Callable[[int, str], None]) -> None:
        """Do something in the folder of a name, once nothing has the name."""
        at = self._folder(parts[:-1], shown)
        try:
            try:
                os.unlink(parts[-1], dir_fd=at)
            except FileNotFoundError:
                pass
            do(at, parts[-1])
        except OSError as e:
            raise Invalid(f"extract {shown!r}: {e.strerror}") from e
        finally:
            os.close(at)

    def _file(self, t: tarfile.TarFile, m: tarfile.TarInfo, at: int, name: str) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=at)
        with os.fdopen(fd, "wb") as f:
            if m.sparse is not None and "GNU.sparse.realsize" in m.pax_headers:
                # What is stored of a file with holes; tarfile takes the last of two sizes.
                m.size = int(m.pax_headers["GNU.sparse.realsize"])
            # The pieces of the file follow each other in the archive, whatever holes are between them.
            stream: Any = t.fileobj
            stream.seek(m.offset_data)
            for at, left in m.sparse or [(0, m.size)]:
                f.seek(at)
                while left > 0:
                    piece = stream.read(min(left, CHUNK))
                    if not piece:
                        raise tarfile.ReadError("it breaks off")
                    f.write(piece)
                    left -= len(piece)
            f.truncate(m.size)
            f.flush()
            os.utime(fd, (m.mtime, m.mtime))
            os.fchmod(fd, m.mode & 0o777)

    def _hard(self, m: tarfile.TarInfo, at: int, name: str) -> None:
        to = _parts(m.linkname)
        if not to:
            raise Invalid(f"the archive has a link to {m.linkname!r}")
        source = self._folder(to[:-1], m.linkname)
        try:
            if stat.S_ISREG(os.stat(to[-1], dir_fd=source, follow_symlinks=False).st_mode):
                os.link(to[-1], name, src_dir_fd=source, dst_dir_fd=at, follow_symlinks=False)
        finally:
            os.close(source)

    def _folder(self, parts: List[str], shown: str) -> int:
        """Open a folder below the root, made if missing. Nothing on the way may be a link."""
        at = os.dup(self.root)
        try:
            for i, p in enumerate(parts):
                try:
                    os.mkdir(p, 0o700, dir_fd=at)
                    self.folders.setdefault(tuple(parts[:i + 1]), (0o755, 0))
                except FileExistsError:
                    pass
                below = os.open(p, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = below
        except OSError as e:
            os.close(at)
            if e.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Invalid(f"the archive's {shown!r} is below what is no folder here") from None
            raise
        except BaseException:
            os.close(at)
            raise
        return at

    def finish(self) -> None:
        """Make the links, then give folders their modes and times, the deepest first."""
        for parts, target in self.links:
            self._in(parts, "/".join(parts), lambda at, name, target=target: os.symlink(target, name, dir_fd=at))
        for path in sorted(self.folders, key=len, reverse=True):
            mode, mtime = self.folders[path]
            fd = self._folder(list(path), "/".join(path))
            try:
                if mtime:
                    os.utime(fd, (mtime, mtime))
                os.fchmod(fd, mode)
            finally:
                os.close(fd)


def _parts(name: str) -> List[str]:
    """Split a member's name. One that would leave the folder is refused, not repaired."""
    parts = [p for p in name.split("/") if p not in ("", ".")]
    if ".." in parts or name.startswith("/") or "\0" in name:
        raise Invalid(f"the archive has a member named {name!r}")
    return parts
