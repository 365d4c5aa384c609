"""Which tokens are placeholders of media: marks [T] from the spans, never from ids."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rollstore.errors import UnsupportedRecordError
from rollstore.schema.flat import Flat, Rows

Ints = npt.NDArray[np.int64]


class Medium(IntEnum):
    """Codes of `TokenBatch.media`: nothing, the schema's words, and any other word, none, or several in one span."""

    none = 0
    image = 1
    audio = 2
    video = 3
    other = 4


NAMED = ("image", "audio", "video")


def media_marks(rows: Rows, offsets: Ints) -> npt.NDArray[np.int8] | None:
    """int8 [tokens of all rows]: a `Medium`; None where no span has media. offsets int64 [B + 1] of the tokens."""
    spans, fields = rows.list("spans"), rows.children("spans")
    if spans is None or not {"start", "length", "media"} <= set(fields):
        return None
    media = Flat(fields["media"])
    chosen = np.flatnonzero(media.lengths)
    if not len(chosen):
        return None
    if fields["length"].null_count:
        raise UnsupportedRecordError("spans.length: wanted a number in every span, got null")
    words = pc.index_in(media.values.field("kind"), value_set=pa.array(NAMED)).fill_null(Medium.other - 1)
    codes = words.to_numpy(zero_copy_only=False) + 1
    first = codes[media.offsets[chosen]]
    differ = np.maximum.reduceat(codes, media.offsets[chosen]) != np.minimum.reduceat(codes, media.offsets[chosen])
    lengths = fields["length"].to_numpy(zero_copy_only=False)[chosen].astype(np.int64)
    begins = offsets[:-1][spans.rows[chosen]] + fields["start"].to_numpy(zero_copy_only=False)[chosen]
    places = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    marks = np.zeros(int(offsets[-1]), np.int8)
    marks[places] = np.repeat(np.where(differ, int(Medium.other), first), lengths)
    return marks
