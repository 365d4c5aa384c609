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


def turns(store: rollstore.Store) -> int:
    """How many rollouts have more than one turn of the policy."""
    with connect(store) as connection:
        query = "SELECT count(DISTINCT rollout_id) FROM spans WHERE is_action AND turn > 0"
        return connection.sql(query).fetchall()[0][0]


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
    say(
        f"\nOne GRPO step: loss {metrics['loss']:.5f}, gradient norm {metrics['gradient_norm']:.3f}; the trainer's "
        f"log-probs are within {metrics['furthest_log_ratio']:.1e} of the sampler's.\n"
        f"{len(first)} + {len(second)} rollouts in {path}, {turns(store)} of them of several turns.\n"
    )
    with connect(store) as connection:
        show("Mean log-prob by weight version", connection, BY_VERSION)
        show("Reward by weight version", connection, REWARD_BY_VERSION)
        show("Reward and mean log-prob by group", connection, BY_GROUP)
    return report_replays(store, model, tokenizer, first, began)


def report_replays(store: rollstore.Store, new_model: Any, tokenizer: Any, ids: list[str], began: float) -> int:
    """Replay one rollout by id under the weights that made it, then under the new ones."""
    old_model, _ = smollm2.load()
    chosen = ids[0]
    same = replay(store, chosen, old_model, weight_version=0)
    say(f"\nReplay of {chosen} from its checkpoint, sample and key:\n{same}")
    for rollout_id in ids:
        changed = replay(store, rollout_id, new_model, reference=old_model, weight_version=1)
        if not changed.identical:
            say(f"\nThe same id under the new weights (a: as recorded, b: now):\n{changed}")
            first = changed.segments[-1].first
            if first is not None and first.token_a is not None and first.token_b is not None:
                a, b = (repr(tokenizer.decode([token])) for token in (first.token_a, first.token_b))
                say(f"  token {first.token_a} is {a}, token {first.token_b} is {b}")
            break
    else:
        say("\nUnder the new weights every rollout of step 0 comes out the same, token for token.")
    say(f"\nDone in {time.monotonic() - began:.0f} s. Look further:")
    say(f"  rollstore ls {store.path}\n  rollstore show {store.path} '{chosen}'")
    return 0 if same.identical else 1


def say(text: str) -> None:
    """Print as it is: what a model wrote is no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/demo")))
