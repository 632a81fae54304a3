"""A trainer in the manner of GRPO that may be killed at any instant.

    python3 trainer.py --job my-run --image busybox --checkpoint my-run.json

Killed and started again with the same arguments it goes on: the checkpoint has the
policy, the job has the sandboxes, and the steps of the sandboxes have the answers of all
that was done since. It ends with the checkpoint, to the byte, of one that nobody killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import sys
from typing import Any, Dict, List

import libdsec
from policy import Policy
from rollout import Calls, Rollout, Task, collect

TASKS = pathlib.Path(__file__).parent / "tasks"


class Checkpoint:
    """Everything that the next step depends on, in a file that is always whole."""

    def __init__(self, path: str, seed: int) -> None:
        self.path = pathlib.Path(path)
        self.step, self.policy, self.history = 0, Policy({}), []  # type: int, Policy, List[Dict[str, Any]]
        if self.path.exists():
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            if saved["seed"] != seed:
                sys.exit(f"{path} is of a run with seed {saved['seed']}")
            self.step, self.policy, self.history = saved["step"], Policy(saved["policy"]), saved["history"]
        self.seed = seed

    def learn(self, tasks: List[Task], groups: List[List[Rollout]], rate: float) -> None:
        """Take one step. Rollouts that failed count for nothing."""
        whole = [[(r.turns, r.reward) for r in group if not r.failed] for group in groups]
        self.policy.update(whole, [len(task.actions) for task in tasks], rate)
        self.history.append({
            task.name: [{"actions": [a for _, a in r.turns], "reward": r.reward, "failed": r.failed} for r in group]
            for task, group in zip(tasks, groups)})
        self.step += 1

    def save(self) -> None:
        """Replace the file. The same state gives the same bytes."""
        saved = {"seed": self.seed, "step": self.step, "policy": self.policy.logits, "history": self.history}
        part = self.path.with_name(self.path.name + ".part")
        with open(part, "w", encoding="utf-8") as f:
            json.dump(saved, f, sort_keys=True, indent=1)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


async def own(client: libdsec.DSecClient, name: str, lease: float) -> libdsec.Job:
    """Become the owner of the job: of one that is there, or of a new one."""
    try:
        return await client.jobs.open(name)
    except libdsec.NotFound:
        return await client.jobs.create(name, lease=lease, on_disconnect="pause", key=name)


async def train(args: argparse.Namespace) -> None:
    tasks = [Task.load(folder) for folder in sorted(TASKS.iterdir())]
    state = Checkpoint(args.checkpoint, args.seed)
    calls = Calls(args.calls)
    async with libdsec.connect(retry=30) as client:
        if state.step < args.steps:
            with calls.call("open"):
                job = await own(client, args.job, args.lease)
            async with job:  # renews the lease
                while state.step < args.steps:
                    calls.note(f"# {state.step}")
                    groups = await collect(job, state.policy, tasks, args.group, state.step, args.seed, args.image, calls)
                    state.learn(tasks, groups, args.rate)
                    calls.note("# checkpoint")
                    state.save()
                    rewards = [r.reward for group in groups for r in group if not r.failed]
                    print(f"step {state.step}: mean reward {sum(rewards) / max(len(rewards), 1):.3f} of {len(rewards)} rollouts", flush=True)
        calls.note("# end")
        with calls.call("end"):
            await (await client.jobs.attach(args.job)).stop()


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--job", required=True, help="name of this run; repeat it to take the run up again")
    p.add_argument("--image", required=True, help="base image with a shell and the usual small programs")
    p.add_argument("--checkpoint", required=True, help="file to keep the state in")
    p.add_argument("--steps", type=int, default=30, help="steps of training (default 30)")
    p.add_argument("--group", type=int, default=8, help="rollouts of each task in a step (default 8)")
    p.add_argument("--rate", type=float, default=4.0, help="rate of learning (default 4)")
    p.add_argument("--seed", type=int, default=1, help="of all that is drawn (default 1)")
    p.add_argument("--lease", type=float, default=30.0, help="seconds after which the sandboxes of a dead trainer pause (default 30)")
    p.add_argument("--calls", help="file to tell which calls are under way")
    asyncio.run(train(p.parse_args()))


if __name__ == "__main__":
    main()
