"""vLLM's outputs become records that say what they are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollstore import Rollout
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import vllm
from tests.writers.vllm_objects import completion, dicts, engine, flat, output, params, recorded, spans

PROCESSED = vllm.configuration(engine("processed_logprobs"))
RAW = vllm.configuration(engine("raw_logprobs"))
POSITIONS = [[(7, -0.5, 1), (9, -1.5, 2)], [(8, -2.0, 3), (5, -0.3, 1), (6, -1.9, 2)]]
"""Two positions of a request for two log-probs: the drawn ids are 7, the likeliest, and 8, the third."""


def one(outputs: Any, asked: Any = None, *, configuration: vllm.Configuration = PROCESSED, **options: Any) -> Rollout:
    """The only rollout of some outputs, as the store would take it."""
    (rollout,) = vllm.rollouts(outputs, asked or params(logprobs=2), configuration=configuration, **options)
    to_table([rollout])
    return rollout


def head(rollout: Rollout) -> list[list[tuple[int, float]]]:
    assert rollout.heads is not None
    tokens, logprobs = rollout.heads.tokens, rollout.heads.logprobs
    assert tokens is not None
    assert logprobs is not None
    counts = rollout.heads.counts
    sizes = [rollout.heads.size] * int(rollout.action_mask.sum()) if counts is None else counts.tolist()
    pairs = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    return [pairs[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))]


def last_span(rollout: Rollout) -> Any:
    assert rollout.spans is not None
    return rollout.spans[-1]


def flags(rollout: Rollout) -> list[tuple[str | None, str | None, int | None]]:
    return [(flag.kind, flag.column, flag.index) for flag in rollout.flags or ()]


# a recorded run of a real engine


@pytest.mark.parametrize(("name", "kind"), [("vllm_proc_fp32", "behavior"), ("vllm_raw_fp32", "raw")])
def test_a_recorded_run_comes_out_as_the_engine_reported_it(name: str, kind: str) -> None:
    outputs, asked, run = recorded(name)
    made = vllm.rollouts(outputs, asked, configuration=vllm.configuration(engine(run["logprobs_mode"])))
    for rollout, rec in zip(made, run["recs"], strict=True):
        assert rollout.tokens.tolist() == rec["prompt_token_ids"] + rec["token_ids"]
        assert rollout.logprobs is not None
        assert rollout.ranks is not None
        assert rollout.logprobs.to_list() == rec["logprobs"]
        assert rollout.ranks.to_list() == rec["ranks"]
        assert (rollout.logprob_kind, rollout.head_kind) == (kind, kind)
        assert (rollout.ending, rollout.ending_reason) == ("terminated", "stop_token")
        assert (last_span(rollout).engine_finish, last_span(rollout).cached_tokens) == (
            "stop",
            rec["num_cached_tokens"],
        )
    assert to_table(made).num_rows == 2


def test_heads_of_a_recorded_run_are_its_likeliest_tokens_without_padding_and_without_the_drawn_one_forced_in() -> None:
    outputs, asked, run = recorded("vllm_proc_fp32")
    made = vllm.rollouts(outputs, asked, configuration=PROCESSED)
    for rollout, rec in zip(made, run["recs"], strict=True):
        wanted = [
            sorted(((t, lp) for t, lp, rank in listed if lp > -math.inf and rank <= 5), key=lambda pair: -pair[1])
            for listed in rec["topk"]
        ]
        assert head(rollout) == wanted
    assert min(map(len, head(made[0]))) == 1  # a support of one token pads the other four places


def test_the_raw_number_is_refused_as_a_denominator_and_the_processed_one_is_taken() -> None:
    outputs, asked, _ = recorded("vllm_raw_fp32")
    made = vllm.rollouts(outputs, asked, configuration=RAW)[0]
    assert made.samplers is not None
    everything = Transform(temperature=True, filters=True, penalties=True)
    refused = usable_as_behavior(made.logprob_kind, made.samplers[0], everything)
    assert not refused.usable
    assert "top_p" in refused.reason
    outputs, asked, _ = recorded("vllm_proc_fp32")
    made = vllm.rollouts(outputs, asked, configuration=PROCESSED)[0]
    assert usable_as_behavior(made.logprob_kind, made.samplers[0], everything).usable  # type: ignore[index]


# which token a number belongs to


@pytest.mark.parametrize("listed", [dicts, flat])
def test_the_drawn_token_is_looked_up_by_its_id_wherever_it_stands(listed: Any) -> None:
    positions = [[(31, -0.25, 1), (77, -1.90, 2)], [(9, -0.30, 1), (11, -1.60, 2)]]
    rollout = one(output([1], completion([77, 7], logprobs=listed(positions))))
    assert rollout.logprobs is not None
    assert rollout.ranks is not None
    assert rollout.logprobs.to_list() == [-1.90, None]
    assert rollout.ranks.to_list() == [2, None]
    assert flags(rollout) == [("sampled_id_missing", "logprobs", 1)]


def test_ranks_that_the_engine_did_not_say_stay_unknown() -> None:
    rollout = one(output([1], completion([7], logprobs=dicts([[(7, -0.5, None)]]))), params(logprobs=0))
    assert rollout.ranks is None
    assert rollout.heads is None


def test_both_shapes_of_log_probs_give_one_record() -> None:
    listed = [[(7, -0.5, 1), (7, -0.5, 1), (9, -1.5, 2)], [(8, -2.0, 3), (5, -0.3, 1), (6, -1.9, 2)]]
    by_dict = one(output([1], completion([7, 8], logprobs=dicts(POSITIONS))))
    by_flat = one(output([1], completion([7, 8], logprobs=flat(listed))))
    assert head(by_dict) == head(by_flat) == [[(7, -0.5), (9, -1.5)], [(5, -0.3), (6, -1.9)]]
    assert by_dict.logprobs is not None
    assert by_flat.logprobs is not None
    assert by_dict.logprobs.to_list() == by_flat.logprobs.to_list() == [-0.5, -2.0]


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        ([(7, -0.5, 2), (9, -0.2, 1)], [(9, -0.2), (7, -0.5)]),
        ([(7, -3.0, 5), (9, -0.2, 1)], [(9, -0.2)]),
    ],
)
def test_where_nobody_says_how_many_were_asked_for_the_rank_tells_whether_the_drawn_one_was_forced_in(
    listed: list[tuple[int, float, int]], wanted: list[tuple[int, float]]
) -> None:
    (made,) = vllm.rollouts(output([1], completion([7], logprobs=dicts([listed]))), None, configuration=RAW)
    assert head(made) == [wanted]
    assert (made.samplers, made.logprob_kind) == (None, "raw")


def test_the_drawn_token_listed_twice_counts_once() -> None:
    listed = flat([[(41, -2.3, 2), (12, -0.2, 1), (41, -2.3, 2), (90, -4.0, 3)]])
    rollout = one(output([1], completion([41], logprobs=listed)), params(logprobs=3))
    assert head(rollout) == [[(12, -0.2), (41, -2.3), (90, -4.0)]]
    mass = sum(math.exp(logprob) for _, logprob in head(rollout)[0])
    assert mass == pytest.approx(0.93731, rel=1e-4)
    assert rollout.flags is None


def test_of_one_id_with_two_log_probs_the_first_is_kept_and_flagged() -> None:
    listed = flat([[(7, -0.5, 1), (7, -0.5, 1), (8, -1.0, 2)], [(5, -1.0, 1), (5, -1.1, 1)]])
    rollout = one(output([1], completion([7, 5], logprobs=listed)), params(logprobs=2))
    assert head(rollout) == [[(7, -0.5), (8, -1.0)], [(5, -1.0)]]
    assert flags(rollout) == [("head_conflict", "head_tokens", 2)]


def test_padding_of_processed_heads_is_dropped_and_minus_infinity_of_raw_ones_kept() -> None:
    listed = [[(7, 0.0, 1), (3, -math.inf, 2), (1, -math.inf, 3)]]
    asked = params(logprobs=3)
    assert head(one(output([1], completion([7], logprobs=dicts(listed))), asked)) == [[(7, 0.0)]]
    kept = head(one(output([1], completion([7], logprobs=dicts(listed))), asked, configuration=RAW))
    assert kept == [[(7, 0.0), (3, -math.inf), (1, -math.inf)]]


def test_stand_ins_for_minus_infinity_are_kept_as_they_came_and_flagged_when_stored() -> None:
    listed = [[(4, -0.2, 1), (5, -math.inf, 2), (6, -9999.0, 3), (7, -3.4028235e38, 4)]]
    (rollout,) = vllm.rollouts(
        output([1], completion([4], logprobs=dicts(listed))), params(logprobs=4), configuration=RAW
    )
    row = to_table([rollout]).to_pylist()[0]
    assert row["head_tokens"] == [4, 6, 5, 7] or row["head_tokens"] == [4, 6, 7, 5]
    assert sorted(row["head_logprobs"])[:3] == [-math.inf, np.float32(-3.4028235e38), -9999.0]
    assert {(f["kind"], f["column"]) for f in row["flags"]} == {("floored_logprob", "head_logprobs")}


def test_a_nan_becomes_unknown_and_flagged_and_the_others_stay() -> None:
    listed = [[(4, -0.1, 1)], [(5, math.nan, 1)], [(6, -0.7, 1)]]
    (rollout,) = vllm.rollouts(
        output([1], completion([4, 5, 6], logprobs=dicts(listed))), params(logprobs=1), configuration=RAW
    )
    row = to_table([rollout]).to_pylist()[0]
    assert row["logprobs"] == [pytest.approx(-0.1), None, pytest.approx(-0.7)]
    assert {(f["kind"], f["index"]) for f in row["flags"]} == {("nan_head", 1), ("nan_logprob", 1)}


def test_ids_of_the_users_choice_are_no_head() -> None:
    asked = params(logprobs=None, logprob_token_ids=[11, 12])
    listed = dicts([[(7, -0.5, 1), (11, -6.0, 1), (12, -9.0, 2)]])
    rollout = one(output([1], completion([7], logprobs=listed)), asked)
    assert rollout.heads is None
    assert rollout.logprobs is not None
    assert rollout.logprobs.to_list() == [-0.5]


@pytest.mark.parametrize(("tokens", "entries"), [(3, 4), (4, 3)])
def test_log_probs_that_are_not_one_a_token_are_refused_with_both_lengths(tokens: int, entries: int) -> None:
    listed = dicts([[(11 + n, -0.1, 1)] for n in range(entries)])
    drawn = completion([11 + n for n in range(tokens)], logprobs=listed)
    with pytest.raises(ValueError, match=f"wanted {tokens} entries, one for each drawn token, got {entries}"):
        one(output([1], drawn))


# which distribution it is of


@pytest.mark.parametrize("mode", [None, "processed_logits", "raw_logits"])
def test_a_mode_that_does_not_say_log_probs_gives_no_kind_to_trust(mode: str | None) -> None:
    configuration = vllm.Configuration(logprobs_mode=mode)
    rollout = one(output([1], completion([7, 8], logprobs=dicts(POSITIONS))), configuration=configuration)
    if mode is None:
        assert (rollout.logprob_kind, rollout.head_kind) == ("unknown", "unknown")
    else:  # logits are no log-probs
        assert (rollout.logprobs, rollout.heads, rollout.logprob_kind) == (None, None, None)


def test_a_greedy_pick_has_a_log_softmax_without_temperature_and_is_no_denominator() -> None:
    rollout = one(output([1], completion([7, 8], logprobs=dicts(POSITIONS))), params(temperature=0.0, logprobs=2))
    assert rollout.logprob_kind == "raw"
    assert rollout.samplers is not None
    verdict = usable_as_behavior(rollout.logprob_kind, rollout.samplers[0], Transform(temperature=True))
    assert verdict == (False, "temperature 0 draws from no distribution")
    shaped = params(temperature=0.0, logprobs=2, presence_penalty=0.5)
    assert one(output([1], completion([7, 8], logprobs=dicts(POSITIONS))), shaped).logprob_kind == "unknown"


def test_with_logits_processors_of_the_users_own_a_processed_number_is_of_an_unknown_distribution() -> None:
    loaded = vllm.configuration(engine(logits_processors=["mine.Noise"]))
    made = one(output([1], completion([7, 8], logprobs=dicts(POSITIONS))), configuration=loaded)
    assert made.logprob_kind == "unknown"
    raw = vllm.configuration(engine("raw_logprobs", logits_processors=["mine.Noise"]))
    assert one(output([1], completion([7, 8], logprobs=dicts(POSITIONS))), configuration=raw).logprob_kind == "raw"


def test_what_the_caller_knows_of_the_distribution_wins() -> None:
    made = one(
        output([1], completion([7, 8], logprobs=dicts(POSITIONS))),
        configuration=vllm.Configuration(),
        fields={"logprob_kind": "behavior", "policy": "mine"},
    )
    assert (made.logprob_kind, made.policy) == ("behavior", "mine")


def test_the_configuration_brings_engine_dtypes_and_sizes() -> None:
    made = one(output([1], completion([7])))
    assert made.engine is not None
    assert made.engine.numerics is not None
    assert (made.engine.name, made.engine.numerics.weights, made.engine.numerics.kv) == ("vllm", "float32", "float32")
    assert (made.vocab_size, made.tokenizer_size, made.policy) == (49152, 49152, "smol")


def test_an_engine_without_a_configuration_is_refused() -> None:
    with pytest.raises(TypeError, match="wanted an engine with a vllm_config"):
        vllm.configuration(SimpleNamespace())


# the sampler


def test_what_was_asked_for_is_written_out() -> None:
    asked = params(
        temperature=0.7, top_p=0.9, top_k=-1, max_tokens=5, seed=2**64 - 1, logit_bias={3: -1.5}, bad_words=["no"],
        stop=["."], stop_token_ids=[2], extra_args={"key": 1}, ignore_eos=True,
    )  # fmt: skip
    made = vllm.sampler(asked)
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.max_tokens) == (0.7, 0.9, 0, 0.0, 5)
    assert (made.seed, made.stop, made.stop_token_ids, made.bad_words) == (2**64 - 1, (".",), (2,), ("no",))
    assert made.logit_bias is not None
    assert (made.logit_bias[0].token, made.logit_bias[0].bias) == (3, -1.5)
    assert made.extra == {"ignore_eos": "true"}
    assert made.grammar == '{"extra_args":{"key":1}}'
    assert made.chain == ("temperature", "min_p", "top_k", "top_p")


def test_whatever_else_takes_tokens_away_stands_as_a_grammar_and_keeps_the_number_from_being_a_denominator() -> None:
    limited = vllm.sampler(params(allowed_token_ids=[4, 5]))
    assert limited.grammar == '{"allowed_token_ids":[4,5]}'
    verdict = usable_as_behavior("behavior", limited, Transform())
    assert not verdict.usable
    assert "grammar" in verdict.reason
    structured = SimpleNamespace(json={"type": "object"}, regex=None, choice=None, grammar=None)
    assert vllm.sampler(params(structured_outputs=structured)).grammar == '{"json":{"type":"object"}}'


@pytest.mark.parametrize(
    ("setting", "value"), [("extra_args", {"key": 1}), ("thinking_token_budget", 0), ("watermarking", True)]
)
def test_a_setting_that_bears_on_the_draw_keeps_raw_from_being_a_denominator(setting: str, value: Any) -> None:
    verdict = usable_as_behavior("raw", vllm.sampler(params(temperature=1.0, **{setting: value})), Transform())
    assert not verdict.usable
    assert "grammar" in verdict.reason
    keyed = vllm.sampler(params(temperature=1.0, extra_args={"replay_key": 3}))
    assert (keyed.grammar, keyed.extra) == (None, {"extra_args": '{"replay_key":3}'})


@pytest.mark.parametrize("indices", [[0, 0], [-1, 0], [0, 2], [None, 0], [0, 1, 2]])
def test_completions_whose_indices_cannot_be_are_refused(indices: list[Any]) -> None:
    said = output([1], *(completion([7], index=index) for index in indices))
    with pytest.raises(ValueError, match=r"index: wanted another one from 0 to 1 of each completion, got \["):
        vllm.rollouts(said, params(n=2, seed=5), configuration=PROCESSED)
    delta = params(n=2, output_kind=SimpleNamespace(name="DELTA"))
    if len(set(indices)) == len(indices) and None not in indices:  # parts of one completion may come one by one
        with pytest.raises(ValueError, match="index: wanted another one"):
            vllm.stream_rollouts([said], delta, configuration=PROCESSED)


def test_a_seed_outside_64_bits_is_kept_as_text() -> None:
    made = vllm.sampler(params(seed=-5))
    assert made.seed is None
    assert made.extra == {"seed": "-5"}


def test_each_of_n_samples_has_the_next_seed_and_they_are_one_group() -> None:
    drawn = [completion([7 + n], index=n, finish_reason="length") for n in range(3)]
    made = vllm.rollouts(output([1], *drawn), params(n=3, seed=10, max_tokens=1), configuration=PROCESSED)
    assert [rollout.samplers[0].seed for rollout in made] == [10, 11, 12]  # type: ignore[index]
    assert [rollout.sample_index for rollout in made] == [0, 1, 2]
    assert {rollout.group_size for rollout in made} == {3}
    assert len({rollout.group_id for rollout in made}) == 1
    assert len({rollout.rollout_id for rollout in made}) == 3


def test_params_are_one_for_all_or_one_for_each() -> None:
    outputs = [output([1], completion([7])), output([1], completion([8]))]
    made = vllm.rollouts(outputs, [params(temperature=0.5), params(temperature=0.6)], configuration=PROCESSED)
    assert [rollout.samplers[0].temperature for rollout in made] == [0.5, 0.6]  # type: ignore[index]
    with pytest.raises(ValueError, match="wanted one for all or 2, one for each output, got 1"):
        vllm.rollouts(outputs, [params()], configuration=PROCESSED)


def test_columns_of_the_callers_can_depend_on_the_output() -> None:
    def fields(out: Any, drawn: Any) -> dict[str, Any]:
        return {"rollout_id": f"r{out.request_id}-{drawn.index}", "prompt_id": "p"}

    assert one(output([1], completion([7])), fields=fields).rollout_id == "r0-0"


# how it ended


@pytest.mark.parametrize(
    ("finish", "stop", "asked", "length", "wanted"),
    [
        ("stop", None, 16, 100, ("terminated", "stop_token")),
        ("stop", 2, 16, 100, ("terminated", "stop_token")),
        ("stop", "\n\n", 16, 100, ("terminated", "stop_string")),
        ("length", None, 2, 100, ("truncated", "max_tokens")),
        ("length", None, 16, 5, ("truncated", "context_limit")),
        ("length", None, None, 5, ("truncated", "context_limit")),
        ("length", None, 16, 100, ("truncated", "unknown")),
        ("abort", None, 16, 100, ("aborted", "engine_abort")),
        ("error", None, 16, 100, ("aborted", "engine_abort")),
        ("repetition", None, 16, 100, ("truncated", "repetition")),
        (None, None, 16, 100, ("unknown", "unknown")),
    ],
)
def test_the_ending_says_what_the_engine_said_and_lengths_tell_its_two_limits_apart(
    finish: str | None, stop: Any, asked: int | None, length: int, wanted: tuple[str, str]
) -> None:
    configuration = vllm.configuration(engine(max_model_len=length))
    drawn = completion([7, 8], finish_reason=finish, stop_reason=stop)
    made = one(output([1, 2, 3], drawn), params(max_tokens=asked), configuration=configuration)
    assert (made.ending, made.ending_reason) == wanted
    assert last_span(made).engine_finish == finish


def test_a_stop_string_cuts_the_text_and_no_token() -> None:
    drawn = completion(
        [7, 8, 9], text="seven", stop_reason=" eight", logprobs=dicts([[(n, -0.1, 1)] for n in (7, 8, 9)])
    )
    made = one(output([1], drawn), params(logprobs=1, stop=[" eight"]))
    assert made.tokens.tolist() == [1, 7, 8, 9]
    assert made.logprobs is not None
    assert made.logprobs.to_list() == [-0.1, -0.1, -0.1]


@pytest.mark.parametrize("logprobs", [None, []])
def test_an_abort_before_the_first_token_is_a_row_without_actions(logprobs: Any) -> None:
    made = one(output([1, 2], completion([], finish_reason="abort", logprobs=logprobs, weight_versions=[])))
    assert made.tokens.tolist() == [1, 2]
    assert not made.action_mask.any()
    row = to_table([made]).to_pylist()[0]
    assert row["logprobs"] == []
    assert (row["ending"], row["bootstrap"]) == ("aborted", None)
    assert (last_span(made).length, last_span(made).engine_finish) == (0, "abort")


def test_an_abort_keeps_the_tokens_so_far_with_their_weights() -> None:
    drawn = completion([7], finish_reason="abort", weight_versions=spans(("3", 0, 1)), logprobs=dicts([[(7, -0.1, 1)]]))
    made = one(output([1], drawn), params(logprobs=1))
    assert made.weight_versions is not None
    assert (made.ending, made.weight_versions.to_list()) == ("aborted", [3])


def test_a_prompt_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids: wanted token ids, got none"):
        one(output(None, completion([7])))


def test_tokens_that_were_put_in_are_not_taken_for_drawn_ones() -> None:
    with pytest.raises(ValueError, match="which were put in"):
        one(output([1], completion([7])), params(trace_decode_token_ids=[7]))


# weights, cache, routing


def test_spans_of_versions_become_versions_of_tokens() -> None:
    drawn = completion([3, 4, 5, 6, 7], weight_versions=spans(("7", 0, 3), ("step-8", 3, 5)))
    made = one(output([1], drawn), cache_state="recomputed")
    row = to_table([made]).to_pylist()[0]
    assert row["weight_versions"] == [7, 7, 7, 8, 8]
    assert (row["weight_version_min"], row["weight_version_max"], row["weight_version_source"]) == (7, 8, "per_span")
    assert [(s.start, s.length, s.weight_label, s.cache_state) for s in made.spans or ()] == [
        (0, 1, None, None),
        (1, 3, "7", "fresh"),
        (4, 2, "step-8", "recomputed"),
    ]


def test_a_label_without_a_number_stays_a_label() -> None:
    made = one(output([1], completion([3], weight_versions=spans(("default", 0, 1)))))
    assert (made.weight_versions, made.weight_version_source) == (None, "per_span")
    assert last_span(made).weight_label == "default"


def test_the_rule_for_labels_can_be_replaced() -> None:
    made = one(
        output([1], completion([3], weight_versions=spans(("v0x1f", 0, 1)))), number=lambda label: int(label[3:], 16)
    )
    assert made.weight_versions is not None
    assert made.weight_versions.to_list() == [31]


def test_the_state_of_a_cache_that_was_hit_or_kept_without_a_word_is_unknown() -> None:
    drawn = completion([3, 4], weight_versions=spans(("7", 0, 1), ("8", 1, 2)))
    made = one(output([1], drawn, num_cached_tokens=16))
    assert [s.cache_state for s in made.spans or ()] == [None, "unknown", "unknown"]
    assert [s.cached_tokens for s in made.spans or ()] == [None, 16, 16]


def test_weights_of_unknown_tokens_stay_unknown() -> None:
    made = one(output([1], completion([3, 4], weight_versions=None)))
    assert (made.weight_versions, made.weight_version_source) == (None, None)
    made = one(output([1], completion([3, 4], weight_versions=spans(("7", 0, 1)))))
    assert made.weight_versions is not None
    assert made.weight_versions.to_list() == [7, None]
    assert to_table([made]).to_pylist()[0]["weight_version_min"] is None


def test_spans_of_versions_that_leave_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted spans in order within 1 tokens, got '7' at 0:2"):
        one(output([1], completion([3], weight_versions=spans(("7", 0, 2)))))


def test_routing_stops_before_the_last_token_and_may_begin_behind_the_prompt() -> None:
    experts = np.arange(2 * 3 * 2, dtype=np.uint8).reshape(2, 3, 2)
    made = one(output([1, 2], completion([7, 8], routed_experts=experts)))
    assert made.routed_experts is not None
    assert made.routed_experts.dtype == np.uint16
    assert made.routed_experts.tolist() == list(range(12))
    assert (made.routed_start, made.routed_count, made.routed_layers, made.routed_k) == (1, 2, 3, 2)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((4, 1, 1), np.int32), "wanted at most 3 rows for 4 tokens, got 4"),
        (np.zeros((3, 2), np.int32), "shape"),
        (np.full((1, 1, 1), 70000), "wanted ids from 0 to 65535"),
    ],
)
def test_routing_that_cannot_be_placed_is_refused(experts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one(output([1, 2], completion([7, 8], routed_experts=experts)))


def test_the_kept_support_and_the_metrics_are_recorded() -> None:
    metrics = SimpleNamespace(num_preemptions=2, arrival_time=1_800_000_000.0, queued_ts=5.0, scheduled_ts=5.25)
    mask = SimpleNamespace(token_ids=[[7, 9], [8]])
    made = one(output([1], completion([7, 8], sampling_mask=mask), metrics=metrics))
    assert made.support_counts is not None
    assert made.support_tokens is not None
    assert (made.support_counts.tolist(), made.support_tokens.tolist()) == ([2, 1], [7, 9, 8])
    assert (last_span(made).preemptions, made.queue_seconds) == (2, 0.25)
    assert made.requested_at is not None
    assert made.requested_at.timestamp() == 1_800_000_000.0


def test_rows_of_the_forward_passes_are_null_unless_they_were_seen() -> None:
    assert one(output([1], completion([7, 8]))).batch_rows is None
    made = one(output([1], completion([7, 8])), batch_rows={("0", 0): [37, 4, 4]})
    assert made.batch_rows is not None
    assert made.batch_rows.to_list() == [37, 4]
    assert one(output([1], completion([7, 8])), batch_rows={("0", 0): [37]}).batch_rows is None


# streams


def chunks() -> list[SimpleNamespace]:
    return [
        output([1], completion([7], logprobs=dicts(POSITIONS[:1]), finish_reason=None)),
        output([1], completion([], logprobs=[], finish_reason=None)),
        output([1], completion([8], logprobs=flat(POSITIONS[1:]), weight_versions=spans(("4", 0, 2)))),
    ]


DELTA = params(logprobs=2, output_kind=SimpleNamespace(name="DELTA"))


def test_the_parts_of_a_stream_are_the_whole() -> None:
    (made,) = vllm.stream_rollouts(chunks(), DELTA, configuration=PROCESSED)
    whole = one(output([1], completion([7, 8], logprobs=dicts(POSITIONS), weight_versions=spans(("4", 0, 2)))))
    assert made.tokens.tolist() == whole.tokens.tolist()
    assert head(made) == head(whole)
    assert made.logprobs is not None
    assert made.weight_versions is not None
    assert (made.logprobs.to_list(), made.weight_versions.to_list()) == ([-0.5, -2.0], [4, 4])
    assert made.ending == "terminated"


def test_of_ever_longer_wholes_the_last_counts() -> None:
    asked = params(logprobs=2, output_kind=SimpleNamespace(name="CUMULATIVE"))
    stream = [
        output([1], completion([7], logprobs=dicts(POSITIONS[:1]), finish_reason=None)),
        output([1], completion([7, 8], logprobs=dicts(POSITIONS))),
    ]
    (made,) = vllm.stream_rollouts(stream, asked, configuration=PROCESSED)
    assert made.tokens.tolist() == [1, 7, 8]


def test_a_stream_that_was_cut_gives_what_came_and_no_finish() -> None:
    (made,) = vllm.stream_rollouts(chunks()[:1], DELTA, configuration=PROCESSED)
    assert (made.tokens.tolist(), made.ending, made.weight_versions) == ([1, 7], "unknown", None)
    assert vllm.stream_rollouts([], DELTA, configuration=PROCESSED) == []


def test_the_samples_of_one_stream_are_kept_apart() -> None:
    asked = params(n=2, logprobs=1, output_kind=SimpleNamespace(name="DELTA"))
    stream = [
        output([1], completion([7], index=1, logprobs=dicts([[(7, -0.1, 1)]]), finish_reason=None)),
        output([1], completion([5], index=0, logprobs=dicts([[(5, -0.2, 1)]]))),
        output([1], completion([8], index=1, logprobs=dicts([[(8, -0.3, 1)]]))),
    ]
    made = vllm.stream_rollouts(stream, asked, configuration=PROCESSED)
    assert [rollout.tokens.tolist() for rollout in made] == [[1, 5], [1, 7, 8]]
    assert len({rollout.group_id for rollout in made}) == 1
