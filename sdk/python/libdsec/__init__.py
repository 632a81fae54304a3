"""libdsec: sandboxes for agents and their trainers.

    async with libdsec.connect() as client:
        async with await client.create(Spec(image="debian")) as sandbox:
            result = await sandbox.exec("make test", timeout=600)
            print(result.code, result.out)

Async first; ``libdsec.sync`` has the same names for programs without an event loop. Every error is a ``DSecError`` of a
class that says its kind. Durations are seconds, sizes bytes, unless their name says otherwise.

What it does not do: it keeps nothing between runs and decides nothing that the server decides.

A call is repeated when there was no answer, where that cannot do a thing twice: reads always; what changes something when
it has a key or a step, which this package gives by itself.
"""

from typing import TYPE_CHECKING, Any, List

from .client import DSecClient, connect
from .errors import (
    Canceled, CommandFailed, Conflict, Denied, Diverged, DSecError, Exhausted, Exists, Internal, Invalid, Lost, Misused, NotFound,
    Timeout, Unauthenticated, Unavailable, Unsupported,
)
from .files import Files
from .fn import Batch, Case, FunctionItem, FunctionResult, Functions, Limits
from .images import Images
from .jobs import Item, Job, JobEvent, JobInfo, JobResult, Jobs
from .ports import Forward, Ports
from .process import Output, Process
from .published import DSecContainer, DSecContainerRunArgs
from .records import Chunk, Delegation, Event, FileInfo, Image, ImagePart, ImageUsage, Progress, Result, SandboxInfo, Snapshot, Spec, Status, Step, Usage
from .sandbox import Sandbox, Session
from .snapshots import Screen, Snapshots

if TYPE_CHECKING:
    from . import sync as sync

__version__ = "0.1.0"

__all__ = [
    "Batch", "Canceled", "Case", "Chunk", "CommandFailed", "Conflict", "DSecClient", "DSecContainer", "DSecContainerRunArgs", "DSecError", "Delegation", "Denied",
    "Diverged", "Event", "Exhausted", "Exists", "FileInfo", "Files", "Forward", "FunctionItem", "FunctionResult", "Functions", "Image", "Images", "Internal", "Invalid",
    "Item", "Job", "JobEvent", "JobInfo", "JobResult", "Jobs", "Limits", "Lost", "Misused",
    "NotFound", "Output", "Ports", "Process", "Progress", "Result", "Sandbox", "SandboxInfo", "Screen", "Session", "Snapshot", "Snapshots", "Spec", "Status", "Step",
    "Timeout", "Unauthenticated", "Unavailable", "Unsupported", "Usage", "connect",
]


def __getattr__(name: str) -> Any:
    """``libdsec.sync``, which costs those nothing who never say it."""
    if name == "sync":
        from importlib import import_module

        return import_module(".sync", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> List[str]:
    return sorted({*globals(), "sync"})
