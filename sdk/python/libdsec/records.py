"""What is asked for and what is answered, as plain data.

Times are ``datetime`` in UTC, durations seconds, sizes bytes. Names in a sandbox
may be any bytes: one that is not UTF-8 is a ``str`` with surrogates, as ``os.fsdecode``
gives it, and is sent back exactly.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from . import _check
from ._rpc import from_bytes, to_bytes

Seconds = Union[int, float, timedelta]
Size = Union[int, str]
Name = Union[str, bytes, os.PathLike[str]]

KINDS = ("container", "microvm", "fullvm", "fncall")


@dataclass
class Delegation:
    """What a sandbox may do to others.

    rights: of ``sandboxes``, ``images``, ``delegate``; default the first alone.
    sandboxes, cpu (cores), memory (bytes) and ttl (seconds) bound what it makes, all at once; 0 does not bound.
    port: on its loopback, default 7070.
    """

    rights: Sequence[str] = ()
    sandboxes: int = 0
    cpu: float = 0
    memory: Size = 0
    ttl: Seconds = 0
    port: int = 0

    def __post_init__(self) -> None:
        _check.fields(self)

    def to_wire(self) -> Dict[str, Any]:
        quota = drop({"sandboxes": self.sandboxes, "cpu": self.cpu, "memory": size(self.memory, "Delegation.memory"), "ttl": span(self.ttl, "Delegation.ttl")})
        return drop({"rights": list(self.rights), "quota": quota, "port": self.port})

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> Delegation:
        q = w.get("quota") or {}
        return cls(tuple(w.get("rights") or ()), int(q.get("sandboxes", 0)), float(q.get("cpu", 0)), int(q.get("memory", 0)),
                   unspan(q.get("ttl")), int(w.get("port", 0)))


@dataclass
class Spec:
    """What sandbox is wanted. Only ``image`` is required; what is empty has the server's default.

    image: base image, ``name`` or ``name@version``.
    workspace: image on top of it: a repository and what its task needs.
    toolkits: images on top of both, at most 16.
    kind: ``container``, ``microvm``, ``fullvm`` or ``fncall``. A kind that the server lacks is Unsupported at once.
    cpu: cores, 0.01 to 1024; default 1.
    memory: bytes, or text such as ``"512M"`` (binary units), swap included; at least 4 MiB, default 1 GiB.
    disk: what may be written, as memory; at least 1 MiB, default 10 GiB.
    pids: processes and threads, at least 4; default 1024.
    ttl: seconds from its creation to its end, 1 s to 30 days; default 1 hour.
    idle: seconds without a call or running command until its end; default never.
    user: of commands that name none: name, uid or uid:gid; default the image's, else root.
    cwd: of commands that name none; default the image's, else ``/``.
    env: variables added to the image's.
    labels: the caller's own words, for listing; at most 64, each of up to 256 bytes.
    job: ID of the job that it belongs to.
    project: the tenant; default the token's.
    network: what it may reach; default ``none``, which is loopback only.
    hostname: default the start of its ID.
    api: give what runs in it a token of its own and the API on its loopback, to drive other sandboxes; default none.
    from_snapshot: ID of a snapshot that it begins with; image, kind and limits are the snapshot's then. Of a sandbox that
        a fork made, its parent.
    """

    image: str = ""
    workspace: str = ""
    toolkits: Sequence[str] = ()
    kind: str = ""
    cpu: float = 0
    memory: Size = 0
    disk: Size = 0
    pids: int = 0
    ttl: Seconds = 0
    idle: Seconds = 0
    user: str = ""
    cwd: Name = ""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    job: str = ""
    project: str = ""
    network: str = ""
    hostname: str = ""
    api: Optional[Delegation] = None
    from_snapshot: str = ""

    def __post_init__(self) -> None:
        _check.fields(self)
        size(self.memory, "Spec.memory")
        size(self.disk, "Spec.disk")

    def to_wire(self) -> Dict[str, Any]:
        """Give it as the server reads it."""
        _check.fields(self)  # it may have been changed
        _check.number("Spec.cpu", self.cpu, least=0)
        w = drop({
            "kind": self.kind,
            "environment": drop({"base": self.image, "workspace": self.workspace, "toolkits": list(self.toolkits)}),
            "resources": drop({"cpu": self.cpu, "memory": size(self.memory, "Spec.memory"), "disk": size(self.disk, "Spec.disk"), "pids": self.pids}),
            "ttl": span(self.ttl, "Spec.ttl"), "idle": span(self.idle, "Spec.idle"), "user": self.user, "labels": dict(self.labels), "job": self.job,
            "project": self.project, "network": self.network, "hostname": self.hostname,
            "from": self.from_snapshot,
        })
        if self.api is not None:
            w["api"] = self.api.to_wire()
        put_name(w, "cwd", self.cwd)
        put_env(w, self.env)
        return w

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> Spec:
        e, r = w.get("environment") or {}, w.get("resources") or {}
        return cls(
            image=e.get("base", ""), workspace=e.get("workspace", ""), toolkits=tuple(e.get("toolkits") or ()),
            kind=w.get("kind", ""), cpu=float(r.get("cpu", 0)), memory=int(r.get("memory", 0)), disk=int(r.get("disk", 0)),
            pids=int(r.get("pids", 0)), ttl=unspan(w.get("ttl")), idle=unspan(w.get("idle")), user=w.get("user", ""),
            cwd=get_name(w, "cwd"), env=get_env(w), labels=dict(w.get("labels") or {}), job=w.get("job", ""),
            project=w.get("project", ""), network=w.get("network", ""), hostname=w.get("hostname", ""),
            api=Delegation.from_wire(w["api"]) if w.get("api") is not None else None, from_snapshot=w.get("from", ""))


@dataclass(frozen=True)
class Usage:
    """What a sandbox has used: cpu in seconds, memory, memory_peak and disk in bytes, the others counted.

    fetched: bytes of its images that came from the store while it waited for them; waited: seconds that its
    processes waited, summed. Both are 0 on hosts before Linux 6.12, which do not say who reads.
    """

    cpu: float = 0.0
    memory: int = 0
    memory_peak: int = 0
    disk: int = 0
    pids: int = 0
    commands: int = 0
    oom_kills: int = 0
    fetched: int = 0
    waited: float = 0.0


@dataclass(frozen=True)
class SandboxInfo:
    """The record of one sandbox, as of the call that gave it.

    state: ``creating``, ``running``, ``paused``; finally ``stopped``, ``failed`` or ``lost``.
    cause: why it ended: ``user``, ``ttl``, ``idle``, ``oom``, ``disk``, ``guest-died``, ``node-lost``, ``evicted``, ...
    took: seconds that its creation took; stages has the parts of it.
    """

    id: str
    spec: Spec
    state: str
    cause: str = ""
    detail: str = ""
    node: str = ""
    created: Optional[datetime] = None
    expires: Optional[datetime] = None
    ended: Optional[datetime] = None
    last_used: Optional[datetime] = None
    usage: Usage = Usage()
    layers: Tuple[str, ...] = ()
    key: str = ""
    took: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether its state is not final."""
        return self.state not in ("stopped", "failed", "lost")

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> SandboxInfo:
        u = w.get("usage") or {}
        return cls(
            id=w.get("id", ""), spec=Spec.from_wire(w.get("spec") or {}), state=w.get("state", ""), cause=w.get("cause", ""),
            detail=w.get("detail", ""), node=w.get("node", ""), created=instant(w.get("created")),
            expires=instant(w.get("expires")), ended=instant(w.get("ended")), last_used=instant(w.get("lastUsed")),
            usage=Usage(
                unspan(u.get("cpu")), *(int(u.get(k, 0)) for k in ("memory", "memoryPeak", "disk", "pids", "commands", "oomKills", "fetched")),
                waited=unspan(u.get("waited"))),
            layers=tuple(w.get("layers") or ()), key=w.get("key", ""), took=unspan(w.get("took")),
            stages={s.get("name", ""): unspan(s.get("took")) for s in w.get("stages") or ()})


class Step(NamedTuple):
    """A name for one operation in a sandbox: repeating it gives the recorded answer, nothing runs twice."""

    session: str
    number: int


@dataclass(frozen=True)
class Status:
    """The record of one command.

    outcome: ``running``, ``exited``, ``signaled``, ``timeout``, ``inactive``, ``not-started``, ``interrupted`` (its guest
        is gone; whether it ran to its end is not known) or ``out-of-memory``.
    code: as a shell counts: 0 to 255, 124 timeout, 126 or 127 not started, 128+n signal n; None while it runs.
    signal: ``KILL``, ``TERM``, ... when signaled.
    detail: for people: why it was not started.
    stdout_total, stderr_total: bytes that it wrote.
    stdout_kept, stderr_kept: of these, bytes of the beginning that can be read again.
    cpu: seconds. max_rss: bytes, of the largest process.
    replayed: the answer was recorded by an earlier call of the same step.
    """

    id: str
    outcome: str
    code: Optional[int] = None
    signal: str = ""
    detail: str = ""
    pid: int = 0
    step: Optional[Step] = None
    started: Optional[datetime] = None
    ended: Optional[datetime] = None
    stdout_total: int = 0
    stdout_kept: int = 0
    stderr_total: int = 0
    stderr_kept: int = 0
    cpu: float = 0.0
    max_rss: int = 0
    replayed: bool = False

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.outcome == "running"

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> Status:
        return cls(**_status(w))


@dataclass(frozen=True)
class Result(Status):
    """How a command ended, and the beginning of what it wrote: at most 4 MiB of each stream.

    More, as far as it is kept, is read with ``sandbox.process(result.id).read(...)``.
    """

    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def out(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """Standard error as text; what is not UTF-8 is replaced."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.outcome == "exited" and self.code == 0

    @property
    def truncated(self) -> bool:
        """Whether it wrote more than is here."""
        return self.stdout_total > len(self.stdout) or self.stderr_total > len(self.stderr)

    @classmethod
    def of(cls, w: Mapping[str, Any], stdout: bytes, stderr: bytes) -> Result:
        return cls(stdout=stdout, stderr=stderr, **_status(w))


def _status(w: Mapping[str, Any]) -> Dict[str, Any]:
    step, out, err = w.get("step"), w.get("stdout") or {}, w.get("stderr") or {}
    outcome = w.get("outcome", "")
    return dict(
        id=w.get("id", ""), outcome=outcome, code=None if outcome == "running" else int(w.get("code", 0)),
        signal=w.get("signal", ""), detail=w.get("detail", ""), pid=int(w.get("pid", 0)),
        step=Step(step.get("session", ""), int(step.get("number", 0))) if step else None,
        started=instant(w.get("started")), ended=instant(w.get("ended")),
        stdout_total=int(out.get("total", 0)), stdout_kept=int(out.get("kept", 0)),
        stderr_total=int(err.get("total", 0)), stderr_kept=int(err.get("kept", 0)),
        cpu=unspan(w.get("cpu")), max_rss=int(w.get("maxRss", 0)), replayed=bool(w.get("replayed")))


@dataclass(frozen=True)
class Chunk:
    """A piece of a command's output.

    stream: ``stdout`` or ``stderr``; a terminal has only the first.
    offset: of the data, counting the bytes of both streams.
    gap: bytes before the data that are not kept any more.
    """

    stream: str
    offset: int
    data: bytes
    gap: int = 0


@dataclass(frozen=True)
class FileInfo:
    """One file. type is ``file``, ``dir``, ``symlink``, ``device``, ``pipe`` or ``socket``; mode is within 0o7777."""

    path: str
    type: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    mod_time: Optional[datetime] = None
    target: str = ""
    nlink: int = 0

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> FileInfo:
        return cls(
            path=get_name(w, "path"), type=w.get("type", ""), mode=int(w.get("mode", 0)), uid=int(w.get("uid", 0)),
            gid=int(w.get("gid", 0)), size=int(w.get("size", 0)), mod_time=instant(w.get("modTime")),
            target=get_name(w, "target"), nlink=int(w.get("nlink", 0)))


@dataclass(frozen=True)
class Event:
    """A change in a watched folder: ``ready`` (the watch is set, always first), ``create``, ``write``, ``remove``,
    ``rename`` (``to`` is set when it stays in the folder), ``chmod``, or ``overflow`` (some were dropped: look again)."""

    op: str
    path: str = ""
    to: str = ""


@dataclass(frozen=True)
class ImagePart:
    """One blob of a layer; names: how many names need it."""

    kind: str
    digest: str
    size: int = 0
    names: int = 0


@dataclass(frozen=True)
class ImageUsage:
    """What an image takes, in bytes: unique in the store, needed by no other name; cached on the node that answered."""

    unique: int = 0
    cached: int = 0
    parts: Tuple[ImagePart, ...] = ()


@dataclass(frozen=True)
class Image:
    """A named, immutable version of a layer. size is of its files, stored of what is kept of them, in bytes.

    tags: what else stands for this version now. usage: where it was asked for and could be found out.
    """

    name: str
    version: str
    role: str
    digest: str = ""
    size: int = 0
    stored: int = 0
    entries: int = 0
    created: Optional[datetime] = None
    source: str = ""
    project: str = ""
    env: Tuple[str, ...] = ()
    cwd: str = ""
    user: str = ""
    tags: Tuple[str, ...] = ()
    usage: Optional[ImageUsage] = None

    @property
    def ref(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> Image:
        c = w.get("config") or {}
        return cls(
            name=w.get("name", ""), version=w.get("version", ""), role=w.get("role", ""), digest=w.get("digest", ""),
            size=int(w.get("size", 0)), stored=int(w.get("stored", 0)), entries=int(w.get("entries", 0)),
            created=instant(w.get("created")), source=w.get("source", ""), project=w.get("project", ""),
            env=tuple(c.get("env") or ()), cwd=c.get("cwd", ""), user=c.get("user", ""), tags=tuple(w.get("tags") or ()),
            usage=_usage(w.get("usage")))


def _usage(w: Optional[Mapping[str, Any]]) -> Optional[ImageUsage]:
    if w is None:
        return None
    return ImageUsage(int(w.get("unique", 0)), int(w.get("cached", 0)), tuple(
        ImagePart(p.get("kind", ""), p.get("digest", ""), int(p.get("size", 0)), int(p.get("names", 0))) for p in w.get("parts") or ()))


@dataclass(frozen=True)
class Snapshot:
    """A saved state of a sandbox. size is in bytes; memory: running processes are in it, not files alone; sequence: of its
    record in the sandbox's trajectory."""

    id: str
    project: str
    sandbox: str
    spec: Spec
    layers: Tuple[str, ...] = ()
    created: Optional[datetime] = None
    size: int = 0
    memory: bool = False
    sequence: int = 0
    key: str = ""

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> Snapshot:
        return cls(
            id=w.get("id", ""), project=w.get("project", ""), sandbox=w.get("sandbox", ""), spec=Spec.from_wire(w.get("spec") or {}),
            layers=tuple(w.get("layers") or ()), created=instant(w.get("created")), size=int(w.get("size", 0)),
            memory=bool(w.get("memory")), sequence=int(w.get("sequence", 0)), key=w.get("key", ""))


@dataclass(frozen=True)
class Progress:
    """One report of an import: bytes done of a total (0 when not known); the last one has the image."""

    stage: str
    done: int = 0
    total: int = 0
    image: Optional[Image] = None


def drop(w: Dict[str, Any]) -> Dict[str, Any]:
    """Leave out what is empty: that is its default."""
    return {k: v for k, v in w.items() if v is not None and v != "" and v != 0 and v != {} and v != [] and v != ()}


def size(v: Size, name: str = "size") -> int:
    """Give bytes: a number, or text such as "512M", "1.5G", "2GiB"."""
    if not isinstance(v, str):
        return int(v)
    m = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(?:I?B)?\s*", v, re.IGNORECASE)
    if m is None:
        raise _check.invalid(name, v, "bytes, as a number or as 512M or 2G")
    return int(float(m[1]) * 1024 ** "KMGTP".find(m[2].upper()) * 1024 if m[2] else float(m[1]))


def seconds(v: Seconds) -> float:
    """Give seconds of either form."""
    return v.total_seconds() if isinstance(v, timedelta) else float(v)


def span(v: Optional[Seconds], name: str = "duration") -> Optional[str]:
    """Give a duration as the server reads it; nothing for zero."""
    if v is None or not v:
        return None
    s = seconds(v)
    if not abs(s) < 1e10:
        raise _check.invalid(name, v, "seconds")
    return f"{s:.9f}s"


def unspan(text: Any) -> float:
    return float(text[:-1]) if isinstance(text, str) and text.endswith("s") else 0.0


def instant(text: Any) -> Optional[datetime]:
    """Give a time; what is finer than a microsecond is cut off."""
    m = re.fullmatch(r"(\d+)-(\d+)-(\d+)T(\d+):(\d+):(\d+)(?:\.(\d+))?Z", text) if isinstance(text, str) else None
    if m is None:
        return None
    return datetime(*(int(x) for x in m.groups()[:6]), int((m[7] or "").ljust(6, "0")[:6]), tzinfo=timezone.utc)  # type: ignore[misc,arg-type]


def text_and_bytes(v: Name) -> Tuple[str, Optional[str]]:
    """Split a name for the wire: a readable text, and the exact bytes where the text cannot have them."""
    raw = os.fsencode(v) if not isinstance(v, str) else v.encode("utf-8", "surrogateescape")
    try:
        return raw.decode("utf-8"), None
    except UnicodeDecodeError:
        return raw.decode("utf-8", "replace"), to_bytes(raw)


def put_name(w: Dict[str, Any], key: str, v: Name) -> None:
    text, exact = text_and_bytes(v)
    if text:
        w[key] = text
    if exact:
        w[key + "Bytes"] = exact


def get_name(w: Mapping[str, Any], key: str) -> str:
    exact = w.get(key + "Bytes")
    return from_bytes(exact).decode("utf-8", "surrogateescape") if exact else w.get(key, "")


def put_env(w: Dict[str, Any], env: Mapping[str, str]) -> None:
    texts: Dict[str, str] = {}
    exact: List[str] = []
    for k, v in env.items():
        name, odd_name = text_and_bytes(k)
        value, odd_value = text_and_bytes(v)
        if odd_name or odd_value:
            exact.append(to_bytes(f"{k}={v}".encode("utf-8", "surrogateescape")))
        else:
            texts[name] = value
    if texts:
        w["env"] = texts
    if exact:
        w["envBytes"] = exact


def get_env(w: Mapping[str, Any]) -> Dict[str, str]:
    env = dict(w.get("env") or {})
    for b in w.get("envBytes") or ():
        k, _, v = from_bytes(b).decode("utf-8", "surrogateescape").partition("=")
        env[k] = v
    return env
