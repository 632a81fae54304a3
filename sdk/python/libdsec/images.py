"""Images: what sandboxes are made of."""

from __future__ import annotations

from typing import Any, AsyncIterator, List, Tuple

from . import _tree
from ._rpc import STALL, Channel, Message
from .files import Data, Stream
from .records import Image, Progress, drop


class Images:
    """The images that the token's project can use."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def list(self) -> List[Image]:
        """Give all, by name, the newest version of each first."""
        a = await self._channel.unary("Images/List", {}, op="libdsec.images.list", safe=True)
        return [Image.from_wire(w) for w in a.get("images") or ()]

    async def inspect(self, name: str) -> Image:
        """Resolve ``name`` (its newest version) or ``name@version``. NotFound: there is none."""
        return Image.from_wire(await self._channel.unary("Images/Inspect", {"name": name}, op="libdsec.images.inspect", safe=True))

    async def upload(self, name: str, tar: Data, *, role: str = "base") -> Image:
        """Make an image from a tar: of a root file system, of "docker save", or of an OCI layout; plain, or compressed
        with gzip or zstd.

        name: ``name@version``; without a version that is the start of its digest. Exists: the version is taken.
        role: ``base``, ``workspace`` or ``toolkit``. tar: as the data of ``files.write``.
        """
        m = {"name": name, "role": role}
        return Image.from_wire(await self._channel.upload("Images/Upload", m, _tree.pieces(tar), op="libdsec.images.upload"))

    def pull(self, ref: str, name: str, *, role: str = "base") -> Pull:
        """Import from an OCI registry, with progress, for ``async for``; the last report has the image."""
        return Pull(self._channel, "Images/Pull", drop({"ref": ref, "name": name, "role": role}), "libdsec.images.pull", "", None)

    async def remove(self, name: str) -> None:
        """Forget ``name@version``. Sandboxes that use it go on."""
        await self._channel.unary("Images/Remove", {"name": name}, op="libdsec.images.remove")

    async def collect(self) -> Tuple[int, int]:
        """Delete what nothing needs. Gives how many blobs and bytes that freed."""
        a = await self._channel.unary("Images/Collect", {}, op="libdsec.images.collect", safe=True, wait=None)
        return int(a.get("blobs", 0)), int(a.get("bytes", 0))


class Pull(Stream):
    """The progress of an import."""

    def __aiter__(self) -> AsyncIterator[Progress]:
        return self

    async def __anext__(self) -> Progress:
        m = await self._next()
        if m is None:
            raise StopAsyncIteration
        image = Image.from_wire(m["image"]) if m.get("image") else None
        return Progress(m.get("stage", ""), int(m.get("done", 0)), int(m.get("total", 0)), image)
