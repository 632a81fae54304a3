"""A command that runs in a sandbox, and its output as it comes.

A command's life is its own: whoever goes away leaves it running, and whoever
comes back reads from any offset.
"""

from __future__ import annotations

import asyncio
import codecs
from types import TracebackType
from typing import AsyncIterator, Dict, List, Optional, Tuple, Type, Union

from . import _check
from ._rpc import CHUNK, Channel, Message, Messages, Steps, from_bytes, to_bytes
from .errors import Conflict, DSecError, Unavailable
from .records import Chunk, Result, Status

MAX_OUTPUT = 4 << 20  # of each stream in a Result


@_check.typed
class Process:
    """A command that was started. ``status`` is as of the last call that told it."""

    def __init__(self, channel: Channel, sandbox: str, status: Status, steps: Steps, offset: Optional[int] = None) -> None:
        self._channel, self._sandbox, self._steps = channel, sandbox, steps
        self.id = status.id
        self.status = status
        # Where standard input stands; None of a command that somebody else started.
        self._offset = offset
        self._input = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Process {self.id} of {self._sandbox}: {self.status.outcome}>"

    def output(self, offset: int = 0) -> Output:
        """Give both streams in the order in which they were written, from an offset of the two together, to the end.

        Use it with ``async for``. A broken connection is taken up where it broke. Afterwards ``status`` has
        how the command ended. Leaving early leaves the command running.
        """
        return Output(self, offset)

    async def lines(self, offset: int = 0) -> AsyncIterator[Tuple[str, str]]:
        """Give the output as (stream, line) pairs: text without its end of line, in which what is not UTF-8 is
        replaced. Characters and lines that are split between chunks are put together."""
        decode = {s: codecs.getincrementaldecoder("utf-8")("replace") for s in ("stdout", "stderr")}
        rest: Dict[str, str] = {"stdout": "", "stderr": ""}
        async with self.output(offset) as output:
            async for chunk in output:
                parts = (rest[chunk.stream] + decode[chunk.stream].decode(chunk.data)).split("\n")
                rest[chunk.stream] = parts.pop()
                for line in parts:
                    yield chunk.stream, line
        for stream in rest:
            last = rest[stream] + decode[stream].decode(b"", True)
            if last:
                yield stream, last

    async def read(self, stream: str = "stdout", offset: int = 0, size: int = MAX_OUTPUT) -> bytes:
        """Give what is kept of one stream: at most size bytes from an offset of that stream, fewer when the command has
        not written more yet. Of many megabytes, ``output`` gives all in less time."""
        out = bytearray()
        while len(out) < size:
            a = await self._channel.unary(
                "Commands/Read", {"id": self.id, "stream": stream, "offset": str(offset + len(out)), "max": min(size - len(out), MAX_OUTPUT)},
                op="libdsec.read", sandbox=self._sandbox, safe=True)
            piece = from_bytes(a.get("data"))
            if not piece:
                break
            out += piece
        return bytes(out)

    async def write(self, data: Union[bytes, str]) -> None:
        """Feed standard input. It returns when the command's pipe has taken all, so it waits while the command
        does not read. Conflict: the input is closed, or the command has ended."""
        raw = data.encode() if isinstance(data, str) else data
        await self._feed(raw, False)

    async def close_stdin(self) -> None:
        """Tell the command that there is no more input. Doing it twice is harmless."""
        await self._feed(b"", True)

    async def _feed(self, raw: bytes, close: bool) -> None:
        async with self._input:  # in the order of the calls
            if self._offset is None:
                a = await self._write({"id": self.id})
                self._offset = int(a.get("offset", 0))
            for at in range(0, max(len(raw), 1), CHUNK):
                piece = raw[at:at + CHUNK]
                m: Message = {"id": self.id, "offset": str(self._offset)}
                if piece:
                    m["data"] = to_bytes(piece)
                if close:
                    m["close"] = True
                try:
                    await self._write(m, self._steps.input())
                except Conflict:
                    # The first run of this step ended the input already.
                    if not self.status.replayed:
                        raise
                self._offset += len(piece)

    async def _write(self, m: Message, step: str = "") -> Message:
        return await self._channel.unary("Commands/Write", m, op="libdsec.write", sandbox=self._sandbox, step=step, safe=True, wait=None)

    async def signal(self, name: Union[str, int]) -> None:
        """Send a signal: ``"TERM"``, ``"SIGTERM"`` or 15. KILL ends the whole tree of processes, every other goes to
        the leader's process group. Conflict: the command has ended."""
        number = name if isinstance(name, str) else str(int(name))
        step = self._steps.take()
        await self._channel.unary("Commands/Signal", {"id": self.id, "signal": number}, op="libdsec.signal", sandbox=self._sandbox, step=step)

    async def kill(self) -> None:
        """End the whole tree of processes. A command that has ended is left as it is."""
        try:
            await self.signal("KILL")
        except Conflict:
            pass

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of the terminal. Invalid: it has none."""
        await self._channel.unary("Commands/Resize", {"id": self.id, "size": {"rows": rows, "cols": cols}}, op="libdsec.resize",
                                  sandbox=self._sandbox, safe=True)

    async def wait(self) -> Status:
        """Return the status once the command has ended, however long that takes."""
        if self.status.running or self.status.outcome == "":
            a = await self._channel.poll("Commands/Wait", {"id": self.id}, lambda a: a.get("outcome") != "running",
                                         op="libdsec.wait", sandbox=self._sandbox)
            self.status = Status.from_wire(a)
        return self.status

    async def result(self) -> Result:
        """Wait, and read the beginning of both streams: at most 4 MiB of each."""
        s = await self.wait()
        out, err = await asyncio.gather(self._kept("stdout", s.stdout_kept), self._kept("stderr", s.stderr_kept))
        fields = {k: getattr(s, k) for k in Status.__dataclass_fields__}
        return Result(stdout=out, stderr=err, **fields)

    async def _kept(self, stream: str, kept: int) -> bytes:
        return await self.read(stream, 0, min(kept, MAX_OUTPUT)) if kept else b""


class Output:
    """The output of a command, for ``async for``. Close it, or leave ``async with``, to stop early."""

    def __init__(self, process: Process, offset: int) -> None:
        self._process, self._offset = process, offset
        self._messages: Optional[Messages] = None
        self._patience = process._channel.patience(True)
        self._ready: List[Chunk] = []
        self._ended = False

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ended:
            try:
                chunk = await self._next()
            except DSecError as e:
                self._close()
                self._patience.broken(e)
                try:
                    await self._patience.again(e)
                except BaseException:
                    self._ended = True
                    raise
                continue
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _next(self) -> Optional[Chunk]:
        p = self._process
        if self._messages is None:
            self._messages = await p._channel.stream(
                "Commands/Attach", {"id": p.id, "offset": str(self._offset)}, op="libdsec.output", sandbox=p._sandbox)
        m = await self._messages.next()
        if m is None:
            raise Unavailable("the stream ended before its last message", op="libdsec.output", sandbox=p._sandbox)
        self._patience.answered()
        stream = "stderr" if m.get("stderr") else "stdout"
        data, gap = from_bytes(m.get(stream)), int(m.get("gap", 0))
        if data or gap:
            self._offset = int(m.get("offset", 0)) + len(data)
        if m.get("status"):
            p.status = Status.from_wire(m["status"])
            self._ended = True
            await self._messages.next()
            self._close()
        if data or gap:
            return Chunk(stream, self._offset - len(data), data, gap)
        return None

    def _close(self) -> None:
        if self._messages is not None:
            self._messages.close()
            self._messages = None

    async def aclose(self) -> None:
        """Stop reading. The command runs on."""
        self._ended = True
        self._close()

    async def __aenter__(self) -> Output:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # "break" in a loop leaves nobody who closes it.
        if self._messages is not None:
            try:
                self._process._channel._loop.call_soon_threadsafe(self._messages.close)  # type: ignore[union-attr]
            except (RuntimeError, AttributeError):  # the loop has ended, and with it the connection
                pass
