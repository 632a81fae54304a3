"""What goes wrong, as one class for each kind.

A program decides by class (or by ``kind`` and ``retryable``); the text is for
people. How a command ended, by its status, a signal or its timeout, is an
outcome, and an error only for who asked for that with ``check=True``: CommandFailed.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, Dict, Optional, Type

if TYPE_CHECKING:
    from .records import Result

__all__ = [
    "DSecError", "Invalid", "Unauthenticated", "Denied", "NotFound", "Exists", "Conflict", "Exhausted",
    "Unavailable", "Lost", "Timeout", "Canceled", "Diverged", "Unsupported", "Internal", "Misused", "CommandFailed",
]


class DSecError(Exception):
    """What every call of this package raises.

    kind: stable name of the kind, ``"not_found"`` and so on.
    op: the operation that found the fault; "" when it is not known.
    sandbox: ID of the sandbox that it is about, or "".
    request: ID of the request, to be found in the server's log, or "".
    retryable: the same call may succeed later without a change.
    """

    kind: str = "internal"
    retryable: bool = False

    def __init__(self, message: str, *, op: str = "", sandbox: str = "", request: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.op = op
        self.sandbox = sandbox
        self.request = request
        # The request never left: repeating it is safe whatever it asks.
        self._not_sent = False

    def __str__(self) -> str:
        text = self.message or self.kind
        if self.sandbox and self.sandbox not in text:
            text = f"sandbox {self.sandbox}: {text}"
        if self.op:
            text = f"{self.op}: {text}"
        if self.request and self.request not in text:
            text = f"{text} (request {self.request})"
        return text

    def __reduce__(self) -> Any:  # so that it crosses processes whole
        return _rebuild, (type(self), self.message, self.op, self.sandbox, self.request)


def _rebuild(cls: Type[DSecError], message: str, op: str, sandbox: str, request: str) -> DSecError:
    return cls(message, op=op, sandbox=sandbox, request=request)


class Invalid(DSecError):
    """The request can never succeed as written."""

    kind = "invalid"


class Unauthenticated(DSecError):
    """No token, or one that is not known."""

    kind = "unauthenticated"


class Denied(DSecError):
    """A known token without the right, or a user without it in the sandbox."""

    kind = "denied"


class NotFound(DSecError):
    """The thing named does not exist."""

    kind = "not_found"


class Exists(DSecError):
    """The name is taken by something else."""

    kind = "exists"


class Conflict(DSecError):
    """Wrong state (such as a sandbox that has ended), or fenced by a newer owner."""

    kind = "conflict"


class Exhausted(DSecError):
    """A quota, a limit or the node is full. The answer is immediate; wait before trying again."""

    kind = "exhausted"
    retryable = True


class Unavailable(DSecError):
    """The server cannot answer now, or there was no answer. What is safe to repeat was repeated."""

    kind = "unavailable"
    retryable = True


class Lost(DSecError):
    """The sandbox, or recorded data of it, existed and is gone: make another one."""

    kind = "lost"


class Timeout(DSecError):
    """The deadline of the call passed. (A command's own timeout is an outcome instead.)"""

    kind = "timeout"
    retryable = True


class Canceled(DSecError):
    """The server ended the call because its caller went away."""

    kind = "canceled"


class Diverged(DSecError):
    """A repeated step asks for something else than was recorded. The text names what differs."""

    kind = "diverged"


class Unsupported(DSecError):
    """This kind of sandbox, host or server lacks the power."""

    kind = "unsupported"


class Internal(DSecError):
    """A fault of the server. Its text stays there, under the ``request``."""

    kind = "internal"


class Misused(Invalid, RuntimeError):
    """A client is used from another process or event loop than its own, or after its end."""


class CommandFailed(DSecError):
    """Raised by ``exec(..., check=True)`` for a command that did not exit with 0. It has the ``result``.

    Its ``kind`` is one of this package's own, which no server gives; repeating the call would run nothing again.
    """

    kind = "command_failed"

    def __init__(self, result: Result, *, sandbox: str = "") -> None:
        super().__init__(_how(result), op="libdsec.exec", sandbox=sandbox)
        self.result = result

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> Any:
        return _failed, (self.result, self.sandbox)


def _failed(result: Result, sandbox: str) -> CommandFailed:
    return CommandFailed(result, sandbox=sandbox)


def _how(r: Result) -> str:
    how = {"exited": f"exited with status {r.code}", "signaled": f"was ended by signal {r.signal}"}.get(r.outcome, r.outcome)
    tail = r.err.strip()[-2000:]
    return f"the command {how}" + (f": {tail}" if tail else "")


KINDS: Dict[str, Type[DSecError]] = {
    c.kind: c
    for c in (Invalid, Unauthenticated, Denied, NotFound, Exists, Conflict, Exhausted, Unavailable, Lost, Timeout,
              Canceled, Diverged, Unsupported, Internal)
}

# One to one, as on the server.
_CODES = {
    "internal": Internal, "invalid_argument": Invalid, "unauthenticated": Unauthenticated, "permission_denied": Denied,
    "not_found": NotFound, "already_exists": Exists, "failed_precondition": Conflict, "resource_exhausted": Exhausted,
    "unavailable": Unavailable, "data_loss": Lost, "deadline_exceeded": Timeout, "canceled": Canceled,
    "aborted": Diverged, "unimplemented": Unsupported,
}

# What something that is no DSec server means by a status of HTTP.
_STATUSES = {401: Unauthenticated, 403: Denied, 404: Unsupported}


def from_wire(error: Any, op: str, sandbox: str, request: str = "", status: int = 200) -> DSecError:
    """Give an error as the server sent it; anything may be missing or malformed."""
    if not isinstance(error, dict) or not isinstance(error.get("code"), str):
        cls = _STATUSES.get(status, Unavailable)
        return cls(f"the answer is HTTP status {status} and no error of DSec", op=op, sandbox=sandbox, request=request)
    cls = _CODES.get(error["code"], Internal)
    message = error.get("message")
    e = cls(message if isinstance(message, str) else "", op=op, sandbox=sandbox, request=request)
    details = error.get("details")
    for d in details if isinstance(details, list) else []:
        if not isinstance(d, dict) or d.get("type") != "dsec.v1.ErrorInfo":
            continue
        info = _texts(d.get("value"))
        e.op = info.get(2) or e.op
        e.sandbox = info.get(3) or e.sandbox
        e.request = info.get(4) or e.request
    return e


def _texts(value: Any) -> Dict[int, str]:
    """Decode the text fields of a protobuf message; nothing of a malformed one."""
    if not isinstance(value, str):
        return {}
    try:
        b = base64.b64decode(value + "=" * (-len(value) % 4))
    except (binascii.Error, ValueError):
        return {}
    out: Dict[int, str] = {}
    at = 0
    while at < len(b):
        tag, at = _varint(b, at)
        size, at = _varint(b, at)
        if tag is None or size is None or tag & 7 != 2 or at + size > len(b):
            return {}
        out[tag >> 3] = b[at:at + size].decode("utf-8", "replace")
        at += size
    return out


def _varint(b: bytes, at: int) -> "tuple[Optional[int], int]":
    value = shift = 0
    while at < len(b) and shift < 64:
        value |= (b[at] & 127) << shift
        at += 1
        if b[at - 1] < 128:
            return value, at
        shift += 7
    return None, at
