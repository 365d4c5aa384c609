"""Tables as Hugging Face datasets on disk: `datasets.load_from_disk(FOLDER/<table>)`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

from rollstore.exchange.folder import Exported, Progress, Written, about, new_folder
from rollstore.exchange.parquet import export as export_parquet
from rollstore.schema import TABLES
from rollstore.store.snapshot import Snapshot
from rollstore.store.store import Store


def export_datasets(
    store: Store,
    folder: str | os.PathLike[str],
    *,
    tables: Sequence[str] = tuple(TABLES),
    snapshot: Snapshot | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write tables as FOLDER/<table>, each a dataset saved to disk. Needs the package datasets.

    By way of Parquet, which is deleted at the end: it needs room for both. What differs from the store is what differs
    in Parquet: a map is a list of structs. A table without rows has no folder, since a dataset of none has no types.
    The folder as for every export. Raises ImportError without the package, StoreError where the folder is taken,
    CorruptionError, WriteError.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("datasets: wanted this package, found none; pip install 'rollstore[exchange]'") from None

    with new_folder(store, folder, snapshot, "") as (staging, held, exported):
        on_the_way, cache = staging / "parquet", staging / "cache"
        written = export_parquet(store, on_the_way, tables=tables, snapshot=held, progress=progress)
        for table, counts in written.tables.items():
            if not counts.rows:
                continue
            files = sorted(map(str, (on_the_way / table).rglob("*.parquet")))
            builder: Any = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(cache))
            builder.save_to_disk(staging / table)
            sizes = [path.stat().st_size for path in (staging / table).iterdir()]
            exported.tables[table] = Written(rows=counts.rows, files=len(sizes), bytes=sum(sizes))
        shutil.rmtree(on_the_way)
        shutil.rmtree(cache, ignore_errors=True)
        about(store, held, exported, staging)
    return exported
