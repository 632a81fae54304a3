"""Sandboxes as an environment of Harbor 0.13.2 (harbor.environments.base.BaseEnvironment).

    harbor run ... --environment-import-path dsec_harbor:DSecEnvironment

A task names an image that the server has, as [environment] docker_image; a Dockerfile is not built here. The sandbox has
no network, so a task that asks for one is refused before it starts.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any, Dict, Optional, Union

import libdsec
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

Path = Union[pathlib.Path, str]


class DSecEnvironment(BaseEnvironment):
    """One trial's sandbox. Its key is the session ID: started again after a crash, a trial finds its sandbox.

    Keyword arguments: ``kind``, ``ttl`` in seconds (default 6 h), and what else BaseEnvironment takes.
    """

    def __init__(self, *args: Any, kind: str = "", ttl: float = 6 * 3600, **kwargs: Any) -> None:
        self._kind, self._ttl = kind, ttl
        self._client: Optional[libdsec.DSecClient] = None
        self._box: Optional[libdsec.Sandbox] = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "dsec"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image:
            raise ValueError("the task names no docker_image: import its image with dsec image import, and name it there")
        if self.network_policy.network_mode != NetworkMode.NO_NETWORK:
            raise ValueError("a sandbox reaches no network: the task has to ask for network_mode no-network")

    async def start(self, force_build: bool) -> None:
        config = self.task_env_config
        spec = libdsec.Spec(
            image=config.docker_image, kind=self._kind, ttl=self._ttl, cpu=self._effective_cpus or 0,
            memory=(self._effective_memory_mb or 0) << 20, disk=(self._effective_storage_mb or 0) << 20)
        self._client = libdsec.connect()
        self._box = await self._client.create(spec, key="harbor/" + self.session_id)
        if config.workdir:
            await self._box.files.mkdir(config.workdir)
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """End the sandbox, or pause it: what it holds can then still be looked at."""
        if self._client is not None and self._box is not None:
            await (self._box.stop() if delete else self._box.pause())
            await self._client.aclose()
            self._client = self._box = None

    async def exec(self, command: str, cwd: Optional[str] = None, env: Optional[Dict[str, str]] = None,
                   timeout_sec: Optional[int] = None, user: Union[str, int, None] = None) -> ExecResult:
        user = self._resolve_user(user)
        r = await self._sandbox.exec(command, cwd=cwd or self.task_env_config.workdir or "", env=self._merge_env(env),
                                     timeout=timeout_sec or 0, user="" if user is None else str(user))
        return ExecResult(stdout=r.out, stderr=r.err, return_code=r.code)  # 124 for one that took too long

    async def upload_file(self, source_path: Path, target_path: str) -> None:
        await self._sandbox.files.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path, target_dir: str) -> None:
        await self._sandbox.files.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(target_path)), exist_ok=True)
        await self._sandbox.files.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path) -> None:
        await self._sandbox.files.download(source_dir, target_dir)

    @property
    def _sandbox(self) -> libdsec.Sandbox:
        if self._box is None:
            raise RuntimeError("the environment is not started")
        return self._box
