"""Summed Arrow messages: every byte lies under an xxh3 sum that is checked before Arrow sees it.

A sum stands, as 16 hexadecimal digits, in custom metadata of the bytes it covers, and counts as sixteen `0` while
they are summed. Three kinds: `head` over the schema message (in a part with the magic before it), `message` over one
encoded record batch, `tail` over all that follows the last batch of a part. spec/layout.md has it byte by byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import pyarrow as pa
import xxhash

from rollstore.errors import CorruptionError

MAGIC = b"ARROW1\x00\x00"
HEAD, MESSAGE, TAIL = "rollstore.head", "rollstore.message", "rollstore.tail"
BATCHES = "rollstore.batches"

# The opening brace and the quotes are in the marks because JSON text of a user's can never hold them unescaped.
_MARKS = {HEAD: b'{"xxh3-head":"', MESSAGE: b'{"xxh3-message":"', TAIL: b'{"xxh3-tail":"'}
_ZEROS = b"0" * 16
_PLACEHOLDERS = {
    HEAD: '{"xxh3-head":"0000000000000000"}',
    MESSAGE: '{"xxh3-message":"0000000000000000","bytes":"0000000000000000","rows":"%016x"}',
    TAIL: '{"xxh3-tail":"0000000000000000"}',
}
_TO_BYTES, _TO_ROWS = 16 + len('","bytes":"'), 32 + len('","bytes":"","rows":"')
"""From the digits of a message's sum to the digits of its length, and of its rows."""

_CONTINUATION = b"\xff\xff\xff\xff"
_LARGEST_METADATA = 1 << 28

Codec = Literal["lz4", "zstd"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Batch:
    """Where one record batch stands in its file: byte offset, bytes, rows, and its sum."""

    offset: int
    length: int
    rows: int
    sum: int


@dataclass(frozen=True)
class Tail:
    """What the end of a part says: its columns, its batches, and the text metadata beside them."""

    schema: pa.Schema
    batches: tuple[Batch, ...]
    metadata: dict[str, str]


def encode_head(schema: pa.Schema) -> bytes:
    """The schema message that opens a journal, summed."""
    head = bytearray(_marked(schema).serialize())
    _patch(memoryview(head), HEAD, digest(memoryview(head), _place(head, HEAD)))
    return bytes(head)


def encode_message(batch: pa.RecordBatch, codec: Codec = "lz4") -> bytes:
    """One record batch as an encapsulated IPC message, summed.

    The batch is in buffers of its own, as `batching.filled` gives it: of a slice, Arrow writes some of what its
    neighbours hold.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_options(codec)) as writer:
        writer.write_batch(batch, custom_metadata={MESSAGE: _PLACEHOLDERS[MESSAGE] % batch.num_rows})
        end = sink.tell()
    stream = memoryview(sink.getvalue()).cast("B")
    message = stream[_metadata_end(stream, 0) : end]  # after the schema message
    _seal_message(message)
    return bytes(message)


def encode_file(
    schema: pa.Schema, batches: Sequence[pa.RecordBatch], metadata: dict[str, str], codec: Codec | None = "lz4"
) -> memoryview:
    """A whole Arrow IPC file, summed: head, one message a batch, and a tail that lists the batches.

    Each batch in buffers of its own, as for `encode_message`.
    """
    rows = [batch.num_rows for batch in batches]
    footer = {TAIL: _PLACEHOLDERS[TAIL], BATCHES: _directory([Batch(0, 0, 0, 0)] * len(rows)), **metadata}
    sink = pa.BufferOutputStream()
    ends: list[int] = []
    with pa.ipc.new_file(sink, _marked(schema), options=_options(codec), metadata=footer) as writer:
        for batch in batches:
            writer.write_batch(batch, custom_metadata={MESSAGE: _PLACEHOLDERS[MESSAGE] % batch.num_rows})
            ends.append(sink.tell())
    file = memoryview(sink.getvalue()).cast("B")
    start = _metadata_end(file, len(MAGIC)) or 0
    head, tail = file[:start], file[ends[-1] if ends else start :]
    head_sum = digest(head, _place(head, HEAD))
    _patch(head, HEAD, head_sum)
    _patch(tail, HEAD, head_sum)  # the footer repeats the schema
    directory: list[Batch] = []
    for end, count in zip(ends, rows, strict=True):
        directory.append(Batch(start, end - start, count, _seal_message(file[start:end])))
        start = end
    place = _find(tail, _directory([Batch(0, 0, 0, 0)] * len(rows)).encode(), BATCHES) if rows else 0
    text = _directory(directory).encode()
    tail[place : place + len(text)] = text
    _patch(tail, TAIL, digest(tail, _place(tail, TAIL)))
    return file


def encode_file_head(schema: pa.Schema) -> bytes:
    """The opening of a part, summed: as `encode_file` begins."""
    file = encode_file(schema, [], {})
    return bytes(file[: len(file) - tail_length(bytes(file[-10:]))])


def encode_tail(schema: pa.Schema, batches: Sequence[Batch], lengths: Sequence[int], metadata: dict[str, str]) -> bytes:
    """The end of a part whose head and messages are written already: as `encode_file` ends.

    `lengths`: of each message, the bytes before its body. Arrow writes a footer only after messages, so it writes one
    after as many empty ones, and their places in it, which are known, give way to the true ones.
    """
    nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    footer = {TAIL: _PLACEHOLDERS[TAIL], BATCHES: _directory(batches), **metadata}
    sink = pa.BufferOutputStream()
    ends: list[int] = []
    with pa.ipc.new_file(sink, _marked(schema), options=_options(None), metadata=footer) as writer:
        for _ in batches:
            writer.write_batch(nothing)
            ends.append(sink.tell())
    file = memoryview(sink.getvalue()).cast("B")
    start = _metadata_end(file, len(MAGIC)) or 0
    head, tail = file[:start], file[ends[-1] if ends else start :]
    if ends:
        starts = [start, *ends[:-1]]
        bodies = [_metadata_end(file, begin) or 0 for begin in starts]
        empty = b"".join(map(_block, starts, ends, bodies))
        true = [(batch.offset, batch.offset + batch.length) for batch in batches]
        place = _find(tail, empty, BATCHES)
        tail[place : place + len(empty)] = b"".join(
            _block(begin, end, begin + length) for (begin, end), length in zip(true, lengths, strict=True)
        )
    _patch(tail, HEAD, digest(head, _place(head, HEAD)))
    _patch(tail, TAIL, digest(tail, _place(tail, TAIL)))
    return bytes(tail)


def read_head(data: bytes | memoryview, where: str) -> tuple[pa.Schema, int] | None:
    """The schema of a journal and the length of its head; None where it is cut short.

    Raises CorruptionError where the head is whole and does not hold its sum.
    """
    length = _metadata_end(data, 0)
    if length is None or length > len(data):
        return None
    head = memoryview(data)[:length]
    _check(head, HEAD, where)
    return _guarded(lambda: pa.ipc.read_schema(pa.py_buffer(head)), where), length


def next_message(data: bytes | memoryview, offset: int) -> Batch | None:
    """The whole message at `offset`, its sum holding; None where it is cut short, torn, or not there."""
    body = _metadata_end(data, offset)
    if body is None or body > len(data):
        return None
    view = memoryview(data)[offset:]
    try:
        place = _place(view[: body - offset], MESSAGE)
        length, rows = (int(bytes(view[place + skip : place + skip + 16]), 16) for skip in (_TO_BYTES, _TO_ROWS))
        if not body - offset <= length <= len(view):
            return None
        return Batch(offset, length, rows, _check(view[:length], MESSAGE, ""))
    except (CorruptionError, ValueError):
        return None


def is_unfinished(data: bytes) -> bool:
    """Whether these bytes are the beginning of a message and nothing worse: what a write leaves that was cut short."""
    end = _metadata_end(data, 0)
    if end is None:
        return data[:4] == _CONTINUATION[: len(data)] and len(data) < 8
    try:
        place = _place(data[:end], MESSAGE) if end <= len(data) else -1
        return place < 0 or int(data[place + _TO_BYTES : place + _TO_BYTES + 16], 16) > len(data)
    except (CorruptionError, ValueError):
        return False


def check_message(message: bytes | memoryview, batch: Batch, where: str) -> None:
    """Raises CorruptionError unless these bytes are that batch of that file."""
    if len(message) != batch.length:
        raise CorruptionError(f"{where}: wanted {batch.length} bytes at {batch.offset}, got {len(message)}")
    if _check(memoryview(message), MESSAGE, where) != batch.sum:
        raise CorruptionError(f"{where}: wanted the batch with sum {batch.sum:016x}, got another one")


def check_head(head: bytes | memoryview, where: str) -> None:
    """Raises CorruptionError unless the opening of a part holds its sum."""
    _check(memoryview(head), HEAD, where)


class Decoder:
    """Checked messages of one schema as record batches, fully validated. Threads may share it.

    Arrow reads a schema again for every stream it opens, which takes as long as a small batch does: streams are kept
    open, and one message after the other is put before them.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._opening = schema.serialize()
        self._idle: dict[tuple[int, ...] | None, list[_Stream]] = {}

    def decode(self, message: bytes | memoryview, where: str, fields: Sequence[int] | None = None) -> pa.RecordBatch:
        """`fields` picks columns by their place in the schema. Raises CorruptionError."""
        idle = self._idle.setdefault(None if fields is None else tuple(fields), [])
        try:
            stream = idle.pop()
        except IndexError:
            stream = _guarded(lambda: _Stream(self._opening, fields), where)
        batch = _guarded(lambda: stream.next(message), where)
        idle.append(stream)  # one that failed is not used again: it may have stopped within a message
        return batch


class _Stream:
    """An open stream of one schema, and what it reads from."""

    def __init__(self, opening: pa.Buffer, fields: Sequence[int] | None) -> None:
        # Arrow's own pool costs a small batch more than it gives: 1.4 ms instead of 0.3 for seventy columns.
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=None if fields is None else list(fields))
        self._feed = _Feed(opening)
        self._reader = pa.ipc.open_stream(pa.PythonFile(self._feed, "r"), options=options)

    def next(self, message: bytes | memoryview) -> pa.RecordBatch:
        self._feed.put(message)
        batch = self._reader.read_next_batch()
        self._feed.put(b"")
        batch.validate(full=True)
        return batch


class _Feed:
    """A file object that holds one message at a time. Apart from `_Stream`, which Arrow would keep alive for ever."""

    closed = False

    def __init__(self, data: pa.Buffer) -> None:
        self._data, self._place = memoryview(data), 0

    def put(self, data: bytes | memoryview) -> None:
        self._data, self._place = memoryview(data), 0

    def read(self, size: int) -> memoryview:
        piece = self._data[self._place : self._place + size]
        self._place += len(piece)
        return piece


def tail_length(ending: bytes) -> int:
    """Bytes of the tail of a part, told by its last 10 bytes; 0 where they are not the end of an Arrow file."""
    if len(ending) < 10 or ending[-6:] != MAGIC[:6]:
        return 0
    return 8 + int.from_bytes(ending[-10:-6], "little") + 10


def read_tail(tail: bytes | memoryview, size: int, where: str) -> Tail:
    """What a part of `size` bytes says at its end. Raises CorruptionError unless its sum holds and it fits the file."""
    _check(memoryview(tail), TAIL, where)
    # A footer alone reads as a file without batches to look at; its sum holds, so Arrow may have it.
    reader = _guarded(lambda: pa.ipc.open_file(pa.py_buffer(tail)), where)
    try:
        metadata = {key.decode(): value.decode() for key, value in (reader.metadata or {}).items()}
        del metadata[TAIL]
        batches = tuple(
            Batch(*(int(field, 16) for field in line.split(" "))) for line in metadata.pop(BATCHES).split("\n") if line
        )
    except (KeyError, ValueError, TypeError) as error:
        raise CorruptionError(f"{where}: the footer's list of batches cannot be read") from error
    end = batches[0].offset if batches else size - len(tail)
    for batch in batches:
        if batch.offset != end or min(batch.offset, batch.length) <= 0 or batch.rows < 0:
            raise CorruptionError(f"{where}: wanted a batch at {end}, got {batch}")
        end += batch.length
    if end != size - len(tail):
        raise CorruptionError(f"{where}: wanted batches up to {size - len(tail)}, got {end}")
    return Tail(_unmarked(reader.schema), batches, metadata)


def holds_mark(data: bytes) -> bool:
    """Whether these bytes hold what only a tail holds: then the file is a part of ours, whole or damaged.

    Either of two names in it, so that damage within one of them leaves the other.
    """
    return _MARKS[TAIL] in data or BATCHES.encode() in data


def digest(data: memoryview, place: int) -> int:
    """xxh3 (64 bits, seed 0) of the data, the 16 digits at `place` counted as zeros."""
    state = xxhash.xxh3_64(data[:place])
    state.update(_ZEROS)
    state.update(data[place + len(_ZEROS) :])
    return state.intdigest()


def sum_of(data: bytes) -> str:
    """xxh3 of plain bytes, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def _seal_message(message: memoryview) -> int:
    place = _place(message[: _metadata_end(message, 0)], MESSAGE)
    message[place + _TO_BYTES : place + _TO_BYTES + 16] = f"{len(message):016x}".encode()
    result = digest(message, place)
    message[place : place + 16] = f"{result:016x}".encode()
    return result


def _check(data: memoryview, kind: str, where: str) -> int:
    searched = data[: _metadata_end(data, 0)] if kind == MESSAGE else data
    place = _place(searched, kind, where)
    wanted, got = bytes(data[place : place + 16]), f"{digest(data, place):016x}".encode()
    if wanted != got:
        raise CorruptionError(f"{where}: wanted the sum {wanted!r} over {kind.removeprefix('rollstore.')}, got {got!r}")
    return int(got, 16)


def _patch(data: memoryview, kind: str, value: int) -> None:
    place = _place(data, kind)
    data[place : place + 16] = f"{value:016x}".encode()


def _place(data: bytes | bytearray | memoryview, kind: str, where: str = "") -> int:
    return _find(data, _MARKS[kind], kind, where) + len(_MARKS[kind])


def _find(data: bytes | bytearray | memoryview, mark: bytes, kind: str, where: str = "") -> int:
    """The one place of a mark. Raises CorruptionError where it is missing or stands twice."""
    raw = bytes(data)
    place = raw.find(mark)
    if place < 0 or raw.find(mark, place + 1) >= 0 or place + len(mark) + 16 > len(raw):
        raise CorruptionError(f"{where}: wanted one {kind}, got {raw.count(mark)}")
    return place


def _metadata_end(data: bytes | bytearray | memoryview, offset: int) -> int | None:
    """Where the metadata of the message at `offset` ends; None where no message begins there."""
    prefix = bytes(data[offset : offset + 8])
    length = int.from_bytes(prefix[4:], "little")
    if len(prefix) < 8 or prefix[:4] != _CONTINUATION or not 0 < length < _LARGEST_METADATA:
        return None
    return offset + 8 + length


def _marked(schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({**(schema.metadata or {}), HEAD.encode(): _PLACEHOLDERS[HEAD].encode()})


def _unmarked(schema: pa.Schema) -> pa.Schema:
    return schema.with_metadata({k: v for k, v in (schema.metadata or {}).items() if k != HEAD.encode()})


def _directory(batches: Sequence[Batch]) -> str:
    return "".join(f"{b.offset:016x} {b.length:016x} {b.rows:016x} {b.sum:016x}\n" for b in batches)


def _block(start: int, end: int, body: int) -> bytes:
    """A message's place as an Arrow footer holds it: offset, bytes before the body, of the body."""
    return struct.pack("<qi4xq", start, body - start, end - body)


def _options(codec: Codec | None) -> pa.ipc.IpcWriteOptions:
    # One thread: a batch is small, and handing its buffers around costs four times the compression.
    return pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)


def _guarded(read: Callable[[], _T], where: str) -> _T:
    """What Arrow makes of bytes whose sum holds; whatever it raises, they are not what they claim."""
    try:
        return read()
    except (pa.ArrowException, OSError, ValueError, TypeError, NotImplementedError, StopIteration) as error:
        raise CorruptionError(f"{where}: Arrow cannot read it: {str(error).splitlines()[0]}") from error
