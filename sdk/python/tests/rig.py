"""What the tests share: a server that misbehaves on purpose, and the node that the Go test started."""

import asyncio
import json
import os
import unittest

import libdsec

# Where the node is; the Go test next to this folder sets it.
URL, TOKEN, IMAGE = os.environ.get("DSEC_TEST_URL"), os.environ.get("DSEC_TEST_TOKEN"), "busybox"
PATIENCE = 20.0


def answer(message, status="200 OK", headers="", chunked=False):
    """Give a unary answer as bytes."""
    body = json.dumps(message).encode()
    if chunked:
        return f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n{headers}\r\n".encode() + chunk(body) + b"0\r\n\r\n"
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def failure(code, message="no", status="400 Bad Request"):
    return answer({"code": code, "message": message}, status)


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def envelope(message, flags=0):
    body = json.dumps(message).encode()
    return bytes([flags]) + len(body).to_bytes(4, "big") + body


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Request:
    """A request as the fake server read it. whole: its body was not broken off."""

    def __init__(self, path, headers, body, whole):
        self.path, self.headers, self.body, self.whole = path, headers, body, whole

    @property
    def message(self):
        return json.loads(self.body)

    @property
    def messages(self):
        out, b = [], self.body
        while b:
            size = int.from_bytes(b[1:5], "big")
            out.append(json.loads(b[5:5 + size]))
            b = b[5 + size:]
        return out


async def read_head(reader):
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").strip().split("\r\n")
    headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
    return first.split()[1], headers


async def read_request(reader):
    path, headers = await read_head(reader)
    body, whole = b"", True
    try:
        if headers.get("transfer-encoding") == "chunked":
            while True:
                size = int((await reader.readline()).strip() or b"x", 16)
                piece = await reader.readexactly(size + 2)
                if size == 0:
                    break
                body += piece[:-2]
        else:
            body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ValueError):
        whole = False
    return Request(path, headers, body, whole)


class Fake:
    """A server that does what a test says. ``serve`` is called for each request, with its number from 0."""

    def __init__(self, serve, ssl=None):
        self._serve, self._ssl = serve, ssl
        self.connections = 0
        self.requests = []
        self.closed = asyncio.Event()  # some connection was closed by the client

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._one, "127.0.0.1", 0, ssl=self._ssl, backlog=1024)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"{'https://localhost' if self._ssl else 'http://127.0.0.1'}:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _one(self, reader, writer):
        self.connections += 1
        try:
            while True:
                request = await read_request(reader)
                self.requests.append(request)
                if not request.whole:
                    return
                again = await self._serve(request, writer, len(self.requests) - 1)
                await writer.drain()
                if again == "hold":  # say nothing until the client goes away
                    await reader.read(1)
                    return
                if again is False:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.transport.abort() if writer.transport.is_closing() else writer.close()

    def client(self, **how):
        return libdsec.DSecClient(self.url, "secret", **how)


def fixed(*answers):
    """Serve these answers in turn, the last one for ever. False closes, "hold" says nothing."""

    async def serve(request, writer, n):
        a = answers[min(n, len(answers) - 1)]
        if isinstance(a, bytes):
            writer.write(a)
            return True
        return a

    return serve


class Async(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        asyncio.get_running_loop().slow_callback_duration = 60  # a busy host is no news

    async def soon(self, work):
        """Wait for what must happen, without an opinion on when."""
        return await asyncio.wait_for(work, PATIENCE)

    async def until(self, condition):
        async def poll():
            while not await condition() if asyncio.iscoroutinefunction(condition) else not condition():
                await asyncio.sleep(0.005)

        await self.soon(poll())


@unittest.skipUnless(URL, "feature node: DSEC_TEST_URL names none; go test ./sdk starts one")
class Node(Async):
    """Tests on a real node. Each has a client and a sandbox of its own."""

    async def asyncSetUp(self):
        await super().asyncSetUp()
        self.client = libdsec.DSecClient(URL, TOKEN)
        self.sb = await self.client.create(self.spec())

    async def asyncTearDown(self):
        try:
            await self.sb.stop()
        finally:
            await self.client.aclose()

    def spec(self, **more):
        return libdsec.Spec(**{**dict(image=IMAGE, memory="256M", cpu=2, pids=512, ttl=600), **more})
