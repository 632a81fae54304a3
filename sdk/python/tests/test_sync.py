"""The face without an event loop."""

import os
import signal
import threading
import time
import unittest

import libdsec
import libdsec.sync
from libdsec import Spec
from tests.rig import IMAGE, TOKEN, URL


@unittest.skipUnless(URL, "feature node: DSEC_TEST_URL names none; go test ./sdk starts one")
class Sync(unittest.TestCase):
    def setUp(self):
        self.client = libdsec.sync.connect(URL, TOKEN)
        self.sb = self.client.create(Spec(image=IMAGE, memory="256M", ttl=600))

    def tearDown(self):
        self.sb.stop()
        self.client.close()
        self.client.close()
        with self.assertRaises(RuntimeError):
            self.client.list()

    def test_the_same_names(self):
        self.assertEqual(self.sb.exec("cat; exit 3", input="x").code, 3)
        with self.assertRaises(libdsec.CommandFailed):
            self.sb.exec("false", check=True)
        p = self.sb.start("cat", stdin=True)
        p.write("a\nb\n")
        p.close_stdin()
        self.assertEqual(b"".join(c.data for c in p.output()), b"a\nb\n")
        self.assertEqual(list(p.lines()), [("stdout", "a"), ("stdout", "b")])
        self.assertEqual((p.wait().code, p.result().out, p.status.running), (0, "a\nb\n", False))
        f = self.sb.files
        f.write("/tmp/x", iter([b"1", b"2"]))
        with f.open("/tmp/x") as pieces:
            self.assertEqual(b"".join(pieces), b"12")
        self.assertEqual([i.path for i in f.list("/tmp")], ["/tmp/x"])
        with f.watch("/tmp") as events:
            self.assertEqual(next(events).op, "ready")
            f.remove("/tmp/x")
            self.assertEqual(next(events).op, "remove")
        with self.assertRaises(libdsec.NotFound):
            f.read("/tmp/x")
        s = self.sb.session("s")
        s.exec("true")
        self.assertTrue(self.client.get(self.sb.id).session("s").exec("true").replayed)
        self.assertEqual((s.number, s.name, s.sandbox.id), (1, "s", self.sb.id))
        self.assertIn(self.sb.id, [i.id for i in self.client.list()])
        self.assertIn(IMAGE, [i.name for i in self.client.images.list()])
        self.assertEqual(self.client.fn.run("echo f", spec=Spec(image=IMAGE, kind="container")).out, "f\n")
        with self.client.create(Spec(image=IMAGE)) as other:
            pass
        self.assertFalse(other.refresh().alive)
        box = self.client.run_container(libdsec.DSecContainerRunArgs(container_image=IMAGE))
        self.assertEqual(box.run_shell("echo b").out, "b\n")
        box.stop()
        job = self.client.jobs.create()
        made = [r.sandbox for r in job.create_many([Spec(image=IMAGE, memory="64M")])]
        self.assertEqual(made[0].exec("echo in a job").out, "in a job\n")
        job.stop()  # done by the call itself
        self.assertFalse(made[0].refresh().alive)

    def test_ports(self):
        self.sb.start("nc -ll -p 7000 -e cat")
        while True:
            try:
                conn = self.sb.ports.dial(7000)
                break
            except libdsec.Unavailable:
                time.sleep(0.01)
        with conn:
            conn.sendall(b"hello")
            conn.shutdown()
            got = b""
            while True:
                piece = conn.recv()
                if not piece:
                    break
                got += piece
            self.assertEqual(got, b"hello")
        import socket

        with self.sb.ports.forward(7000) as f, socket.create_connection((f.host, f.port)) as s:
            s.sendall(b"x")
            self.assertEqual(s.recv(1), b"x")

    def test_threads(self):
        out = {}
        threads = [threading.Thread(target=lambda i=i: out.update({i: self.sb.exec(f"echo {i}").out})) for i in range(20)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(out, {i: f"{i}\n" for i in range(20)})

    def test_ctrl_c(self):
        """An interrupt ends the wait; the command runs on."""
        main = threading.get_ident()
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

        def interrupt():
            while not self.sb.files.exists("/tmp/began"):
                pass
            signal.pthread_kill(main, signal.SIGINT)

        t = threading.Thread(target=interrupt)
        t.start()
        with self.assertRaises(KeyboardInterrupt):
            self.sb.exec("touch /tmp/began; sleep 1000")
        t.join()
        self.assertEqual([s.running for s in self.sb.processes()], [True])

    def test_a_fork(self):
        pid = os.fork()
        if pid == 0:
            try:
                self.client.list()
            except RuntimeError:
                os._exit(7)
            os._exit(0)
        self.assertEqual(os.waitpid(pid, 0)[1], 7 << 8)


if __name__ == "__main__":
    unittest.main()
