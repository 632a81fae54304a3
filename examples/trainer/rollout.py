"""Tasks, and rollouts of them in sandboxes.

A task is a folder: task.json with the actions that the policy may take, project with
what the agent works on, and tests, which no sandbox sees before its rollout is over.

A rollout makes its calls in an order that depends on the policy and a seed alone, in a
session of its sandbox. So a trainer that comes back makes the same calls with the same
names: what was done is answered from the record, what still runs is attached to, and the
rollout goes on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import random
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional

import libdsec
from policy import Policy, Turn

TURNS = 3  # actions of one rollout
RAN = "/var/ran"  # where each command leaves its number, so that one that ran twice is seen


@dataclass(frozen=True)
class Task:
    """One task: what the policy may do, and the files of both sides by name."""

    name: str
    actions: List[str]
    project: Dict[str, str]
    tests: Dict[str, str]

    @classmethod
    def load(cls, folder: pathlib.Path) -> Task:
        def files(of: str) -> Dict[str, str]:
            return {f.name: f.read_text(encoding="utf-8") for f in sorted((folder / of).iterdir())}

        about = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        return cls(folder.name, about["actions"], files("project"), files("tests"))


class Calls:
    """Tells a file which calls are under way: a line before and one after each. It is for those who want to end the
    trainer in the middle of one."""

    def __init__(self, path: Optional[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1

    def note(self, line: str) -> None:
        if self._fd >= 0:
            os.write(self._fd, f"{line}\n".encode())

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        self.note("+ " + name)
        try:
            yield
        finally:
            self.note("- " + name)


@dataclass
class Rollout:
    """What became of one: its turns and its reward, or why it has none."""

    turns: List[Turn]
    reward: float = 0.0
    failed: str = ""


async def collect(job: libdsec.Job, policy: Policy, tasks: List[Task], group: int, step: int, seed: int, image: str,
                  calls: Calls) -> List[List[Rollout]]:
    """Give one group of rollouts for each task, all made at once, each in a sandbox of its own."""
    spec = libdsec.Spec(image=image, cpu=0.5, memory="64M", disk="64M", pids=64, ttl=3600)
    wanted = [(task, i) for task in tasks for i in range(group)]
    # The key finds the sandbox again, also one that has ended.
    items = [libdsec.Item(spec, f"{step}/{task.name}/{i}") for task, i in wanted]
    with calls.call("create"):
        made = {r.index: r async for r in job.create_many(items)}

    async def one(index: int, task: Task, i: int) -> Rollout:
        result = made[index]
        try:
            if result.error is not None:
                raise result.error
            return await run(result.sandbox, policy, task, random.Random(f"{seed}/{step}/{task.name}/{i}"), calls)
        except (libdsec.Exhausted, libdsec.Lost) as e:  # no room, or gone with its node: no fault of the policy
            return Rollout([], failed=str(e))

    done = await asyncio.gather(*(one(k, task, i) for k, (task, i) in enumerate(wanted)))
    return [list(done[k * group:(k + 1) * group]) for k in range(len(tasks))]


async def run(sandbox: libdsec.Sandbox, policy: Policy, task: Task, rng: random.Random, calls: Calls) -> Rollout:
    """Let the policy work on a task, grade what it made, and end the sandbox."""
    session = sandbox.session("rollout")

    async def put(folder: str, files: Dict[str, str]) -> None:
        for name, content in files.items():
            with calls.call("write"):
                await session.files.write(f"{folder}/{name}", content, parents=True)

    async def sh(line: str) -> str:
        with calls.call("exec"):
            result = await session.exec(f"echo {session.number + 1} >>{RAN}; {line}", cwd="/work", timeout=30)
        lines = result.out.splitlines()
        return lines[-1] if lines else result.outcome

    await put("/work", task.project)
    seen = f"{task.name}: {await sh('sh check.sh')}"
    turns: List[Turn] = []
    for _ in range(TURNS):
        action = policy.act(seen, len(task.actions), rng)
        turns.append((seen, action))
        seen = f"{task.name}: {await sh(task.actions[action] + '; sh check.sh')}"
    await put("/grade", task.tests)
    passed, _, total = (await sh("sh /grade/run.sh")).partition(" of ")
    with calls.call("exec"):
        await session.exec(["cat", RAN])  # for the record
    with calls.call("stop"):
        await sandbox.stop()
    return Rollout(turns, int(passed) / int(total) if passed.isdigit() and total.isdigit() else 0.0)
