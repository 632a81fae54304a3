"""Against a real node: what the calls do."""

import asyncio
import hashlib
import io
import os
import tarfile
import tempfile
import unittest

import libdsec
from libdsec import Spec, _tree
from tests.rig import IMAGE, TOKEN, URL, Node

ODD = b"\xff\xfe name"


class Commands(Node):
    async def test_how_a_command_ends(self):
        r = await self.sb.exec("echo out; echo err >&2; exit 3")
        self.assertEqual((r.stdout, r.stderr, r.code, r.outcome, r.ok), (b"out\n", b"err\n", 3, "exited", False))
        r = await self.sb.exec(["printf", "%s|", "a b", "", b"\xff"])
        self.assertEqual((r.stdout, r.ok, r.truncated), (b"a b||\xff|", True, False))
        r = await self.sb.exec(["nothing-here"])
        self.assertEqual((r.code, r.outcome), (127, "not-started"))
        r = await self.sb.exec("kill -9 $$")
        self.assertEqual((r.code, r.outcome, r.signal), (137, "signaled", "KILL"))
        r = await self.sb.exec("echo early; sleep 1000", timeout=0.3)
        self.assertEqual((r.code, r.outcome, r.out), (124, "timeout", "early\n"))
        r = await self.sb.exec("sleep 1000", idle=0.2)
        self.assertEqual(r.outcome, "inactive")
        with self.assertRaisesRegex(libdsec.CommandFailed, "status 4: why") as e:
            await self.sb.exec("echo why >&2; exit 4", check=True)
        self.assertEqual(e.exception.result.code, 4)

    async def test_where_and_as_whom(self):
        r = await self.sb.exec("pwd; id -un; echo $A", cwd="/home/alice", user="alice", env={"A": "é b"})
        self.assertEqual(r.out, "/home/alice\nalice\né b\n")
        with self.assertRaises(libdsec.Invalid) as e:
            await self.sb.exec("true", user="nobody-here")
        self.assertEqual(e.exception.sandbox, self.sb.id)
        self.assertTrue(e.exception.request)
        for bad in ([], "", b"true"):
            with self.assertRaises(libdsec.Invalid):
                await self.sb.exec(bad)

    async def test_input(self):
        self.assertEqual((await self.sb.exec("cat", input="é")).out, "é")
        self.assertEqual((await self.sb.exec("cat")).stdout, b"")
        big = os.urandom(1 << 20) * 5
        r = await self.sb.exec("sha256sum", input=big)
        self.assertEqual(r.out.split()[0], hashlib.sha256(big).hexdigest())
        self.assertEqual((await self.sb.exec("head -c 3", input=big)).stdout, big[:3])  # it need not read all

    async def test_more_output_than_a_result_has(self):
        size = 5 << 20
        r = await self.sb.exec(f"head -c {size} /dev/zero | tr '\\0' x")
        self.assertTrue(r.truncated)
        self.assertEqual((len(r.stdout), r.stdout_total), (4 << 20, size))
        self.assertEqual(len(await self.sb.process(r.id).read("stdout", 4 << 20)), 1 << 20)

    async def test_output_as_it_comes(self):
        p = await self.sb.start("printf 'a\\000\\r\\n\\n'; read x; printf '\\377'; printf e >&2; printf 'end'", stdin=True)
        seen = b""
        async with p.output() as output:
            async for chunk in output:
                seen += chunk.data
                if seen == b"a\0\r\n\n":
                    await p.write("go\n")
        self.assertEqual(sorted(seen), sorted(b"a\0\r\n\n\xffeend"))
        self.assertEqual((p.status.outcome, p.status.code), ("exited", 0))
        self.assertEqual(b"".join([c.data async for c in p.output(3)]), seen[3:])
        again = self.sb.process(p.id)
        self.assertEqual((await again.result()).stderr, b"e")

    async def test_lines(self):
        p = await self.sb.start("printf 'a\\303'; sleep 0.1; printf '\\251b\\nlast'; printf 'e\\n' >&2")
        self.assertEqual(sorted([x async for x in p.lines()]), [("stderr", "e"), ("stdout", "aéb"), ("stdout", "last")])

    async def test_feeding_and_ending(self):
        p = await self.sb.start("cat", stdin=True)
        await p.write(b"x" * 300000)
        await p.write("end")
        await p.close_stdin()
        await p.close_stdin()
        r = await p.result()
        self.assertEqual((len(r.stdout), r.stdout[-3:]), (300003, b"end"))
        with self.assertRaises(libdsec.Conflict):
            await p.write("more")
        p = await self.sb.start("trap 'echo got; exit 7' USR1; echo ready; while :; do sleep 0.05; done")
        async for _ in p.output():
            break
        await p.signal("USR1")
        self.assertEqual(((await p.wait()).code, (await p.result()).out), (7, "ready\ngot\n"))
        await p.kill()
        p = await self.sb.start("sleep 1000 & wait")
        self.assertIn(p.id, [s.id for s in await self.sb.processes() if s.running])
        await p.kill()
        self.assertEqual((await p.wait()).signal, "KILL")

    async def test_one_that_was_fed_before(self):
        p = await self.sb.start("cat", stdin=True)
        await p.write("one ")
        again = self.sb.process(p.id)
        await again.write("two")
        await again.close_stdin()
        self.assertEqual((await again.result()).out, "one two")

    async def test_terminal(self):
        p = await self.sb.pty("stty size; read x; stty size; cat", rows=30, cols=100)
        await self._shows(p, b"30 100")
        await p.resize(40, 120)
        await p.write("go\n")
        await self._shows(p, b"40 120")
        await p.close_stdin()
        self.assertEqual((await p.wait()).code, 0)
        shell = await self.sb.pty()
        await shell.write("echo =$((1+1))=\n")
        await self._shows(shell, b"=2=")
        await shell.kill()
        q = await self.sb.start("true")
        with self.assertRaises(libdsec.Invalid):
            await q.resize(1, 1)

    async def _shows(self, p, text):
        seen = b""
        async with p.output() as output:
            async for chunk in output:
                seen += chunk.data
                if text in seen:
                    return seen
        self.fail(f"{text!r} is not in {seen!r}")

    async def test_cancelling_leaves_it_running(self):
        task = asyncio.ensure_future(self.sb.exec("touch /tmp/began; sleep 1000"))
        await self._began()
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertEqual([s.running for s in await self.sb.processes()], [True])

    async def test_cancelling_kills_if_asked_to(self):
        task = asyncio.ensure_future(self.sb.exec("touch /tmp/began; sleep 1000", kill_on_cancel=True))
        await self._began()
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        s = await self.soon(self.sb.process("c1").wait())
        self.assertEqual((s.outcome, s.signal), ("signaled", "KILL"))

    async def _began(self):
        async def there():
            return await self.sb.files.exists("/tmp/began")

        await self.until(there)

    async def test_many_at_once(self):
        results = await asyncio.gather(*(self.sb.exec(f"echo {i}") for i in range(100)))
        self.assertEqual([r.out for r in results], [f"{i}\n" for i in range(100)])


class Sessions(Node):
    async def test_a_restarted_trainer_gets_its_answers(self):
        async def rollout(s):
            a = await s.exec("echo x >> /tmp/count; cat /tmp/count")
            p = await s.start("cat >> /tmp/count; echo fed", stdin=True)
            await p.write("y")
            await p.close_stdin()
            b = await p.result()
            await s.files.write("/tmp/z", "1", append=True)
            c = await s.exec("cat /tmp/count /tmp/z")
            return [a, b, c], s.number

        first, n = await rollout(self.sb.session("r 1"))
        second, m = await rollout((await self.client.get(self.sb.id)).session("r 1"))
        self.assertEqual((n, m), (6, 6))
        self.assertEqual([r.stdout for r in first], [r.stdout for r in second])
        self.assertEqual(([r.replayed for r in first], second[0].replayed, second[2].replayed), ([False] * 3, True, True))
        self.assertEqual(first[2].out, "x\ny1")
        self.assertEqual((await self.sb.exec("cat /tmp/count /tmp/z")).out, "x\ny1")
        self.assertIs(self.sb.session("r 1"), self.sb.session("r 1"))

    async def test_a_step_that_runs_is_attached_to(self):
        one = asyncio.ensure_future(self.sb.session("s").exec("echo x >> /tmp/n; until test -e /tmp/go; do sleep 0.02; done; cat /tmp/n"))
        other = (await self.client.get(self.sb.id)).session("s")

        async def there():
            return await self.sb.files.exists("/tmp/n")

        await self.until(there)
        two = asyncio.ensure_future(other.exec("echo x >> /tmp/n; until test -e /tmp/go; do sleep 0.02; done; cat /tmp/n"))
        await self.sb.exec("touch /tmp/go")
        self.assertEqual(((await one).out, (await two).out), ("x\n", "x\n"))

    async def test_a_different_request_is_diverged(self):
        await self.sb.session("s").exec("echo a")
        with self.assertRaisesRegex(libdsec.Diverged, 'step 1 of session "s"'):
            await (await self.client.get(self.sb.id)).session("s").exec("echo b")
        self.assertEqual((await self.sb.exec("echo a", step=("s", 1))).out, "a\n")
        self.assertTrue((await self.sb.exec("echo a", step="s:1")).replayed)


class Sandboxes(Node):
    async def test_life(self):
        info = await self.sb.refresh()
        self.assertEqual((info.state, info.alive, info.spec.memory, info.spec.image), ("running", True, 256 << 20, IMAGE))
        later = await self.sb.extend(1200)
        self.assertGreater(later.expires, info.expires)
        waiting = asyncio.ensure_future(self.sb.wait())
        ended = await self.sb.stop()
        self.assertEqual((ended.state, ended.cause), ("stopped", "user"))
        self.assertEqual((await self.soon(waiting)).state, "stopped")
        self.assertEqual((await self.sb.stop()).state, "stopped")
        with self.assertRaises(libdsec.Conflict):
            await self.sb.exec("true")

    async def test_pausing(self):
        p = await self.sb.start("read x; echo got $x", stdin=True)
        self.assertEqual((await self.sb.pause()).state, "paused")
        self.assertEqual((await self.sb.pause()).state, "paused")
        self.assertEqual((await self.sb.exec("echo awake")).out, "awake\n")  # what is asked of it wakes it
        await self.sb.pause()
        self.assertEqual((await self.sb.resume()).state, "running")
        await p.write("it\n")
        self.assertEqual((await p.result()).out, "got it\n")

    async def test_jobs(self):
        job = await self.client.jobs.create(lease=600, on_disconnect="stop")
        spec = self.spec()
        items = [libdsec.Item(spec, f"k{i}") for i in range(3)]
        made = await job.create_many(items)
        self.assertEqual([r.error for r in made], [None] * 3)
        again = await job.create_many(items)
        self.assertEqual({r.key: r.id for r in made}, {r.key: r.id for r in again})
        self.assertEqual((await made[0].sandbox.exec("echo in")).out, "in\n")
        self.assertEqual({r.sandbox.info.state for r in await job.pause()}, {"paused"})
        self.assertEqual({r.sandbox.info.state for r in await job.resume()}, {"running"})
        heir = await self.client.jobs.open(job.id)
        self.assertEqual((job.epoch, heir.epoch), (1, 2))
        with self.assertRaises(libdsec.Conflict):
            await job.renew()
        with self.assertRaises(libdsec.Conflict):
            await made[0].sandbox.exec("true")
        mine = {s.id: s for s in await heir.sandboxes()}
        self.assertEqual(sorted(mine), sorted(r.id for r in made))
        self.assertEqual((await mine[made[0].id].exec("echo heir")).out, "heir\n")
        await heir.stop()
        self.assertEqual(await heir.sandboxes(), [])
        seen = [e async for e in heir.events(follow=False)]
        self.assertEqual([e.seq for e in seen], list(range(1, len(seen) + 1)))
        self.assertEqual(sum(e.type == "created" for e in seen), 3)
        self.assertIn("owner-changed", [e.type for e in seen])

    async def test_keys(self):
        a = await self.client.create(self.spec(), key="k " + self.sb.id)
        b = await self.client.create(self.spec(), key="k " + self.sb.id)
        self.assertEqual(a.id, b.id)
        with self.assertRaises(libdsec.Conflict):
            await self.client.create(self.spec(pids=99), key="k " + self.sb.id)
        await a.stop()

    async def test_what_cannot_be_made(self):
        for spec, cls in ((Spec(), libdsec.Invalid), (self.spec(image="not-there"), libdsec.NotFound), (self.spec(kind="cloud"), libdsec.Invalid),
                          (self.spec(memory="1K"), libdsec.Invalid), (self.spec(ttl=-1), libdsec.Invalid)):
            with self.assertRaises(cls, msg=spec):
                await self.client.create(spec)
        for id in ("sbx", "", "é", "a b"):
            with self.assertRaises(libdsec.NotFound, msg=id):
                await self.client.get(id)
        async with libdsec.DSecClient(URL, "wrong") as c:
            with self.assertRaises(libdsec.Unauthenticated):
                await c.list()

    async def test_listing(self):
        label = {"of": self.sb.id}
        made = [await self.client.create(self.spec(labels=label)) for _ in range(3)]
        self.assertEqual([i.id for i in await self.client.list(labels=label)], [s.id for s in reversed(made)])
        page = await self.client.list(labels=label, limit=2)
        rest = await self.client.list(labels=label, after=page[-1].id)
        self.assertEqual([i.id for i in page + rest], [s.id for s in reversed(made)])
        await made[0].stop()
        self.assertEqual(len(await self.client.list(labels=label)), 2)
        self.assertEqual(len(await self.client.list(labels=label, all=True)), 3)
        await asyncio.gather(*(s.stop() for s in made))

    async def test_leaving_the_block_stops_it(self):
        async with await self.client.create(self.spec()) as sb:
            pass
        self.assertEqual((await self.client.get(sb.id)).info.state, "stopped")

        async def cancelled():
            async with await self.client.create(self.spec()) as sb:
                boxes.append(sb)
                await asyncio.Event().wait()

        boxes = []
        task = asyncio.ensure_future(cancelled())
        await self.until(lambda: boxes)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertEqual((await self.soon(boxes[0].wait())).cause, "user")

    async def test_snapshots_and_forks(self):
        await self.sb.exec("echo kept > /kept; rm -r /home")
        snap = await self.sb.snapshot(key="s-" + self.sb.id)
        self.assertEqual((await self.sb.snapshot(key="s-" + self.sb.id)).id, snap.id)
        self.assertEqual((snap.sandbox, snap.memory, snap.spec.kind), (self.sb.id, False, "container"))
        self.assertGreater(snap.sequence, 0)
        await self.sb.exec("echo changed > /kept")
        self.assertIn(snap.id, [s.id for s in await self.client.snapshots.list()])
        async with await self.client.create(libdsec.Spec(from_snapshot=snap.id)) as sb:
            self.assertEqual(await sb.files.read("/kept"), b"kept\n")
            self.assertEqual((await sb.exec("ls /home")).code, 1)
            self.assertEqual(sb.info.spec.from_snapshot, snap.id)
        await self.client.snapshots.remove(snap.id)
        with self.assertRaises(libdsec.NotFound):
            await self.client.snapshots.get(snap.id)
        with self.assertRaises(libdsec.NotFound):
            await self.client.create(libdsec.Spec(from_snapshot=snap.id))
        kids = await self.sb.fork(2, labels={"child": "yes"}, key="f-" + self.sb.id)
        self.assertEqual([k.id for k in await self.sb.fork(2, key="f-" + self.sb.id)], [k.id for k in kids])
        for k in kids:
            self.assertEqual((await k.exec("cat /kept; hostname")).out.split()[0], "changed")
            self.assertEqual((k.info.spec.from_snapshot, k.info.spec.labels["child"]), (self.sb.id, "yes"))
            await k.stop()
        with self.assertRaises(libdsec.Invalid):
            await self.sb.fork(65)
        with self.assertRaises(libdsec.Unsupported):
            await self.sb.screen.screenshot()
        with self.assertRaises(libdsec.Unsupported):
            await self.sb.screen.click(at=(1, 2))

    async def test_images(self):
        name = "test-" + self.sb.id
        await self.sb.exec("echo new > /new")
        image = await self.sb.commit(name + "@v1")
        self.assertEqual((image.ref, image.role), (name + "@v1", "workspace"))
        with self.assertRaises(libdsec.Exists):
            await self.sb.commit(name + "@v1")
        self.assertEqual((await self.client.images.inspect(name)).digest, image.digest)
        async with await self.client.create(self.spec(workspace=image.ref)) as sb:
            self.assertEqual(await sb.files.read("/new"), b"new\n")
        b = io.BytesIO()
        with tarfile.open(fileobj=b, mode="w") as t:
            info = tarfile.TarInfo("tool")
            info.size = 3
            t.addfile(info, io.BytesIO(b"abc"))
        tool = await self.client.images.upload(name + "-tool@1", b.getvalue(), role="toolkit")
        async with await self.client.create(self.spec(toolkits=[tool.ref])) as sb:
            self.assertEqual(await sb.files.read("/tool"), b"abc")
        self.assertEqual((await self.client.images.tag(tool.ref, "stable")).tags, ("stable",))
        with self.assertRaises(libdsec.Exists):
            await self.client.images.tag(tool.ref, "1")
        self.assertEqual((await self.client.images.inspect(name + "-tool@stable")).ref, tool.ref)
        with self.assertRaises(libdsec.Conflict):
            await self.client.images.remove(tool.ref)
        await self.client.images.remove(name + "-tool@stable")
        listed = {i.ref: i for i in await self.client.images.list(name, usage=True)}
        self.assertEqual(sorted(listed), sorted([image.ref, tool.ref]))
        self.assertGreater(listed[tool.ref].usage.unique, 0)
        self.assertEqual((await self.client.images.adopt(tool.digest, name + "-tool@2")).role, "toolkit")
        self.assertEqual((await self.client.images.inspect(tool.ref)).usage.unique, 0)
        await self.client.images.remove(name + "-tool@2")
        for ref in (image.ref, tool.ref):
            self.assertIn(ref, [i.ref for i in await self.client.images.list()])
            await self.client.images.remove(ref)
            self.assertNotIn(ref, [i.ref for i in await self.client.images.list()])

    async def test_functions(self):
        r = await self.client.fn.run("cat /in/a", spec=self.spec(kind="container"), files={"/in/a": "given"})
        self.assertEqual(r.out, "given")

    async def test_published_names(self):
        async with libdsec.DSecClient.open(URL, TOKEN) as client:
            box = await client.run_container(libdsec.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, init_user="alice"), timeout=30)
            self.assertEqual((await box.run_shell("id -un")).out, "alice\n")
            self.assertEqual((await box.run_shell("sleep 1000", timeout=0.1)).outcome, "timeout")
            self.assertEqual(box.sandbox.info.spec.memory, 64 << 20)
            self.assertEqual((await box.stop()).state, "stopped")
        client = await libdsec.DSecClient.open(URL, TOKEN)
        await client.list()
        await client.aclose()


class Files(Node):
    async def test_reading_and_writing(self):
        f = self.sb.files
        info = await f.write("/tmp/a/b", "é", parents=True, mode=0o640)
        self.assertEqual((info.path, info.size, info.mode, info.type), ("/tmp/a/b", 2, 0o640, "file"))
        await f.write("/tmp/a/b", b"0123456789")
        await f.write("/tmp/a/b", "end", append=True)
        await f.write("/tmp/a/b", "X", at=2)
        self.assertEqual(await f.read("/tmp/a/b"), b"01X3456789end")
        self.assertEqual(await f.read("/tmp/a/b", offset=2, size=3), b"X34")
        self.assertEqual((await f.stat("/tmp/a/b")).mode, 0o640)
        with self.assertRaises(libdsec.NotFound):
            await f.write("/no/folder", b"")
        with self.assertRaises(libdsec.Denied):
            await f.write("/etc/x", b"", user="alice")
        self.assertEqual((await f.write("/tmp/own", b"", user="alice")).uid, 1000)
        big = os.urandom(3 << 20)
        await f.write("/tmp/big", io.BytesIO(big))
        async with f.open("/tmp/big") as pieces:
            self.assertEqual(b"".join([p async for p in pieces]), big)
        async for _ in f.open("/tmp/big"):
            break
        self.assertEqual(await f.read_text("/tmp/a/b"), "01X3456789end")

    async def test_names_are_bytes(self):
        f = self.sb.files
        path = b"/tmp/" + ODD
        await f.write(path, b"x")
        (found,) = await f.list("/tmp")
        self.assertEqual(os.fsencode(found.path), path)
        self.assertEqual(await f.read(found.path), b"x")
        await f.move(path, "/tmp/new\nline")
        self.assertEqual([i.path for i in await f.list("/tmp")], ["/tmp/new\nline"])

    async def test_the_others(self):
        f = self.sb.files
        await f.mkdir("/tmp/d/e", mode=0o700)
        await f.mkdir("/tmp/d/e")
        await f.symlink("/tmp/d/link", "e")
        await f.write("/tmp/d/e/f", "1")
        await f.chmod("/tmp/d/e/f", 0o600)
        await f.chown("/tmp/d/e/f", "alice:alice")
        got = {i.path: i for i in await f.list("/tmp/d", depth=2)}
        self.assertEqual(sorted(got), ["/tmp/d/e", "/tmp/d/e/f", "/tmp/d/link"])
        self.assertEqual((got["/tmp/d/link"].type, got["/tmp/d/link"].target), ("symlink", "e"))
        self.assertEqual((got["/tmp/d/e/f"].mode, got["/tmp/d/e/f"].uid), (0o600, 1000))
        await f.remove("/tmp/d")
        self.assertFalse(await f.exists("/tmp/d"))
        with self.assertRaises(libdsec.NotFound):
            await f.remove("/tmp/d")

    async def test_watching(self):
        seen = []
        async with self.sb.files.watch("/tmp", recursive=True) as events:
            async for e in events:
                seen.append((e.op, e.path))
                if e.op == "ready":
                    await self.sb.files.mkdir("/tmp/sub")
                    await self.sb.exec("echo x > /tmp/sub/file")
                if e.path == "/tmp/sub/file":
                    break
        self.assertEqual((seen[0][0], ("create", "/tmp/sub") in seen), ("ready", True))

    async def test_trees(self):
        with tempfile.TemporaryDirectory() as d:
            os.makedirs(d + "/in/sub/empty")
            for name, data in (("a", b"1"), ("sub/b", os.urandom(700000))):
                with open(f"{d}/in/{name}", "wb") as f:
                    f.write(data)
            os.chmod(d + "/in/a", 0o755)
            os.symlink("sub/b", d + "/in/link")
            os.link(d + "/in/a", d + "/in/hard")
            os.mkfifo(d + "/in/pipe")
            with open(os.fsencode(d) + b"/in/" + ODD, "wb") as f:
                f.write(b"odd")
            await self.sb.files.upload(d + "/in", "/tmp/t")
            r = await self.sb.exec("cd /tmp/t; printf '%s\n' *; cat a link | wc -c; test a -ef hard && test -x a && test -d sub/empty && echo same")
            self.assertEqual(r.stdout.split(), [b"a", b"hard", b"link", b"sub", b"\xff\xfe", b"name", b"700001", b"same"])
            await self.sb.files.download("/tmp/t", d + "/out")
            self.assertEqual(sorted(os.listdir(os.fsencode(d) + b"/out")), [b"a", b"hard", b"link", b"sub", ODD])
            self.assertEqual(os.readlink(d + "/out/link"), "sub/b")
            self.assertEqual(os.stat(d + "/out/a").st_ino, os.stat(d + "/out/hard").st_ino)
            self.assertEqual(os.stat(d + "/out/a").st_mode & 0o777, 0o755)
            with open(d + "/in/sub/b", "rb") as f, open(d + "/out/link", "rb") as g:
                self.assertEqual(f.read(), g.read())
            await self.sb.files.upload(d + "/in/a", "/tmp/deep/a")
            await self.sb.files.download("/tmp/deep/a", d + "/one")
            with open(d + "/one", "rb") as f:
                self.assertEqual(f.read(), b"1")
            await self.sb.exec("truncate -s 5M /tmp/t/holes; printf x >> /tmp/t/holes")
            await self.sb.files.download("/tmp/t", d + "/out")
            self.assertEqual(os.path.getsize(d + "/out/holes"), (5 << 20) + 1)
            with self.assertRaises(libdsec.NotFound):
                await self.sb.files.download("/nothing", d + "/x")
            self.assertFalse(os.path.exists(d + "/x"))
            await self.sb.files.upload(d + "/in", "/home/alice/t", user="alice")
            self.assertEqual((await self.sb.exec("cat /home/alice/t/a", user="alice")).out, "1")


class Hostile(unittest.IsolatedAsyncioTestCase):
    """What a sandbox sends cannot leave the folder that it is for."""

    async def unpack(self, folder, *members):
        b = io.BytesIO()
        with tarfile.open(fileobj=b, mode="w") as t:
            for name, kind, target in members:
                m = tarfile.TarInfo(name)
                m.type, m.linkname = kind, target
                m.size, m.mode = (3, 0o6777) if kind == tarfile.REGTYPE else (0, 0o755)
                t.addfile(m, io.BytesIO(b"bad") if kind == tarfile.REGTYPE else None)
        await _tree.unpack(_tree.pieces(b.getvalue()), folder)

    async def test_archives(self):
        R, D, S, L = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
        with tempfile.TemporaryDirectory() as d:
            victim = d + "/victim"
            os.mkdir(victim)
            with open(victim + "/f", "w") as f:
                f.write("good")
            for n, members in enumerate((
                    [("../victim/f", R, "")], [(victim + "/f", R, "")], [("a/../../victim/f", R, "")],
                    [("h", L, "../victim/f")], [("h", L, victim + "/f")], [("l", S, victim), ("h", L, "l/f")],
                    [("l", S, victim), ("l/f", R, "")], [("l", S, victim), ("l", D, "")], [("f", R, ""), ("f/x", R, "")], [("/", R, "")])):
                try:
                    await self.unpack(f"{d}/out{n}", *members)
                    await self.unpack(f"{d}/out{n}", *members)  # the links of the first are there now
                except libdsec.Invalid:
                    pass
                with open(victim + "/f") as f:
                    self.assertEqual((f.read(), os.listdir(victim)), ("good", ["f"]), members)
                self.assertEqual(os.stat(victim + "/f").st_nlink, 1)
            os.mkdir(d + "/again")
            os.symlink(victim, d + "/again/sub")
            with self.assertRaises(libdsec.Invalid):
                await self.unpack(d + "/again", ("sub/f", R, ""))
            os.symlink(victim + "/f", d + "/again/f")
            await self.unpack(d + "/again", ("f", R, ""))
            self.assertFalse(os.path.islink(d + "/again/f"))
            self.assertEqual(os.stat(d + "/again/f").st_mode & 0o7777, 0o777)
            with open(victim + "/f") as f:
                self.assertEqual(f.read(), "good")

    async def test_a_malformed_archive(self):
        with tempfile.TemporaryDirectory() as d:
            for raw in (b"x" * 5000, b"", tarfile.TarInfo("a").tobuf()[:300]):
                try:
                    await _tree.unpack(_tree.pieces(raw), d + "/o")
                except libdsec.Unavailable:
                    pass
                self.assertEqual(os.listdir(d + "/o"), [])


class Ports(Node):
    async def test_dialling(self):
        await self.sb.start("nc -ll -p 7000 -e cat")
        with self.assertRaises(libdsec.Unavailable):
            await self.sb.ports.dial(7001)
        reader, writer = await self._dial(7000)
        async with writer:
            data = os.urandom(1 << 20)

            async def send():
                writer.write(data)
                await writer.drain()
                writer.write_eof()
                await writer.drain()

            _, back = await asyncio.gather(send(), reader.read(-1))
            self.assertEqual(back, data)
        with self.assertRaises(libdsec.Conflict):
            writer.write(b"x")
        writer.close()
        await writer.wait_closed()

    async def _dial(self, port):
        while True:
            try:
                return await self.sb.ports.dial(port)
            except libdsec.Unavailable:
                await asyncio.sleep(0.01)

    async def test_forwarding(self):
        await self.sb.start("nc -ll -p 7000 -e cat")
        _, w = await self._dial(7000)
        w.close()
        async with await self.sb.ports.forward(7000) as f:
            async def one(i):
                reader, writer = await asyncio.open_connection(f.host, f.port)
                writer.write(b"hello %d" % i)
                writer.write_eof()
                got = await reader.read(-1)
                writer.close()
                return got

            self.assertEqual(await asyncio.gather(*(one(i) for i in range(5))), [b"hello %d" % i for i in range(5)])
            reader, writer = await asyncio.open_connection(f.host, f.port)
            writer.write(b"x")
            self.assertEqual(await reader.read(1), b"x")
        with self.assertRaises(OSError):
            await asyncio.open_connection(f.host, f.port)
        try:
            self.assertEqual(await self.soon(reader.read(1)), b"")
        except ConnectionError:
            pass
        writer.close()


if __name__ == "__main__":
    unittest.main()
