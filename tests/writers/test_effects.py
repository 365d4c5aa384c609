"""Settings without a column: what may bear on the draw keeps log-probs from being a denominator, the rest is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstore import Rollout, Sampler, UnsupportedRecordError
from rollstore.batch import collate
from rollstore.batch.denominator import refuse_unusable
from rollstore.batch.token_batch import PENALTY_BITS
from rollstore.schema import to_table
from rollstore.usable import Transform, usable_as_behavior
from rollstore.writers import openai, sglang
from rollstore.writers.openai.choices import CONSTRAINTS
from tests.writers.upstream import chat

PLAIN = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


def by_openai(more: dict[str, Any], kind: str) -> Rollout:
    request = {"messages": [], "logprobs": True, **PLAIN, **more}
    return openai.rollouts(json.dumps(chat([1, 2], [3, 4])), request, server=openai.Server(logprob_kind=kind))[0]


def by_sglang(more: dict[str, Any], kind: str, **beside: Any) -> Rollout:
    said = {"output_token_logprobs": [[-0.5, 3, None], [-0.25, 2, None]], "finish_reason": {"type": "stop"}}
    if kind == "behavior":
        said["output_token_sampling_logprobs"] = [-0.5, -0.25]
    request = {"input_ids": [1], "sampling_params": {**PLAIN, **more}, "return_logprob": True, "rid": "a", **beside}
    server = sglang.Server(original_logprobs=kind == "raw")
    return sglang.rollouts({"output_ids": [3, 2], "meta_info": said}, request, server=server)[0]


ENGINES = [by_openai, by_sglang]


def usable(row: Rollout, **done: bool) -> bool:
    to_table([row])
    return usable_as_behavior(row.logprob_kind, (row.samplers or (None,))[0], Transform(**done)).usable


HARMLESS = [
    ("ignore_eos", True, "true"), ("include_stop_str_in_output", True, "true"), ("truncate_prompt_tokens", 5, "5"),
    ("repetition_detection", {"min_count": 3}, '{"min_count":3}'), ("stop_regex", "a+", "a+"),
    ("no_stop_trim", True, "true"), ("lora_path", "adapter-3", "adapter-3"),
    ("vllm_xargs", {"replay_key": 7}, '{"replay_key":7}'),
]  # fmt: skip


@pytest.mark.parametrize("of", ENGINES)
@pytest.mark.parametrize(("name", "value", "kept"), HARMLESS)
def test_a_setting_that_leaves_the_distribution_is_kept_and_costs_no_log_prob(
    of: Any, name: str, value: Any, kept: str
) -> None:
    row = of({name: value}, "raw")
    assert (row.samplers[0].extra, row.samplers[0].grammar) == ({name: kept}, None)
    assert usable(row)


BEARING = [
    ("typical_p", 0.5), ("xtc_probability", 0.5), ("vllm_xargs", {"a": 1}), ("repeat_penalty", 1.1), ("top_a", 0.2),
    ("use_beam_search", True), ("a_setting_of_a_later_release", 0.5), ("min_p", 2), ("logit_bias", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["raw", "tempered", "behavior"])
@pytest.mark.parametrize("of", ENGINES)
@pytest.mark.parametrize(("name", "value"), BEARING)
def test_a_setting_that_may_bear_on_the_draw_is_named_and_no_log_prob_is_taken_for_one_without_it(
    of: Any, kind: str, name: str, value: Any
) -> None:
    assert usable(of({}, kind))
    row = of({name: value}, kind)
    assert list(json.loads(row.samplers[0].grammar)) == [name]
    assert not usable(row, filters=True, temperature=True)


OFF = [
    ("typical_p", 1.0), ("typical_p", "1.0"), ("xtc_probability", 0), ("repeat_penalty", 1), ("use_beam_search", False),
    ("vllm_xargs", {}), ("custom_logit_processor", None), ("best_of", 1), ("a_setting_of_a_later_release", None),
]  # fmt: skip


@pytest.mark.parametrize("of", ENGINES)
@pytest.mark.parametrize(("name", "value"), OFF)
def test_a_setting_at_the_value_at_which_it_does_nothing_is_none(of: Any, name: str, value: Any) -> None:
    row = of({name: value}, "raw")
    assert (row.samplers[0].extra, row.samplers[0].grammar) == (None, None)
    assert usable(row)


@pytest.mark.parametrize("of", ENGINES)
@pytest.mark.parametrize("kind", ["tempered", "behavior"])
def test_after_code_of_the_users_own_a_number_is_of_no_known_distribution(of: Any, kind: str) -> None:
    row = of({"custom_logit_processor": "{}"}, kind)
    assert row.logprob_kind == "unknown"
    assert json.loads(row.samplers[0].grammar) == {"custom_logit_processor": "{}"}


@pytest.mark.parametrize("kind", ["raw", "tempered", "behavior"])
@pytest.mark.parametrize("given", ["{}", ["{}"]])
def test_a_processor_beside_the_sampling_params_counts_too(kind: str, given: Any) -> None:
    row = by_sglang({}, kind, custom_logit_processor=given, lora_path=["adapter-3"])
    assert row.logprob_kind == "unknown"
    (how,) = row.samplers or ()
    assert (json.loads(how.grammar or ""), how.extra) == (
        {"custom_logit_processor": "{}"}, {"lora_path": "adapter-3"}
    )  # fmt: skip


def test_each_prompt_has_its_own_processor_and_adapter() -> None:
    said = [{"output_ids": [3], "meta_info": {"output_token_logprobs": [[-0.5, 3, None]]}} for _ in range(2)]
    request = {
        "input_ids": [[1], [2]], "sampling_params": PLAIN, "custom_logit_processor": [None, "{}"],
        "lora_path": ["a", "b"],
    }  # fmt: skip
    rows = sglang.rollouts(said, request)
    assert [row.logprob_kind for row in rows] == ["tempered", "unknown"]
    assert [(row.samplers or ())[0].extra for row in rows] == [{"lora_path": "a"}, {"lora_path": "b"}]


def test_what_was_asked_and_how_a_reply_is_sent_are_no_settings() -> None:
    beside = {
        "stream": True, "stream_options": {"include_usage": True}, "tools": [{}], "user": "a", "metadata": {"a": "b"},
        "return_token_ids": True, "chat_template_kwargs": {"a": 1}, "priority": 3, "n": 1, "logprob_start_len": 0,
    }  # fmt: skip
    for row in (by_openai(beside, "raw"), by_sglang({}, "raw", **beside)):
        (how,) = row.samplers or ()
        assert (how.extra, how.grammar) == (None, None)


ONLY_TAKES_AWAY = [
    "root ::= yes | no", "json", '["yes", "no"]', "{not json", '{"type": "object", "properties": {"a": {}}}',
    '{"$ref": "#/a", "$defs": {}}', '{"json": {"type": "object"}}', '{"typical_p": 0.5, "allowed_token_ids": [1]}',
]  # fmt: skip
MAY_RESHAPE = [
    '{"dry_multiplier": 0.8}', '{"json": {"type": "object"}, "dry_multiplier": 0.8}', '{"xtc_probability": 0.5}',
    '{"custom_logit_processor": "{}"}', '{"a_setting_of_a_later_release": 1}', '{"temperature": "hot"}',
    '{"extra_args": {"typical_p": 1}}', '{"type": "chat", "dry_multiplier": 0.8}',
]  # fmt: skip


def recorded(grammar: str | None, *, rollout_id: str = "a") -> Rollout:
    how = Sampler(temperature=1.0, grammar=grammar)
    own = {"logprobs": [-0.5], "logprob_kind": "behavior", "samplers": [how]}
    return Rollout(rollout_id=rollout_id, tokens=[1, 2], action_mask=[False, True], **own)


def passes(row: Rollout, **done: bool) -> bool:
    """Whether the sampler itself and the batch made of it, which must agree, are taken for a denominator."""
    (how,) = row.samplers or ()
    single = usable_as_behavior(row.logprob_kind, how, Transform(**done)).usable
    batch = collate(to_table([row]), trainer_transform=Transform(**done))
    try:
        refuse_unusable(batch)
    except UnsupportedRecordError:
        assert not single
        return False
    assert single
    return True


@pytest.mark.parametrize("grammar", ONLY_TAKES_AWAY)
def test_a_trainer_over_the_recorded_support_has_done_what_only_takes_tokens_away(grammar: str) -> None:
    row = recorded(grammar)
    assert collate(to_table([row])).penalties.tolist() == [PENALTY_BITS["grammar"]]
    assert passes(row, support=True)
    assert passes(row, penalties=True)
    assert not passes(row, filters=True)


@pytest.mark.parametrize("grammar", MAY_RESHAPE)
def test_a_trainer_over_the_recorded_support_has_not_done_what_may_move_logits(grammar: str) -> None:
    row = recorded(grammar)
    assert collate(to_table([row])).penalties.tolist() == [PENALTY_BITS["grammar"] | PENALTY_BITS["other_settings"]]
    assert not passes(row, support=True, filters=True, temperature=True)
    assert passes(row, penalties=True)
    (how,) = row.samplers or ()
    for done, missing in ((Transform(), "grammar"), (Transform(support=True), "other_settings")):
        verdict = usable_as_behavior("behavior", how, done)
        assert verdict.reason == f"the trainer did not declare that it applied {missing}"


@pytest.mark.parametrize("kind", ["raw", "tempered"])
def test_a_number_before_the_filters_is_no_denominator_beside_what_may_move_logits(kind: str) -> None:
    how = Sampler(temperature=1.0, grammar='{"dry_multiplier": 0.8}')
    everything = Transform(temperature=True, filters=True, support=True, penalties=True)
    assert not usable_as_behavior(kind, how, everything).usable


def test_samplers_of_one_table_are_each_judged_by_their_own_settings() -> None:
    hows = [None, '{"dry_multiplier": 0.8}', "", "root ::= a", '{"dry_multiplier": 0.8}']
    table = to_table([recorded(text, rollout_id=str(n)) for n, text in enumerate(hows)])
    both = PENALTY_BITS["grammar"] | PENALTY_BITS["other_settings"]
    assert collate(table).penalties.tolist() == [0, both, 0, PENALTY_BITS["grammar"], both]


def test_what_a_writer_asks_for_as_a_constraint_is_known_to_take_tokens_away() -> None:
    for name in CONSTRAINTS:
        assert passes(recorded(json.dumps({name: 1})), support=True), name


def test_the_bits_that_batches_have_always_had_keep_their_numbers() -> None:
    names = [
        "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens",
        "grammar", "not_honoured", "unrecorded", "other_settings",
        "filters_before_temperature",
    ]  # fmt: skip
    assert {name: 1 << bit for bit, name in enumerate(names)} == PENALTY_BITS
