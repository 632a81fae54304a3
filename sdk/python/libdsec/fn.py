"""Calls of functions: programs without state, each where nothing of another is and nothing of it is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, AsyncIterator, Dict, Generator, Iterable, List, Mapping, Optional, Sequence, Set, Union

from . import _check
from ._rpc import Channel, Message, from_bytes, to_bytes
from .errors import KINDS, DSecError, Internal, Invalid, Unavailable
from .jobs import Lasting
from .records import Name, Result, Seconds, Size, Spec, drop, put_env, put_name, seconds, size, span, text_and_bytes, unspan
from .sandbox import Argv

if TYPE_CHECKING:
    from .client import DSecClient

GRACE = 120.0  # seconds beyond a call's own, for waiting and building


@dataclass(frozen=True)
class Limits:
    """What a call may use; what is 0 has the server's default.

    time: seconds, default 30. cpu: seconds of all its processes, default 10. memory: bytes or text such as ``"64M"``, files
    included, default 256 MiB. output: bytes of each stream, default 1 MiB, at most 4; more ends the call. pids: default 64.
    """

    time: Seconds = 0
    cpu: Seconds = 0
    memory: Size = 0
    output: Size = 0
    pids: int = 0

    def __post_init__(self) -> None:
        _check.fields(self)

    def to_wire(self) -> Dict[str, Any]:
        return drop({"wall": span(self.time, "Limits.time"), "cpu": span(self.cpu, "Limits.cpu"), "memory": size(self.memory, "Limits.memory"),
                     "output": size(self.output, "Limits.output"), "pids": self.pids})


@dataclass(frozen=True)
class FunctionResult:
    """How a call ended.

    outcome: ``ok``, ``exit`` (another status), ``timeout`` (limit says of which: ``wall`` or ``cpu``), ``memory``, ``output``,
        ``signal`` or ``compile-error`` (the streams are the compiler's).
    code: as a shell counts. stdout, stderr: at most the output limit; the totals say how much was read.
    wall, cpu: seconds. memory: bytes, the peak. warm: an interpreter that was running already answered.
    """

    outcome: str
    limit: str = ""
    code: int = 0
    signal: str = ""
    detail: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    warm: bool = False

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.outcome == "ok"

    @property
    def truncated(self) -> bool:
        """Whether it wrote more than is here."""
        return self.stdout_total > len(self.stdout) or self.stderr_total > len(self.stderr)

    @property
    def out(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def err(self) -> str:
        """Standard error as text; what is not UTF-8 is replaced."""
        return self.stderr.decode("utf-8", "replace")

    @classmethod
    def from_wire(cls, w: Mapping[str, Any]) -> FunctionResult:
        return cls(w.get("outcome", ""), w.get("limit", ""), int(w.get("code", 0)), w.get("signal", ""), w.get("detail", ""),
                   from_bytes(w.get("stdout", "")), from_bytes(w.get("stderr", "")), int(w.get("stdoutTotal", 0)),
                   int(w.get("stderrTotal", 0)), unspan(w.get("wall")), unspan(w.get("cpu")), int(w.get("memory", 0)),
                   bool(w.get("warm", False)))


@dataclass(frozen=True)
class Case:
    """One run of a batch. What is not None or empty replaces what the batch has."""

    input: Union[None, bytes, str] = None
    args: Sequence[str] = ()
    source: Union[None, bytes, str] = None
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        _check.fields(self)

    def to_wire(self) -> Dict[str, Any]:
        w: Dict[str, Any] = drop({"limits": self.limits.to_wire()})
        for key, value in (("source", self.source), ("stdin", self.input)):
            if value is not None:
                w[key] = to_bytes(_bytes(value))
        _put_args(w, self.args)
        put_env(w, self.env)
        return w


@dataclass(frozen=True)
class FunctionItem:
    """The end of one case: its index, and its result or the error that kept it from running."""

    index: int
    result: Optional[FunctionResult] = None
    error: Optional[DSecError] = None


class Batch(Lasting):
    """The ends of the cases: ``async for`` takes them as they come, ``await`` all of them as a list in their order.

    Nothing is done before either; one that is dropped without is warned of, as a coroutine is. A broken connection
    is taken up with the cases that are not over.
    """

    def __init__(self, channel: Channel, m: Message) -> None:
        self._m = m
        self._index = list(range(len(m["cases"])))
        self._count = len(self._index)
        self._begun = False
        self._seen: Set[int] = set()
        super().__init__(channel, "Functions/Batch", m, "libdsec.fn.batch")

    def _rest(self) -> None:
        left = [(i, c) for i, c in zip(self._index, self._m["cases"]) if i not in self._seen]
        self._index = [i for i, _ in left]
        self._m["cases"] = [c for _, c in left]

    def __aiter__(self) -> AsyncIterator[FunctionItem]:
        return self

    async def __anext__(self) -> FunctionItem:
        while True:
            if self._count and len(self._seen) == self._count and self._messages is None:
                raise StopAsyncIteration
            self._begun = True
            w = await self._lasting()
            if w is None:
                if len(self._seen) < self._count:
                    raise Unavailable("the batch ended early", op="libdsec.fn.batch")
                raise StopAsyncIteration
            at = int(w.get("index", 0))
            if not 0 <= at < len(self._index):
                raise Unavailable("a result has no case", op="libdsec.fn.batch")
            index = self._index[at]
            if index in self._seen:
                continue
            self._seen.add(index)
            if w.get("errorKind"):
                return FunctionItem(index, error=KINDS.get(w["errorKind"], Internal)(w.get("error", ""), op="libdsec.fn.batch"))
            return FunctionItem(index, FunctionResult.from_wire(w.get("result") or {}))

    async def _all(self) -> List[FunctionItem]:
        async with self:
            return sorted([i async for i in self], key=lambda i: i.index)

    def __await__(self) -> Generator[Any, None, List[FunctionItem]]:
        return self._all().__await__()


@_check.typed
class Functions:
    """Judges, compilers, graders: what needs no state."""

    def __init__(self, client: DSecClient) -> None:
        self._client = client

    async def call(self, source: Union[bytes, str], *, runtime: str = "python3", image: str = "", spec: Optional[Spec] = None,
                   args: Sequence[str] = (), input: Union[None, bytes, str] = None,
                   files: Optional[Mapping[str, Union[bytes, str]]] = None, env: Optional[Mapping[str, str]] = None,
                   user: str = "", preload: Sequence[str] = (), limits: Limits = Limits()) -> FunctionResult:
        """Run a program once, where it finds nothing but its images and what it is given.

        source: the program. runtime: ``python3``, ``bash``, ``sh``, ``c``, ``c++``, ``go`` or ``node``, as far as the image has it.
        image, or spec for an environment of more than that; of a spec nothing but the environment and project counts.
        files: contents by path below the working folder, ``/work``. preload: Python modules that are imported before the call.

        Errors: Unsupported for a runtime that the image lacks, Invalid for a bad call, Exhausted when there is no room. How the
        program ended is no error. A call is repeated when there was no answer: it has no effect outside of itself.
        """
        f = _function(source, runtime, image, spec, args, input, files, env, user, preload, limits)
        deadline = (seconds(limits.time) or 30.0) + GRACE
        return FunctionResult.from_wire(await self._client._channel.unary("Functions/Call", {"function": f}, op="libdsec.fn.call",
                                                                          safe=True, deadline=deadline))

    def batch(self, cases: Iterable[Case], *, source: Union[bytes, str] = b"", runtime: str = "python3", image: str = "",
              spec: Optional[Spec] = None, args: Sequence[str] = (), files: Optional[Mapping[str, Union[bytes, str]]] = None,
              env: Optional[Mapping[str, str]] = None, user: str = "", preload: Sequence[str] = (), limits: Limits = Limits(),
              at_a_time: int = 0) -> Batch:
        """Run a program on many inputs, each as ``call`` does; a source is built once.

        at_a_time: cases that run at once, at most 64; default what the node finds good.
        """
        f = _function(source, runtime, image, spec, args, None, files, env, user, preload, limits)
        m = drop({"function": f, "cases": [c.to_wire() for c in cases], "atATime": at_a_time})
        if "cases" not in m:
            raise Invalid("a batch has no case", op="libdsec.fn.batch")
        return Batch(self._client._channel, m)

    async def run(self, command: Argv, *, image: str = "", spec: Optional[Spec] = None, input: Union[None, bytes, str] = None,
                  files: Optional[Mapping[str, Union[bytes, str]]] = None, env: Optional[Mapping[str, str]] = None, cwd: Name = "",
                  user: str = "", timeout: Seconds = 60, check: bool = False) -> Result:
        """Run a command in a sandbox that nobody used before.

        image, or spec for more than that; a spec that names no kind is of kind ``fncall``, or ``container`` where there are
        files, which sandboxes of that kind have not. files: contents by path, written before. The others as for
        ``Sandbox.exec``; timeout is 60 seconds unless it is given. For many short programs, ``call`` is faster.
        """
        wanted = spec if spec is not None else Spec(image=image)
        if not wanted.kind:
            wanted = Spec(**{**wanted.__dict__, "kind": "container" if files else "fncall"})
        async with await self._client.create(wanted) as sandbox:
            for path, content in (files or {}).items():
                await sandbox.files.write(path, content, parents=True)
            return await sandbox.exec(command, input=input, env=env, cwd=cwd, user=user, timeout=timeout, check=check)


def _bytes(v: Union[bytes, str]) -> bytes:
    return v.encode() if isinstance(v, str) else bytes(v)


def _put_args(w: Dict[str, Any], args: Sequence[str]) -> None:
    both = [text_and_bytes(a) for a in args]
    if any(exact for _, exact in both):
        w["argsBytes"] = [exact or to_bytes(text.encode()) for text, exact in both]
    if both:
        w["args"] = [text for text, _ in both]


def _function(source: Union[bytes, str], runtime: str, image: str, spec: Optional[Spec], args: Sequence[str],
              input: Union[None, bytes, str], files: Optional[Mapping[str, Union[bytes, str]]], env: Optional[Mapping[str, str]],
              user: str, preload: Sequence[str], limits: Limits) -> Message:
    s = spec if spec is not None else Spec(image=image)
    w: Dict[str, Any] = drop({
        "environment": drop({"base": s.image, "workspace": s.workspace, "toolkits": list(s.toolkits)}), "project": s.project,
        "runtime": runtime, "preload": list(preload), "source": to_bytes(_bytes(source)),
        "stdin": to_bytes(_bytes(input)) if input is not None else None, "user": user, "limits": limits.to_wire(),
    })
    _put_args(w, args)
    put_env(w, env or {})
    entries = []
    for path, content in (files or {}).items():
        entry: Dict[str, Any] = {"data": to_bytes(_bytes(content))}
        put_name(entry, "path", path)
        entries.append(entry)
    if entries:
        w["files"] = entries
    return w
