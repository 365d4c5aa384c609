"""A disk without room, and one that may only be read: typed errors, nothing acknowledged lost, on when there is room.

Each test runs in a namespace of its own, where a small file system can be mounted; it ends with the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import subprocess, sys
from contextlib import suppress
from pathlib import Path
import numpy as np
from rollstore.errors import RollstoreError, WriteError
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, once, rollout

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)

def mount(*options):
    subprocess.run(["mount", *options, str(folder)], check=True)

def noisy(name, **fields):
    return rollout(name, tokens=400, metadata={"noise": rng.bytes(2_000).hex()}, **fields)

def refused(action):
    try:
        action()
    except WriteError as error:
        assert isinstance(error, OSError) and "\\n" not in str(error), error
        return str(error)
    raise SystemExit("the disk took what it has no room for")

def fill():
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))

def final_names():
    return sorted(str(path) for part in ("rollouts", "commits") for path in (folder / "s" / part).iterdir())

mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
store = open_store(folder / "s", create=True)
"""


def run(tmp_path: Path, script: str) -> None:
    """In a mount namespace; as another user than root, in a user namespace too."""
    private = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    allowed = subprocess.run([*private, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"no file system can be mounted here: {allowed.stderr.strip()}")
    disk, code = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    code.write_text(PRELUDE + textwrap.dedent(script))
    command = [*private, sys.executable, str(code), str(disk)]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path})
    assert done.returncode == 0, done.stderr


def test_a_writer_on_a_full_disk_keeps_what_it_acknowledged_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        writer = store.writer(seal_bytes=150_000)
        taken = flushed = 0
        while taken < 1000:
            writer.append(noisy(f"r{taken}"))
            taken += 1
            try:
                writer.flush(sync=taken % 3 == 0)
            except WriteError:
                break
            flushed = taken
        assert 100 < flushed < 1000, flushed
        for _ in range(3):
            with suppress(WriteError):  # a journal that became a part may have made room
                writer.flush()
                flushed = taken
        names = [f"r{n}" for n in range(flushed)]
        found = ids(open_store(store.path))
        assert set(found) >= set(names) and set(found.values()) == {1}
        assert not [line for line in errors(open_store(store.path)) if "damaged" in line]
        mount("-o", "remount,size=16m")
        writer.append(noisy("after"))
        writer.flush(sync=True)
        writer.close()
        assert ids(open_store(store.path)) == once("after", *(f"r{n}" for n in range(taken)))
        assert errors(open_store(store.path)) == []
        assert not list((folder / "s" / "staging").iterdir()) and not list((folder / "s" / "journal").iterdir())
        """,
    )


def test_a_close_that_finds_no_room_leaves_the_rows_in_the_journal_for_the_next_try(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        writer = store.writer()
        for number in range(50):
            writer.append(noisy(f"r{number}"))
            writer.flush()
        fill()
        before = final_names()
        refused(writer.close)
        assert final_names() == before == []
        assert ids(open_store(store.path)) == once(*(f"r{n}" for n in range(50)))
        (folder / "filler").unlink()
        writer.close()
        assert len(final_names()) == 1
        assert ids(open_store(store.path)) == once(*(f"r{n}" for n in range(50)))
        assert errors(open_store(store.path)) == []
        """,
    )


def test_upkeep_on_a_full_disk_changes_nothing_and_is_done_when_there_is_room(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        from datetime import timedelta
        from rollstore.store.retention import Keep
        wanted = []
        for part in range(4):
            names = [f"r{part}-{n}" for n in range(30)]
            store.append("rollouts", [noisy(name, run_id=f"run{n % 2}") for n, name in enumerate(names)])
            wanted += names
        fill()
        before = final_names()
        for action in (store.compact, lambda: store.retain(Keep(runs=("run1",)))):
            said = refused(action)
            assert "No space left" in said, said
            assert final_names() == before
            assert ids(open_store(store.path)) == once(*wanted)
            assert not list((folder / "s" / "staging").iterdir())
        (folder / "filler").unlink()
        mount("-o", "remount,size=16m")
        assert store.compact().added
        store.vacuum(grace=0)
        assert ids(open_store(store.path)) == once(*wanted)
        store.retain(Keep(runs=("run1",)))
        assert len(ids(open_store(store.path))) == 60
        assert errors(open_store(store.path)) == []
        """,
    )


def test_a_disk_that_may_only_be_read_is_read_and_every_change_is_a_typed_error(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        from rollstore.store.retention import Keep
        store.append("rollouts", [rollout("a"), rollout("b", run_id="gone")])
        store.append("rollouts", [rollout("c", run_id="x")])
        writer = store.writer()
        writer.append(rollout("d"))
        writer.flush()
        kept = Path(writer._written.journal.name)
        writer.after_fork()  # as if its process had died
        mount("-o", "remount,ro")
        read = open_store(store.path)
        assert ids(read) == once("a", "b", "c", "d")
        assert read.get("a") and read.get("d")
        assert errors(read) == [] and read.info().tables["rollouts"].rows == 4
        with read.snapshot() as snapshot:
            assert snapshot.lease is None
        late = store.writer()
        late.append(rollout("e"))
        for change in (late.flush, late.close, read.compact, read.vacuum, read.recover,
                       lambda: read.retain(Keep(runs=("x",))), lambda: read.append("rollouts", [rollout("f")])):
            assert "Read-only" in refused(change)
        mount("-o", "remount,rw")
        late.close()
        assert open_store(store.path).recover().sealed == [str(kept)]
        assert ids(open_store(store.path)) == once("a", "b", "c", "d", "e")
        """,
    )
