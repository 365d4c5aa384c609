"""A producer and a consumer of one store that stop at named points and go on when told: run by test_follow.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rollstore import Rollout
from rollstore.readers.follow import Follower, Rules
from rollstore.store.store import open as open_store

GROUPS, MEMBERS = 6, 2
IDS = [f"g{group}-{member}" for member in range(MEMBERS) for group in range(GROUPS)]
"""Members of a group are written far apart."""


def point(name: str) -> None:
    """Say where we are, and wait to be told to go on; whoever waits here may be killed."""
    print(name, flush=True)
    if not sys.stdin.readline():
        os._exit(3)


def produce(path: str) -> None:
    store = open_store(path)
    there = set(store.scan("rollouts", columns=["rollout_id"]).read_all()["rollout_id"].to_pylist())
    writer = store.writer(run="run", seal_bytes=20_000)
    for id_ in IDS:
        if id_ not in there:
            writer.append(
                Rollout(
                    rollout_id=id_, tokens=[1, 2, 3], action_mask=[0, 0, 1], step=0, group_id=id_[:2],
                    group_size=MEMBERS, ending="terminated", reward=1.0,
                )
            )  # fmt: skip
            point("appended")
            writer.flush()
            point("flushed")
    writer.close()
    point("done")


def consume(path: str, checkpoint: Path) -> None:
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "trained": []}
    rules = Rules(rollouts_per_batch=1, whole_groups=True, timeout=0.0)
    follower = Follower(
        open_store(path), train_run="train", rules=rules, columns=["rollout_id"], resume_step=saved["step"]
    )
    while True:
        table = follower.next()
        if table is None:
            point("nothing")
            continue
        point("given")
        follower.commit(weight_version=7)
        point("committed")
        saved = {"step": follower.step, "trained": [*saved["trained"], table["rollout_id"].to_pylist()]}
        checkpoint.with_suffix(".new").write_text(json.dumps(saved))
        checkpoint.with_suffix(".new").rename(checkpoint)
        point("saved")


if __name__ == "__main__":
    if sys.argv[1] == "produce":
        produce(sys.argv[2])
    else:
        consume(sys.argv[2], Path(sys.argv[3]))
