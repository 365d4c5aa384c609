"""`record(llm, writer)`: everything an engine generates is appended, and returned as it was."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Protocol

from rollstore.errors import SchemaError
from rollstore.schema import Rollout
from rollstore.writers.apart import append_apart
from rollstore.writers.vllm.configuration import configuration
from rollstore.writers.vllm.outputs import Fields, is_delta, paired, rollouts, stream_rollouts
from rollstore.writers.weights import Number, version_number

INTERNAL = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM puts behind a request id to keep ids apart inside."""


class Appends(Protocol):
    """What a recording needs of a writer."""

    def append(self, data: list[Rollout]) -> None: ...


class Recording:
    """What `record` put around an engine. `stop`, or the end of the `with` block, takes it off again."""

    def __init__(
        self, llm: Any, writer: Appends, fields: Fields | None, number: Number, cache_state: str | None
    ) -> None:
        self._llm, self._writer, self._fields, self._number = llm, writer, fields, number
        self._cache_state = cache_state
        self._configuration = configuration(llm)
        self._asked: dict[str, Any] = {}
        self._rows: dict[tuple[str, int], list[int]] | None = None
        self._pauses: list[str] = []
        self._put: list[tuple[Any, str, Any]] = []
        if inspect.isasyncgenfunction(llm.generate):
            self._wrap(llm, "generate", self._streamed)
            self._wrap(llm, "pause_generation", self._paused)
        else:
            for name, wrapper in (
                ("generate", self._called), ("chat", self._called), ("enqueue", self._queued),
                ("enqueue_chat", self._queued), ("wait_for_completion", self._waited),
            ):  # fmt: skip
                self._wrap(llm, name, wrapper)
            self._watch_steps()

    def stop(self) -> None:
        """Leave the engine as it was before. Stopping twice is no error."""
        while self._put:
            owner, name, before = self._put.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            self._put.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, wrapper(original))

    def _called(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            self._append(outputs, self._params(args, kwargs))
            return outputs

        return call

    def _queued(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            requests = original(*args, **kwargs)
            params = self._params(args, kwargs)
            each = params if isinstance(params, Sequence) else [params] * len(requests)
            self._asked.update(zip((INTERNAL.sub("", request) for request in requests), each, strict=True))
            return requests

        return call

    def _waited(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            generated = [output for output in outputs if isinstance(getattr(output, "outputs", None), list)]
            self._append(generated, [self._asked.pop(output.request_id, None) for output in generated])
            return outputs

        return call

    def _params(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        return self._llm.get_default_sampling_params() if given is None else given

    def _append(self, outputs: Sequence[Any], params: Any) -> None:
        """All that can be recorded; then raise what could not, so that one output does not cost the others."""
        rows: list[Rollout] = []
        wrong: list[ValueError] = []
        for output, asked in paired(outputs, params):
            try:
                rows += rollouts(
                    [output], [asked], configuration=self._configuration, fields=self._fields, number=self._number,
                    cache_state=self._cache_state or "unknown", batch_rows=self._rows,
                )  # fmt: skip
            except ValueError as error:
                wrong.append(error)
        if self._rows is not None:
            self._rows.clear()
        self._keep(rows)
        if wrong:
            raise wrong[0]

    def _keep(self, rows: list[Rollout]) -> None:
        if rows:
            try:
                self._writer.append(rows)
            except SchemaError as error:
                append_apart(self._writer.append, rows, error)

    def _streamed(self, original: Any) -> Any:
        async def generate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            params = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
            chunks: list[Any] = []
            pauses = len(self._pauses)
            cut: dict[str, Any] = {}
            try:
                async with aclosing(original(*args, **kwargs)) as stream:
                    async for chunk in stream:
                        if not is_delta(params):  # the newest holds all that the one before it did
                            new = {completion.index for completion in chunk.outputs}
                            chunks = [old for old in chunks if not new.issuperset(c.index for c in old.outputs)]
                        chunks.append(chunk)
                        yield chunk
            except (asyncio.CancelledError, GeneratorExit):
                cut = {"ending": "aborted", "ending_reason": "cancelled"}
                raise
            except Exception:
                cut = {"ending": "aborted", "ending_reason": "engine_abort"}
                raise
            finally:
                self._append_stream(chunks, params, cut, set(self._pauses[pauses:]))

        return generate

    def _append_stream(self, chunks: list[Any], params: Any, cut: Mapping[str, Any], pauses: set[str]) -> None:
        state = self._cache_state or (pauses.pop() if len(pauses) == 1 else "unknown")

        def fields(output: Any, completion: Any) -> Mapping[str, Any]:
            own = self._fields(output, completion) if callable(self._fields) else self._fields or {}
            return {**own, **cut} if completion.finish_reason is None else own

        rows = stream_rollouts(
            chunks, params, configuration=self._configuration, fields=fields, number=self._number, cache_state=state
        )
        self._keep(rows)

    def _paused(self, original: Any) -> Any:
        async def pause(*args: Any, **kwargs: Any) -> Any:
            result = await original(*args, **kwargs)
            self._pauses.append("recomputed" if kwargs.get("clear_cache", True) else "retained")
            return result

        return pause

    def _watch_steps(self) -> None:
        """Count the token rows of each forward pass where the engine runs in this process."""
        engine: Any = getattr(self._llm, "llm_engine", None)
        core = getattr(getattr(engine, "engine_core", None), "engine_core", None)
        scheduler = getattr(core, "scheduler", None)
        if scheduler is None:
            return
        states = engine.output_processor.request_states
        counted: dict[tuple[str, int], list[int]] = {}
        self._rows = counted

        def watched(original: Any) -> Any:
            def update(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                clients = original(scheduled, *args, **kwargs)
                for client in clients.values():
                    for output in client.outputs:
                        state = states.get(output.request_id)
                        if state is not None:
                            rows = counted.setdefault((state.external_req_id, state.request_index), [])
                            rows.extend([scheduled.total_num_scheduled_tokens] * len(output.new_token_ids))
                return clients

            return update

        self._wrap(scheduler, "update_from_output", watched)


def record(
    llm: Any,
    writer: Appends,
    *,
    fields: Fields | None = None,
    number: Number = version_number,
    cache_state: str | None = None,
) -> Recording:
    """From now on, append everything that the engine generates to the writer; what it returns does not change.

    Of an `LLM`: `generate`, `chat`, and `enqueue` with `wait_for_completion`. Of an `AsyncLLM`: `generate`, also where
    the stream was left or broke. `fields` are columns of the rollouts table, or a function of (RequestOutput,
    CompletionOutput) that gives them. `number` and `cache_state`: see `replies`; without one, the state is read from
    the pauses that an `AsyncLLM` is asked for meanwhile. What the store refuses raises out of the call that generated.
    """
    return Recording(llm, writer, fields, number, cache_state)
