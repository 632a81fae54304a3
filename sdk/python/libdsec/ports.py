"""TCP ports inside a sandbox, reached from outside whatever its network is."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Optional, Set, Tuple, Type, Union

from . import _check
from ._rpc import CHUNK, Channel, Messages, from_bytes, to_bytes
from .errors import Conflict, DSecError

CLOSE = 5.0  # seconds that the end of a connection may take


@_check.typed
class Ports:
    """The ports of one sandbox."""

    def __init__(self, channel: Channel, sandbox: str) -> None:
        self._channel, self._sandbox = channel, sandbox

    async def dial(self, port: int) -> Tuple[asyncio.StreamReader, PortWriter]:
        """Connect to a port on the sandbox's loopback; Unavailable when nothing listens.

        It gives a reader and a writer as ``asyncio.open_connection`` does. Close the writer.
        """
        a = await self._channel.unary("Ports/Dial", {"port": port}, op="libdsec.ports.dial", sandbox=self._sandbox)
        conn = str(a.get("conn", ""))
        messages = await self._channel.stream("Ports/Receive", {"conn": conn}, op="libdsec.ports.receive", sandbox=self._sandbox,
                                              wait=self._channel.timeout)
        reader = asyncio.StreamReader(limit=CHUNK)
        writer = PortWriter(self._channel, self._sandbox, conn, messages)
        flow = _Flow()
        reader.set_transport(flow)
        writer._task = asyncio.ensure_future(_receive(messages, reader, flow))
        return reader, writer

    async def forward(self, port: int, *, local: int = 0, host: str = "127.0.0.1") -> Forward:
        """Listen here and lead each connection to a port of the sandbox. local 0 takes a free port.

        Close it, or leave ``async with``, to end it and its connections.
        """
        f = Forward(self, port)
        f._server = await asyncio.start_server(f._serve, host, local, limit=CHUNK)
        f.host, f.port = f._server.sockets[0].getsockname()[:2]
        return f


class _Flow(asyncio.ReadTransport):
    """Holds the sandbox's data back while its reader has enough."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()

    def pause_reading(self) -> None:
        self.go.clear()

    def resume_reading(self) -> None:
        self.go.set()


async def _receive(messages: Messages, reader: asyncio.StreamReader, flow: _Flow) -> None:
    try:
        while True:
            await flow.go.wait()
            m = await messages.next()
            if m is None:
                reader.feed_eof()
                return
            reader.feed_data(from_bytes(m.get("data")))
    except DSecError as e:
        reader.set_exception(e)
    except asyncio.CancelledError:
        reader.feed_eof()
        raise
    finally:
        messages.close()


class PortWriter:
    """The writing side of a connection, in the manner of ``asyncio.StreamWriter``."""

    def __init__(self, channel: Channel, sandbox: str, conn: str, messages: Messages) -> None:
        self._channel, self._sandbox, self._conn, self._messages = channel, sandbox, conn, messages
        self._buffer = bytearray()
        self._offset = 0
        self._shut = self._sent_end = self._closing = False
        self._lock = asyncio.Lock()
        self._task: "Optional[asyncio.Task[None]]" = None
        self._end: "Optional[asyncio.Task[None]]" = None

    def write(self, data: Union[bytes, bytearray, memoryview]) -> None:
        """Take data to send; drain sends them."""
        if self._shut or self._closing:
            raise Conflict("the connection is closed for sending", op="libdsec.ports.write", sandbox=self._sandbox)
        self._buffer += data

    def write_eof(self) -> None:
        """Say, with the next drain, that no more will be sent. The other side can go on."""
        self._shut = True

    async def drain(self) -> None:
        """Send what was written. A broken call is repeated: its offset makes that harmless."""
        async with self._lock:
            while self._buffer or (self._shut and not self._sent_end):
                piece = bytes(self._buffer[:CHUNK])
                last = self._shut and len(piece) == len(self._buffer)
                m = {"conn": self._conn, "offset": str(self._offset)}
                if piece:
                    m["data"] = to_bytes(piece)
                if last:
                    m["close"] = True  # type: ignore[assignment]
                await self._channel.unary("Ports/Send", m, op="libdsec.ports.send", sandbox=self._sandbox, safe=True, wait=None)
                del self._buffer[:len(piece)]
                self._offset += len(piece)
                self._sent_end = self._sent_end or last

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """End the connection, both sides. What was not drained is dropped. Doing it twice is harmless."""
        if not self._closing:
            self._closing = True
            self._end = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        call = self._channel.unary("Ports/Close", {"conn": self._conn}, op="libdsec.ports.close", sandbox=self._sandbox, wait=CLOSE)
        try:
            await call
        except DSecError:  # the server drops it with the stream
            pass
        finally:
            self._messages.close()
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def wait_closed(self) -> None:
        """Wait for the end that close began."""
        if self._end is not None:
            await asyncio.shield(self._end)

    async def __aenter__(self) -> PortWriter:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self.close()
        await self.wait_closed()


class Forward:
    """A local port that leads into a sandbox. host and port say where it is."""

    def __init__(self, ports: Ports, to: int) -> None:
        self._ports, self._to = ports, to
        self._server: Optional[asyncio.AbstractServer] = None
        self._tasks: "Set[asyncio.Task[Any]]" = set()
        self.host, self.port = "", 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            inner_reader, inner_writer = await self._ports.dial(self._to)
            async with inner_writer:
                # Either side may end first; the other goes on.
                await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except (DSecError, OSError, asyncio.CancelledError):
            # Whoever connected learns it by a reset.
            writer.transport.abort()
        finally:
            writer.close()
            if task is not None:
                self._tasks.discard(task)

    async def aclose(self) -> None:
        """Stop listening and end the connections. Doing it twice is harmless."""
        if self._server is None:
            return
        self._server.close()
        tasks = set(self._tasks)
        for t in tasks:
            t.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE)
        self._server = None

    async def __aenter__(self) -> Forward:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self.aclose()


async def _pump(reader: asyncio.StreamReader, writer: Any) -> None:
    while True:
        data = await reader.read(CHUNK)
        if not data:
            break
        writer.write(data)
        await writer.drain()
    if not (isinstance(writer, asyncio.StreamWriter) and not writer.can_write_eof()):
        writer.write_eof()
        await writer.drain()
