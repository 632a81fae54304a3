"""Calls of dsec.v1: Connect with JSON over HTTP/1.1.

It knows how messages are framed, what an error looks like and when a call may
be made again; it does not know what the messages say.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import os
import random
import ssl as ssl_module
import time
from numbers import Integral, Real
from typing import Any, AsyncIterator, Awaitable, Callable, Coroutine, Dict, FrozenSet, Iterable, List, Optional, Set, Tuple, Union

from . import _http
from .errors import DSecError, Invalid, Misused, NotFound, Timeout, Unavailable, from_wire

VERSION = "0.1.0"
CHUNK = 256 << 10  # largest data of one message
STALL = 60.0  # seconds between two pieces of data that are known to be there
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
POLL = 300  # seconds that a question may be open
UNDER_WAY = 15  # times the retry budget, for what was under way
END = 2  # flag of a stream's last message

Message = Dict[str, Any]


def escape(text: str) -> str:
    """Give any text as the value of a header."""
    raw = os.fsencode(text) if any("\udc80" <= c <= "\udcff" for c in text) else text.encode("utf-8", "replace")
    return "".join(chr(b) if 0x20 < b < 0x7F and b != 0x25 else f"%{b:02X}" for b in raw)


class Patience:
    """Decides whether a call is made again, and waits before that."""

    def __init__(self, budget: float, kinds: FrozenSet[str], safe: bool) -> None:
        self.budget, self.kinds, self.safe = budget, kinds, safe
        self.whole = budget
        self.end: Optional[float] = None
        self.pause = 0.0

    def answered(self) -> None:
        """Note progress: the next failure starts anew, with more patience."""
        self.end, self.pause, self.budget = None, 0.0, UNDER_WAY * self.whole

    def broken(self, e: DSecError) -> None:
        """Note that a stream or a wait failed. One that reached the server was under way, though there was no answer
        yet: a command may be quiet for hours before its server restarts. Only the first failure counts, so that a
        server that ends every call is not asked for ever."""
        if self.end is None and not e._not_sent:
            self.budget = UNDER_WAY * self.whole

    async def again(self, e: DSecError) -> None:
        """Return when the call is to be repeated, else raise e."""
        if e.kind not in self.kinds or not (self.safe or e._not_sent):
            raise e
        now = time.monotonic()
        if self.end is None:
            self.end = now + self.budget
        self.pause = min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)
        # Many clients lose the same server at once; they do not come back at once.
        pause = self.pause * (0.5 + random.random() / 2)
        if now + pause > self.end:
            raise e
        await asyncio.sleep(pause)


class Steps:
    """Gives each operation of a session its number: 1, 2, 3 and so on.

    A session that nobody named has a random one, so that a broken call can be repeated safely.
    """

    def __init__(self, session: str = "", first: int = 1) -> None:
        self.named = bool(session)
        self.session = session or f"py-{random.SystemRandom().getrandbits(80):020x}"
        self.number = first - 1  # of the last operation

    def take(self, step: Any = None) -> str:
        """Give the header of the next operation, or of one that the caller named."""
        if step is None:
            self.number += 1
            return step_text(self.session, self.number)
        if isinstance(step, int):
            if not self.named:
                raise Invalid("a step that is a number needs a session: sandbox.session(NAME), or step=(SESSION, NUMBER)")
            return step_text(self.session, step)
        if isinstance(step, str):
            session, colon, number = step.rpartition(":")
            if not colon or not session or not (number.isascii() and number.isdigit()):
                raise Invalid(f"step {step!r} is not SESSION:NUMBER")
            return step_text(session, int(number))
        if not isinstance(step, (tuple, list)) or len(step) != 2:
            raise Invalid(f"step is {step!r}; wanted a number, SESSION:NUMBER, or (SESSION, NUMBER)")
        session, number = step
        return step_text(session, number)

    def input(self) -> str:
        """Give the header of a piece of input. Its offset makes it repeatable already; the step answers it when its
        command is gone."""
        return self.take() if self.named else ""


def step_text(session: str, number: int) -> str:
    if not isinstance(session, str) or not session or not isinstance(number, int) or not 0 <= number < 1 << 64:
        raise Invalid(f"step {number} of session {session!r} is not a name and a number from 0 on")
    return f"{escape(session)}:{number}"


class Channel:
    """The calls of one client."""

    def __init__(self, url: str, token: str, *, retry: float, retry_on: Iterable[str], timeout: float, connections: int,
                 ssl: Optional[ssl_module.SSLContext]) -> None:
        if any(not "!" <= c <= "~" for c in token):
            raise Invalid("the token has a character that no token has")
        self.url = url
        self.pool = _http.Pool(url, limit=connections, ssl=ssl)
        self.timeout = timeout
        self._retry, self._kinds = max(retry, 0.0), frozenset(retry_on)
        self._common = {"User-Agent": f"libdsec/{VERSION}", "Connect-Protocol-Version": "1"}
        if token:
            self._common["Authorization"] = "Bearer " + token
        self._loop: Optional[asyncio.AbstractEventLoop] = None
        self._pid = os.getpid()
        self._tasks: Set["asyncio.Task[Any]"] = set()
        self.orphans: List[str] = []  # keys of creates whose caller went away

    def _here(self) -> None:
        """Refuse a use that would wait for ever."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop or self._pid != os.getpid():
            raise Misused("a client belongs to one process and one event loop: connect again here")

    def patience(self, safe: bool) -> Patience:
        return Patience(self._retry, self._kinds, safe)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that nobody waits for before the client closes."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_http._seen)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=5)
        self.pool.close()
        await asyncio.sleep(0)  # lets the transports close

    def _headers(self, content: str, sandbox: str, step: str, key: str, limit: Optional[float]) -> Dict[str, str]:
        h = dict(self._common)
        h["Content-Type"] = content
        if sandbox:
            if any(not "!" <= c <= "~" for c in sandbox):
                raise NotFound(f"no sandbox has the id {sandbox[:64]!r}")
            h["Dsec-Sandbox"] = sandbox
        if step:
            h["Dsec-Step"] = step
        if key:
            h["Dsec-Key"] = escape(key)
        if limit is not None:
            h["Connect-Timeout-Ms"] = str(max(1, math.ceil(limit * 1000)))
        return h

    async def unary(self, method: str, message: Message, *, op: str, sandbox: str = "", step: str = "", key: str = "",
                    safe: bool = False, wait: Optional[float] = -1.0, deadline: Optional[float] = None) -> Message:
        """Make a call, again and again while that is safe and there is no answer.

        safe: repeating it has no further effect (a step or a key makes it so).
        wait: seconds until an answer has to begin; None: as long as it takes.
        deadline: seconds for all of it; the server gets to know it.
        """
        self._here()
        if wait is not None and wait < 0:
            wait = self.timeout
        body = _json(message)
        patience = self.patience(safe or bool(step) or bool(key))
        end = None if deadline is None else time.monotonic() + deadline
        while True:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise Timeout(f"no answer within {deadline:g} s", op=op, sandbox=sandbox)
            headers = self._headers("application/json", sandbox, step, key, left)
            try:
                # A server that knows the deadline answers at it; the limit here
                # is for one that does not.
                limit = wait if left is None else left + 1.0
                return await self._unary(method, headers, body, limit, op, sandbox)
            except DSecError as e:
                if end is not None and time.monotonic() >= end:
                    raise e if e.kind == "timeout" else Timeout(f"no answer within {deadline:g} s: {e.message}", op=op, sandbox=sandbox) from e
                await patience.again(e)

    async def _unary(self, method: str, headers: Dict[str, str], body: bytes, wait: Optional[float], op: str, sandbox: str) -> Message:
        answer = None
        try:
            answer = await _http.request(self.pool, "/dsec.v1." + method, headers, body, wait=wait)
            raw = await answer.all(1 << 30, stall=STALL)
        except (_http.Fault, DSecError) as e:
            raise _named(e, op, sandbox) from None
        finally:
            if answer is not None:
                answer.close()
        request = answer.headers.get("dsec-request", "")
        value = _decode(raw)
        if answer.status != 200:
            raise from_wire(value, op, sandbox, request, answer.status)
        if not isinstance(value, dict):
            raise Unavailable("the answer is no JSON object", op=op, sandbox=sandbox, request=request)
        return value

    async def poll(self, method: str, message: Message, done: Callable[[Message], bool], *, op: str, sandbox: str) -> Message:
        """Ask until an answer is what is waited for. The server answers each question after a while in any case."""
        self._here()
        patience = self.patience(True)
        body = _json(dict(message, max=f"{POLL}s"))
        while True:
            try:
                headers = self._headers("application/json", sandbox, "", "", None)
                try:
                    answer = await self._unary(method, headers, body, POLL + STALL, op, sandbox)
                except Timeout as e:
                    raise Unavailable(e.message, op=op, sandbox=sandbox) from e
            except DSecError as e:
                patience.broken(e)
                await patience.again(e)
                continue
            if done(answer):
                return answer
            patience.answered()

    async def stream(self, method: str, message: Message, *, op: str, sandbox: str = "", step: str = "",
                     stall: Optional[float] = None, wait: Optional[float] = None) -> "Messages":
        """Open a server stream. It is not repeated; see Messages for how it ends."""
        self._here()
        body = _json(message)
        headers = self._headers("application/connect+json", sandbox, step, "", None)
        try:
            answer = await _http.request(self.pool, "/dsec.v1." + method, headers, _frame(body), wait=wait)
        except (_http.Fault, DSecError) as e:
            raise _named(e, op, sandbox) from None
        try:
            if answer.status != 200:
                raw = await answer.all(1 << 20, stall=STALL)
                raise from_wire(_decode(raw), op, sandbox, answer.headers.get("dsec-request", ""), answer.status)
        except _http.Fault as e:
            raise _named(e, op, sandbox) from None
        finally:
            if answer.status != 200:
                answer.close()
        return Messages(answer, op, sandbox, stall)

    async def upload(self, method: str, first: Message, data: AsyncIterator[bytes], *, op: str, sandbox: str = "",
                     step: str = "") -> Message:
        """Send a client stream: first says what it is, data follows in pieces of any size."""
        self._here()
        headers = self._headers("application/connect+json", sandbox, step, "", None)
        try:
            answer = await _http.request(self.pool, "/dsec.v1." + method, headers, _framed(first, data), wait=self.timeout * 10)
        except (_http.Fault, DSecError) as e:
            raise _named(e, op, sandbox) from None
        if answer.status != 200:
            try:
                raw = await answer.all(1 << 20, stall=STALL)
            except _http.Fault as e:
                raise _named(e, op, sandbox) from None
            finally:
                answer.close()
            raise from_wire(_decode(raw), op, sandbox, answer.headers.get("dsec-request", ""), answer.status)
        messages = Messages(answer, op, sandbox, STALL)
        try:
            value = await messages.next()
            if value is None:
                raise Unavailable("the answer has no message", op=op, sandbox=sandbox)
            await messages.next()
            return value
        finally:
            messages.close()


class Messages:
    """The messages of a server stream. One that breaks off is an error, never an end."""

    def __init__(self, answer: _http.Answer, op: str, sandbox: str, stall: Optional[float]) -> None:
        self._answer, self._op, self._sandbox, self._stall = answer, op, sandbox, stall
        self._buffer = bytearray()
        self._ended = False

    async def next(self) -> Optional[Message]:
        """Give the next message; None after the last one."""
        if self._ended:
            return None
        try:
            flags, raw = await self._next()
        except (_http.Fault, DSecError) as e:
            self.close()
            raise _named(e, self._op, self._sandbox) from None
        except BaseException:
            self.close()
            raise
        value = _decode(raw)
        if not isinstance(value, dict) or flags not in (0, END):
            self.close()
            raise Unavailable("the stream has a message that is no JSON object", op=self._op, sandbox=self._sandbox)
        if flags == 0:
            return value
        self._ended = True
        try:
            await self._answer.some(stall=STALL)  # the end of the body, so that the connection is kept
        except (_http.Fault, DSecError):
            pass
        self.close()
        if value.get("error") is not None:
            raise from_wire(value["error"], self._op, self._sandbox, self._answer.headers.get("dsec-request", ""))
        return None

    async def _next(self) -> Tuple[int, bytes]:
        await self._fill(5)
        flags, size = self._buffer[0], int.from_bytes(self._buffer[1:5], "big")
        if size > 64 << 20:
            raise _http.Fault(f"the stream has a message of {size} bytes")
        await self._fill(5 + size)
        raw = bytes(memoryview(self._buffer)[5:5 + size])
        del self._buffer[:5 + size]
        return flags, raw

    async def _fill(self, n: int) -> None:
        while len(self._buffer) < n:
            piece = await self._answer.some(stall=self._stall)
            if not piece:
                raise _http.Fault("the stream ended before its last message")
            self._buffer += piece

    def close(self) -> None:
        """Close the connection, unless the stream was read to its end."""
        self._ended = True
        self._answer.close()


def _json(m: Message) -> bytes:
    return json.dumps(m, separators=(",", ":"), default=_plain).encode()


def _plain(v: Any) -> Any:
    """Give numbers of other libraries, which are numbers by the rules of Python, as JSON has them."""
    if isinstance(v, Integral):
        return int(v)
    if isinstance(v, Real):
        return float(v)
    raise Invalid(f"{v!r} is a {type(v).__name__}, which no call has a place for")


def _frame(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4, "big") + body


async def _framed(first: Message, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    message = dict(first)
    async for big in data:
        view = memoryview(big)
        for at in range(0, len(view), CHUNK):
            message["data"] = to_bytes(view[at:at + CHUNK])
            yield _frame(_json(message))
            message = {}
    if message:
        yield _frame(_json(message))


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _named(e: BaseException, op: str, sandbox: str) -> DSecError:
    """Give what failed here as an error of the call."""
    if not isinstance(e, DSecError):
        return Unavailable(str(e), op=op, sandbox=sandbox)
    if not e.op:
        e.op, e.sandbox = op, e.sandbox or sandbox
    return e


def to_bytes(data: Union[bytes, bytearray, memoryview]) -> str:
    """Give data as JSON has them."""
    return base64.b64encode(data).decode("ascii")


def from_bytes(text: Any) -> bytes:
    """The inverse; nothing where there is nothing."""
    if not text:
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise Unavailable("the answer has malformed data") from None


async def bounded(work: Awaitable[Any], seconds: float) -> None:
    """Wait for work at most so long, whatever comes of it."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
    task.add_done_callback(_http._seen)

