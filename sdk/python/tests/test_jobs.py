"""Jobs, against a server that answers as the schema says."""

import asyncio
import gc
import unittest
import warnings

import libdsec
from libdsec import Item, Spec
from tests.rig import END, HEAD, Async, Fake, answer, chunk, envelope, failure

JOB = {"id": "j", "onDisconnect": "pause", "lease": "0.03s", "epoch": "2", "state": "active", "counts": {"running": 3}}


def stream(*messages, end=True):
    return HEAD + b"".join(chunk(envelope(m)) for m in messages) + (chunk(envelope({}, 2)) + END if end else b"")


def box(n):
    return {"id": f"sb{n}", "state": "running"}


class Jobs(Async):
    async def test_calls_carry_the_epoch(self):
        async def serve(request, writer, n):
            kind = request.path.rpartition("/")[2]
            writer.write(answer(JOB if kind in ("Open", "Get") and "Jobs" in request.path else {"sandboxes": [box(1)]} if kind == "List" else box(1)))
            return True

        async with Fake(serve) as fake, fake.client() as c:
            job = await c.jobs.open("j")
            self.assertEqual((job.epoch, job.info.lease, job.info.counts), (2, 0.03, {"running": 3}))
            sb = await job.create(Spec(image="x"), key="k")
            await sb.stop()
            await (await job.sandboxes())[0].stop()
            self.assertEqual([r.headers.get("dsec-job-epoch") for r in fake.requests], [None, "2", "2", "2", "2"])
            self.assertEqual(fake.requests[1].message["spec"]["job"], "j")
            watcher = await c.jobs.attach("j")
            await watcher.get("sb1")
            self.assertNotIn("dsec-job-epoch", fake.requests[-1].headers)
            self.assertEqual(fake.connections, 1)

    async def test_create_many_is_taken_up(self):
        async def serve(request, writer, n):
            items = request.messages[0]["items"]
            if n == 0:
                writer.write(stream({"index": 1, "key": "b", "sandbox": box(1)}, {"key": "a", "sandbox": box(0)}, end=False))
                return False
            writer.write(stream({"index": 1, "key": items[1]["key"], "error": {"kind": "exhausted", "message": "full"}},
                                {"key": items[0]["key"], "sandbox": box(2)}))
            return True

        async with Fake(serve) as fake, fake.client() as c:
            job = libdsec.Job(c._channel, libdsec.JobInfo("j"), 2)
            one, two = Spec(image="x"), Spec(image="y")
            got = await job.create_many([Item(one, "a"), Item(two, "b"), Item(one, "c"), two])
            self.assertEqual([(r.index, r.key, r.id) for r in got], [(1, "b", "sb1"), (0, "a", "sb0"), (3, "3", ""), (2, "c", "sb2")])
            self.assertIsInstance(got[2].error, libdsec.Exhausted)
            self.assertEqual([i["key"] for i in fake.requests[1].messages[0]["items"]], ["c", "3"])
            self.assertEqual(len(fake.requests[0].messages[0]["specs"]), 2)

    async def test_each_item_has_its_own_spec(self):
        async def serve(request, writer, n):
            writer.write(stream(*({"index": i, "key": m["key"], "sandbox": box(i)} for i, m in enumerate(request.messages[0]["items"]))))
            return True

        def changed():
            spec = Spec(image="x", labels={})
            for i in range(50):
                spec.labels["task"] = f"t{i}"
                yield Item(spec, f"t{i}")

        for items in (
            (Item(Spec(image="x", labels={"task": f"t{i}"}), f"t{i}") for i in range(50)),  # nobody keeps these
            changed(),  # and these are one thing that changes
        ):
            async with Fake(serve) as fake, fake.client() as c:
                job = libdsec.Job(c._channel, libdsec.JobInfo("j"), 2)
                await job.create_many(items)
                m = fake.requests[0].messages[0]
                got = [(i["key"], m["specs"][i.get("spec", 0)]["labels"]["task"]) for i in m["items"]]
                self.assertEqual(got, [(f"t{i}", f"t{i}") for i in range(50)])

    async def test_calls_on_all_tell_each_once(self):
        async def serve(request, writer, n):
            writer.write(stream({"sandbox": box(0)}, end=False) if n == 0 else stream({"sandbox": box(0)}, {"index": 1, "sandbox": box(1)}))
            return n > 0

        async with Fake(serve) as fake, fake.client() as c:
            job = libdsec.Job(c._channel, libdsec.JobInfo("j"), 2)
            unused = job.stop()
            self.assertEqual(len(fake.requests), 0)  # nothing is done before it is asked for
            await unused.aclose()
            self.assertEqual([r.id async for r in job.pause()], ["sb0", "sb1"])

    async def test_events_are_taken_up(self):
        async def serve(request, writer, n):
            after = int(request.messages[0].get("after", 0))
            if n < 3:
                writer.write(stream({"seq": str(after + 1), "type": "created", "sandbox": "sb1"}, end=False))
                return False
            writer.write(stream({"seq": str(after + 1), "type": "stopped", "cause": "user"}))
            return True

        async with Fake(serve) as fake, fake.client() as c:
            job = libdsec.Job(c._channel, libdsec.JobInfo("j"), 2)
            self.assertEqual([(e.seq, e.type) async for e in job.events(after=5)],
                             [(6, "created"), (7, "created"), (8, "created"), (9, "stopped")])

    async def test_the_lease_is_renewed_until_it_is_lost(self):
        async def serve(request, writer, n):
            writer.write(answer(JOB) if n < 4 else failure("failed_precondition", "epoch 3 owns it"))
            return True

        with self.assertLogs("libdsec"):
            async with Fake(serve) as fake, fake.client() as c, await c.jobs.open("j") as job:
                await self.until(lambda: job.fenced)
                self.assertIsInstance(job.fenced, libdsec.Conflict)
                self.assertEqual(fake.requests[1].message, {"job": "j", "epoch": "2"})
                self.assertEqual(len(fake.requests), 5)
        await asyncio.sleep(0)

    async def test_whoever_stops_a_job_did_not_lose_its_lease(self):
        async def serve(request, writer, n):
            kind = request.path.rpartition("/")[2]
            if kind == "Stop":
                writer.write(stream({"sandbox": box(0)}))
            else:
                writer.write(failure("failed_precondition", "it is stopped") if any(r.path.endswith("/Stop") for r in fake.requests) else answer(JOB))
            return True

        async with Fake(serve) as fake, fake.client() as c, await c.jobs.open("j") as job:
            self.assertEqual([r.id for r in await job.stop()], ["sb0"])
            await self.until(lambda: job._keeper.done())
            self.assertIsNone(job.fenced)
            self.assertTrue(fake.requests[-1].path.endswith("/Renew"))

    async def test_what_is_never_awaited_is_warned_of(self):
        async with libdsec.DSecClient("http://127.0.0.1:1", "t", retry=0) as c:
            job = libdsec.Job(c._channel, libdsec.JobInfo("j"), 2)
            for make, want in ((job.stop, "libdsec.job.stop"), (lambda: job.create_many([Spec(image="x")]), "libdsec.job.create_many"),
                               (lambda: c.fn.batch([libdsec.Case()]), "libdsec.fn.batch")):
                with self.assertWarnsRegex(RuntimeWarning, want + " was never awaited"):
                    make()
                    gc.collect()
                with warnings.catch_warnings(record=True) as seen, self.assertRaises(libdsec.Unavailable):
                    warnings.simplefilter("always")
                    await make()
                self.assertEqual([str(w.message) for w in seen if issubclass(w.category, RuntimeWarning)], [])


if __name__ == "__main__":
    unittest.main()
