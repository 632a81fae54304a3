"""Rollouts in sandboxes for slime 0.3.1: --custom-generate-function-path and --custom-rm-path.

    --custom-generate-function-path dsec_slime.generate --custom-rm-path dsec_slime.reward

The model writes a line of shell between <shell> and </shell> and sees what it printed, until it writes none. A sample's
metadata: ``image``, ``files`` (content by path), ``tests`` (content by path, in the sandbox only when it is graded) and
``grade``, a line that prints ``3 of 4`` or says by its status whether all is well. The sandbox's ID is left there as
``dsec``: a sample that was aborted goes on where it was, also in another process.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Dict, MutableMapping

import libdsec
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TURNS = 16
TIMEOUT = 60  # seconds of a line of shell
OUTPUT = 8 << 10  # characters of its output that the model sees
SPEC: Dict[str, Any] = {"memory": "1G", "ttl": 4 * 3600}
STOP = "</shell>"

_clients: MutableMapping[asyncio.AbstractEventLoop, libdsec.DSecClient] = weakref.WeakKeyDictionary()


def client() -> libdsec.DSecClient:
    """Give the client of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = libdsec.connect()
    return _clients[loop]


async def generate(args: Any, sample: Sample, sampling_params: Dict[str, Any]) -> Sample:
    """Let the model work in a sandbox."""
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if "dsec" in sample.metadata:
        sandbox = await client().get(sample.metadata["dsec"])
    else:
        sandbox = await client().create(libdsec.Spec(image=sample.metadata["image"], **SPEC))
        sample.metadata["dsec"] = sandbox.id
        await put(sandbox, sample.metadata.get("files", {}))
    if not sample.tokens:
        sample.tokens = list(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
    params = dict(sampling_params, stop=[STOP], no_stop_trim=True)
    for _ in range(TURNS):
        answer = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":  # nothing of this turn is kept; the sandbox is
            sample.status = Sample.Status.ABORTED
            return sample
        drawn = meta["output_token_logprobs"]
        sample.append_response_tokens(args, tokens=[t[1] for t in drawn], log_probs=[t[0] for t in drawn], meta_info=meta, text=answer["text"])
        _, begun, line = answer["text"].rpartition("<shell>")
        if meta["finish_reason"]["type"] != "stop" or not begun or not line.endswith(STOP):
            return sample  # with the status that meta_info told
        r = await sandbox.exec(line[:-len(STOP)], timeout=TIMEOUT)
        seen = f"\n<output>\n{(r.out + r.err)[:OUTPUT]}\n</output> status {r.code}\n"
        sample.append_response_tokens(args, tokens=tokenizer(seen, add_special_tokens=False)["input_ids"], trainable=False, text=seen)
    sample.status = Sample.Status.TRUNCATED
    return sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Grade what the sandbox holds with the hidden tests, and end it. One that is gone earned nothing."""
    try:
        async with await client().get(sample.metadata["dsec"]) as sandbox:
            await put(sandbox, sample.metadata.get("tests", {}))
            r = await sandbox.exec(sample.metadata["grade"], timeout=600)
    except (libdsec.Lost, libdsec.Conflict) as e:
        sample.metadata["dsec_error"] = str(e)
        return 0.0
    passed, of, total = (r.out.splitlines() or [""])[-1].partition(" of ")
    return int(passed) / int(total) if of and passed.isdigit() and total.isdigit() else float(r.ok)


async def put(sandbox: libdsec.Sandbox, files: Dict[str, str]) -> None:
    for path, content in files.items():
        await sandbox.files.write(path, content, parents=True)
