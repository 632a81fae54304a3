"""A client of HTTP/1.1 for asyncio: one server, many connections kept alive.

It does what a client of DSec needs and no more: POST, bodies of known length
or in chunks in both directions, TLS. It follows no redirects and uses no proxy.

Invariants:
- A connection is in one place: with the request that took it, or idle. One whose
  answer was not read to its end is closed, never reused, so a cancelled request
  closes its connection.
- Every wait has an end: connecting and short answers by a limit of time, long
  ones by the probes of TCP.
- At most ``Pool.hard`` connections are open.
"""

from __future__ import annotations

import asyncio
import collections
import errno
import logging
import socket
import ssl as ssl_module
import time
import urllib.parse
from typing import AsyncIterator, Callable, Deque, Dict, List, Optional, Tuple, Union

from .errors import DSecError, Invalid, Timeout, Unavailable

log = logging.getLogger("libdsec")

CONNECT = 5.0  # seconds to connect, TLS included
IDLE = 30.0  # seconds that an unused connection is kept: shorter than servers do
PROBE = 15  # seconds between probes of a silent connection; three unanswered end it
MAX_HEAD = 64 << 10
MAX_LINE = 1 << 10  # of a chunk's size
BUFFER = 256 << 10
SOFT = 256  # connections opened without asking whether that helps
TICK = 0.05
OLD = 1.0
BATCH = 64  # connections opened at once
SMALL = 16 << 10  # a body that is sent without waiting
RESERVE = 64  # descriptors left to the rest of the program

Body = Union[bytes, AsyncIterator[bytes]]


class Fault(Exception):
    """The other side broke the rules of HTTP, or the connection broke."""


def descriptors() -> int:
    """How many files the process may have open; a guess where that is not known."""
    try:
        import resource
    except ImportError:  # not Unix
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Pool:
    """Connections to one server.

    Up to SOFT are opened as they are wanted. More are opened only when that
    helps: when none came free for a while, as with commands that take long, or
    when somebody has waited long.
    """

    def __init__(self, url: str, *, limit: int = 4096, ssl: Optional[ssl_module.SSLContext] = None) -> None:
        u = urllib.parse.urlsplit(url)
        try:
            host, port = u.hostname, u.port
            (host or "").encode("idna")
        except ValueError:
            host, port = None, None
        if u.scheme not in ("http", "https") or not host or u.query or u.fragment or any(c <= " " for c in url):
            raise Invalid(f"server URL {url!r} is not http://HOST:PORT or https://HOST")
        self.host = host
        self.port = port or (443 if u.scheme == "https" else 80)
        self.prefix = u.path.rstrip("/")
        self.authority = u.netloc.rpartition("@")[2]
        self.ssl: Optional[ssl_module.SSLContext] = None
        if u.scheme == "https":
            self.ssl = ssl or ssl_module.create_default_context()
        self.hard = max(1, min(limit, descriptors() - RESERVE))
        self.soft = min(SOFT, self.hard)
        self.open = 0  # taken, idle, or being opened
        self.closed = False
        self._idle: List[Connection] = []
        self._taken: "set[Connection]" = set()
        self._waiting: Deque[Tuple[float, "asyncio.Future[Optional[Connection]]"]] = collections.deque()
        self._released = 0.0
        self._timer: Optional[asyncio.TimerHandle] = None
        self._reaper: Optional[asyncio.TimerHandle] = None
        self._connecting: Optional[asyncio.Semaphore] = None
        self._warned = False

    async def acquire(self) -> Connection:
        """Take a connection. Whoever takes it calls release or discard."""
        if self.closed:
            raise Invalid("the client is closed")
        while self._idle:
            conn = self._idle.pop()
            if conn.usable():
                self._taken.add(conn)
                return conn
            self._drop(conn)
        if self.open < self.soft and not self._waiting:
            self.open += 1
            return await self._connect()
        future: "asyncio.Future[Optional[Connection]]" = asyncio.get_running_loop().create_future()
        self._waiting.append((time.monotonic(), future))
        self._arm()
        try:
            got = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                left = future.result()
                if left is None:
                    self._freed()
                else:
                    self.release(left)
            raise
        return got or await self._connect()

    def release(self, conn: Connection) -> None:
        """Give back a connection whose answer was read to its end."""
        self._released = time.monotonic()
        self._taken.discard(conn)
        if self.closed or not conn.usable():
            self._drop(conn)
            return
        conn.since = self._released
        future = self._next()
        if future is not None:
            self._taken.add(conn)
            future.set_result(conn)
            return
        self._idle.append(conn)
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().call_later(IDLE, self._reap)

    def discard(self, conn: Connection) -> None:
        """Close a connection that cannot be used again."""
        if conn in self._taken:
            self._taken.discard(conn)
            self._drop(conn)

    def close(self) -> None:
        """Close everything; requests under way fail."""
        self.closed = True
        for timer in (self._timer, self._reaper):
            if timer is not None:
                timer.cancel()
        self._timer = self._reaper = None
        for conn in self._idle + list(self._taken):
            conn.abort(Invalid("the client is closed"))
        self._idle.clear()
        while True:
            future = self._next()
            if future is None:
                return
            future.set_exception(Invalid("the client is closed"))

    def _next(self) -> "Optional[asyncio.Future[Optional[Connection]]]":
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                return future
        return None

    def _drop(self, conn: Connection) -> None:
        conn.abort()
        self._freed()

    def _freed(self) -> None:
        """Pass the place of a connection to whoever waits."""
        future = None if self.closed else self._next()
        if future is not None:
            future.set_result(None)
        else:
            self.open -= 1

    def _arm(self) -> None:
        if self._timer is None and self._waiting and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        stuck = now - self._released > TICK
        for _ in range(BATCH):
            while self._waiting and self._waiting[0][1].done():
                self._waiting.popleft()
            if not self._waiting or not (stuck or now - self._waiting[0][0] > OLD):
                break
            if self.open >= self.hard:
                if not self._warned and now - self._waiting[0][0] > OLD:
                    self._warned = True
                    log.warning("all %d connections are in use and calls wait; a higher limit of open files (ulimit -n) "
                                "or of the client (connections=) lets more run at once", self.hard)
                break
            future = self._next()
            if future is None:
                break
            self.open += 1
            future.set_result(None)
        self._arm()

    def _reap(self) -> None:
        self._reaper = None
        now = time.monotonic()
        while self._idle and (now - self._idle[0].since >= IDLE or not self._idle[0].usable()):
            self._drop(self._idle.pop(0))
        if self._idle:
            wait = self._idle[0].since + IDLE - now
            self._reaper = asyncio.get_running_loop().call_later(wait, self._reap)

    async def _connect(self) -> Connection:
        """Open a connection in a place that is counted already."""
        try:
            if self._connecting is None:
                self._connecting = asyncio.Semaphore(BATCH)
            async with self._connecting:
                conn = await self._opened()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE) and self.open > 1:
                self.open -= 1  # not passed on: the next one would fail as well
                self.hard = self.open  # as many as there are is what the host allows
                self.soft = min(self.soft, self.hard)
                return await self.acquire()
            self._freed()
            raise self._unreachable(e) from e
        except BaseException:
            self._freed()
            raise
        if self.closed:
            conn.abort()
            self._freed()
            raise Invalid("the client is closed")
        self._taken.add(conn)
        return conn

    async def _opened(self) -> Connection:
        task = asyncio.ensure_future(dial(str(self.host), self.port, self.ssl))

        def forget(t: "asyncio.Task[Tuple[asyncio.StreamReader, asyncio.StreamWriter]]") -> None:
            if not t.cancelled() and t.exception() is None:
                t.result()[1].transport.abort()

        try:
            done, _ = await asyncio.wait({task}, timeout=CONNECT)
        except asyncio.CancelledError:
            task.add_done_callback(forget)
            task.cancel()
            raise
        if not done:
            task.add_done_callback(forget)
            task.cancel()
            raise OSError(errno.ETIMEDOUT, f"no connection within {CONNECT:g} s")
        return Connection(*task.result())

    def _unreachable(self, e: OSError) -> DSecError:
        if isinstance(e, ssl_module.SSLCertVerificationError):
            return Invalid(f"the certificate of {self.authority} is not trusted: {e.verify_message}")
        err = Unavailable(f"connect to {self.authority}: {e.strerror or e}")
        err._not_sent = True
        return err


class Reader(asyncio.StreamReader):
    """Reads what arrived before the connection broke, and only then its end: an answer may be in it."""

    def set_exception(self, exc: BaseException) -> None:
        if isinstance(exc, OSError):
            self.feed_eof()
        else:
            super().set_exception(exc)  # type: ignore[arg-type]


async def dial(host: str, port: int, ssl: Optional[ssl_module.SSLContext]) -> Tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection."""
    loop = asyncio.get_running_loop()
    reader = Reader(limit=BUFFER, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, host, port, ssl=ssl, server_hostname=host if ssl else None)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)  # type: ignore[arg-type]


class Connection:
    """One connection. Its methods are for whoever took it from the pool."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.since = 0.0
        self.used = False  # has served a request
        self._why: Optional[BaseException] = None
        sock = writer.get_extra_info("socket")
        if sock is not None:
            _set(sock, socket.SOL_SOCKET, "SO_KEEPALIVE", 1)
            _set(sock, socket.IPPROTO_TCP, "TCP_KEEPIDLE", PROBE)
            _set(sock, socket.IPPROTO_TCP, "TCP_KEEPINTVL", PROBE)
            _set(sock, socket.IPPROTO_TCP, "TCP_KEEPCNT", 3)

    def usable(self) -> bool:
        """Whether nothing was heard from the other side since the last answer."""
        return not (self.reader.at_eof() or self.writer.is_closing() or self.reader.exception() is not None
                    or getattr(self.reader, "_buffer", None))

    def abort(self, why: Optional[BaseException] = None) -> None:
        """Close at once; whoever waits for it fails with why."""
        if why is not None and self._why is None:
            self._why = why
            if self.reader.exception() is None:
                self.reader.set_exception(why)
        self.writer.transport.abort()

    def limit(self, seconds: Optional[float]) -> "Limit":
        """Abort the connection unless a block ends in time."""
        return Limit(self, seconds)

    def fault(self, e: BaseException) -> BaseException:
        """Say why a read or write failed."""
        return self._why or (e if isinstance(e, DSecError) else Fault(str(e) or type(e).__name__))

    async def send(self, head: bytes, body: Body, stall: Optional[float] = None) -> None:
        """Send a request. Only a body in pieces, or a large one, is waited for: each piece for at most stall seconds."""
        if isinstance(body, bytes):
            self.writer.write(head + body)
            if len(body) >= SMALL:
                with self.limit(stall):
                    await self.writer.drain()
            return
        self.writer.write(head)
        async for piece in body:
            if piece:
                await asyncio.sleep(0)  # an answer that is there is taken before a write finds the connection broken
                self.writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
                with self.limit(stall):
                    await self.writer.drain()
        self.writer.write(b"0\r\n\r\n")
        with self.limit(stall):
            await self.writer.drain()

    async def head(self) -> Tuple[int, Dict[str, str]]:
        """Read the status and the headers of an answer."""
        while True:
            try:
                raw = await self.reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                raise Fault("the head of the answer is too large") from None
            except asyncio.IncompleteReadError as e:
                raise Fault("the connection was closed " + ("within" if e.partial else "before") + " the answer") from None
            if len(raw) > MAX_HEAD:
                raise Fault("the head of the answer is too large")
            status, headers = parse_head(raw)
            if status >= 200:
                self.used = True
                return status, headers
            if status == 101:
                raise Fault("the answer changes the protocol")

    async def line(self) -> bytes:
        try:
            raw = await self.reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise Fault("a line between chunks is too long") from None
        except asyncio.IncompleteReadError:
            raise Fault("the connection was closed within the answer") from None
        if len(raw) > MAX_LINE:
            raise Fault("a line between chunks is too long")
        return raw.rstrip(b"\r\n")


class Limit:
    """A limit of time on what a block does with a connection."""

    def __init__(self, conn: Connection, seconds: Optional[float]) -> None:
        self.conn, self.seconds = conn, seconds
        self.timer: Optional[asyncio.TimerHandle] = None

    def __enter__(self) -> None:
        if self.seconds is not None:
            self.timer = asyncio.get_running_loop().call_later(max(self.seconds, 0), self._expire)

    def _expire(self) -> None:
        self.conn.abort(Timeout(f"no answer within {self.seconds:g} s"))

    def __exit__(self, *_: object) -> None:
        if self.timer is not None:
            self.timer.cancel()


def _set(sock: socket.socket, level: int, name: str, value: int) -> None:
    option = getattr(socket, name, None)
    if option is not None:
        try:
            sock.setsockopt(level, option, value)
        except OSError:  # no TCP, such as in a test
            pass


def parse_head(raw: bytes) -> Tuple[int, Dict[str, str]]:
    """Decode the head of an answer, its empty line included."""
    lines = raw[:-4].decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()) or len(code) != 3 or rest[3:4].strip():
        raise Fault(f"the answer begins with {lines[0][:64]!r} and is no HTTP/1.1")
    headers: Dict[str, str] = {}
    for text in lines[1:]:
        name, colon, value = text.partition(":")
        if not colon or not name or name != name.strip():
            raise Fault(f"the answer has the malformed header {text[:64]!r}")
        name, value = name.lower(), value.strip()
        if name in headers and name in ("content-length", "transfer-encoding") and headers[name] != value:
            raise Fault(f"the answer has two headers {name}")
        headers[name] = value
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(code), headers


class Answer:
    """An answer whose head has arrived. Its body is read once, by read or pieces."""

    def __init__(self, pool: Pool, conn: Connection, status: int, headers: Dict[str, str], sent: Callable[[], bool]) -> None:
        self.status, self.headers = status, headers
        self._pool, self._conn, self._sent = pool, conn, sent
        self._chunked = False
        self._left: Optional[int] = 0  # of the body, or of the chunk; None: until the connection closes
        self._done = False
        self._first = True
        encoding = headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if encoding:
            if encoding != "chunked":
                raise Fault(f"the answer has the transfer encoding {encoding[:64]!r}")
            self._chunked = True
        elif length is not None:
            if not (length.isascii() and length.isdigit()) or len(length) > 18:
                raise Fault(f"the answer has the length {length[:64]!r}")
            self._left = int(length)
        elif status in (204, 304):
            self._left = 0
        else:
            self._left = None

    async def some(self, most: int = BUFFER, stall: Optional[float] = None) -> bytes:
        """Give bytes of the body as they arrive; b"" at its end."""
        try:
            with self._conn.limit(stall):
                return await self._some(most)
        except BaseException as e:
            self.close()
            if isinstance(e, (OSError, Fault, DSecError, asyncio.IncompleteReadError)):
                raise self._conn.fault(e) from None
            raise

    async def _some(self, most: int) -> bytes:
        if self._done:
            return b""
        if self._chunked and self._left == 0:
            await self._chunk()
            if self._done:
                return b""
        if self._left == 0:
            self._finish()
            return b""
        data = await self._conn.reader.read(most if self._left is None else min(most, self._left))
        if self._left is None:
            if not data:
                self._finish()
            return data
        if not data:
            raise Fault("the connection was closed within the answer")
        self._left -= len(data)
        if self._left == 0 and not self._chunked:
            self._finish()
        return data

    async def _chunk(self) -> None:
        """Read the line before a chunk, and after the last one the trailers."""
        if not self._first and await self._conn.line():
            raise Fault("a chunk is longer than it says")
        self._first = False
        size = (await self._conn.line()).partition(b";")[0].strip()
        if not size or len(size) > 15 or size.strip(b"0123456789abcdefABCDEF"):
            raise Fault(f"a chunk has the size {size[:64]!r}")
        self._left = int(size, 16)
        if self._left == 0:
            for _ in range(64):
                if not await self._conn.line():
                    self._finish()
                    return
            raise Fault("the answer has too many trailers")

    async def all(self, most: int, stall: Optional[float] = None) -> bytes:
        """Give the whole body."""
        out = bytearray()
        while True:
            piece = await self.some(stall=stall)
            if not piece:
                return bytes(out)
            out += piece
            if len(out) > most:
                self.close()
                raise Fault(f"the answer is larger than {most} bytes")

    def _finish(self) -> None:
        self._done = True
        keep = self._left is not None and self._sent() and self.headers.get("connection", "").lower() != "close"
        if keep:
            self._pool.release(self._conn)
        else:
            self._pool.discard(self._conn)

    def close(self) -> None:
        """Close the connection unless the answer was read to its end."""
        if not self._done:
            self._done = True
            self._pool.discard(self._conn)


async def request(pool: Pool, path: str, headers: Dict[str, str], body: Body, *, wait: Optional[float]) -> Answer:
    """Send a POST and wait for the head of its answer, at most wait seconds.

    A server may answer before it has all of the body: the answer counts.
    """
    conn = await pool.acquire()
    lines = [f"POST {pool.prefix}{path} HTTP/1.1", f"Host: {pool.authority}"]
    lines += [f"{k}: {v}" for k, v in headers.items()]
    lines.append(f"Content-Length: {len(body)}" if isinstance(body, bytes) else "Transfer-Encoding: chunked")
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    sender: "Optional[asyncio.Task[None]]" = None
    reading: "Optional[asyncio.Task[Tuple[int, Dict[str, str]]]]" = None
    try:
        if isinstance(body, bytes) and len(body) < SMALL:
            with conn.limit(wait):
                await conn.send(head, body)
                status, got = await conn.head()
            return Answer(pool, conn, status, got, lambda: True)
        sender = asyncio.ensure_future(conn.send(head, body, wait))
        reading = asyncio.ensure_future(conn.head())
        await asyncio.wait({sender, reading}, return_when=asyncio.FIRST_COMPLETED)
        broken = None
        if sender.done():
            broken = sender.exception()
            if broken is not None and not isinstance(broken, OSError):
                raise broken  # the body's own
        # A connection that broke while sending may have brought an answer before.
        with conn.limit(wait if broken is None else 1.0):
            status, got = await reading
        whole = sender.done() and sender.exception() is None
        return Answer(pool, conn, status, got, lambda: whole)
    except BaseException as e:
        pool.discard(conn)
        if isinstance(e, (OSError, Fault, asyncio.IncompleteReadError)) or e is conn._why:
            raise conn.fault(e) from None
        raise
    finally:
        for task in (sender, reading):
            if task is not None:
                task.cancel()
                task.add_done_callback(_seen)


def _seen(task: "asyncio.Task[object]") -> None:
    """Take the exception of a task that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
