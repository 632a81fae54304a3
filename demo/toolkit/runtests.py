"""Runs the workspace's own test suite and prints one line of JSON."""

import json
import os
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.getcwd())

# test_tool is left out: it starts an interpreter for each test, which says
# nothing about the project and doubles the time.
names = sorted(
    "simplejson.tests." + f[:-3]
    for f in os.listdir("simplejson/tests")
    if f.startswith("test_") and f.endswith(".py") and f != "test_tool.py"
)
suite = unittest.TestLoader().loadTestsFromNames(names)
with open(os.devnull, "w") as quiet:
    result = unittest.TextTestRunner(stream=quiet).run(suite)
failed = sorted(test.id() for test, _ in result.failures + result.errors)
print(json.dumps({"ran": result.testsRun, "failed": failed}))
