"""A sandbox: run commands in it, use its files and ports, end it."""

from __future__ import annotations

import asyncio
import secrets
from types import TracebackType
from typing import Any, AsyncIterable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union

from . import _check
from ._rpc import CHUNK, Channel, Message, Steps, from_bytes, to_bytes
from .errors import CommandFailed, Conflict, DSecError, Invalid, Timeout
from .files import Files
from .ports import Ports
from .process import Process
from .snapshots import Screen
from .records import Image, Name, Result, SandboxInfo, Seconds, Size, Snapshot, Spec, Status, drop, put_env, put_name, seconds, size, span, text_and_bytes

Argv = Union[str, Sequence[Name]]
StepName = Union[None, int, str, Tuple[str, int]]

MAX_STDIN = 4 << 20  # that one call takes; more is fed piece by piece
GATHER = 0.1  # seconds
LOOK = 2.0  # seconds for that
NEWEST = 256  # sandboxes among which one that was just made is looked for
KILL = 5.0  # seconds that the killing of an abandoned command may take


@_check.typed
class Operations:
    """What a Sandbox and a Session of it can do: the same, under names of their own."""

    def __init__(self, channel: Channel, sandbox: str, steps: Steps) -> None:
        self._channel = channel
        self._steps = steps
        self.id = sandbox
        self.files = Files(channel, sandbox, steps)
        self.ports = Ports(channel, sandbox)

    async def exec(self, command: Argv, *, input: Union[None, bytes, str] = None, env: Optional[Mapping[str, str]] = None,
                   cwd: Name = "", user: str = "", timeout: Seconds = 0, idle: Seconds = 0, output: Size = 0,
                   step: StepName = None, check: bool = False, kill_on_cancel: bool = False) -> Result:
        """Run a command to its end.

        command: a line for the sandbox's ``/bin/sh -c``, or a program and its arguments.
        input: standard input, of any size; default none at all.
        env: variables added to the sandbox's. cwd: absolute. user: name, uid or uid:gid.
        timeout: seconds after which its whole tree of processes is killed; default none, at most 30 days.
        idle: seconds without output after which it is; default none.
        output: bytes kept of each stream, default 16 MiB, at most 1 GiB; the result has the first 4 MiB.
        step: a name for this operation instead of the session's next one.
        check: raise CommandFailed unless it exits with 0.
        kill_on_cancel: kill it when this task is cancelled. Otherwise it runs on: repeat the step, or find it with
            ``processes()``. Either way the task is cancelled at once.

        A timeout, a signal or a program that cannot be started is an outcome of the Result. Errors: Invalid for a user
        or folder that does not exist, Conflict for a sandbox that has ended, Diverged for a step of another command.
        """
        raw = input.encode() if isinstance(input, str) else input
        c = _command(command, env, cwd, user, timeout, idle, output)
        name = self._steps.take(step)
        if kill_on_cancel or (raw is not None and len(raw) > MAX_STDIN):
            result = await self._long(c, raw, name, kill_on_cancel)
        else:
            m: Message = {"command": c}
            if raw:
                m["stdin"] = to_bytes(raw)
            a = await self._run(m, name)
            result = Result.of(a.get("status") or {}, from_bytes(a.get("stdout")), from_bytes(a.get("stderr")))
        if check and not result.ok:
            raise CommandFailed(result, sandbox=self.id)
        return result

    async def _run(self, m: Message, step: str) -> Message:
        patience = self._channel.patience(True)
        while True:
            try:
                return await self._channel.unary("Commands/Run", m, op="libdsec.exec", sandbox=self.id, step=step, wait=None)
            except DSecError as e:  # it may have run for long: the step attaches to it
                patience.broken(e)
                await patience.again(e)

    async def _long(self, c: Message, raw: Optional[bytes], step: str, kill: bool) -> Result:
        """Run a command whose ID has to be known, or whose input is long."""
        if raw is not None:
            c = dict(c, stdin="pipe")
        try:
            p = await self._start(c, step)
            if raw is not None and p.status.running:
                try:
                    for at in range(0, max(len(raw), 1), CHUNK):
                        await p._write(drop({"id": p.id, "offset": str(at), "data": to_bytes(raw[at:at + CHUNK]), "close": at + CHUNK >= len(raw)}))
                except Conflict:  # it ended, or closed its input, without reading all: no error, as with a pipe
                    pass
            return await p.result()
        except asyncio.CancelledError:
            if kill:
                self._channel.spawn(self._kill(c, step))
            raise

    async def _kill(self, c: Message, step: str) -> None:
        """Kill a command whose caller went away, also one whose start was not answered yet."""

        async def work() -> None:
            p = await self._start(c, step)  # the step finds it
            await self._channel.unary("Commands/Signal", {"id": p.id, "signal": "KILL"}, op="libdsec.kill", sandbox=self.id, wait=KILL)

        try:
            await asyncio.wait_for(work(), KILL)
        except (DSecError, asyncio.TimeoutError):
            pass

    async def start(self, command: Argv, *, stdin: bool = False, env: Optional[Mapping[str, str]] = None, cwd: Name = "",
                    user: str = "", timeout: Seconds = 0, idle: Seconds = 0, output: Size = 0, step: StepName = None) -> Process:
        """Start a command and return at once. It runs whether or not anybody looks.

        stdin: give it a pipe to read from, fed by ``Process.write``. The others as for exec.
        """
        c = _command(command, env, cwd, user, timeout, idle, output)
        if stdin:
            c["stdin"] = "pipe"
        return await self._start(c, self._steps.take(step))

    async def pty(self, command: Argv = "exec /bin/sh", *, rows: int = 24, cols: int = 80, env: Optional[Mapping[str, str]] = None,
                  cwd: Name = "", user: str = "", timeout: Seconds = 0, idle: Seconds = 0, output: Size = 0,
                  step: StepName = None) -> Process:
        """Start a command with a terminal of so many rows and columns; default a shell.

        What it shows comes as ``stdout``; ``close_stdin`` types an end of file.
        """
        c = _command(command, env, cwd, user, timeout, idle, output)
        c["stdin"] = "pipe"
        c["tty"] = {"rows": rows, "cols": cols}
        return await self._start(c, self._steps.take(step))

    async def _start(self, c: Message, step: str) -> Process:
        a = await self._channel.unary("Commands/Start", {"command": c}, op="libdsec.start", sandbox=self.id, step=step)
        return Process(self._channel, self.id, Status.from_wire(a), self._steps, 0)

    def process(self, id: str) -> Process:
        """Give a command that was started before, by its ID. It makes no call."""
        return Process(self._channel, self.id, Status(id=id, outcome=""), self._steps)

    async def processes(self) -> List[Status]:
        """Give the commands that run and those still remembered, oldest first."""
        a = await self._channel.unary("Commands/List", {}, op="libdsec.processes", sandbox=self.id, safe=True)
        return [Status.from_wire(w) for w in a.get("commands") or ()]


@_check.typed
class Sandbox(Operations):
    """One sandbox. ``info`` is as of the last call that told it.

    As ``async with`` it is stopped at the end. Every call but a read has a step of a random session, so that a broken
    connection is no reason to fail or to do it twice; ``session`` names the steps for a trainer that may be restarted.
    """

    def __init__(self, channel: Channel, info: SandboxInfo) -> None:
        super().__init__(channel, info.id, Steps())
        self.info = info
        self.screen = Screen(channel, info.id)
        self._sessions: Dict[str, Session] = {}

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}: {self.info.state}>"

    def session(self, name: str) -> Session:
        """Give a view of this sandbox that numbers its operations 1, 2, 3 and so on, in the order in which they begin.

        A program that is restarted and makes the same calls in the same order repeats the same names: what was done is
        answered from the record, what still runs is attached to, nothing runs twice. A call that differs is Diverged. One
        Sandbox object gives one session of a name; a new one, as after a restart, counts from 1.
        """
        if name not in self._sessions:
            if not name:
                raise Invalid("a session needs a name")
            self._sessions[name] = Session(self, name)
        return self._sessions[name]

    async def refresh(self) -> SandboxInfo:
        """Ask for the record."""
        return await self._told("Get", {}, safe=True)

    async def extend(self, ttl: Seconds) -> SandboxInfo:
        """Move the end of its time to live to ttl seconds from now, at most 30 days."""
        return await self._told("Extend", {"ttl": span(ttl) or "0s"}, safe=True)

    async def stop(self) -> SandboxInfo:
        """End it and everything in it; return once nothing of it is left. One that has ended is left as it is."""
        return await self._told("Stop", {}, safe=True, wait=None)

    async def wait(self) -> SandboxInfo:
        """Return the record once it has ended, however long that takes."""
        a = await self._channel.poll("Sandboxes/Wait", {}, lambda a: not SandboxInfo.from_wire(a).alive, op="libdsec.wait", sandbox=self.id)
        self.info = SandboxInfo.from_wire(a)
        return self.info

    async def commit(self, name: str) -> Image:
        """Write what changed in its root as a workspace image, ``name@version``.

        It is frozen while its files are read. Exists: the version is taken.
        """
        a = await self._channel.unary("Sandboxes/Commit", {"name": name}, op="libdsec.commit", sandbox=self.id, wait=None)
        return Image.from_wire(a)

    async def pause(self) -> SandboxInfo:
        """Freeze it and give its memory back. Any use of it resumes it. Pausing a paused one is success."""
        return await self._told("Pause", {}, safe=True, wait=None)

    async def resume(self) -> SandboxInfo:
        """Let it run on. Resuming a running one is success."""
        return await self._told("Resume", {}, safe=True, wait=None)

    async def snapshot(self, *, key: Optional[str] = None) -> Snapshot:
        """Save its state: of a container its files, of a virtual machine memory and disk. It runs on.

        A Spec with ``from_snapshot`` makes a sandbox of it, also when this one has ended. key: repeating it with the same
        key gives the same snapshot. Unsupported: its kind cannot be saved.
        """
        a = await self._channel.unary("Snapshots/Take", {}, op="libdsec.snapshot", sandbox=self.id, key=key or secrets.token_hex(12), wait=None)
        return Snapshot.from_wire(a)

    async def fork(self, count: int = 1, *, ttl: Seconds = 0, labels: Optional[Mapping[str, str]] = None, key: Optional[str] = None) -> List[Sandbox]:
        """Make sandboxes that begin as copies of this one as it is now: all of them, or none. It runs on.

        count: at most 64. ttl: seconds from the fork to their end; default as the parent's. labels: over those of the
        parent. key: repeating it with the same key gives the same children.
        """
        m = drop({"count": count, "ttl": span(ttl), "labels": dict(labels or {})})
        a = await self._channel.unary("Snapshots/Fork", m, op="libdsec.fork", sandbox=self.id, key=key or secrets.token_hex(12), wait=None)
        return [Sandbox(self._channel, SandboxInfo.from_wire(w)) for w in a.get("sandboxes") or ()]

    async def _told(self, verb: str, m: Message, **how: Any) -> SandboxInfo:
        a = await self._channel.unary("Sandboxes/" + verb, m, op="libdsec." + verb.lower(), sandbox=self.id, **how)
        self.info = SandboxInfo.from_wire(a)
        return self.info

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        stop = asyncio.ensure_future(self.stop())
        try:
            await asyncio.shield(stop)
        except asyncio.CancelledError:
            # Cancelled at once, but nothing is left behind.
            self._channel.spawn(_quiet(stop))
            raise


async def create(channel: Channel, spec: Spec, key: Optional[str], timeout: Seconds) -> Sandbox:
    """Make a sandbox. One that nobody learns of, because its caller went away or waited no longer while the answer was on
    its way, is ended; with a key of the caller's own it stays, for that key finds it."""
    _check.number("timeout", seconds(timeout), least=0, above=True, op="libdsec.create")
    own = key or secrets.token_hex(12)
    try:
        a = await channel.unary("Sandboxes/Create", {"spec": spec.to_wire()}, op="libdsec.create", key=own, deadline=seconds(timeout))
    except (asyncio.CancelledError, Timeout):
        if not key:
            channel.orphans.append(own)
            if len(channel.orphans) == 1:  # else somebody is about to look
                channel.spawn(_end_orphans(channel))
        raise
    return Sandbox(channel, SandboxInfo.from_wire(a))


async def _end_orphans(channel: Channel) -> None:
    await asyncio.sleep(GATHER)  # many are cancelled at once
    keys = set(channel.orphans)
    channel.orphans.clear()
    try:
        a = await channel.unary("Sandboxes/List", {"limit": NEWEST + 2 * len(keys)}, op="libdsec.create", safe=True, wait=LOOK)
    except DSecError:
        return
    for w in a.get("sandboxes") or ():
        if w.get("key") in keys:
            await _quiet(asyncio.ensure_future(
                channel.unary("Sandboxes/Stop", {}, op="libdsec.create", sandbox=str(w.get("id", "")), safe=True, wait=KILL)))


async def _quiet(work: "asyncio.Future[Any]") -> None:
    try:
        await work
    except DSecError:
        pass


class Session(Operations):
    """A sandbox's operations under the names of one session. ``number`` is that of the last one."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        super().__init__(sandbox._channel, sandbox.id, Steps(name))
        self.sandbox = sandbox
        self.name = name

    @property
    def number(self) -> int:
        """Number of the last operation; 0 before the first."""
        return self._steps.number

    @number.setter
    def number(self, n: int) -> None:
        self._steps.number = n

    def __repr__(self) -> str:
        return f"<Session {self.name!r} of {self.id}, {self.number} operations>"


def _command(command: Argv, env: Optional[Mapping[str, str]], cwd: Name, user: str, timeout: Seconds, idle: Seconds, output: Size) -> Message:
    c: Message = drop({"user": user, "timeout": span(timeout, "timeout"), "idle": span(idle, "idle"), "output": size(output, "output")})
    if isinstance(command, str):
        put_name(c, "shell", command)
    elif isinstance(command, (bytes, bytearray)):
        raise Invalid("a command is a str for the shell, or a list of a program and its arguments")
    else:
        words = [text_and_bytes(a) for a in command]
        c["argv"] = [text for text, _ in words]
        if any(exact for _, exact in words):
            c["argvBytes"] = [exact or to_bytes(text.encode()) for text, exact in words]
    put_name(c, "cwd", cwd)
    if env:
        put_env(c, env)
    return c
