"""The main job on a real model: record, query, train, record again, replay by id. `make demo` runs it.

python -m examples.demo [STORE]      # default: runs/demo, begun anew each time
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import rollstore
from examples import smollm2
from examples.arithmetic import TASKS
from examples.loop import collect, train
from rollstore.readers.duckdb import connect
from rollstore.replay.replay import replay

console = Console()

BY_VERSION = """
SELECT weight_version AS version, count(DISTINCT rollout_id) AS rollouts, count(*) AS actions,
       round(avg(logprob), 4) AS "mean log-prob", round(avg(entropy), 4) AS "mean entropy"
FROM actions GROUP BY 1 ORDER BY 1
"""
REWARD_BY_VERSION = """
SELECT weight_version_min AS version, count(*) AS rollouts, round(avg(reward), 3) AS reward,
       count(*) FILTER (ending = 'truncated') AS truncated
FROM rollouts WHERE reward_status = 'scored' GROUP BY 1 ORDER BY 1
"""
BY_GROUP = """
SELECT g.group_id AS "group", g.step AS version, g.present AS members, round(g.reward_mean, 3) AS reward,
       g.zero_variance AS "no signal", round(l.logprob, 4) AS "mean log-prob"
FROM groups g JOIN (SELECT step, group_id, avg(logprob) AS logprob FROM actions GROUP BY ALL) l USING (step, group_id)
ORDER BY version, "group"
"""


def show(title: str, connection: Any, query: str) -> None:
    """Print the answer to a query as a table."""
    answer = connection.execute(query)
    table = Table(title=title, title_justify="left")
    for column in answer.description:
        table.add_column(column[0], justify="right")
    for row in answer.fetchall():
        table.add_row(*("" if value is None else str(value) for value in row))
    console.print(table)


def main(path: Path) -> int:
    began = time.monotonic()
    if path.exists() and (path / "rollstore.json").exists():
        shutil.rmtree(path)
    model, tokenizer = smollm2.load()
    store = rollstore.open(path, create=True)
    columns = (TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done, total=of)

        first = collect(store, model, tokenizer, TASKS, step=0, progress=progress)
        metrics = train(store, model, step=0, progress=progress)
        second = collect(
            store, model, tokenizer, TASKS, step=1, progress=lambda _, d, n: progress("rollouts, step 1", d, n)
        )
    console.print(
        f"\nOne GRPO step: loss {metrics['loss']:.5f}, gradient norm {metrics['gradient_norm']:.3f}, "
        f"furthest trainer log-prob from the sampler's {metrics['furthest_log_ratio']:.1e}. "
        f"{len(first)} + {len(second)} rollouts in {path}.\n"
    )
    with connect(store) as connection:
        show("Mean log-prob by weight version", connection, BY_VERSION)
        show("Reward by weight version", connection, REWARD_BY_VERSION)
        show("Reward and mean log-prob by group", connection, BY_GROUP)
    return report_replays(store, model, first, began)


def report_replays(store: rollstore.Store, new_model: Any, ids: list[str], began: float) -> int:
    """Replay one rollout by id under the weights that made it, then under the new ones."""
    old_model, _ = smollm2.load()
    chosen = ids[0]
    same = replay(store, chosen, old_model)
    console.print(f"\nReplay of {chosen} from its checkpoint, sample and key:")
    console.print(str(same), markup=False, highlight=False)
    for rollout_id in ids:
        changed = replay(store, rollout_id, new_model, reference=old_model)
        if not changed.identical:
            console.print("\nThe same key under the new weights:")
            console.print(str(changed), markup=False, highlight=False)
            break
    else:
        console.print("\nUnder the new weights every rollout of step 0 comes out the same, token for token.")
    console.print(f"\nDone in {time.monotonic() - began:.0f} s. Look further:")
    console.print(f"  rollstore ls {store.path}\n  rollstore show {store.path} '{chosen}'", markup=False)
    return 0 if same.identical else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/demo")))
