"""The check that an engine's writer keeps what the engine said, and makes up nothing: `check_writer`.

A case says, in no engine's words, what was asked for and what was drawn. The team renders it as its engine would report
it, hands that to its writer, and returns the rollouts; the check holds them against the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollstore.errors import SchemaError
from rollstore.schema import Rollout, from_table, to_table
from rollstore.testing.invented import NAMES, invented

TOLERANCE = 1e-4
"""How far a log-prob may move on its way through an engine's report, as a probability in four bytes."""

Head = dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Output:
    """What was drawn for one sample.

    logprobs: of the drawn tokens, None for one that the engine did not say. heads: the k likeliest of each; none: none
    were asked for. versions: the weights that drew each; none: nothing was said of them. finish: `stop_token` (the last
    token is the end), `stop_string`, `max_tokens`, `context_limit`, `prompt_too_long`, or `abort`.
    """

    tokens: tuple[int, ...]
    finish: str
    logprobs: tuple[float | None, ...] = ()
    heads: tuple[Head, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request and what came of it. `needs`: what an engine must be able to do for this to happen at all."""

    name: str
    outputs: tuple[Output, ...]
    prompt: tuple[int, ...] = (5, 6, 7)
    temperature: float = 0.5
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 8
    context: int = 64
    seed: int | None = 7
    end_token: int = 2
    head_size: int = 2
    vocabulary: int = 100
    kind: str = "behavior"
    needs: frozenset[str] = field(default_factory=frozenset[str])


class WriterFailure(AssertionError):
    """A writer that does not pass. `failures` holds every one: case, what, wanted, got."""

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures
        super().__init__("\n".join(failures))


Render = Callable[[Case], Sequence[Rollout]]


def _plain(name: str, tokens: Sequence[int], finish: str = "stop_token", **case: Any) -> Case:
    """A case of one sample, each token with a log-prob of its own and a head of two."""
    logprobs = tuple(-0.5 - 0.25 * n for n in range(len(tokens)))
    heads = tuple(
        {token: value, 90 + n % 5: -2.5} for n, (token, value) in enumerate(zip(tokens, logprobs, strict=True))
    )
    return Case(
        name=name, outputs=(Output(tokens=tuple(tokens), finish=finish, logprobs=logprobs, heads=heads),), **case
    )


def _with(case: Case, **output: Any) -> Case:
    return replace(case, outputs=(replace(case.outputs[0], **output),))


CASES: tuple[Case, ...] = (
    _plain("a reply that ends with the end token, which is kept", (8, 9, 2)),
    _plain("ids of zero, and one drawn twice", (0, 0, 4, 2), prompt=(0, 5)),
    _plain("the end token inside the prompt", (8, 2), prompt=(5, 2, 6, 2)),
    _plain("a prompt of one token", (8, 2), prompt=(1,)),
    _plain("as many tokens as were asked for", (8, 9, 8, 9), "max_tokens", max_tokens=4),
    _plain("a full context", (8, 9), "context_limit", prompt=(5, 6), context=4, needs=frozenset({"context_limit"})),
    _plain("a stop string, whose tokens are kept", (8, 9, 10), "stop_string", needs=frozenset({"stop_string"})),
    _plain("an abort in the middle", (8, 9), "abort", needs=frozenset({"abort"})),
    _plain("an abort before the first token", (), "abort", needs=frozenset({"abort", "empty"})),
    _plain("a prompt that fills the context", (), "prompt_too_long", prompt=(5,) * 12, context=12,
           needs=frozenset({"prompt_too_long", "empty"})),
    _with(_plain("a drawn token that is not the likeliest", (77, 2)),
          logprobs=(-1.9, -0.3), heads=({31: -0.25, 77: -1.9}, {2: -0.3, 9: -1.5})),
    _with(_plain("a drawn token outside the k likeliest", (77, 2)),
          logprobs=(-4.0, -0.3), heads=({31: -0.25, 12: -1.9}, {2: -0.3, 9: -1.6})),
    _with(_plain("one log-prob that the engine did not say", (8, 9, 2), needs=frozenset({"unknown_logprob"})),
          logprobs=(-0.5, None, -0.75), heads=()),
    _with(_plain("weights that change after the second token", (8, 9, 2), needs=frozenset({"version_change"})),
          versions=(7, 7, 8)),
    replace(_plain("log-probs of the raw distribution", (8, 9, 2), needs=frozenset({"raw"})), kind="raw"),
    _plain("filters that were asked for", (8, 9, 2), top_k=50, top_p=0.75),
    replace(_plain("a greedy pick", (8, 2), temperature=0.0, needs=frozenset({"greedy"})), kind="raw"),
    replace(_plain("two samples of one prompt", (8, 9, 2), needs=frozenset({"samples"})), outputs=(
        *_plain("", (8, 9, 2)).outputs, *_plain("", (10, 2)).outputs)),
)  # fmt: skip
"""The cases that `check_writer` runs."""


LACKS = frozenset({"logprobs", "heads", "versions", "seed", "max_tokens", "behavior"})
"""What an engine may be unable to say."""


def check_writer(
    write: Render, *, lacks: Iterable[str] = (), says: Iterable[str] = (), cases: Iterable[Case] = CASES
) -> tuple[str, ...]:
    """Run every case through a writer. Raises WriterFailure with all that is wrong; returns the cases left out.

    write: renders a case as the engine would report it, and returns the writer's rollouts, one for each output.
    lacks: what the engine cannot say (`logprobs`, `heads`, `versions`, `seed`, `max_tokens`, `behavior`), which must
    then be null, or do (what a case needs: `abort`, `empty`, `context_limit`, `prompt_too_long`, `stop_string`,
    `unknown_logprob`, `version_change`, `raw`, `greedy`, `samples`), whose cases are left out. Others never are.
    says: columns that the engine itself says something in that no case gives, as `entropies`, `spans.cached_tokens`
    or `samplers.chain`. In every other column what the case does not give must be null. Raises ValueError for a word in
    `lacks` or `says` that is none.
    """
    every = tuple(cases)
    needs = frozenset[str]().union(*(case.needs for case in (*CASES, *every)))
    without, own = _known("lacks", lacks, LACKS | needs), _known("says", says, NAMES)
    failures: list[str] = []
    left_out: list[str] = []
    for case in every:
        if case.needs & without or (case.kind == "behavior" and "behavior" in without and "logprobs" not in without):
            left_out.append(case.name)
        else:
            failures += [f"{case.name}: {problem}" for problem in _tried(write, case, without, own)]
    if failures:
        raise WriterFailure(failures)
    return tuple(left_out)


def _known(what: str, words: Iterable[str], known: frozenset[str]) -> frozenset[str]:
    given = frozenset((words,) if isinstance(words, str) else words)
    strange = sorted(given - known)
    if strange:
        raise ValueError(f"{what}: wanted some of {', '.join(sorted(known))}, got {', '.join(strange)}")
    return given


def _tried(write: Render, case: Case, lacks: frozenset[str], says: frozenset[str]) -> list[str]:
    try:
        made: Any = write(case)
        rows: list[Any] = [None] if made is None else list(made)
    except Exception as error:  # whatever it is, the other cases are still to be run
        return [f"the writer raises {type(error).__name__}: {error}"]
    strange = [type(row).__name__ for row in rows if not isinstance(row, Rollout)]
    if strange:
        return [f"rollouts: wanted {len(case.outputs)} of them, got {strange[0]}"]
    try:
        return _problems(case, rows, lacks, says)
    except SchemaError as error:
        return [f"the schema refuses it: {error}"]


def _problems(case: Case, rows: list[Rollout], lacks: frozenset[str], says: frozenset[str]) -> list[str]:
    if len(rows) != len(case.outputs):
        return [f"rollouts: wanted {len(case.outputs)}, got {len(rows)}"]
    stored = from_table(to_table(rows))  # what the schema refuses raises here
    found: list[str] = []
    for n, (row, output) in enumerate(zip(stored, case.outputs, strict=True)):
        found += _nan(output, rows[n])
        checks = (_tokens(case, output, row), _logprobs(case, output, row, lacks), _heads(case, output, row, lacks),
                  _versions(output, row, lacks), _end(output, row), _asked(case, n, row, lacks),
                  invented(case, output, row, says))  # fmt: skip
        found += [problem for check in checks for problem in check]
    if len(rows) > 1:
        wanted = [(len(rows), n) for n in range(len(rows))]
        got = [(row.group_size, row.sample_index) for row in stored]
        found += _differ("group_size, sample_index", wanted, got)
        if len({row.rollout_id for row in stored}) < len(stored):
            found.append(f"rollout_id: wanted another one for each sample, got {[row.rollout_id for row in stored]}")
        if len({row.group_id for row in stored}) != 1 or stored[0].group_id is None:
            found.append(f"group_id: wanted one for all samples, got {[row.group_id for row in stored]}")
    return found


def _tokens(case: Case, output: Output, row: Rollout) -> list[str]:
    mask = [False] * len(case.prompt) + [True] * len(output.tokens)
    found = _differ("tokens", [*case.prompt, *output.tokens], row.tokens.tolist())
    found += _differ("action_mask", mask, row.action_mask.astype(bool).tolist())
    drawn = [span for span in row.spans or () if span.is_action]
    if not drawn:
        return [*found, "spans: wanted one that was drawn, of no length where nothing was, got none"]
    if any(span.origin != "sampled" or (span.sampler is None and row.samplers) for span in drawn):
        found.append("spans: wanted drawn ones of origin sampled that name their sampler")
    return found


def _logprobs(case: Case, output: Output, row: Rollout, lacks: frozenset[str]) -> list[str]:
    if "logprobs" in lacks:
        return _differ("logprobs", None, row.logprobs) + _differ("logprob_kind", None, row.logprob_kind)
    if row.logprobs is None:
        return [f"logprobs: wanted {list(output.logprobs)}, got none"]
    found = [] if _close(output.logprobs, row.logprobs.to_list()) else [
        f"logprobs: wanted {list(output.logprobs)}, got {row.logprobs.to_list()}"
    ]  # fmt: skip
    if output.tokens and row.logprob_kind != case.kind:
        found.append(f"logprob_kind: wanted {case.kind}, got {row.logprob_kind}")
    return found


def _nan(output: Output, row: Rollout) -> list[str]:
    """A NaN as the writer handed it over: a store keeps null in its place, and warns."""
    said = row.logprobs
    if said is None or len(said) != len(output.logprobs):
        return []
    places = [n for n, value in enumerate(said.to_list()) if value is not None and math.isnan(value)]
    return [f"logprobs: wanted null where the engine said nothing, got NaN at {places}"] if places else []


def _heads(case: Case, output: Output, row: Rollout, lacks: frozenset[str]) -> list[str]:
    """The k likeliest, or those of them that are sure; the drawn one only where it is among them."""
    if "heads" in lacks or "logprobs" in lacks:
        return _differ("heads", None, row.heads) + _differ("head_kind", None, row.head_kind)
    heads = row.heads
    if not output.heads:
        entries = 0 if heads is None or heads.tokens is None else len(heads.tokens)
        kind = [] if not output.tokens else _differ("head_kind", None, row.head_kind)
        return kind + ([f"heads: wanted none, as the case gives none, got {entries} entries"] if entries else [])
    if heads is None or heads.tokens is None or heads.logprobs is None:
        return ["heads: wanted those of each action, got none"]
    counts = [heads.size or 0] * len(output.tokens) if heads.counts is None else np.asarray(heads.counts).tolist()
    ends = np.cumsum([0, *counts]).tolist()
    if not max(counts) <= (heads.size or 0) <= max(case.head_size, *map(len, output.heads)):
        return [f"heads: wanted a size of at most {case.head_size}, got {heads.size} with up to {max(counts)} entries"]
    found: list[str] = []
    for n, wanted in enumerate(output.heads):
        ids, values = (np.asarray(part[ends[n] : ends[n + 1]]).tolist() for part in (heads.tokens, heads.logprobs))
        likeliest = sorted(wanted.items(), key=lambda pair: -pair[1])[: len(ids)]
        if not ids or [token for token, _ in likeliest] != ids or not _close([v for _, v in likeliest], values):
            found.append(
                f"heads: action {n}: wanted the likeliest of {wanted}, got {dict(zip(ids, values, strict=True))}"
            )
    if row.head_kind != case.kind:
        found.append(f"head_kind: wanted {case.kind}, got {row.head_kind}")
    return found


PER_TOKEN = ("per_token", "per_span")
"""How versions are known that an engine says of each token."""


def _versions(output: Output, row: Rollout, lacks: frozenset[str]) -> list[str]:
    got = None if row.weight_versions is None else row.weight_versions.to_list()
    if "versions" in lacks:
        return _differ("weight_versions", None, got)
    if not output.versions:
        return []
    found = _differ("weight_versions", list(output.versions), got)
    if row.weight_version_source not in PER_TOKEN:
        found.append(f"weight_version_source: wanted {' or '.join(PER_TOKEN)}, got {row.weight_version_source}")
    bounds = (min(output.versions), max(output.versions))
    return found + _differ("weight_version_min, _max", bounds, (row.weight_version_min, row.weight_version_max))


ENDINGS = {
    "stop_token": ("terminated", "stop_token"),
    "stop_string": ("terminated", "stop_string"),
    "max_tokens": ("truncated", "max_tokens"),
    "context_limit": ("truncated", "context_limit"),
    "prompt_too_long": ("truncated", "prompt_too_long"),
    "abort": ("aborted", "engine_abort"),
}
"""How each finish has to be recorded."""


def _end(output: Output, row: Rollout) -> list[str]:
    return _differ("ending, ending_reason", ENDINGS[output.finish], (row.ending, row.ending_reason))


def _asked(case: Case, index: int, row: Rollout, lacks: frozenset[str]) -> list[str]:
    """What was asked for. A filter that is off may be null; of several samples, so may their seeds."""
    if not row.samplers:
        return ["samplers: wanted what was asked for, got none"]
    got, *others = row.samplers
    if others:
        return [f"samplers: wanted that of the one request, got {len(row.samplers)}"]
    found = [] if got.temperature is not None and math.isclose(got.temperature, case.temperature, rel_tol=1e-6) else [
        f"temperature: wanted {case.temperature}, got {got.temperature}"
    ]  # fmt: skip
    if case.temperature > 0:  # a greedy pick has no filters, whatever was asked for
        found += _differ("top_k", case.top_k, max(got.top_k or 0, 0))
        found += _differ("top_p", case.top_p, 1.0 if got.top_p is None else got.top_p)
    found += _differ("max_tokens", None if "max_tokens" in lacks else case.max_tokens, got.max_tokens)
    seed = None if "seed" in lacks or case.seed is None else case.seed + index
    derived = len(case.outputs) > 1 and got.seed is None  # what an engine makes of one seed for several is its own
    return found if derived else found + _differ("seed", seed, got.seed)


def _differ(what: str, wanted: Any, got: Any) -> list[str]:
    return [] if wanted == got else [f"{what}: wanted {wanted}, got {got}"]


def _close(wanted: Sequence[float | None], got: Sequence[float | None]) -> bool:
    """Whether each value is known where it was said, and the same but for rounding."""
    return len(wanted) == len(got) and all(
        (one is None) == (other is None) and (one is None or other is None or abs(one - other) <= TOLERANCE)
        for one, other in zip(wanted, got, strict=True)
    )
