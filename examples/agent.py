"""An agent that knows only the ordinary OpenAI client, recorded by the gateway between it and an engine.

python -m examples.agent UPSTREAM [STORE] [--model smol] [--logprob-kind behavior]

UPSTREAM is the address of an OpenAI-compatible server that can say which ids it drew, as `vllm serve` does. The agent
asks sums, twice each; some it answers with a calculator, whose word is another turn of the same conversation. One reply
is streamed. What it was asked and what it got it judges itself, and says so to the gateway; what was drawn, with which
log-prob, under which sampler, the gateway has from the engine, and what is printed comes from the store.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

import rollstore
from examples.arithmetic import TASKS, Task, calculate, verify

GROUP, MOST = 2, 24
ASKED = (TASKS[0], TASKS[3], TASKS[6])
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def gateway(upstream: str, store: str, kind: str) -> Iterator[str]:
    """The address of a gateway that records into a store, on this machine, for as long as the block runs."""
    command = [
        sys.executable, "-m", "rollstore", "gateway", "--upstream", upstream, "--store", store, "--port", "0",
        "--run", "agent", "--logprob-kind", kind,
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stderr.readline() if process.stderr else ""
            if not said.startswith("listening on "):
                raise RuntimeError(f"gateway: wanted an address, got {said.strip()!r}")
            yield said.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()  # it writes what is open before it goes


def answer(client: OpenAI, model: str, task: Task, step: int, sample: int) -> tuple[str, str]:
    """(the rollout's id, the last reply) of one conversation."""
    name = f"{task.prompt_id}/{sample}"
    columns = {"group_id": task.prompt_id, "group_size": GROUP, "sample_index": sample, "step": step}
    headers = {"x-rollstore-rollout": name, "x-rollstore-columns": json.dumps(columns)}
    messages: list[Any] = list(task.messages)
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": MOST, "extra_headers": headers}
    if sample == 0 and not task.uses_calculator:
        parts = client.chat.completions.create(model=model, messages=messages, seed=sample, stream=True, **settings)
        return name, "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    reply = client.chat.completions.create(model=model, messages=messages, seed=sample, **settings)
    said = reply.choices[0].message.content or ""
    if task.uses_calculator:
        result = calculate(said)
        told = "Write the expression between << and >>." if result is None else f"The calculator says {result}."
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
        reply = client.chat.completions.create(model=model, messages=messages, seed=sample, **settings)
        said = reply.choices[0].message.content or ""
    return name, said


def judge(address: str, rollout: str, reward: float) -> None:
    """Tell the gateway that a rollout is over, and what it is worth."""
    data = json.dumps({"rollout_id": rollout, "reward": reward}).encode()
    request = urllib.request.Request(f"{address}/rollstore/end", data, {"content-type": "application/json"})
    with NO_PROXY.open(request) as response:
        response.read()


def main(arguments: list[str] | None = None) -> int:
    """Run the agent behind a gateway, and say what the store has of it."""
    parser = argparse.ArgumentParser(description="An agent behind the gateway.")
    parser.add_argument("upstream", help="address of the engine's server, as http://127.0.0.1:8000")
    parser.add_argument("store", nargs="?", help="kept there; unless given, thrown away")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--logprob-kind", default="behavior")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or f"{folder}/store"
        store = rollstore.open(path, create=True)
        with (
            gateway(options.upstream, path, options.logprob_kind) as address,
            OpenAI(base_url=f"{address}/v1", api_key="passed on, never stored", max_retries=0) as client,
        ):
            for task in ASKED:
                for sample in range(GROUP):
                    rollout, said = answer(client, options.model, task, 0, sample)
                    judge(address, rollout, verify(said, task.answer))
        report(store)
    return 0


def report(store: rollstore.Store) -> None:
    """Each rollout as it was recorded."""
    for name in sorted({one.as_py() for one in store.scan("rollouts").read_all()["rollout_id"]}):
        segments = store.get(name)
        drawn = sum(int(segment.action_mask.sum()) for segment in segments)
        surprise = -sum(float(segment.logprobs.values.sum()) for segment in segments) / max(drawn, 1)
        turns = sum(span.is_action for segment in segments for span in segment.spans or ())
        last = segments[-1]
        print(
            f"{name}: {turns} turns, {drawn} tokens drawn, {surprise:.2f} nats a token, {last.ending} "
            f"({last.ending_reason}), reward {last.reward:g}"
        )


if __name__ == "__main__":
    sys.exit(main())
