"""Calls of functions, against a real node and a server that misbehaves."""

import unittest

import libdsec
from libdsec import Case, Limits, sync
from tests.rig import END, HEAD, IMAGE, TOKEN, URL, Async, Fake, answer, chunk, envelope, failure, fixed


@unittest.skipUnless(URL, "feature node: DSEC_TEST_URL names none; go test ./sdk starts one")
class Calls(Async):
    async def asyncSetUp(self):
        await super().asyncSetUp()
        self.client = libdsec.DSecClient(URL, TOKEN)

    async def asyncTearDown(self):
        await self.client.aclose()

    async def test_call(self):
        r = await self.client.fn.call("read x; echo $x $1 $A; cat f; pwd; exit 3", runtime="sh", image=IMAGE, args=["a"], input="in\n",
                                      files={"f": "given\n"}, env={"A": "é"})
        self.assertEqual((r.outcome, r.code, r.out, r.ok), ("exit", 3, "in a é\ngiven\n/work\n", False))
        self.assertGreater(r.memory, 0)
        r = await self.client.fn.call("echo x >> /tmp/x; cat /tmp/x", runtime="sh", image=IMAGE)
        self.assertEqual((r.outcome, r.out), ("ok", "x\n"))
        r = await self.client.fn.call("sleep 100", runtime="sh", image=IMAGE, limits=Limits(time=0.3))
        self.assertEqual((r.outcome, r.limit, r.code), ("timeout", "wall", 124))
        r = await self.client.fn.call("yes", runtime="sh", image=IMAGE, limits=Limits(output="1K"))
        self.assertEqual((r.outcome, len(r.stdout), r.truncated), ("output", 1024, True))

    async def test_batch(self):
        items = await self.client.fn.batch([Case(input=f"{i}\n", args=["x"] * i) for i in range(8)], source="read x; echo $x $#",
                                           runtime="sh", image=IMAGE, at_a_time=3)
        self.assertEqual([i.result.out for i in items], [f"{i} {i}\n" for i in range(8)])

    async def test_refused(self):
        with self.assertRaisesRegex(libdsec.Unsupported, "python3"):
            await self.client.fn.call("print(1)", image=IMAGE)
        with self.assertRaises(libdsec.Invalid):
            await self.client.fn.call("x", runtime="perl", image=IMAGE)
        with self.assertRaises(libdsec.Invalid):
            await self.client.fn.call("x", runtime="sh", image=IMAGE, files={"../x": "y"})
        with self.assertRaises(libdsec.Invalid):
            self.client.fn.batch([])

    async def test_a_sandbox_of_the_kind(self):
        r = await self.client.fn.run("echo $A; pwd", image=IMAGE, env={"A": "b"}, cwd="/tmp")
        self.assertEqual(r.out, "b\n/tmp\n")
        r = await self.client.fn.run("cat /in/a", image=IMAGE, files={"/in/a": "given"})
        self.assertEqual(r.out, "given")
        async with await self.client.create(libdsec.Spec(image=IMAGE, kind="fncall")) as sb:
            self.assertEqual((await sb.exec("echo x > /tmp/x; cat /tmp/x")).out, "x\n")
            self.assertEqual((await sb.exec("cat /tmp/x")).code, 1)
            with self.assertRaises(libdsec.Unsupported):
                await sb.files.write("/tmp/x", "y")

    def test_without_an_event_loop(self):
        with sync.connect(URL, TOKEN) as client:
            self.assertEqual(client.fn.call("echo hi", runtime="sh", image=IMAGE).out, "hi\n")
            seen = sorted(i.index for i in client.fn.batch([Case(), Case()], source="echo", runtime="sh", image=IMAGE))
            self.assertEqual(seen, [0, 1])


def ends(*items):
    return HEAD + b"".join(chunk(envelope(i)) for i in items)


class Broken(Async):
    async def test_a_call_is_repeated(self):
        async with Fake(fixed(False, answer({"outcome": "ok", "stdout": "aGk="}))) as server:
            async with server.client() as client:
                r = await client.fn.call("x", runtime="sh", image="i")
                self.assertEqual((r.out, len(server.requests)), ("hi", 2))

    async def test_a_batch_goes_on_where_it_broke(self):
        first = ends({"index": 1, "result": {"outcome": "ok", "stdout": "MQ=="}})
        rest = ends({"index": 0, "result": {"outcome": "ok", "stdout": "MA=="}},
                    {"index": 1, "errorKind": "exhausted", "error": "full"}) + chunk(envelope({}, 2)) + END

        async def serve(request, writer, n):
            writer.write((first, rest)[n])
            return n == 1

        async with Fake(serve) as server:
            async with server.client() as client:
                items = await client.fn.batch([Case(input=str(i)) for i in range(3)], source="x", runtime="sh", image="i")
                self.assertEqual([i.result and i.result.out for i in items], ["0", "1", None])
                self.assertIsInstance(items[2].error, libdsec.Exhausted)
                self.assertEqual(len(server.requests[1].messages[0]["cases"]), 2)

    async def test_an_error(self):
        async with Fake(fixed(failure("unimplemented", "no go", "501 Not Implemented"))) as server:
            async with server.client() as client:
                with self.assertRaisesRegex(libdsec.Unsupported, "no go"):
                    await client.fn.call("x", runtime="go", image="i")
