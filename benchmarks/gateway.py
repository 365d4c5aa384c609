"""What the gateway adds to a call, beside the direct call: `python -m benchmarks.gateway [--calls N] [--rounds N]`.

The engine is a stand-in in a process of its own that answers a chat at once with 100 drawn tokens and their log-probs,
so that what is left is the way there and back. The gateway is the command as a user starts it, recording into a store.
Calls go out one after another over one connection each, in turn direct and through the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rollstore

DRAWN = range(1000, 1100)
REPLY: dict[str, Any] = {
    "id": "chat", "object": "chat.completion", "model": "m", "prompt_token_ids": list(range(200)),
    "choices": [{
        "index": 0, "message": {"role": "assistant", "content": "word " * 100}, "finish_reason": "stop",
        "token_ids": list(DRAWN), "logprobs": {"content": [
            {"token": f"token_id:{token}", "logprob": -0.25, "bytes": None, "top_logprobs": []} for token in DRAWN
        ]},
    }],
}  # fmt: skip


async def engine() -> None:
    """Answer every request with the same reply; says its port first."""
    body = json.dumps(REPLY).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = re.search(rb"(?i)content-length: *(\d+)", head)
                await reader.readexactly(int(size[1]) if size else 0)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def timed(connection: http.client.HTTPConnection, number: int) -> float:
    """Milliseconds of one call."""
    asked = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}], "temperature": 1.0}
    body = json.dumps(asked)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    connection.getresponse().read()
    return (time.perf_counter() - began) * 1e3


def measured(calls: int, folder: Path) -> tuple[list[float], list[float]]:
    """(direct, through the gateway): milliseconds of each call."""
    rollstore.open(folder / "store", create=True)
    python = [sys.executable, "-m"]
    behind = subprocess.Popen([*python, "benchmarks.gateway", "--engine"], stdout=subprocess.PIPE, text=True)
    port = int((behind.stdout or sys.stdin).readline())
    command = ["rollstore", "gateway", "--upstream", f"http://127.0.0.1:{port}", "--store", str(folder / "store")]
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    front = subprocess.Popen([*python, *command, "--port", "0"], **pipes)
    try:
        said = (front.stderr or sys.stdin).readline()
        direct = http.client.HTTPConnection("127.0.0.1", port)
        through = http.client.HTTPConnection("127.0.0.1", int(said.rpartition(":")[2]))
        for number in range(50):
            timed(direct, number)
            timed(through, number)
        pairs = [(timed(direct, number), timed(through, number)) for number in range(calls)]
    finally:
        front.terminate()
        front.wait()
        behind.terminate()
        behind.wait()
    return [one for one, _ in pairs], [other for _, other in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(engine())
        return
    added: list[float] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            direct, through = measured(options.calls, Path(folder))
        added.append(statistics.median(through) - statistics.median(direct))
        shown = [
            f"p50 {statistics.median(one):.2f} p99 {statistics.quantiles(one, n=100)[98]:.2f}"
            for one in (direct, through)
        ]
        print(f"direct {shown[0]} ms, gateway {shown[1]} ms: adds {added[-1]:.2f} ms at p50")
    extremes = f"{min(added):.2f} to {max(added):.2f}"
    print(f"adds {statistics.median(added):.2f} ms at p50 (median of {len(added)} rounds, {extremes})")


if __name__ == "__main__":
    main()
