"""Calls of functions: one command in a pristine sandbox, which is gone afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Optional, Union

from .records import Name, Result, Seconds, Spec
from .sandbox import Argv

if TYPE_CHECKING:
    from .client import DSecClient


class Functions:
    """Judges, compilers, graders: what needs no state."""

    def __init__(self, client: DSecClient) -> None:
        self._client = client

    async def run(self, command: Argv, *, image: str = "", spec: Optional[Spec] = None, input: Union[None, bytes, str] = None,
                  files: Optional[Mapping[str, Union[bytes, str]]] = None, env: Optional[Mapping[str, str]] = None, cwd: Name = "",
                  user: str = "", timeout: Seconds = 60, check: bool = False) -> Result:
        """Run a command in a sandbox that nobody used before.

        image, or spec for more than that; a spec that names no kind is of kind ``fncall``. files: contents by path, written
        before. The others as for ``Sandbox.exec``; timeout is 60 seconds unless it is given.
        """
        wanted = spec if spec is not None else Spec(image=image)
        if not wanted.kind:
            wanted = Spec(**{**wanted.__dict__, "kind": "fncall"})
        async with await self._client.create(wanted) as sandbox:
            for path, content in (files or {}).items():
                await sandbox.files.write(path, content, parents=True)
            return await sandbox.exec(command, input=input, env=env, cwd=cwd, user=user, timeout=timeout, check=check)
