"""Checks of arguments: what a caller got wrong is said at once, by name, as Invalid.

The declared types of the public methods are the table of what is accepted, so there is no second one that could say
something else. Ranges that the server knows are left to it; those that only this side knows are checked where they apply.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import math
import os
import typing
from numbers import Integral, Real
from typing import Any, Callable, Dict, Optional, Tuple, Type, TypeVar

from .errors import Invalid

# Whole numbers are from 0 on, but for arguments of these names.
RANGES = {
    "port": (1, 65535), "local": (0, 65535), "rows": (1, 65535), "cols": (1, 65535), "mode": (0, 0o7777),
    "count": (1, 64), "at_a_time": (0, 64), "times": (1, 1000), "connections": (1, 1 << 31),
}
# How the parts of a client are called in the op of an error.
PLACES = {"Files": "files.", "Ports": "ports.", "Images": "images.", "Jobs": "jobs.", "Job": "job.", "Functions": "fn.", "Snapshots": "snapshots."}
LARGEST = (1 << 63) - 1  # that the wire has

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

# What is wrong: where within the argument (":" for a value out of range), the value there, what is wanted.
Complaint = Optional[Tuple[str, Any, str]]
Checker = Callable[[Any], Complaint]

WORDS = (str, bytes, bytearray, memoryview)  # sequences that are meant as one thing


def invalid(name: str, value: Any, wanted: str, op: str = "") -> Invalid:
    """Say what an argument is, and what it may be."""
    text = repr(value)
    if len(text) > 100:
        text = text[:97] + "..."
    return Invalid(f"{name} is {text}; wanted {wanted}", op=op)


def number(name: str, value: Any, *, least: float, most: float = math.inf, above: bool = False, op: str = "") -> None:
    """Refuse what is not a number from least to most; above: not least itself."""
    if isinstance(value, Real) and not isinstance(value, bool) and least <= value <= most and not (above and value == least):
        return
    low = f"above {least:g}" if above else f"from {least:g}"
    raise invalid(name, value, f"a number {low}" + (f" to {most:g}" if most < math.inf else " on"), op)


def typed(cls: C) -> C:
    """Check the arguments of a class's public methods by their types."""
    for name, f in list(vars(cls).items()):
        if inspect.isfunction(f) and not name.startswith("_"):
            setattr(cls, name, checked(f))
    return cls


def checked(f: F) -> F:
    """Check the arguments of one function by their types."""
    cls, _, name = f.__qualname__.rpartition(".")
    op = "libdsec." + (cls if name == "__init__" else PLACES.get(cls, "") + name)
    names = list(inspect.signature(f).parameters)
    checkers: Dict[str, Checker] = {}
    ready = False

    def check(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        nonlocal ready
        if not ready:  # not before: a type may be of a module that is not read yet
            checkers.update({k: c for k, c in _checkers(f, RANGES).items() if c})
            ready = True
        for key, value in [*zip(names, args), *kwargs.items()]:
            checker = checkers.get(key)
            wrong = checker(value) if checker else None
            if wrong is not None:
                raise invalid(key + wrong[0].rstrip(":"), wrong[1], wrong[2], op)

    if inspect.iscoroutinefunction(f):
        @functools.wraps(f)
        async def later(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await f(*args, **kwargs)

        return later  # type: ignore[return-value]

    @functools.wraps(f)
    def now(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return f(*args, **kwargs)

    return now  # type: ignore[return-value]


def fields(value: Any) -> None:
    """Check the fields of a dataclass by their types."""
    cls = type(value)
    for key, checker in _fields(cls).items():
        wrong = checker(getattr(value, key))
        if wrong is not None:
            raise invalid(f"{cls.__name__}.{key}{wrong[0].rstrip(':')}", wrong[1], wrong[2])


@functools.lru_cache(maxsize=None)
def _fields(cls: Type[Any]) -> Dict[str, Checker]:
    return {k: c for k, c in _checkers(cls, {}).items() if c}


def _checkers(of: Any, ranges: Dict[str, Tuple[int, int]]) -> Dict[str, Optional[Checker]]:
    return {k: _checker(hint, ranges.get(k, (0, LARGEST))) for k, hint in typing.get_type_hints(of).items() if k != "return"}


def _simple(hint: Any) -> Optional[Tuple[Callable[[Any], bool], str]]:
    """Give how a value of a plain type is told, and the type's name."""
    if hint is type(None):
        return (lambda v: v is None), "None"
    if hint is int:
        return (lambda v: type(v) is int or (isinstance(v, Integral) and not isinstance(v, bool))), "int"
    if hint is float:
        return (lambda v: type(v) is float or (isinstance(v, Real) and not isinstance(v, bool))), "float"
    if hint is bytes:
        return (lambda v: isinstance(v, (bytes, bytearray, memoryview))), "bytes"
    if typing.get_origin(hint) is os.PathLike:
        return (lambda v: isinstance(v, os.PathLike)), "path"
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return (lambda v: isinstance(v, hint)), hint.__name__
    return None


def _checker(hint: Any, whole: Tuple[int, int] = (0, LARGEST)) -> Optional[Checker]:
    """Give the check of one type; None for what everything is. whole: the range of a whole number."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        parts = [_checker(h, whole) for h in of]
        if any(p is None for p in parts):
            return None
        return _union([p for p in parts if p], _names(of))
    if origin is tuple:
        return _tuple([_checker(h) for h in of], "(" + ", ".join(_name(h) for h in of) + ")")
    if origin is collections.abc.Mapping:
        return _mapping(*(_checker(h) for h in of))
    if origin in (collections.abc.Sequence, collections.abc.Iterable):
        return _items(origin, _checker(of[0]), _name(hint))
    simple = _simple(hint)
    if simple is None:
        return None
    ok, name = simple
    if hint is int:
        return _whole(ok, *whole)
    return lambda v: None if ok(v) else ("", v, f"{name}, not {type(v).__name__}")


def _whole(ok: Callable[[Any], bool], least: int, most: int) -> Checker:
    def check(v: Any) -> Complaint:
        if not ok(v):
            return "", v, f"int, not {type(v).__name__}"
        if not least <= int(v) <= most:
            return ":", v, f"int from {least} " + ("on" if v < least and most > 1 << 31 else f"to {most}")
        return None

    return check


def _name(hint: Any) -> str:
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        return _names(of)
    if origin is collections.abc.Mapping:
        return f"mapping of {_name(of[0])} to {_name(of[1])}"
    if origin in (collections.abc.Sequence, collections.abc.Iterable):
        return f"list of {_name(of[0])}"
    if origin is tuple:
        return "(" + ", ".join(_name(h) for h in of) + ")"
    simple = _simple(hint)
    return simple[1] if simple else str(hint)


def _names(of: Tuple[Any, ...]) -> str:
    return " or ".join(dict.fromkeys(_name(h) for h in of))


def _union(parts: "list[Checker]", names: str) -> Checker:
    def check(v: Any) -> Complaint:
        inner: Complaint = None
        for p in parts:
            wrong = p(v)
            if wrong is None:
                return None
            if wrong[0]:  # the right thing, with something wrong in it
                inner = wrong
        return inner or ("", v, f"{names}, not {type(v).__name__}")

    return check


def _tuple(parts: "list[Optional[Checker]]", name: str) -> Checker:
    def check(v: Any) -> Complaint:
        if not isinstance(v, (tuple, list)) or len(v) != len(parts):
            return "", v, f"{name}, not {type(v).__name__}"
        for i, (p, x) in enumerate(zip(parts, v)):
            wrong = p(x) if p else None
            if wrong is not None:
                return f"[{i}]{wrong[0]}", wrong[1], wrong[2]
        return None

    return check


def _items(kind: Any, item: Optional[Checker], name: str) -> Checker:
    def check(v: Any) -> Complaint:
        if isinstance(v, WORDS) or not isinstance(v, kind):
            return "", v, f"{name}, not {type(v).__name__}"
        if item and isinstance(v, (list, tuple)):  # others may be read but once
            for i, x in enumerate(v):
                wrong = item(x)
                if wrong is not None:
                    return f"[{i}]{wrong[0]}", wrong[1], wrong[2]
        return None

    return check


def _mapping(key: Optional[Checker], value: Optional[Checker]) -> Checker:
    def check(v: Any) -> Complaint:
        if not isinstance(v, collections.abc.Mapping):
            return "", v, f"mapping, not {type(v).__name__}"
        for k, x in v.items():
            for p, part, at in ((key, k, " key"), (value, x, f"[{k!r}]")):
                wrong = p(part) if p else None
                if wrong is not None:
                    return at + wrong[0], wrong[1], wrong[2]
        return None

    return check
