"""From a dump of JSON lines to answers: write a dump as scripts do, say which field is which, import it, and ask.

python -m examples.migration [FOLDER]

FOLDER is made, or empty. Every seventh row of the dump is broken in some way, as dumps are: those stand in a file of
their own afterwards, with the reason, and everything else is in the store.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import rollstore
from rollstore.exchange import import_jsonl
from rollstore.readers.duckdb import connect

MAPPING = """
[columns]
rollout_id = "uid"
group_id = "problem"
step = "trainer_step"
prompt_tokens = "prompt_ids"
response_tokens = "out.ids"
response_logprobs = "out.lp"
reward = "verdicts.0"
"metadata.split" = "split"

[constants]
logprob_kind = "behavior"   # the script that wrote the dump took them after temperature and filters
"""


def dump(path: Path, rows: int = 200) -> None:
    """What a training script left: ids, log-probs, a list of verdicts; and rows that went wrong."""
    draw = random.Random(7)
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            length = draw.randrange(2, 12)
            row = {
                "uid": f"r{number}", "problem": f"p{number // 4}", "trainer_step": number // 40,
                "prompt_ids": [1, 2 + number // 4 % 50], "split": draw.choice(["train", "held out"]),
                "out": {"ids": [draw.randrange(60) for _ in range(length)],
                        "lp": [-draw.random() for _ in range(length)]},
                "verdicts": [float(draw.random() < 0.3 + 0.1 * (number // 40)), "unused"],
            }  # fmt: skip
            if number % 21 == 7:
                row["out"]["lp"].pop()  # one log-prob fewer than tokens
            elif number % 21 == 14:
                row["uid"] = "r0"  # an id that is taken
            line = json.dumps(row)
            file.write((line[:-9] if number % 21 == 20 else line) + "\n")  # and a line that was cut


def main(arguments: list[str] | None = None) -> int:
    """Make the dump, import it, and print what the store says."""
    given = sys.argv[1:] if arguments is None else arguments
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given[0]) if given else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            sys.exit(f"{folder}: wanted an empty folder, found one with files")
        dump(folder / "dump.jsonl")
        (folder / "fields.toml").write_text(MAPPING, encoding="utf-8")
        store = rollstore.open(folder / "store", create=True)
        report = import_jsonl(
            store, [folder / "dump.jsonl"], mapping=folder / "fields.toml", rejects=folder / "bad.jsonl", run="migrated"
        )
        print(f"{report.total.read} rows: {report.total.taken} taken, {report.total.refused} refused")
        for cause, count in report.causes.items():
            print(f"  {count:3} refused: {cause}")
        with connect(store) as connection:
            rows = connection.execute("""
                SELECT step, count(*) AS groups, count(*) FILTER (zero_variance) AS without_signal, avg(reward_mean)
                FROM groups GROUP BY ALL ORDER BY step""").fetchall()
        for step, groups, flat, reward in rows:
            print(f"step {step}: {groups} groups, {flat} without signal, mean reward {reward:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
