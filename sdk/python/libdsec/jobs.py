"""Jobs: the sandboxes of one trainer run, owned under a lease.

A trainer holds the lease by renewing it. When it dies, the server does what the
job says with its sandboxes; the trainer that comes back opens the job and is its
next owner. Calls of the one before are then Conflict: it is fenced.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import secrets
import warnings
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import TracebackType
from typing import Any, AsyncIterator, Callable, Dict, Generator, Iterable, List, Mapping, Optional, Set, Type, Union

from . import _check
from ._rpc import Channel, Message
from .errors import KINDS, DSecError, Internal, Unavailable
from .files import Stream
from .records import SandboxInfo, Seconds, Spec, drop, instant, span, unspan
from .sandbox import Sandbox, create

log = logging.getLogger("libdsec")


@dataclass(frozen=True)
class JobInfo:
    """The record of one job.

    on_disconnect: ``pause``, ``keep`` or ``stop``: what becomes of its sandboxes when the lease ends.
    lease: seconds. epoch: of the present owner, 0 before there was one. state: ``active``, ``disconnected`` or ``stopped``.
    counts: its sandboxes by state, those that ended in the last 24 h included. events: number of its last event.
    """

    id: str
    project: str = ""
    on_disconnect: str = ""
    lease: float = 0.0
    epoch: int = 0
    state: str = ""
    lease_ends: Optional[datetime] = None
    created: Optional[datetime] = None
    labels: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    events: int = 0

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> JobInfo:
        return cls(
            id=w.get("id", ""), project=w.get("project", ""), on_disconnect=w.get("onDisconnect", ""), lease=unspan(w.get("lease")),
            epoch=int(w.get("epoch", 0)), state=w.get("state", ""), lease_ends=instant(w.get("leaseEnds")),
            created=instant(w.get("created")), labels=dict(w.get("labels") or {}),
            counts={k: int(v) for k, v in (w.get("counts") or {}).items()}, events=int(w.get("events", 0)))


@dataclass(frozen=True)
class JobEvent:
    """Something that happened. Events of a job are numbered from 1 without gaps.

    type: ``created``, ``paused``, ``resumed``, ``stopped``, ``failed``, ``oom``, ``lost``, ``lease-lost``, ``owner-changed``, or
        ``gap``: ``missed`` events before the next one are not kept any more.
    sandbox, key: whose it is; "" for what concerns the job as a whole.
    retry: creating it again may lead to a better end.
    """

    seq: int
    type: str
    time: Optional[datetime] = None
    sandbox: str = ""
    key: str = ""
    cause: str = ""
    detail: str = ""
    retry: bool = False
    epoch: int = 0
    missed: int = 0

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> JobEvent:
        return cls(
            seq=int(w.get("seq", 0)), type=w.get("type", ""), time=instant(w.get("time")), sandbox=w.get("sandbox", ""),
            key=w.get("key", ""), cause=w.get("cause", ""), detail=w.get("detail", ""), retry=bool(w.get("retry")),
            epoch=int(w.get("epoch", 0)), missed=int(w.get("missed", 0)))


@dataclass(frozen=True)
class JobResult:
    """What became of one sandbox in a call on many: ``sandbox``, or the ``error``; ``id`` is "" when there is none."""

    index: int
    key: str
    id: str
    sandbox: Optional[Sandbox]
    error: Optional[DSecError]


@dataclass(frozen=True)
class Item:
    """One sandbox of ``Job.create_many``. key: its name in the job, unique; default its position."""

    spec: Spec
    key: str = ""

    def __post_init__(self) -> None:
        _check.fields(self)


@_check.typed
class Jobs:
    """The jobs that the token's project has."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def create(self, id: str = "", *, on_disconnect: str = "pause", lease: Seconds = 30, labels: Optional[Mapping[str, str]] = None,
                     project: str = "", key: Optional[str] = None) -> Job:
        """Make a job; the caller is its first owner.

        id: default one is made. on_disconnect: ``pause``, ``keep`` or ``stop``. lease: seconds, 1 s to 24 h.
        key: repeating a create with the same key gives the same job. Exists: the ID is taken.
        """
        m = drop({"job": id, "project": project, "onDisconnect": on_disconnect, "lease": span(lease), "labels": dict(labels or {})})
        return self._job(await self._channel.unary("Jobs/Create", m, op="libdsec.jobs.create", key=key or secrets.token_hex(12)))

    async def open(self, id: str) -> Job:
        """Become the owner: the one before is fenced, a new lease begins. It resumes nothing: a paused sandbox wakes when it
        is used. Conflict: the job is stopped."""
        return self._job(await self._channel.unary("Jobs/Open", {"job": id}, op="libdsec.jobs.open"))

    async def attach(self, id: str) -> Job:
        """Give a job without owning it, as an operator or a watcher does."""
        return Job(self._channel, await self.get(id))

    async def get(self, id: str) -> JobInfo:
        """Give the record of one."""
        return JobInfo.from_wire(await self._channel.unary("Jobs/Get", {"job": id}, op="libdsec.jobs.get", safe=True))

    async def list(self) -> List[JobInfo]:
        """Give all, newest first."""
        a = await self._channel.unary("Jobs/List", {}, op="libdsec.jobs.list", safe=True)
        return [JobInfo.from_wire(w) for w in a.get("jobs") or ()]

    def _job(self, w: Message) -> Job:
        info = JobInfo.from_wire(w)
        channel = copy.copy(self._channel)  # the same connections; its calls carry the epoch
        channel._common = dict(channel._common, **{"Dsec-Job-Epoch": str(info.epoch)})
        return Job(channel, info, info.epoch)


@_check.typed
class Job:
    """One job. As ``async with`` it renews the lease in the background; leaving stops that and lets the lease end."""

    def __init__(self, channel: Channel, info: JobInfo, epoch: int = 0) -> None:
        self._channel = channel
        self.info = info
        self.id = info.id
        self.epoch = epoch
        self.fenced: Optional[DSecError] = None  # why the background gave the lease up
        self._keeper: "Optional[asyncio.Task[None]]" = None
        self._stopped = False

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.info.state}, epoch {self.epoch}>"

    async def renew(self) -> JobInfo:
        """Begin the lease anew. Conflict: somebody else opened the job, or it is stopped."""
        a = await self._channel.unary("Jobs/Renew", {"job": self.id, "epoch": str(self.epoch)}, op="libdsec.job.renew", safe=True)
        self.info = JobInfo.from_wire(a)
        return self.info

    def keep(self) -> None:
        """Renew the lease in the background, three times as often as needed, until release or the end of the client. When the
        job has another owner, ``fenced`` says so."""
        if self._keeper is None:
            self._keeper = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.info.lease / 3)
            try:
                await self.renew()
            except DSecError as e:
                if e.retryable:
                    continue
                if self._stopped:  # by this program: nobody took it away
                    return
                self.fenced = e
                log.warning("job %s: the lease is lost: %s", self.id, e)
                return

    async def release(self) -> None:
        """Stop renewing in the background."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def refresh(self) -> JobInfo:
        """Ask for the record."""
        self.info = JobInfo.from_wire(await self._channel.unary("Jobs/Get", {"job": self.id}, op="libdsec.job.get", safe=True))
        return self.info

    async def create(self, spec: Spec, *, key: Optional[str] = None, timeout: Seconds = 600) -> Sandbox:
        """Make a sandbox of this job; as ``client.create``."""
        return await create(self._channel, replace(spec, job=self.id), key, timeout)

    def create_many(self, items: Iterable[Union[Spec, Item]]) -> Results:
        """Make up to 32,000 sandboxes: one result for each, in the order in which they come.

        Repeating it with the same keys makes nothing twice, so a broken connection is taken up. The rest is Conflict when the
        lease is lost meanwhile.
        """
        specs: List[Message] = []
        places: Dict[str, int] = {}  # by content: an object may be gone, or changed, by the time the next one comes
        wire: List[Message] = []
        for i, item in enumerate(items):
            if not isinstance(item, (Spec, Item)):
                raise _check.invalid(f"items[{i}]", item, "Spec or Item", "libdsec.job.create_many")
            spec, key = (item, "") if isinstance(item, Spec) else (item.spec, item.key)
            content = spec.to_wire()
            place = places.setdefault(json.dumps(content, sort_keys=True, default=float), len(specs))
            if place == len(specs):
                specs.append(content)
            wire.append(drop({"key": key or str(i), "spec": place}))
        m = drop({"job": self.id, "epoch": str(self.epoch), "specs": specs, "items": wire})
        return Results(self._channel, "Jobs/CreateMany", m, "libdsec.job.create_many")

    async def get(self, id: str) -> Sandbox:
        """Find a sandbox of this job; its calls carry the epoch."""
        a = await self._channel.unary("Sandboxes/Get", {}, op="libdsec.get", sandbox=id, safe=True)
        return Sandbox(self._channel, SandboxInfo.from_wire(a))

    async def sandboxes(self, *, all: bool = False) -> List[Sandbox]:
        """Give its sandboxes, newest first; with those that ended if all."""
        a = await self._channel.unary("Sandboxes/List", drop({"all": all, "job": self.id}), op="libdsec.list", safe=True)
        return [Sandbox(self._channel, SandboxInfo.from_wire(w)) for w in a.get("sandboxes") or ()]

    def pause(self) -> Results:
        """Pause all sandboxes that run."""
        return Results(self._channel, "Jobs/Pause", {"job": self.id}, "libdsec.job.pause")

    def resume(self) -> Results:
        """Let all sandboxes go on."""
        return Results(self._channel, "Jobs/Resume", {"job": self.id}, "libdsec.job.resume")

    def stop(self) -> Results:
        """End all sandboxes and the job, which cannot be opened again."""
        return Results(self._channel, "Jobs/Stop", {"job": self.id}, "libdsec.job.stop", self._stops)

    def _stops(self) -> None:
        self._stopped = True

    def label(self, labels: Mapping[str, str]) -> Results:
        """Set labels of the job and of its sandboxes that have not ended; an empty value takes one away."""
        return Results(self._channel, "Jobs/Label", {"job": self.id, "labels": dict(labels)}, "libdsec.job.label")

    def events(self, *, after: int = 0, follow: bool = True) -> Events:
        """Give what happened behind event number after; follow waits for more. A broken connection is taken up."""
        return Events(self._channel, self.id, after, follow)

    async def __aenter__(self) -> Job:
        self.keep()
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        await self.release()


class Lasting(Stream):
    """A server stream that is opened again where it broke."""

    _begun = True  # False for what does nothing until it is awaited

    def __init__(self, channel: Channel, method: str, m: Message, op: str) -> None:
        super().__init__(channel, method, m, op, "", None)
        self._what = op
        self._patience = channel.patience(True)

    async def aclose(self) -> None:
        """End it early. Doing it twice is harmless."""
        self._begun = True
        await super().aclose()

    def __del__(self) -> None:
        if not self._begun:
            warnings.warn(f"{self._what} was never awaited: nothing is done", RuntimeWarning, source=self)
        super().__del__()

    def _rest(self) -> None:
        """Say what is still to be asked for."""
        raise NotImplementedError

    async def _lasting(self) -> Optional[Message]:
        while True:
            try:
                m = await self._next()
                self._patience.answered()
                return m
            except DSecError as e:
                if self._messages is None:  # opening it was repeated already
                    raise
                self._messages.close()
                self._messages = None
                self._patience.broken(e)
                try:
                    await self._patience.again(e)
                except BaseException:
                    self._ended = True
                    raise
                self._rest()


class Results(Lasting):
    """One result for each sandbox: ``async for`` takes them as they come, ``await`` all of them as a list.

    Nothing is done before either; one that is dropped without is warned of, as a coroutine is.
    """

    def __init__(self, channel: Channel, method: str, m: Message, op: str, begins: Optional[Callable[[], None]] = None) -> None:
        self._m, self._op = dict(m), op
        self._begins = begins
        super().__init__(channel, method, self._m, op)
        self._index: Optional[List[int]] = list(range(len(m["items"]))) if "items" in m else None
        self._first = self._index
        self._begun = False
        self._seen: Set[Any] = set()

    def _rest(self) -> None:
        if self._index is None or self._first is None:
            return  # all of it again, which is harmless; what was seen is not told twice
        items = [(i, w) for i, w in zip(self._index, self._m["items"]) if i not in self._seen]
        self._index = [i for i, _ in items]
        self._m["items"] = [w for _, w in items]

    def __aiter__(self) -> AsyncIterator[JobResult]:
        return self

    async def __anext__(self) -> JobResult:
        while True:
            if self._index is not None and len(self._seen) == len(self._first or ()) and self._messages is None and self._seen:
                raise StopAsyncIteration
            if not self._begun and self._begins is not None:
                self._begins()
            self._begun = True
            w = await self._lasting()
            if w is None:
                raise StopAsyncIteration
            info = SandboxInfo.from_wire(w.get("sandbox") or {})
            index = int(w.get("index", 0))
            if self._index is not None:
                if not 0 <= index < len(self._index):
                    raise Unavailable("a result has no item", op=self._op)
                index = self._index[index]
            name = index if self._index is not None else info.id
            if name in self._seen:
                continue
            self._seen.add(name)
            error = None
            if w.get("error"):
                e = w["error"]
                error = KINDS.get(e.get("kind", ""), Internal)(e.get("message", ""), op=self._op, sandbox=info.id)
            sandbox = Sandbox(self._channel, info) if error is None else None
            return JobResult(index, w.get("key", ""), info.id, sandbox, error)

    async def _all(self) -> List[JobResult]:
        async with self:
            return [r async for r in self]

    def __await__(self) -> Generator[Any, None, List[JobResult]]:
        return self._all().__await__()


class Events(Lasting):
    """Events of a job, for ``async for``. Close it, or leave ``async with``, to stop."""

    def __init__(self, channel: Channel, job: str, after: int, follow: bool) -> None:
        self._m: Message = drop({"job": job, "after": str(after), "follow": follow})
        super().__init__(channel, "Jobs/Events", self._m, "libdsec.job.events")

    def _rest(self) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[JobEvent]:
        return self

    async def __anext__(self) -> JobEvent:
        w = await self._lasting()
        if w is None:
            raise StopAsyncIteration
        e = JobEvent.from_wire(w)
        if e.seq:
            self._m["after"] = str(e.seq)
        return e

    async def __aenter__(self) -> Events:
        return self
