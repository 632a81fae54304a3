"""Snapshots of sandboxes, and screens."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from . import _check
from ._rpc import Channel, Message, from_bytes
from .records import Snapshot, drop


@_check.typed
class Snapshots:
    """The saved states of the token's project and those below. ``Sandbox.snapshot`` makes one; a Spec's ``from_snapshot``
    names the one that a new sandbox begins with."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def list(self) -> List[Snapshot]:
        """Give all, newest first."""
        a = await self._channel.unary("Snapshots/List", {}, op="libdsec.snapshots.list", safe=True)
        return [Snapshot.from_wire(w) for w in a.get("snapshots") or ()]

    async def get(self, id: str) -> Snapshot:
        """Find one. NotFound: there is none, or only another project's."""
        return Snapshot.from_wire(await self._channel.unary("Snapshots/Get", {"id": id}, op="libdsec.snapshots.get", safe=True))

    async def remove(self, id: str) -> None:
        """Delete one. Sandboxes that were made from it are not touched."""
        await self._channel.unary("Snapshots/Remove", {"id": id}, op="libdsec.snapshots.remove", wait=None)


@_check.typed
class Screen:
    """The display, keyboard and pointer of a sandbox whose kind has them; for others all is Unsupported."""

    def __init__(self, channel: Channel, sandbox: str) -> None:
        self._channel = channel
        self.id = sandbox

    async def screenshot(self) -> bytes:
        """Give what the display shows, as PNG."""
        a = await self._channel.unary("Screens/Screenshot", {}, op="libdsec.screenshot", sandbox=self.id, safe=True)
        return from_bytes(a.get("png"))

    async def type(self, text: str) -> None:
        """Type text, on a US keyboard; Invalid for characters that it has no key for."""
        await self._input([{"text": text}])

    async def press(self, *keys: str) -> None:
        """Press keys one after the other: ``ret``, ``esc``, ``f1``; those joined by ``-`` together: ``ctrl-alt-f2``."""
        await self._input([{"key": k} for k in keys])

    async def move(self, x: int, y: int) -> None:
        """Move the pointer there, in pixels from the upper left."""
        await self._input([_to((x, y))])

    async def click(self, *, at: Sequence[int] = (), button: str = "left", times: int = 1) -> None:
        """Press ``left``, ``middle``, ``right``, ``wheel-up`` or ``wheel-down``. at: x and y to move to first."""
        events: List[Message] = [_to((at[0], at[1]))] if at else []
        await self._input(events + [{"button": button}] * times)

    async def _input(self, events: List[Message]) -> None:
        await self._channel.unary("Screens/Input", {"events": events}, op="libdsec.input", sandbox=self.id)


def _to(p: Tuple[int, int]) -> Message:
    return {"move": drop({"x": p[0], "y": p[1]})}
