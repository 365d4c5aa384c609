"""Real processes: killed, out of room, forked, many at once, and on folders they may only read."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from rollstore.store.store import Store
from rollstore.store.store import open as open_store
from tests.store.conftest import errors, ids, once, rollout

PRELUDE = """
import sys
sys.path.insert(0, sys.argv[2])
from tests.store.conftest import ids, rollout
from rollstore.errors import RollstoreError, WriteError
from rollstore.store.store import open as open_store
store = open_store(sys.argv[1])
"""


def start(store: Store, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), store.path, str(Path(__file__).parent), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def test_a_writer_killed_at_any_moment_loses_nothing_it_had_flushed(store: Store) -> None:
    script = """
    writer = store.writer(seal_bytes=30_000)
    print("ready", flush=True)
    number = 0
    while True:
        writer.append(rollout(f"{sys.argv[3]}-{number}", tokens=200))
        writer.flush()
        print(number, flush=True)
        number += 1
    """
    draw = random.Random(11)
    promised: set[str] = set()
    for turn in range(6):
        process = start(store, script, str(turn))
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(draw.randrange(60)):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.wait()
        process.stdout.close()
        process.stdin.close()
        last = [int(line) for line in rest[:-1] if line.isdigit()]
        if last:
            promised |= {f"{turn}-{number}" for number in range(last[-1] + 1)}
        found = ids(store)
        assert set(found) >= promised
        assert set(found.values()) <= {1}
    store.recover()
    found = ids(store)
    assert set(found) >= promised
    assert set(found.values()) == {1}
    assert errors(store) == []
    assert list((Path(store.path) / "journal").iterdir()) == []
    assert list((Path(store.path) / "staging").iterdir()) == []


def test_a_full_disk_is_a_typed_error_and_the_writer_goes_on_when_there_is_room(store: Store) -> None:
    script = """
    import resource
    import numpy as np
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    writer = store.writer()
    taken = flushed = 0
    rng = np.random.default_rng(0)
    for number in range(200):
        writer.append(rollout(f"r{number}", tokens=400, metadata={"noise": rng.bytes(300).hex()}))
        taken += 1
        try:
            writer.flush()
        except WriteError as error:
            assert isinstance(error, OSError)
            break
        flushed = taken
    assert 0 < flushed < 200
    assert len(ids(store)) == flushed
    try:
        writer.flush()
        raise SystemExit("a full disk took a write")
    except WriteError:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.append(rollout("after"))
    writer.close()
    print(taken)
    """
    process = start(store, script)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert ids(store) == once("after", *(f"r{number}" for number in range(int(output))))
    assert errors(store) == []


def test_a_forked_child_writes_under_its_own_name_and_does_not_keep_the_parent_s_lock(store: Store) -> None:
    script = """
    import os
    writer = store.writer()
    writer.append(rollout("parent"))
    writer.flush()
    writer.append(rollout("pending"))
    if os.fork() == 0:
        writer.append(rollout("child"))
        writer.flush()
        print("written", flush=True)
        sys.stdin.readline()
        writer.close()
        os._exit(0)
    sys.stdin.readline()
    """
    process = start(store, script)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)  # the parent; the child lives on
    process.wait()
    report = store.recover()
    assert (len(report.sealed), len(report.kept)) == (1, 1)
    assert ids(store) == once("parent", "child")
    process.stdin.write("\n")
    process.stdin.close()
    process.stdout.read()
    process.stdout.close()
    assert ids(store) == once("parent", "child")
    assert store.recover().sealed == []
    assert len({part.name.split("-")[1] for part in store.parts("rollouts")}) == 2


def test_many_processes_write_while_one_reads_and_one_compacts(store: Store) -> None:
    script = """
    for turn in range(3):
        with store.writer(seal_bytes=20_000) as writer:
            for number in range(15):
                writer.append(rollout(f"{sys.argv[3]}-{turn}-{number}", tokens=100))
                writer.flush()
    """
    writers = [start(store, script, str(number)) for number in range(4)]
    while any(process.poll() is None for process in writers):
        store.compact()
        with store.snapshot() as snapshot:
            first = snapshot.scan("rollouts", ["rollout_id"]).read_all().column(0).to_pylist()
            again = snapshot.scan("rollouts", ["rollout_id"]).read_all().column(0).to_pylist()
        assert sorted(first) == sorted(set(first))
        assert first == again
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    assert ids(store) == once(*(f"{w}-{t}-{n}" for w in range(4) for t in range(3) for n in range(15)))
    store.compact()
    store.vacuum(grace=0)
    assert ids(store) == once(*(f"{w}-{t}-{n}" for w in range(4) for t in range(3) for n in range(15)))
    assert errors(store) == []


def test_a_folder_that_may_only_be_read_is_read(store: Store) -> None:
    with store.writer() as writer:
        writer.append(rollout("a"))
        writer.flush()
        reading = """
        import os
        store.get("a")  # what the interpreter loads late may be closed to the other user
        if os.getuid() == 0:
            os.setuid(65534)
        store = open_store(store.path)
        assert list(ids(store)) == ["a"]
        assert store.get("a")[0].rollout_id == "a"
        assert store.info().tables["rollouts"].rows == 1
        for refused in (lambda: store.append("rollouts", [rollout("b")]), store.recover):
            try:
                refused()
            except WriteError as error:
                assert "\\n" not in str(error)
            else:
                raise SystemExit("written")
        """
        folders = [Path(store.path), *(path for path in Path(store.path).iterdir() if path.is_dir())]
        upper = [path for path in Path(store.path).parents if path.is_relative_to("/tmp") and path != Path("/tmp")]
        modes = {path: path.stat().st_mode for path in [*folders, *upper]}
        for path in Path(store.path).rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the umask made of it
        try:
            for path in upper:
                path.chmod(0o755)
            for path in folders:
                path.chmod(0o555)
            process = start(store, reading)
            process.communicate(timeout=60)
        finally:
            for path, mode in modes.items():
                path.chmod(mode)
        assert process.returncode == 0
    assert ids(open_store(store.path)) == once("a")
