"""What is wrong with arguments is said at once, by name, as an error of one family."""

import asyncio
import inspect
import numbers
import os
import pickle
import typing
import unittest
from fractions import Fraction

import libdsec
from libdsec import _check, records
from libdsec.records import Result, SandboxInfo, Spec, Status

NOWHERE = "http://127.0.0.1:1"


class Whole:
    """An integer of another library, as numpy has them."""

    def __init__(self, n):
        self.n = n

    def __int__(self):
        return self.n

    def __lt__(self, other):
        return self.n < other

    def __bool__(self):
        return bool(self.n)


numbers.Integral.register(Whole)


class Settings(unittest.TestCase):
    def test_of_a_client(self):
        for how, want in (
                ({"retry": -1}, "retry is -1; wanted a number from 0 on"),
                ({"retry": "5"}, "retry is '5'; wanted float, not str"),
                ({"retry": True}, "retry is True; wanted float, not bool"),
                ({"retry": float("nan")}, "retry is nan; wanted a number from 0 on"),
                ({"retry": None}, "retry is None; wanted float, not NoneType"),
                ({"timeout": 0}, "timeout is 0; wanted a number above 0"),
                ({"timeout": float("inf")}, "timeout is inf; wanted a number above 0 to "),
                ({"connections": 0}, "connections is 0; wanted int from 1 to "),
                ({"connections": 1.5}, "connections is 1.5; wanted int, not float"),
                ({"retry_on": "unavailable"}, "retry_on is 'unavailable'; wanted list of str, not str"),
                ({"retry_on": ["unavaliable"]}, "retry_on is 'unavaliable'; wanted kinds of error: invalid, "),
                ({"retry_on": [3]}, "retry_on[0] is 3; wanted str, not int"),
                ({"retry_on": {3}}, "retry_on is 3; wanted kinds of error: "),
                ({"retry_on": 7}, "retry_on is 7; wanted list of str, not int"),
                ({"url": b"http://h"}, "url is b'http://h'; wanted str or None, not bytes"),
                ({"ssl": True}, "ssl is True; wanted SSLContext or None, not bool")):
            for make in (libdsec.DSecClient, libdsec.connect, libdsec.sync.connect):
                with self.assertRaises(libdsec.Invalid, msg=how) as e:
                    make(**{"url": NOWHERE, "token": "t", **how})
                self.assertIn(f"libdsec.DSecClient: {want}", str(e.exception))

    def test_what_may_be(self):
        for how in ({"retry": 0}, {"retry": float("inf")}, {"timeout": 0.001}, {"connections": 1}, {"retry_on": ()}, {"retry_on": {"exhausted", "lost"}},
                    {"retry": Fraction(1, 2)}):
            libdsec.DSecClient(NOWHERE, "t", **how)

    def test_of_records(self):
        for make, want in (
                (lambda: Spec(image=5), "Spec.image is 5; wanted str, not int"),
                (lambda: Spec(toolkits="git"), "Spec.toolkits is 'git'; wanted list of str, not str"),
                (lambda: Spec(env={"A": 5}), "Spec.env['A'] is 5; wanted str, not int"),
                (lambda: Spec(env={5: "A"}), "Spec.env key is 5; wanted str, not int"),
                (lambda: Spec(env=["A=5"]), "Spec.env is ['A=5']; wanted mapping, not list"),
                (lambda: Spec(memory=[]), "Spec.memory is []; wanted int or str, not list"),
                (lambda: Spec(pids=-1), "Spec.pids is -1; wanted int from 0 on"),
                (lambda: Spec(memory=-1), "Spec.memory is -1; wanted int from 0 on"),
                (lambda: Spec(disk=1 << 63), "Spec.disk is 9223372036854775808; wanted int from 0 to 9223372036854775807"),
                (lambda: Spec(memory="lots"), "Spec.memory is 'lots'; wanted bytes, as a number or as 512M or 2G"),
                (lambda: Spec(ttl=float("inf")).to_wire(), "Spec.ttl is inf; wanted seconds"),
                (lambda: Spec(ttl="1h"), "Spec.ttl is '1h'; wanted int or float or timedelta, not str"),
                (lambda: Spec(cpu=float("nan")).to_wire(), "Spec.cpu is nan; wanted a number from 0 on"),
                (lambda: libdsec.Delegation(port="80"), "Delegation.port is '80'; wanted int"),
                (lambda: libdsec.Limits(pids=1.5), "Limits.pids is 1.5; wanted int"),
                (lambda: libdsec.Case(args="x"), "Case.args is 'x'; wanted list of str"),
                (lambda: libdsec.Item("debian"), "Item.spec is 'debian'; wanted Spec"),
                (lambda: libdsec.DSecContainerRunArgs(memory_limit_mb="1"), "DSecContainerRunArgs.memory_limit_mb is '1'; wanted int")):
            with self.assertRaises(libdsec.Invalid) as e:
                make()
            self.assertIn(want, str(e.exception))
        spec = Spec(image="a")
        spec.cpu = "2"
        with self.assertRaisesRegex(libdsec.Invalid, "Spec.cpu is '2'"):
            spec.to_wire()

    def test_numbers_of_other_libraries(self):
        from libdsec import _rpc

        spec = Spec(image="a", cpu=Fraction(1, 2), memory=Whole(1 << 20), pids=Whole(7))
        self.assertEqual(_rpc._json(spec.to_wire()), b'{"environment":{"base":"a"},"resources":{"cpu":0.5,"memory":1048576,"pids":7}}')


class Calls(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.client = c = libdsec.DSecClient(NOWHERE, "t", retry=0)
        self.box = libdsec.Sandbox(c._channel, SandboxInfo("sb1", Spec(image="a"), "running"))
        self.job = libdsec.Job(c._channel, libdsec.JobInfo("j"))
        self.all = [c, self.box, self.box.session("s"), self.box.files, self.box.ports, self.box.screen, self.box.process("c1"), c.images, c.jobs, self.job, c.fn,
                    c.snapshots, libdsec.DSecContainer(self.box)]

    async def asyncTearDown(self):
        await self.client.aclose()

    async def test_each_argument_of_each_call(self):
        """Nothing is passed on that is of no type that the signature has."""
        seen = 0
        for on in self.all:
            for name, f in inspect.getmembers(type(on), inspect.isfunction):
                if name.startswith("_"):
                    continue
                hints = {k: h for k, h in typing.get_type_hints(f).items() if k != "return"}
                for arg, hint in hints.items():
                    if arg in ("how", "data", "tar") or isinstance(hint, typing.TypeVar) or hint is typing.Any:
                        continue
                    with self.assertRaises(libdsec.Invalid, msg=f"{type(on).__name__}.{name}({arg}=)") as e:
                        got = getattr(on, name)(**{arg: object()})
                        if inspect.isawaitable(got):
                            await got
                    self.assertRegex(str(e.exception), rf"\b{arg}\b.* is <object object")
                    seen += 1
        self.assertGreater(seen, 120)

    async def test_what_is_within(self):
        box = self.box
        for call, want in (
                (lambda: box.exec(["a", 5]), "libdsec.exec: command[1] is 5; wanted str or bytes or path, not int"),
                (lambda: box.exec(b"true"), "command is b'true'"),
                (lambda: box.exec("true", env={"A": None}), "env['A'] is None; wanted str, not NoneType"),
                (lambda: box.exec("true", timeout="5"), "timeout is '5'; wanted int or float or timedelta, not str"),
                (lambda: box.exec("true", timeout=True), "timeout is True"),
                (lambda: box.exec("true", step=("s",)), "step is ('s',)"),
                (lambda: box.exec("true", step=1.5), "step is 1.5"),
                (lambda: box.files.write("/x", 5), "data is 5; wanted bytes, text, a file, or pieces of bytes, not int"),
                (lambda: box.files.read("/x", offset=-1), "libdsec.files.read: offset is -1; wanted int from 0 on"),
                (lambda: box.files.chmod("/x", 0o100000), "mode is 32768; wanted int from 0 to 4095"),
                (lambda: box.process("c1").read("stdout", -5), "offset is -5; wanted int from 0 on"),
                (lambda: box.process("c1").read("stdout", 0, -5), "size is -5; wanted int from 0 on"),
                (lambda: box.pty(rows=0), "rows is 0; wanted int from 1 to 65535"),
                (lambda: box.fork(0), "count is 0; wanted int from 1 to 64"),
                (lambda: box.exec("true", step=-1), "step is -1; wanted int from 0 on"),
                (lambda: self.client.list(limit=-1), "limit is -1; wanted int from 0 on"),
                (lambda: self.job.events(after=-1), "after is -1; wanted int from 0 on"),
                (lambda: box.ports.dial(0), "port is 0; wanted int from 1 to 65535"),
                (lambda: box.ports.forward(80, local=70000), "local is 70000; wanted int from 0 to 65535"),
                (lambda: self.client.create(Spec(image="a"), timeout=0), "timeout is 0.0; wanted a number above 0"),
                (lambda: self.client.create("debian"), "spec is 'debian'; wanted Spec, not str"),
                (lambda: self.job.create_many(Spec(image="a")), "items is Spec("),
                (lambda: self.job.create_many([Spec(image="a"), "b"]), "items[1] is 'b'; wanted Spec or Item"),
                (lambda: self.job.create_many(x for x in ["b"]), "items[0] is 'b'; wanted Spec or Item"),
                (lambda: self.client.fn.batch([libdsec.Case()], at_a_time=65), "at_a_time is 65; wanted int from 0 to 64"),
                (lambda: self.client.fn.batch(["x"]), "cases[0] is 'x'; wanted Case")):
            with self.assertRaises(libdsec.Invalid, msg=want) as e:
                got = call()
                if inspect.isawaitable(got):
                    await got
            self.assertIn(want, str(e.exception))

    async def test_signatures_stay(self):
        self.assertTrue(inspect.iscoroutinefunction(libdsec.Sandbox.exec))
        self.assertIn("kill_on_cancel", inspect.signature(libdsec.Sandbox.exec).parameters)
        self.assertIn("Run a command", libdsec.Sandbox.exec.__doc__)
        with self.assertRaises(TypeError):  # a name that is not known is what it is everywhere in Python
            await self.box.exec("true", timout=3)


class Family(unittest.TestCase):
    def test_a_failed_command_is_one_of_the_family(self):
        e = libdsec.CommandFailed(Result("c1", "exited", code=4, stderr=b"why"), sandbox="sb1")
        self.assertIsInstance(e, libdsec.DSecError)
        self.assertEqual((e.kind, e.op, e.sandbox, e.retryable, str(e)), ("command_failed", "libdsec.exec", "sb1", False, "the command exited with status 4: why"))
        back = pickle.loads(pickle.dumps(e))
        self.assertEqual((type(back), str(back), back.result, back.sandbox), (libdsec.CommandFailed, str(e), e.result, "sb1"))

    def test_a_client_of_another_loop(self):
        c = libdsec.DSecClient(NOWHERE, "t", retry=0)

        async def use():
            try:
                await c.list()
            finally:
                await c.aclose()

        with self.assertRaises(libdsec.Unavailable):
            asyncio.run(use())
        for family in (libdsec.DSecError, libdsec.Invalid, RuntimeError):
            with self.assertRaises(family):
                asyncio.run(use())
        self.assertIsInstance(pickle.loads(pickle.dumps(libdsec.Misused("x"))), RuntimeError)


if __name__ == "__main__":
    unittest.main()
