"""A shell in a sandbox as a tool of verl 0.7.0 (verl.tools.base_tool.BaseTool).

verl makes, uses and releases a tool instance for each call of the model; the sandbox lives for the whole trajectory, by
the request_id of its AgentData, and ends by itself when it is idle. A call with "submit" grades it and is the last one.
Callers without AgentData have one sandbox for each instance, which release ends.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from typing import Any, Dict, MutableMapping, Optional, Tuple

import libdsec
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a line of shell in a computer of your own, whose files stay from call to call.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "the line"},
                "submit": {"type": "boolean", "description": "the work is done: grade it after this line"},
            },
            "required": ["command"],
        },
    },
}

# Agent loops make their tools anew for each trajectory: the client and the sandboxes are those of the process.
_clients: MutableMapping[asyncio.AbstractEventLoop, libdsec.DSecClient] = weakref.WeakKeyDictionary()


class DSecTool(BaseTool):
    """The tool. config: ``image``, and whatever else a libdsec.Spec takes under ``spec``; ``timeout`` and ``max_output``.

    A row's ``tools_kwargs["shell"]["create_kwargs"]``: ``image`` and ``files`` (content by path), if not as configured;
    ``tests`` (content by path), which come into the sandbox when it is graded, and ``grade``, a line that prints
    ``3 of 4`` or says by its status whether all is well.
    """

    def __init__(self, config: Dict[str, Any], tool_schema: Optional[OpenAIFunctionToolSchema] = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._instances: Dict[str, Dict[str, Any]] = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs: Any) -> Tuple[str, ToolResponse]:
        instance_id = instance_id or uuid.uuid4().hex
        self._instances[instance_id] = dict(kwargs.get("create_kwargs") or {}, owner=instance_id)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: Dict[str, Any], **kwargs: Any) -> Tuple[ToolResponse, float, dict]:
        task, agent = self._instances[instance_id], kwargs.get("agent_data")
        if agent is not None:
            task["owner"], task["shared"] = agent.request_id, True
        sandbox = await self._sandbox(task)
        if not sandbox.info.alive:
            return ToolResponse(text="The work was submitted already."), 0.0, {}
        limit = self.config.get("max_output", 16 << 10)
        r = await sandbox.exec(str(parameters.get("command", "")), timeout=self.config.get("timeout", 60))
        text = (r.out + r.err)[:limit] + ("" if r.ok else f"\n[{r.outcome}, status {r.code}]")
        reward = 0.0
        if parameters.get("submit"):
            reward = await self.calc_reward(instance_id)
            await sandbox.stop()
        return ToolResponse(text=text or "[no output]"), reward, {"sandbox": sandbox.id, "code": r.code}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        task = self._instances[instance_id]
        sandbox = await self._sandbox(task)
        for path, content in task.get("tests", {}).items():
            await sandbox.files.write(path, content, parents=True)
        r = await sandbox.exec(task.get("grade", "true"), timeout=self.config.get("grade_timeout", 600))
        passed, of, total = (r.out.splitlines() or [""])[-1].partition(" of ")
        return int(passed) / int(total) if of and passed.isdigit() and total.isdigit() else float(r.ok)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        task = self._instances.pop(instance_id)
        if not task.get("shared"):
            await (await self._sandbox(task)).stop()

    async def _sandbox(self, task: Dict[str, Any]) -> libdsec.Sandbox:
        loop = asyncio.get_running_loop()
        if loop not in _clients:
            _clients[loop] = libdsec.connect()
        spec = libdsec.Spec(**dict({"image": task.get("image") or self.config["image"], "idle": 900}, **self.config.get("spec", {})))
        # The key gives the same sandbox each time, ended or not; nothing has to be remembered here.
        sandbox = await _clients[loop].create(spec, key="verl/" + task["owner"])
        setup = sandbox.session("setup")
        for path, content in task.get("files", {}).items() if sandbox.info.alive else ():
            await setup.files.write(path, content, parents=True)  # answered from the record after the first time
        return sandbox
