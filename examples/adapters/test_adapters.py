"""Each adapter is used as its framework uses it, against a node that DSEC_URL names.

The interfaces are those of verl 0.7.0, slime 0.3.1 and Harbor 0.13.2. Where a package is
not installed, what is public of it is restated here, as little as the adapters see.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import importlib
import pathlib
import sys
import tempfile
import types
import unittest
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional


def restate(name: str, **names: Any) -> None:
    """Give a module these names, unless the package is there."""
    try:
        importlib.import_module(name)
    except ImportError:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:k]), types.ModuleType(parts[k - 1]))
        for key, value in names.items():
            setattr(sys.modules[name], key, value)


class Schema:
    """verl.tools.schemas.OpenAIFunctionToolSchema"""

    def __init__(self, text: Dict[str, Any]) -> None:
        self.type, self.function = text["type"], types.SimpleNamespace(**text["function"])

    @classmethod
    def model_validate(cls, text: Dict[str, Any]) -> "Schema":
        return cls(text)


@dataclass
class ToolResponse:
    """verl.tools.schemas.ToolResponse"""

    text: Optional[str] = None
    image: Optional[List[Any]] = None
    video: Optional[List[Any]] = None


class BaseTool:
    """verl.tools.base_tool.BaseTool"""

    def __init__(self, config: Dict[str, Any], tool_schema: Schema) -> None:
        self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name

    async def create(self, instance_id: Optional[str] = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def execute(self, instance_id: str, parameters: Dict[str, Any], **kwargs: Any) -> Any:
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        raise NotImplementedError

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        raise NotImplementedError


@dataclass
class Sample:
    """slime.utils.types.Sample: what a generate function sees of it."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    prompt: str = ""
    tokens: List[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: Optional[List[int]] = None
    rollout_log_probs: Optional[List[float]] = None
    status: Status = Status.PENDING
    metadata: Dict[str, Any] = field(default_factory=dict)

    def append_response_tokens(self, args: Any = None, *, tokens: Any = None, log_probs: Any = None, trainable: bool = True,
                               meta_info: Optional[Dict[str, Any]] = None, text: Optional[str] = None) -> None:
        if trainable == (log_probs is None):
            raise ValueError("drawn tokens have log probabilities, others have none")
        n = len(tokens)
        self.tokens, self.response, self.response_length = self.tokens + list(tokens), self.response + (text or ""), self.response_length + n
        self.loss_mask = (self.loss_mask or []) + [int(trainable)] * n
        self.rollout_log_probs = (self.rollout_log_probs or []) + (list(log_probs) if trainable else [0.0] * n)
        if meta_info:
            ends = {"stop": self.Status.COMPLETED, "length": self.Status.TRUNCATED, "abort": self.Status.ABORTED}
            self.status = ends[meta_info["finish_reason"]["type"]]


class Tokenizer:
    def __call__(self, text: str, add_special_tokens: bool = True) -> Dict[str, List[int]]:
        return {"input_ids": list(text.encode())}


class GenerateState:
    """slime.rollout.sglang_rollout.GenerateState"""

    def __init__(self, args: Any) -> None:
        self.tokenizer = Tokenizer()


class Mode(enum.Enum):
    """harbor.models.task.config.NetworkMode"""

    NO_NETWORK = "no-network"
    PUBLIC = "public"


@dataclass
class ExecResult:
    """harbor.environments.base.ExecResult"""

    return_code: int
    stdout: Optional[str] = None
    stderr: Optional[str] = None


@dataclass
class Capabilities:
    """harbor.environments.capabilities.EnvironmentCapabilities"""

    disable_internet: bool = False
    gpus: bool = False


class BaseEnvironment(abc.ABC):
    """harbor.environments.base.BaseEnvironment: its abstract methods, and the helpers that it gives."""

    def __init__(self, environment_dir: pathlib.Path, environment_name: str, session_id: str, trial_paths: Any, task_env_config: Any,
                 persistent_env: Optional[Dict[str, str]] = None, mounts: Any = None, network_policy: Any = None, **kwargs: Any) -> None:
        self.environment_dir, self.environment_name, self.session_id = environment_dir, environment_name, session_id
        self.task_env_config, self.default_user = task_env_config, None
        self._persistent_env, self._mounts, self._network_policy = persistent_env or {}, mounts or [], network_policy
        self._validate_definition()
        if network_policy.network_mode == Mode.NO_NETWORK and not self.capabilities.disable_internet:
            raise ValueError("no-network is not supported")

    @staticmethod
    @abc.abstractmethod
    def type() -> str: ...

    @abc.abstractmethod
    def _validate_definition(self) -> None: ...

    @abc.abstractmethod
    async def start(self, force_build: bool) -> None: ...

    @abc.abstractmethod
    async def stop(self, delete: bool) -> None: ...

    @abc.abstractmethod
    async def upload_file(self, source_path: Any, target_path: str) -> None: ...

    @abc.abstractmethod
    async def upload_dir(self, source_dir: Any, target_dir: str) -> None: ...

    @abc.abstractmethod
    async def download_file(self, source_path: str, target_path: Any) -> None: ...

    @abc.abstractmethod
    async def download_dir(self, source_dir: str, target_dir: Any) -> None: ...

    @abc.abstractmethod
    async def exec(self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None) -> ExecResult: ...

    network_policy = property(lambda self: self._network_policy)
    _effective_cpus = property(lambda self: self.task_env_config.cpus)
    _effective_memory_mb = property(lambda self: self.task_env_config.memory_mb)
    _effective_storage_mb = property(lambda self: self.task_env_config.storage_mb)

    def _resolve_user(self, user: Any) -> Any:
        return self.default_user if user is None else user

    def _merge_env(self, env: Optional[Dict[str, str]]) -> Optional[Dict[str, str]]:
        return dict(self._persistent_env, **(env or {})) or None

    def _mount_targets(self, *, writable_only: bool = False) -> List[str]:
        return [m["target"] for m in self._mounts]

    async def ensure_dirs(self, dirs: List[str], *, chmod: bool = True) -> Any:
        return await self.exec("mkdir -p " + " ".join(dirs), user="root") if dirs else None

    async def _upload_environment_dir_after_start(self) -> None:
        await self.upload_dir(self.environment_dir, self.task_env_config.workdir)

    async def is_file(self, path: str, user: Any = None) -> bool:
        return (await self.exec(f"test -f {path}", timeout_sec=10, user=user)).return_code == 0


restate("verl.tools.base_tool", BaseTool=BaseTool)
restate("verl.tools.schemas", OpenAIFunctionToolSchema=Schema, ToolResponse=ToolResponse)
restate("slime.rollout.sglang_rollout", GenerateState=GenerateState)
restate("slime.utils.http_utils", post=None)
restate("slime.utils.types", Sample=Sample)
restate("harbor.environments.base", BaseEnvironment=BaseEnvironment, ExecResult=ExecResult)
restate("harbor.environments.capabilities", EnvironmentCapabilities=Capabilities)
restate("harbor.models.task.config", NetworkMode=Mode)

import dsec_harbor  # noqa: E402
import dsec_slime  # noqa: E402
import dsec_verl  # noqa: E402
import libdsec  # noqa: E402

FILES = {"/work/add.sh": "echo $(($1 - $2))\n"}
TESTS = {"/grade/run.sh": 'ok=0\n[ "$(sh /work/add.sh 1 2)" = 3 ] && ok=1\n[ "$(sh /work/add.sh 0 0)" = 0 ] && ok=$((ok+1))\necho $ok of 2\n'}
GRADE = "sh /grade/run.sh"
REPAIR = "sed -i 's/ - / + /' /work/add.sh"


class Verl(unittest.IsolatedAsyncioTestCase):
    task = {"files": FILES, "tests": TESTS, "grade": GRADE}

    async def asyncTearDown(self) -> None:
        await dsec_verl._clients.pop(asyncio.get_running_loop()).aclose()

    async def call(self, agent: Any, **parameters: Any) -> Any:
        """Do what verl's tool agent does for each call of the model: with a tool of its own, made and released."""
        tool = dsec_verl.DSecTool({"image": "busybox", "spec": {"memory": "64M", "ttl": 300}}, None)
        instance, _ = await tool.create(create_kwargs=self.task)
        try:
            return await tool.execute(instance, parameters, agent_data=agent)
        finally:
            await tool.release(instance)

    async def test_trajectory(self) -> None:
        agent = types.SimpleNamespace(request_id="trajectory-1")
        response, reward, metrics = await self.call(agent, command="cat /work/add.sh; ls /grade")
        self.assertIn("$1 - $2", response.text)
        self.assertIn("status 1", response.text, "the tests are there before the end")
        self.assertEqual(reward, 0.0)
        other, _, _ = await self.call(types.SimpleNamespace(request_id="trajectory-2"), command="echo mine >/mine; cat /mine", submit=True)
        self.assertEqual(other.text, "mine\n")
        response, reward, again = await self.call(agent, command=REPAIR + "; ls /mine", submit=True)
        self.assertIn("No such file", response.text)
        self.assertEqual((reward, again["sandbox"]), (1.0, metrics["sandbox"]))
        response, reward, _ = await self.call(agent, command="true")
        self.assertEqual((response.text, reward), ("The work was submitted already.", 0.0))
        async with libdsec.connect() as client:
            self.assertEqual((await client.get(metrics["sandbox"])).info.state, "stopped")

    async def test_instance(self) -> None:
        tool = dsec_verl.DSecTool({"image": "busybox"}, None)
        self.assertEqual(tool.name, "shell")
        instance, _ = await tool.create("instance-1", create_kwargs=self.task)
        await tool.execute(instance, {"command": "true"})
        self.assertEqual(await tool.calc_reward(instance), 0.5)
        await tool.release(instance)


class Slime(unittest.IsolatedAsyncioTestCase):
    args = types.SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=1)

    async def asyncSetUp(self) -> None:
        self.says: List[Any] = []
        dsec_slime.post = self.post

    async def asyncTearDown(self) -> None:
        await dsec_slime._clients.pop(asyncio.get_running_loop()).aclose()

    async def post(self, url: str, payload: Dict[str, Any]) -> Dict[str, Any]:
        """Say what a model would."""
        self.asked = bytes(payload["input_ids"]).decode()
        text, reason = self.says.pop(0)
        self.assertIn("</shell>", payload["sampling_params"]["stop"])
        return {"text": text, "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, b] for b in text.encode()]}}

    def sample(self) -> Any:
        return Sample(prompt="Repair add.sh.", metadata={"image": "busybox", "files": FILES, "tests": TESTS, "grade": GRADE})

    async def test_rollout(self) -> None:
        sample = self.sample()
        self.says = [("Look. <shell>cat /work/add.sh</shell>", "stop"), ("", "abort")]
        sample = await dsec_slime.generate(self.args, sample, {"temperature": 1})
        self.assertIs(sample.status, Sample.Status.ABORTED)
        self.assertIn("$1 - $2", self.asked, "the model does not see what its command printed")
        # What was aborted is taken up, with its sandbox.
        self.says = [(f"<shell>{REPAIR}</shell>", "stop"), ("Done.", "stop")]
        sample = await dsec_slime.generate(self.args, sample, {"temperature": 1})
        self.assertIs(sample.status, Sample.Status.COMPLETED)
        self.assertEqual(bytes(sample.tokens).decode(), "Repair add.sh." + sample.response)
        drawn = bytes(t for t, m in zip(sample.tokens[len("Repair add.sh."):], sample.loss_mask) if m).decode()
        self.assertEqual(drawn, f"Look. <shell>cat /work/add.sh</shell><shell>{REPAIR}</shell>Done.")
        self.assertEqual(await dsec_slime.reward(self.args, sample), 1.0)
        self.assertEqual(await dsec_slime.reward(self.args, sample), 0.0, "an ended sandbox earned something")
        self.assertIn("dsec_error", sample.metadata)

    async def test_length(self) -> None:
        self.says = [("<shell>sle", "length")]
        sample = await dsec_slime.generate(self.args, self.sample(), {})
        self.assertIs(sample.status, Sample.Status.TRUNCATED)
        self.assertEqual(await dsec_slime.reward(self.args, sample), 0.5)


class Harbor(unittest.IsolatedAsyncioTestCase):
    def environment(self, folder: pathlib.Path, mode: Any = Mode.NO_NETWORK, image: Optional[str] = "busybox") -> Any:
        config = types.SimpleNamespace(docker_image=image, workdir="/app", cpus=1, memory_mb=64, storage_mb=64, env={}, gpus=0)
        return dsec_harbor.DSecEnvironment(
            folder, "task", "task__trial-1", None, config, persistent_env={"A": "1"}, ttl=300,
            mounts=[{"target": "/logs/agent"}], network_policy=types.SimpleNamespace(network_mode=mode))

    async def test_trial(self) -> None:
        with tempfile.TemporaryDirectory() as text:
            here = pathlib.Path(text)
            (here / "environment" / "data").mkdir(parents=True)
            (here / "environment" / "data" / "in").write_text("put")
            for mode, image in ((Mode.PUBLIC, "busybox"), (Mode.NO_NETWORK, None)):
                with self.assertRaises(ValueError):
                    self.environment(here / "environment", mode, image)
            e = self.environment(here / "environment")
            self.assertEqual((e.type(), e.capabilities.disable_internet), ("dsec", True))
            await e.start(force_build=False)
            r = await e.exec("pwd; cat data/in; echo $A$B; id -u; echo bad >&2; exit 3", env={"B": "2"}, timeout_sec=30, user=1000)
            self.assertEqual((r.stdout, r.stderr, r.return_code), ("/app\nput12\n1000\n", "bad\n", 3))
            self.assertEqual((await e.exec("sleep 60", timeout_sec=1)).return_code, 124)
            self.assertEqual((await e.exec("pwd", cwd="/logs/agent")).stdout, "/logs/agent\n")
            (here / "tests").mkdir()
            (here / "tests" / "test.sh").write_text("echo 1 > /logs/agent/reward\n")
            await e.upload_dir(here / "tests", "/tests")
            await e.upload_file(here / "tests" / "test.sh", "/deep/down/test.sh")
            self.assertTrue(await e.is_file("/deep/down/test.sh"))
            self.assertEqual((await e.exec("sh /tests/test.sh")).return_code, 0)
            await e.download_file("/logs/agent/reward", here / "out" / "reward")
            await e.download_dir("/logs", here / "logs")
            self.assertEqual((here / "out" / "reward").read_text(), "1\n")
            self.assertEqual((here / "logs" / "agent" / "reward").read_text(), "1\n")
            # Kept: the same trial finds what it did.
            await e.stop(delete=False)
            e = self.environment(here / "environment")
            await e.start(force_build=False)
            self.assertEqual((await e.exec("cat /logs/agent/reward")).stdout, "1\n")
            await e.stop(delete=True)
            with self.assertRaises(RuntimeError):
                await e.exec("true")


if __name__ == "__main__":
    unittest.main()
