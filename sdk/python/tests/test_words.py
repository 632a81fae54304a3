"""Conversions, names and settings: what needs no server."""

import ast
import glob
import json
import os
import pickle
import subprocess
import sys
import tempfile
import unittest
from datetime import timedelta
from unittest import mock

import libdsec
from libdsec import _http, _rpc, client, errors, records

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Words(unittest.TestCase):
    def test_sizes(self):
        for text, want in {"512M": 512 << 20, "1.5G": 3 << 29, "2GiB": 2 << 30, "4kb": 4096, "7": 7, " 3 ": 3}.items():
            self.assertEqual(records.size(text), want, text)
        self.assertEqual(records.size(5), 5)
        for text in ("", "M", "-1", "1X", "1e3", "1 G G"):
            with self.assertRaises(libdsec.Invalid, msg=text):
                records.size(text)

    def test_durations(self):
        self.assertEqual(records.span(1.5), "1.500000000s")
        self.assertEqual(records.span(timedelta(minutes=2)), "120.000000000s")
        self.assertIsNone(records.span(0))
        self.assertEqual(records.unspan("0.000423768s"), 0.000423768)
        for bad in (float("nan"), float("inf"), 1e30):
            with self.assertRaises(libdsec.Invalid):
                records.span(bad)

    def test_times(self):
        t = records.instant("2026-11-30T20:36:27.135522699Z")
        self.assertEqual(t.isoformat(), "2026-11-30T20:36:27.135522+00:00")
        self.assertEqual(records.instant("2026-11-30T20:36:27Z").microsecond, 0)
        self.assertEqual(records.instant("2026-11-30T20:36:27.5Z").microsecond, 500000)
        for bad in (None, "", "yesterday", 3):
            self.assertIsNone(records.instant(bad))

    def test_spec_survives_the_wire(self):
        spec = libdsec.Spec(image="a@1", workspace="w", toolkits=("t",), kind="container", cpu=0.5, memory=1 << 30, disk=1 << 20, pids=9,
                            ttl=60.0, idle=5.0, user="u", cwd="/x", env={"A": "b"}, labels={"l": "m"}, job="j", project="p", network="none",
                            hostname="h", api=libdsec.Delegation(("sandboxes",), 3, 1.5, 1 << 20, 9.0, 80))
        self.assertEqual(records.Spec.from_wire(json.loads(json.dumps(spec.to_wire()))), spec)
        self.assertEqual(libdsec.Spec(image="a").to_wire(), {"environment": {"base": "a"}})
        odd = libdsec.Spec(image="a", cwd=b"/\xff", env={"A": "\udcff", "B": "é"})
        back = records.Spec.from_wire(json.loads(json.dumps(odd.to_wire())))
        self.assertEqual((back.cwd, back.env), ("/\udcff", {"A": "\udcff", "B": "é"}))

    def test_a_result_knows_what_it_lacks(self):
        r = records.Result.of({"id": "c1", "outcome": "exited", "code": 0, "stdout": {"total": "9", "kept": "9"}}, b"\xff12", b"")
        self.assertTrue(r.ok and r.truncated)
        self.assertEqual(r.out, "\ufffd12")
        self.assertFalse(records.Result.of({"outcome": "timeout", "code": 124}, b"", b"").ok)
        self.assertIsNone(records.Status.from_wire({"outcome": "running"}).code)
        self.assertEqual(records.Status.from_wire({"outcome": "exited"}).code, 0)

    def test_names_of_headers(self):
        self.assertEqual(_rpc.escape("a b%é\n:"), "a%20b%25%C3%A9%0A:")
        self.assertEqual(_rpc.escape("\udcff"), "%FF")

    def test_steps(self):
        s = _rpc.Steps("roll out")
        self.assertEqual([s.take(), s.take(), s.take(9), s.take(), s.input()],
                         [f"roll%20out:{n}" for n in (1, 2, 9, 3, 4)])
        self.assertEqual(s.take(("x", 5)), "x:5")
        self.assertEqual(s.take("a:b:7"), "a:b:7")
        auto = _rpc.Steps()
        self.assertNotEqual(auto.session, _rpc.Steps().session)
        self.assertEqual(auto.input(), "")
        for bad in (3, "x", ":1", "a:-1", ("", 1), ("a", -1), ("a", 1 << 64)):
            with self.assertRaises(libdsec.Invalid, msg=bad):
                auto.take(bad)

    def test_each_kind_has_a_class_and_a_code(self):
        kinds = {"invalid", "unauthenticated", "denied", "not_found", "exists", "conflict", "exhausted", "unavailable", "lost", "timeout",
                 "canceled", "diverged", "unsupported", "internal"}
        self.assertEqual(set(errors.KINDS), kinds)
        self.assertEqual({c.kind for c in errors._CODES.values()}, kinds)
        self.assertEqual({k for k, c in errors.KINDS.items() if c.retryable}, {"unavailable", "exhausted", "timeout"})

    def test_errors_of_the_wire(self):
        e = errors.from_wire({"code": "aborted", "message": "differs", "details": [
            {"type": "other"}, {"type": "dsec.v1.ErrorInfo", "value": "CghkaXZlcmdlZBIIZWRnZS5SdW4aA3NieCIDcmVx"}]}, "op", "", "r")
        self.assertEqual((type(e), e.op, e.sandbox, e.request), (libdsec.Diverged, "edge.Run", "sbx", "req"))
        self.assertIn("differs", str(e))
        again = pickle.loads(pickle.dumps(e))
        self.assertEqual((type(again), str(again)), (type(e), str(e)))
        for odd in ({"code": "not_found", "details": "x"}, {"code": "not_found", "details": [1, {"type": "dsec.v1.ErrorInfo", "value": "!"}]},
                    {"code": "not_found", "message": 3, "details": [{"type": "dsec.v1.ErrorInfo", "value": "/////////////w=="}]}):
            self.assertIsInstance(errors.from_wire(odd, "", ""), libdsec.NotFound)
        self.assertIsInstance(errors.from_wire({"code": "new"}, "", ""), libdsec.Internal)
        for status, cls in {401: libdsec.Unauthenticated, 403: libdsec.Denied, 404: libdsec.Unsupported, 502: libdsec.Unavailable}.items():
            self.assertIsInstance(errors.from_wire(None, "", "", status=status), cls)

    def test_heads(self):
        self.assertEqual(_http.parse_head(b"HTTP/1.1 200 OK\r\nA: b \r\n\r\n"), (200, {"a": "b"}))
        self.assertEqual(_http.parse_head(b"HTTP/1.0 200\r\n\r\n"), (200, {"connection": "close"}))
        for bad in (b"", b"SSH-2.0-x", b"HTTP/1.1 20 OK", b"HTTP/1.1 2000", b"HTTP/2 200", b"HTTP/1.1 200 OK\r\nno colon", b"HTTP/1.1 200 OK\r\n: x",
                    b"HTTP/1.1 200 OK\r\na b : c\r\n d: e", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2", "HTTP/1.1 ²00".encode()):
            with self.assertRaises(_http.Fault, msg=bad):
                _http.parse_head(bad + b"\r\n\r\n")

    def test_malformed_settings(self):
        for url in ("127.0.0.1:7070", "ftp://x", "http://", "http://h:x", "http://h:99999", "http://a b", "http://h/?q", "http://h\r\nX: y", "http://" + "a" * 70):
            with self.assertRaises(libdsec.Invalid, msg=url):
                libdsec.DSecClient(url, "t")
        with self.assertRaises(libdsec.Invalid):
            libdsec.DSecClient("http://h", "a\r\nX: y")

    def test_where_the_server_is(self):
        with tempfile.TemporaryDirectory() as d:
            os.mkdir(d + "/dsec")
            with open(d + "/dsec/context.json", "w") as f:
                json.dump({"url": "http://c:1", "token": "ct"}, f)
            base = {"XDG_CONFIG_HOME": d, "HOME": d + "/none"}
            for env, args, want in (
                    ({}, (None, None), ("http://c:1", "ct")),
                    ({"DSEC_URL": "http://e:2"}, (None, None), ("http://e:2", "")),  # the token is the context's server's
                    ({"DSEC_URL": "http://c:1"}, (None, None), ("http://c:1", "ct")),
                    ({"DSEC_TOKEN": "et"}, (None, None), ("http://c:1", "et")),
                    ({"DSEC_URL": "http://e:2", "DSEC_TOKEN": "et"}, ("http://a:3", "at"), ("http://a:3", "at")),
                    ({"XDG_CONFIG_HOME": "relative"}, (None, None), (client.DEFAULT_URL, ""))):
                with mock.patch.dict(os.environ, {**base, **env}, clear=True):
                    self.assertEqual(client.find(*args), want)
            with open(d + "/dsec/context.json", "w") as f:
                f.write("[")
            with mock.patch.dict(os.environ, base, clear=True), self.assertRaises(libdsec.Invalid):
                client.find(None, None)

    def test_published_arguments(self):
        args = libdsec.DSecContainerRunArgs(container_image="i", memory_limit_mb=512, cpu_cores_limit=2, ttl_running_stop=60,
                                            network_rules={"pypi": False}, init_user="root")
        self.assertEqual(args.spec(), libdsec.Spec(image="i", kind="container", memory=512 << 20, cpu=2, idle=60, user="root"))
        args.network_rules = {"pypi": True}
        with self.assertRaises(libdsec.Unsupported):
            args.spec()


class Package(unittest.TestCase):
    def test_the_oldest_python_reads_it(self):
        for path in glob.glob(ROOT + "/libdsec/*.py") + glob.glob(ROOT + "/examples/*.py"):
            with open(path, encoding="utf-8") as f:
                ast.parse(f.read(), path, feature_version=(3, 9))

    def test_everything_public_has_a_docstring(self):
        for path in glob.glob(ROOT + "/libdsec/*.py"):
            if path.endswith("sync.py"):
                continue
            with open(path, encoding="utf-8") as f:
                tree = ast.parse(f.read())
            self.assertTrue(ast.get_docstring(tree), path)
            for cls in (n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")):
                self.assertTrue(ast.get_docstring(cls), f"{path}: {cls.name}")

    def test_the_synchronous_face_is_up_to_date(self):
        r = subprocess.run([sys.executable, ROOT + "/tools/make_sync.py", "--check"], capture_output=True, text=True)
        self.assertEqual(r.returncode, 0, r.stderr)

    def test_only_the_standard_library(self):
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import libdsec\n"
            "assert 'libdsec.sync' not in sys.modules and 'sync' in dir(libdsec)\n"
            "assert libdsec.sync.connect and 'libdsec.sync' in sys.modules\n"
            "from libdsec import sync"
        )
        r = subprocess.run([sys.executable, "-S", "-I", "-W", "error", "-c", code, ROOT], capture_output=True, text=True)
        self.assertEqual(r.returncode, 0, r.stderr)


if __name__ == "__main__":
    unittest.main()
