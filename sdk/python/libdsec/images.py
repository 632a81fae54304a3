"""Images: what sandboxes are made of."""

from __future__ import annotations

from typing import Any, AsyncIterator, List, Sequence, Tuple

from . import _check, _tree
from ._rpc import STALL, Channel, Message
from .files import Data, Pieces, Stream
from .records import Image, Progress, drop


@_check.typed
class Images:
    """The images that the token's project can use."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def list(self, prefix: str = "", *, usage: bool = False) -> List[Image]:
        """Give those whose names begin with prefix, by name, the newest version of each first.

        usage: find out what each takes.
        """
        images: List[Image] = []
        m = drop({"prefix": prefix, "usage": usage})
        while True:
            a = await self._channel.unary("Images/List", m, op="libdsec.images.list", safe=True)
            images += [Image.from_wire(w) for w in a.get("images") or ()]
            if not a.get("next"):
                return images
            m["after"] = a["next"]

    async def inspect(self, name: str) -> Image:
        """Resolve ``name`` (its newest version), ``name@version`` or ``name@tag``, with usage. NotFound: there is none."""
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

    async def adopt(self, digest: str, name: str) -> Image:
        """Name a layer that the store has already, for operators. NotFound: it has not."""
        m = {"digest": digest, "name": name}
        return Image.from_wire(await self._channel.unary("Images/Adopt", m, op="libdsec.images.adopt", safe=True))

    async def tag(self, name: str, tag: str) -> Image:
        """Let ``name@tag`` stand for the version that name resolves to, at once if it stood for another.

        Exists: the tag is a version, which never changes.
        """
        return Image.from_wire(await self._channel.unary("Images/Tag", {"name": name, "tag": tag}, op="libdsec.images.tag", safe=True))

    async def remove(self, name: str) -> None:
        """Forget ``name@tag``, or ``name@version`` if it has no tags. Sandboxes that use it go on."""
        await self._channel.unary("Images/Remove", {"name": name}, op="libdsec.images.remove")

    def export(self, base: str, workspace: str = "", toolkits: Sequence[str] = ()) -> Pieces:
        """Give an environment as an OCI image, in pieces, for ``async for``: the tar of its layout."""
        m = drop({"base": base, "workspace": workspace, "toolkits": list(toolkits)})
        return Pieces(self._channel, "Images/Export", m, "libdsec.images.export", "")

    async def collect(self, *, alone: bool = False) -> Tuple[int, int]:
        """Delete what nothing needs. Gives how many blobs and bytes that freed.

        alone: no other cluster uses the store; needed where the server cannot know.
        """
        a = await self._channel.unary("Images/Collect", drop({"alone": alone}), op="libdsec.images.collect", safe=True, wait=None)
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
