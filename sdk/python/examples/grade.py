"""A judge: the same program and cases, unchanged, with every kind of sandbox.

    python3 examples/grade.py --image debian --kind microvm

Each case is one command that needs nothing of the one before, so that a function call, which
finds everything pristine, can answer it as well as a machine that runs for hours.
"""

import argparse
import asyncio

import libdsec

PROGRAM = 'read a b; if [ "$b" = 0 ]; then echo "division by zero" >&2; exit 3; fi; echo $((a / b))'
CASES = (("84 2\n", 0, "42\n"), ("7 -2\n", 0, "-3\n"), ("1 0\n", 3, ""))


async def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--image", required=True, help="base image with a shell; for fullvm a disk image")
    p.add_argument("--kind", default="container", help="container, microvm, fullvm or fncall (default container)")
    args = p.parse_args()

    passed = 0
    async with libdsec.connect() as client:
        spec = libdsec.Spec(image=args.image, kind=args.kind, memory="256M", cwd="/tmp", ttl=600)
        async with await client.create(spec) as sandbox:
            for given, code, out in CASES:
                result = await sandbox.exec(PROGRAM, input=given, timeout=60)
                right = (result.code, result.out) == (code, out)
                print(f"{given.strip()!r}: {'right' if right else f'{result.code} {result.out!r} {result.err!r}'}")
                passed += right
    print(f"{passed} of {len(CASES)} right")
    return 0 if passed == len(CASES) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
