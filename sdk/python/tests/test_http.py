"""Against a server that misbehaves: framing, broken connections, repetition, cancellation, limits."""

import asyncio
import io
import os
import ssl
import unittest
from unittest import mock

import libdsec
from libdsec import _http, _rpc
from tests.rig import END, HEAD, Async, Fake, answer, chunk, envelope, failure, fixed

BOX = {"id": "sb1", "state": "running"}
LOCALHOST = os.path.join(os.path.dirname(__file__), "localhost.pem")


def bytewise(raw):
    """Serve an answer a byte at a time."""

    async def serve(request, writer, n):
        for i in range(len(raw)):
            writer.write(raw[i:i + 1])
            await writer.drain()
            await asyncio.sleep(0)
        return True

    return serve


class Framing(Async):
    async def test_answers_in_any_pieces(self):
        stream = HEAD + chunk(envelope({"files": [{"path": "/a"}]})[:3]) + chunk(envelope({"files": [{"path": "/a"}]})[3:] + envelope({"files": [{"path": "/b"}]}) +
                                                                               envelope({}, 2)[:2]) + chunk(envelope({}, 2)[2:]) + END
        for raw in (answer(BOX), answer(BOX, chunked=True), b"HTTP/1.1 100 Continue\r\n\r\n" + answer(BOX)):
            async with Fake(bytewise(raw)) as fake, fake.client() as c:
                self.assertEqual((await c.get("sb1")).id, "sb1")
                self.assertEqual((await c.get("sb1")).id, "sb1")
                self.assertEqual(fake.connections, 1)
        async with Fake(fixed(answer(BOX))) as box, Fake(bytewise(stream)) as fake, box.client() as c, fake.client() as c2:
            sb = libdsec.Sandbox(c2._channel, (await c.get("sb1")).info)
            self.assertEqual([f.path for f in await sb.files.list("/")], ["/a", "/b"])
            self.assertEqual([f.path for f in await sb.files.list("/")], ["/a", "/b"])
            self.assertEqual(fake.connections, 1)

    async def test_garbage_is_unavailable(self):
        ok = b"HTTP/1.1 200 OK\r\n"
        for raw in (b"SSH-2.0-OpenSSH\r\n\r\n", b"\0\1\2\r\n\r\n", ok + b"Content-Length: -1\r\n\r\n", ok + b"Content-Length: x\r\n\r\n",
                    ok + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n", ok + b"Transfer-Encoding: gzip\r\n\r\n",
                    ok + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", ok + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
                    ok + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n", ok + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000 + b"\r\n",
                    ok + b"A: " + b"x" * (1 << 20), ok + b"no colon\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n",
                    answer([1]), answer(BOX)[:-5] + b"#####", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{{{"):
            async with Fake(fixed(raw)) as fake, fake.client(retry=0, timeout=5) as c:
                with self.assertRaises(libdsec.Unavailable, msg=raw[:80]) as e:
                    await c.get("sb1")
                self.assertEqual((e.exception.op, e.exception.sandbox), ("libdsec.get", "sb1"))

    async def test_an_answer_that_breaks_off(self):
        for raw in (b"", b"HTTP/1.1 200", answer(BOX)[:-1], answer(BOX, chunked=True)[:-5], answer(BOX, chunked=True)[:-2]):
            async def serve(request, writer, n, raw=raw):
                writer.write(raw if n == 0 else answer(BOX))
                return n > 0

            async with Fake(serve) as fake, fake.client() as c:
                self.assertEqual((await c.get("sb1")).id, "sb1")
                self.assertEqual(len(fake.requests), 2)

    async def test_an_error_of_a_proxy(self):
        page = b"<html>bad gateway</html>"
        raw = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page)
        async with Fake(fixed(raw, answer(BOX))) as fake, fake.client() as c:
            self.assertEqual((await c.get("sb1")).id, "sb1")
        async with Fake(fixed(raw)) as fake, fake.client(retry=0) as c:
            with self.assertRaisesRegex(libdsec.Unavailable, "502"):
                await c.get("sb1")

    async def test_a_body_until_the_end_of_the_connection(self):
        async def serve(request, writer, n):
            writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"id":"sb1"}')
            return False

        async with Fake(serve) as fake, fake.client() as c:
            self.assertEqual((await c.get("sb1")).id, "sb1")
            self.assertEqual((await c.get("sb1")).id, "sb1")
            self.assertEqual((fake.connections, c._channel.pool.open), (2, 0))

    async def test_slow_answers(self):
        async with Fake(fixed("hold")) as fake, fake.client(timeout=0.05) as c:
            with self.assertRaises(libdsec.Timeout):
                await c.get("sb1")
            self.assertEqual(c._channel.pool.open, 0)
        with mock.patch.object(_rpc, "STALL", 0.05):
            async def serve(request, writer, n):
                writer.write(answer(BOX)[:-3])
                return "hold"

            async with Fake(serve) as fake, fake.client() as c:
                with self.assertRaises(libdsec.Timeout):
                    await c.get("sb1")
                await self.soon(fake.closed.wait())

    async def test_a_deadline_is_told_and_kept(self):
        async with Fake(fixed("hold")) as fake, fake.client() as c:
            with self.assertRaises(libdsec.Timeout):
                await self.soon(c.create(libdsec.Spec(image="x"), timeout=0.01))
            self.assertEqual(fake.requests[0].headers["connect-timeout-ms"], "10")
            self.assertEqual(len(fake.requests), 1)

    async def test_every_kind_of_error(self):
        for code, cls in libdsec.errors._CODES.items():
            async with Fake(fixed(failure(code))) as fake, fake.client(retry=0) as c:
                with self.assertRaises(cls) as e:
                    await c.get("sb1")
                self.assertIs(type(e.exception), cls)

    async def test_ids_and_keys_cannot_break_out(self):
        async with Fake(fixed(answer(BOX))) as fake, fake.client() as c:
            with self.assertRaises(libdsec.NotFound):
                await c.get("sb1\r\nX: y")
            self.assertEqual(len(fake.requests), 0)
            await c.create(libdsec.Spec(image="x"), key="a\r\nX: y é")
            self.assertEqual(fake.requests[0].headers["dsec-key"], "a%0D%0AX:%20y%20%C3%A9")
            self.assertNotIn("x", fake.requests[0].headers)


class Streams(Async):
    def process(self, c):
        return libdsec.Process(c._channel, "sb1", libdsec.Status("c1", "running"), _rpc.Steps("s"), 0)

    async def test_output_goes_on_where_it_broke(self):
        """Whatever the connection breaks in, no byte is lost or told twice."""
        out = b"".join(bytes([i]) * 7 for i in range(20))
        status = {"id": "c1", "outcome": "exited", "code": 3}

        def said(offset):
            pieces = [envelope({"offset": str(i), "stdout": _rpc.to_bytes(out[i:i + 7])}) for i in range(offset, len(out), 7)]
            return HEAD + b"".join(chunk(p) for p in pieces) + chunk(envelope({"status": status}) + envelope({}, 2)) + END

        for cut in (0, 50, len(HEAD), len(HEAD) + 30, len(HEAD) + 200, len(said(0)) - 40, len(said(0)) - 20):
            async def serve(request, writer, n):
                whole = said(int(request.messages[0].get("offset", 0)))
                writer.write(whole[:cut] if n == 0 else whole)
                return n > 0

            async with Fake(serve) as fake, fake.client() as c:
                p = self.process(c)
                got = [(x.offset, x.data) async for x in p.output()]
                self.assertEqual(b"".join(d for _, d in got), out, cut)
                self.assertEqual([o for o, _ in got], list(range(0, len(out), 7)))
                self.assertEqual(p.status.code, 3)

    async def test_a_stream_without_its_end_is_no_success(self):
        async with Fake(fixed(HEAD + chunk(envelope({"data": "YQ=="})) + END)) as fake, fake.client(retry=0) as c:
            with self.assertRaisesRegex(libdsec.Unavailable, "ended before"):
                await libdsec.Files(c._channel, "sb1", _rpc.Steps()).read("/x")
            self.assertEqual(len(fake.requests), 1)

    async def test_an_error_at_the_end_of_a_stream(self):
        raw = HEAD + chunk(envelope({"data": "YQ=="}) + envelope({"error": {"code": "not_found", "message": "gone"}}, 2)) + END
        async with Fake(fixed(raw)) as fake, fake.client() as c:
            files = libdsec.Files(c._channel, "sb1", _rpc.Steps())
            for _ in range(2):
                with self.assertRaisesRegex(libdsec.NotFound, "gone"):
                    await files.read("/x")
            self.assertEqual(fake.connections, 1)  # it was read to its end

    async def test_garbage_in_a_stream(self):
        for raw in (b"\0\0\0\0\3{{{", b"\0\0\0\0\2[]", b"\0\xff\xff\xff\xff", b"\1\0\0\0\2{}", b'\0\0\0\0\x0c{"data":"!"}', b"\0\0\0"):
            async with Fake(fixed(HEAD + chunk(raw) + END)) as fake, fake.client(retry=0) as c:
                with self.assertRaises(libdsec.Unavailable, msg=raw):
                    await libdsec.Files(c._channel, "sb1", _rpc.Steps()).read("/x")

    async def test_leaving_early_closes_the_connection(self):
        async def serve(request, writer, n):
            writer.write(HEAD + chunk(envelope({"op": "ready"})))
            return "hold"

        async with Fake(serve) as fake, fake.client() as c:
            async for event in libdsec.Files(c._channel, "sb1", _rpc.Steps()).watch("/"):
                self.assertEqual(event.op, "ready")
                break
            await self.soon(fake.closed.wait())
            await self.until(lambda: c._channel.pool.open == 0)

    async def test_data_that_stall(self):
        with mock.patch("libdsec.files.STALL", 0.05):
            async def serve(request, writer, n):
                writer.write(HEAD + chunk(envelope({"data": "YQ=="})))
                return "hold"

            async with Fake(serve) as fake, fake.client() as c:
                with self.assertRaises(libdsec.Timeout):
                    await libdsec.Files(c._channel, "sb1", _rpc.Steps()).read("/x")


class Uploads(Async):
    async def test_pieces_of_any_size(self):
        end = HEAD + chunk(envelope({"path": "/x", "type": "file"}) + envelope({}, 2)) + END
        big = os.urandom(_rpc.CHUNK * 2 + 1)

        async def later():
            yield b"a"
            yield b""
            yield big

        async with Fake(fixed(end)) as fake, fake.client() as c:
            files = libdsec.Files(c._channel, "sb1", _rpc.Steps())
            for data, want in ((b"", b""), ("é", "é".encode()), (big, big), ([b"a", b"b"], b"ab"), (later(), b"a" + big), (io.BytesIO(big), big)):
                self.assertEqual((await files.write("/x", data, mode=0o600)).path, "/x")
                messages = fake.requests[-1].messages
                self.assertEqual(messages[0]["file"], {"path": "/x"})
                self.assertTrue(all("file" not in m for m in messages[1:]))
                self.assertEqual(b"".join(_rpc.from_bytes(m.get("data")) for m in messages), want)
                self.assertTrue(all(len(_rpc.from_bytes(m.get("data"))) <= _rpc.CHUNK for m in messages))
            self.assertEqual(fake.connections, 1)

    async def test_an_answer_before_the_end_of_the_body(self):
        """The server says why it does not want the rest; that is the error, not a broken pipe."""

        async def one(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(failure("resource_exhausted", "disk full", "429 Too Many Requests"))
            writer.write_eof()
            while await reader.read(1 << 20):
                pass
            writer.close()

        async def endless():
            while True:
                yield bytes(1 << 16)

        server = await asyncio.start_server(one, "127.0.0.1", 0)
        async with libdsec.DSecClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "t") as c:
            with self.assertRaisesRegex(libdsec.Exhausted, "disk full"):
                await self.soon(libdsec.Files(c._channel, "sb1", _rpc.Steps()).write("/x", endless()))
        server.close()

    async def test_data_that_fail_are_broken_off(self):
        class Mine(Exception):
            pass

        async def bad():
            yield b"half"
            raise Mine

        async with Fake(fixed(answer({}))) as fake, fake.client() as c:
            with self.assertRaises(Mine):
                await libdsec.Files(c._channel, "sb1", _rpc.Steps()).write("/x", bad())
            await self.soon(fake.closed.wait())
            self.assertFalse(fake.requests[0].whole)
            for odd in (3, ["text"]):
                with self.assertRaises((libdsec.Invalid, TypeError)):
                    await libdsec.Files(c._channel, "sb1", _rpc.Steps()).write("/x", odd)


class Repetition(Async):
    async def test_the_same_step_is_repeated(self):
        ran = answer({"status": {"id": "c1", "outcome": "exited", "code": 0}, "stdout": "aGk="})
        async with Fake(fixed(False, failure("unavailable", status="503 x"), ran)) as fake, fake.client() as c:
            sb = libdsec.Sandbox(c._channel, libdsec.SandboxInfo("sb1", libdsec.Spec(), "running"))
            self.assertEqual((await sb.exec("x")).out, "hi")
            self.assertEqual(len({r.headers["dsec-step"] for r in fake.requests}), 1)
            self.assertEqual(len(fake.requests), 3)
            await sb.session("r 1").exec("y")
            self.assertEqual(fake.requests[-1].headers["dsec-step"], "r%201:1")

    async def test_the_same_key_is_repeated(self):
        async with Fake(fixed(False, answer(BOX))) as fake, fake.client() as c:
            await c.create(libdsec.Spec(image="x"))
            self.assertEqual(fake.requests[0].headers["dsec-key"], fake.requests[1].headers["dsec-key"])
            await c.create(libdsec.Spec(image="x"))
            self.assertNotEqual(fake.requests[2].headers["dsec-key"], fake.requests[1].headers["dsec-key"])

    async def test_what_could_happen_twice_is_not_repeated(self):
        async with Fake(fixed(False)) as fake, fake.client() as c:
            with self.assertRaises(libdsec.Unavailable):
                await libdsec.Ports(c._channel, "sb1").dial(80)
            with self.assertRaises(libdsec.Unavailable):
                await c.images.upload("x", b"tar")
            self.assertEqual(len(fake.requests), 2)

    async def test_errors_that_stay_are_not_repeated(self):
        for code in set(libdsec.errors._CODES) - {"unavailable"}:
            async with Fake(fixed(failure(code))) as fake, fake.client() as c:
                with self.assertRaises(libdsec.DSecError):
                    await c.get("sb1")
                self.assertEqual(len(fake.requests), 1, code)
        async with Fake(fixed(failure("resource_exhausted"), answer(BOX))) as fake, fake.client(retry_on=("exhausted",)) as c:
            await c.get("sb1")

    async def test_patience_ends(self):
        async with Fake(fixed(failure("unavailable"))) as fake, fake.client(retry=0.1) as c:
            with self.assertRaises(libdsec.Unavailable):
                await self.soon(c.get("sb1"))
            self.assertGreater(len(fake.requests), 1)

    async def test_nobody_listens(self):
        async with Fake(fixed(answer(BOX))) as fake:
            url = fake.url
        async with libdsec.DSecClient(url, "t", retry=0.05) as c:
            with self.assertRaisesRegex(libdsec.Unavailable, "connect to 127.0.0.1"):
                await c.images.upload("x", b"")


class Connections(Async):
    async def test_they_are_kept(self):
        async with Fake(fixed(answer(BOX))) as fake, fake.client() as c:
            for _ in range(10):
                await c.get("sb1")
            self.assertEqual(fake.connections, 1)
        async with Fake(fixed(answer(BOX, headers="Connection: close\r\n"))) as fake, fake.client() as c:
            for _ in range(3):
                await c.get("sb1")
            self.assertEqual((fake.connections, c._channel.pool.open), (3, 0))

    async def test_one_that_the_server_closed_is_not_used(self):
        async def serve(request, writer, n):
            writer.write(answer(BOX))
            return False

        async with Fake(serve) as fake, fake.client(retry=0) as c:
            for _ in range(5):
                await c.get("sb1")
                await self.until(lambda: not c._channel.pool._idle or not c._channel.pool._idle[0].usable())
            self.assertEqual(len(fake.requests), 5)

    async def test_two_thousand_calls_share_a_few(self):
        async with Fake(fixed(answer(BOX))) as fake, fake.client(connections=32) as c:
            got = await asyncio.gather(*(c.get("sb1") for _ in range(2000)))
            self.assertEqual(len(got), 2000)
            self.assertLessEqual(fake.connections, 32)
            self.assertEqual(c._channel.pool.open, len(c._channel.pool._idle))

    async def test_long_calls_get_more(self):
        """Calls that end only once all of them are there need a connection each."""
        many, here, go = 40, [0], asyncio.Event()

        async def serve(request, writer, n):
            here[0] += 1
            if here[0] == many:
                go.set()
            await go.wait()
            writer.write(answer(BOX))
            return True

        with mock.patch.object(_http, "SOFT", 8):
            async with Fake(serve) as fake, fake.client() as c:
                await self.soon(asyncio.gather(*(c.get("sb1") for _ in range(many))))
                self.assertEqual(fake.connections, many)

    async def test_the_limit_of_open_files(self):
        with mock.patch.object(_http, "descriptors", lambda: _http.RESERVE + 3):
            async with Fake(fixed(answer(BOX))) as fake, fake.client() as c:
                await asyncio.gather(*(c.get("sb1") for _ in range(50)))
                self.assertLessEqual(fake.connections, 3)

    async def test_no_more_files(self):
        real, opened = _http.dial, [0]

        async def scarce(*args, **how):
            if opened[0] == 2:
                raise OSError(24, "Too many open files")
            opened[0] += 1
            return await real(*args, **how)

        with mock.patch.object(_http, "dial", scarce):
            async with Fake(fixed(answer(BOX))) as fake, fake.client() as c:
                await self.soon(asyncio.gather(*(c.get("sb1") for _ in range(50))))
                self.assertEqual((fake.connections, c._channel.pool.hard), (2, 2))

    async def test_cancelling(self):
        async with Fake(fixed("hold")) as fake, fake.client() as c:
            task = asyncio.ensure_future(c.get("sb1"))
            await self.until(lambda: fake.requests)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await self.soon(fake.closed.wait())
            self.assertEqual(c._channel.pool.open, 0)

    async def test_a_create_that_nobody_waits_for(self):
        """What was made while its caller went away is ended, unless the caller has a key that finds it."""
        async def serve(request, writer, n):
            kind = request.path.rpartition("/")[2]
            if kind == "Create":
                return "hold"
            if kind == "List":
                made = [r.headers["dsec-key"] for r in fake.requests if r.path.endswith("/Create")]
                writer.write(answer({"sandboxes": [{"id": f"sb{i}", "key": k, "state": "running"} for i, k in enumerate(made + ["another"])]}))
            else:
                writer.write(answer(BOX))
            return True

        def stopped():
            return sorted(r.headers["dsec-sandbox"] for r in fake.requests if r.path.endswith("/Stop"))

        async with Fake(serve) as fake, fake.client() as c:
            job = libdsec.Job(c._channel, libdsec.JobInfo("j"), 2)
            spec = libdsec.Spec(image="x")
            calls = [asyncio.ensure_future(w) for w in (c.create(spec), c.create(spec, key="mine"), job.create(spec))]
            await self.until(lambda: len(fake.requests) == 3)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            mine = next(i for i, r in enumerate(fake.requests) if r.headers["dsec-key"] == "mine")
            want = [f"sb{i}" for i in range(3) if i != mine]
            await self.until(lambda: len(stopped()) == 2)
            self.assertEqual(stopped(), want)
            self.assertEqual(sum(r.path.endswith("/List") for r in fake.requests), 1)
            # One that waited no longer, just before the end of the client.
            with self.assertRaises(libdsec.Timeout):
                await c.create(spec, timeout=0.01)
        self.assertEqual(stopped(), [*want, "sb3"])

    async def test_cancelling_one_that_waits(self):
        go = asyncio.Event()

        async def serve(request, writer, n):
            await go.wait()
            writer.write(answer(BOX))
            return True

        async with Fake(serve) as fake, fake.client(connections=1) as c:
            first, second, third = (asyncio.ensure_future(c.get("sb1")) for _ in range(3))
            await self.until(lambda: fake.requests)
            second.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await second
            go.set()
            await self.soon(asyncio.gather(first, third))
            self.assertEqual((fake.connections, c._channel.pool.open), (1, 1))

    async def test_cancelling_while_it_connects(self):
        blocked = asyncio.Event()

        async def never(*args, **how):
            blocked.set()
            await asyncio.Event().wait()

        async with Fake(fixed(answer(BOX))) as fake, fake.client() as c:
            with mock.patch.object(_http, "dial", never):
                task = asyncio.ensure_future(c.get("sb1"))
                await blocked.wait()
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
            await self.until(lambda: c._channel.pool.open == 0)

    async def test_a_server_that_takes_no_connection(self):
        async def never(*args, **how):
            await asyncio.Event().wait()

        with mock.patch.object(_http, "CONNECT", 0.01), mock.patch.object(_http, "dial", never):
            async with libdsec.DSecClient("http://127.0.0.1:1", "t", retry=0) as c:
                with self.assertRaisesRegex(libdsec.Unavailable, "no connection within"):
                    await c.get("sb1")
                self.assertEqual(c._channel.pool.open, 0)

    async def test_closing_ends_what_is_under_way(self):
        async with Fake(fixed("hold")) as fake:
            c = fake.client(connections=1)
            tasks = [asyncio.ensure_future(c.get("sb1")) for _ in range(3)]
            await self.until(lambda: fake.requests)
            await c.aclose()
            for t in tasks:
                with self.assertRaisesRegex(libdsec.Invalid, "closed"):
                    await self.soon(t)
            with self.assertRaisesRegex(libdsec.Invalid, "closed"):
                await c.get("sb1")

    async def test_tls(self):
        here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        here.load_cert_chain(LOCALHOST)
        trust = ssl.create_default_context(cafile=LOCALHOST)
        async with Fake(fixed(answer(BOX)), ssl=here) as fake:
            async with fake.client(ssl=trust) as c:
                self.assertEqual((await c.get("sb1")).id, "sb1")
            async with fake.client() as c:
                with self.assertRaisesRegex(libdsec.Invalid, "not trusted"):
                    await c.get("sb1")
        async with Fake(fixed(answer(BOX))) as plain:
            async with libdsec.DSecClient(plain.url.replace("http", "https"), "t", retry=0, ssl=trust) as c:
                with mock.patch.object(_http, "CONNECT", 0.05), self.assertRaises(libdsec.Unavailable):
                    await c.get("sb1")


class Loops(unittest.TestCase):
    def test_a_client_belongs_to_its_loop(self):
        async def first(c):
            with self.assertRaises(libdsec.Unavailable):
                await c.get("sb1")

        async def second(c):
            with self.assertRaises(RuntimeError):
                await c.get("sb1")

        c = libdsec.DSecClient("http://127.0.0.1:1", "t", retry=0)
        asyncio.run(first(c))
        asyncio.run(second(c))


if __name__ == "__main__":
    unittest.main()
