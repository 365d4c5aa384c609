"""llama.cpp's server replies, and draws of one's own sampler, become records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rollstore import Rollout, Sampler
from rollstore.schema import to_table
from rollstore.usable import Transform, Verdict, usable_as_behavior
from rollstore.writers import llamacpp
from rollstore.writers.conversation import rollout

DATA = Path(__file__).parent.parent / "data" / "engines"
SETTINGS = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "n_predict": 4, "seed": 7, "repeat_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "n_probs": 2, "typical_p": 1.0, "xtc_probability": 0.0,
    "top_n_sigma": -1.0, "dry_multiplier": 0.0, "mirostat": 0, "dynatemp_range": 0.0, "stop": [], "grammar": "",
    "logit_bias": [],
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
}  # fmt: skip


def body(tokens: list[int] | None, stop: str = "eos", settings: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "content": "", "tokens": tokens, "stop_type": stop, "generation_settings": {**SETTINGS, **(settings or {})},
        "tokens_evaluated": 2, "model": "smol.gguf", **fields,
    }  # fmt: skip


def one(reply: Any, **options: Any) -> Rollout:
    (made,) = llamacpp.rollouts(reply, [1, 3], **options)
    to_table([made])
    return made


def raw(token: int, logprob: float, *top: tuple[int, float]) -> dict[str, Any]:
    return {"id": token, "logprob": logprob, "top_logprobs": [{"id": t, "logprob": lp} for t, lp in top]}


def test_the_plain_log_probs_are_raw() -> None:
    made = one(
        body([7, 2], completion_probabilities=[raw(7, -0.5, (7, -0.5), (9, -1.5)), raw(2, -3.0, (5, -0.1), (6, -4.0))])
    )
    assert made.logprobs is not None
    assert (made.logprobs.to_list(), made.logprob_kind, made.head_kind) == ([-0.5, -3.0], "raw", "raw")
    assert made.heads is not None
    assert made.heads.tokens is not None
    assert (made.heads.size, made.heads.tokens.tolist()) == (2, [7, 9, 5, 6])


def test_probabilities_after_sampling_are_behavior_log_probs() -> None:
    places = [
        {"id": 7, "prob": 0.25, "top_probs": [{"id": 9, "prob": 0.75}, {"id": 7, "prob": 0.25}, {"id": 4, "prob": 0.0}]}
    ]
    made = one(body([7], completion_probabilities=places, settings={"n_probs": 3}))
    assert made.logprobs is not None
    assert (made.logprobs.to_list(), made.logprob_kind) == ([math.log(0.25)], "behavior")
    assert made.heads is not None
    assert made.heads.tokens is not None
    assert made.heads.tokens.tolist() == [9, 7]  # what could not be drawn is not in the head


def test_the_tokens_of_a_stop_word_have_no_log_probs_and_stay() -> None:
    made = one(body([7, 8, 9], "word", stopping_word="END", completion_probabilities=[raw(7, -0.5)]))
    assert made.logprobs is not None
    assert made.logprobs.to_list() == [-0.5, None, None]
    assert made.ending_reason == "stop_string"


@pytest.mark.parametrize("tokens", [[7, 8, 8, 2], [7, 8, 2, 2]])
def test_log_probs_that_cannot_be_placed_are_left_out_and_flagged(tokens: list[int]) -> None:
    made = one(body(tokens, completion_probabilities=[raw(7, -0.5), raw(8, -0.7), raw(2, -0.1)]))
    assert made.logprobs is None
    assert [flag.kind for flag in made.flags or ()] == ["unplaced_logprobs"]


@pytest.mark.parametrize("places", [[raw(9, -0.5)], [raw(7, -0.5), raw(8, -0.5)]])
def test_log_probs_of_other_tokens_are_refused(places: list[Any]) -> None:
    with pytest.raises(ValueError, match="completion_probabilities: wanted those of the 1 tokens"):
        one(body([7], completion_probabilities=places))


def test_without_ids_a_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="return_tokens"):
        one(body(None))
    with pytest.raises(ValueError, match="prompt: wanted token ids, got text"):
        llamacpp.rollouts(body([7]), "hi")
    with pytest.raises(ValueError, match="wanted the 3 tokens that were evaluated, got 2"):
        one(body([7], tokens_evaluated=3))


@pytest.mark.parametrize(
    ("stop", "count", "truncated", "wanted", "flags"),
    [
        ("eos", 2, False, ("terminated", "stop_token"), []),
        ("word", 2, False, ("terminated", "stop_string"), []),
        ("limit", 4, False, ("truncated", "max_tokens"), []),
        ("limit", 3, True, ("truncated", "context_limit"), []),
        ("limit", 4, True, ("truncated", "max_tokens"), ["context_shifted"]),
        ("none", 1, False, ("unknown", "unknown"), []),
    ],
)
def test_the_stop_type_says_how_it_ended(
    stop: str, count: int, truncated: bool, wanted: tuple[str, str], flags: list[str]
) -> None:
    made = one(body(list(range(5, 5 + count)), stop, stopping_word="x", truncated=truncated))
    assert (made.ending, made.ending_reason) == wanted
    assert (made.spans or ())[-1].engine_finish == stop
    assert [flag.kind for flag in made.flags or ()] == flags


def test_the_settings_are_recorded_with_the_order_in_which_they_were_applied() -> None:
    made = llamacpp.sampler({**SETTINGS, "logit_bias": [{"token": 3, "bias": -1.0}], "stop": ["END"]})
    assert made.chain == ("top_k", "top_p", "min_p", "temperature")
    assert (made.temperature, made.top_k, made.max_tokens, made.seed, made.stop) == (0.8, 40, 4, 7, ("END",))
    assert made.logit_bias is not None
    assert made.logit_bias[0].token == 3
    assert (made.grammar, made.applied) == (None, True)


def test_what_the_server_chose_or_did_not_limit_is_null() -> None:
    made = llamacpp.sampler({**SETTINGS, "seed": 2**32 - 1, "n_predict": -1, "temperature": -1.0})
    assert (made.seed, made.max_tokens, made.temperature) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.9),
        ("xtc_probability", 0.5),
        ("top_n_sigma", 1.0),
        ("dry_multiplier", 0.8),
        ("grammar", "root ::= [a]"),
    ],
)
def test_steps_without_a_column_stand_as_a_grammar(name: str, value: Any) -> None:
    made = llamacpp.sampler({**SETTINGS, name: value})
    assert made.grammar is not None
    assert json.loads(made.grammar) == {name: value}


PLAIN = {
    **SETTINGS, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": False, "min_keep": 0,
    "adaptive_target": -1.0, "lora": [],
}  # fmt: skip
"""Settings under which the raw distribution is the one that draws."""


def verdict_of(settings: Any, kind: str = "raw", **done: bool) -> Verdict:
    return usable_as_behavior(kind, llamacpp.sampler({**PLAIN, **settings}), Transform(**done))


@pytest.mark.parametrize(
    ("steps", "filters"),
    [(SETTINGS["samplers"], False), (["temperature", "top_k", "top_p", "min_p"], True)],
)
def test_filters_of_the_servers_own_order_are_covered_by_the_support_alone(steps: Any, filters: bool) -> None:
    asked = {"temperature": 0.8, "top_p": 0.9, "samplers": steps}
    assert verdict_of(asked, "behavior", temperature=True, filters=True).usable is filters
    assert verdict_of(asked, "behavior", temperature=True, support=True).usable


def test_a_ban_which_the_server_writes_as_null_is_a_bias_and_hides_no_other() -> None:
    assert verdict_of({}).usable
    listed = [{"bias": None, "token": 2}, [4, False], {"token": 5, "bias": 3.0}]
    (made,) = one(body([7], settings={**PLAIN, "logit_bias": listed})).samplers or ()
    assert made.extra is None
    assert [(each.token, each.bias) for each in made.logit_bias or ()] == [(2, -math.inf), (4, -math.inf), (5, 3.0)]
    assert verdict_of({"logit_bias": listed[:1]}).reason == "a raw log-prob was recorded, which leaves out logit_bias"


@pytest.mark.parametrize("more", [{}, {"logit_bias": [{"bias": None, "token": 2}]}])
def test_an_end_token_that_is_ignored_is_one_that_could_not_be_drawn(more: Any) -> None:
    made = llamacpp.sampler({**PLAIN, "ignore_eos": True, **more})
    assert made.extra == {"ignore_eos": "true"}
    assert (made.logit_bias is None, made.grammar is None) == (not more, bool(more))
    assert not verdict_of({"ignore_eos": True, **more}).usable


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"samplers": ["adaptive_p", "temperature"]}, None),
        ({"samplers": ["adaptive_p", "temperature"], "adaptive_target": 0.4}, {"samplers": ["adaptive_p"]}),
        ({"samplers": ["infill", "temperature", "later"]}, {"samplers": ["infill", "later"]}),
        ({"lora": [{"id": 0, "scale": 0.0}]}, None),
        ({"lora": [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.5}]}, {"lora": [{"id": 1, "scale": 0.5}]}),
        ({"min_keep": 3}, {"min_keep": 3}),
        ({"logit_bias": [{"token": [1], "bias": 1.0}]}, {"logit_bias": '[{"token":[1],"bias":1.0}]'}),
        ({"n_predict": "many"}, None),
    ],
)
def test_steps_and_adapters_without_a_column_are_named_and_keep_log_probs_from_being_a_denominator(
    settings: Any, told: Any
) -> None:
    grammar = llamacpp.sampler({**PLAIN, **settings}).grammar
    assert (None if grammar is None else json.loads(grammar)) == told
    assert verdict_of(settings).usable is (told is None)
    assert verdict_of(settings, "behavior").usable is (told is None)


def test_a_setting_whose_step_did_not_run_is_recorded_as_doing_nothing_with_what_was_asked_beside() -> None:
    asked = {"temperature": 0.5, "top_k": 5, "top_p": 0.5, "repeat_penalty": 1.5, "typical_p": 0.5}
    made = llamacpp.sampler({**PLAIN, **asked, "samplers": ["top_k"]})
    assert (made.temperature, made.top_k, made.top_p, made.repetition_penalty) == (1.0, 5, 1.0, 1.0)
    assert (made.chain, made.applied, made.grammar) == (("top_k",), True, None)
    assert made.extra == {"temperature": "0.5", "top_p": "0.5", "repeat_penalty": "1.5", "typical_p": "0.5"}
    assert verdict_of({**asked, "samplers": ["top_k"]}, "behavior", filters=True).usable
    greedy = llamacpp.sampler({**PLAIN, "temperature": 0, "samplers": []})
    assert (greedy.temperature, greedy.extra) == (1.0, {"temperature": "0"})


def test_a_reply_that_says_no_steps_has_its_settings_as_they_were_asked() -> None:
    made = llamacpp.sampler({**PLAIN, "samplers": None, "temperature": 0.5, "top_p": 0.5})
    assert (made.temperature, made.top_p, made.chain, made.extra) == (0.5, 0.5, None, None)


def test_under_mirostat_the_temperature_is_applied_whatever_the_steps() -> None:
    made = llamacpp.sampler({**PLAIN, "mirostat": 2, "temperature": 0.5, "samplers": ["top_k"]})
    assert (made.temperature, made.applied) == (0.5, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samplers", 5), ("samplers", "edkypmxt"), ("samplers", [1]), ("n_predict", "many"), ("repeat_penalty", "x"),
        ("logit_bias", [{"token": [1], "bias": 1.0}]), ("logit_bias", 5),
    ],
)  # fmt: skip
def test_a_setting_of_another_shape_is_kept_as_it_was_and_costs_no_reply(name: str, value: Any) -> None:
    made = one(body([7], settings={name: value, "n_probs": "2"}))
    assert made.samplers is not None
    assert made.samplers[0].extra == {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    }


def test_the_number_of_likeliest_tokens_may_be_a_text() -> None:
    places = [raw(7, -0.5, (7, -0.5))]
    made = one(body([7], completion_probabilities=places, settings={"n_probs": "3"}))
    assert made.heads is not None
    assert made.heads.size == 3


@pytest.mark.parametrize("reply", [b"{", "[]", b"\xff", 5, [body([7])], {"tokens": ["7"]}])
def test_what_is_no_reply_is_named(reply: Any) -> None:
    with pytest.raises(ValueError, match=r"reply: .*wanted .*got"):
        llamacpp.rollouts(reply, [1, 3])


def test_mirostat_does_not_honour_the_filters_and_a_dynamic_temperature_is_not_one_number() -> None:
    assert llamacpp.sampler({**SETTINGS, "mirostat": 2}).applied is False
    assert llamacpp.sampler({**SETTINGS, "dynatemp_range": 0.5}).temperature is None


def test_the_recorded_draws_of_ones_own_sampler_come_out_as_they_were() -> None:
    run = json.loads((DATA / "llamacpp_own.json").read_text())
    endings = []
    for rec in run["recs"]:
        settings = Sampler(temperature=0.8, top_p=0.9, top_k=50, seed=1000, max_tokens=48)
        reply = llamacpp.drawn(
            rec["prompt_token_ids"],
            rec["token_ids"],
            logprobs=rec["logprobs"],
            settings=settings,
            finish=rec["finish_reason"],
        )
        made = rollout(reply)
        to_table([made])
        assert made.tokens.tolist() == rec["prompt_token_ids"] + rec["token_ids"]
        assert made.logprobs is not None
        assert (made.logprobs.to_list(), made.logprob_kind) == (rec["logprobs"], "behavior")
        endings.append((made.ending, made.ending_reason))
    assert endings == [("truncated", "max_tokens"), ("terminated", "stop_token")]


def test_draws_with_another_number_of_log_probs_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted 2 entries, one for each drawn token, got 1"):
        llamacpp.drawn([1], [7, 8], logprobs=[-0.5])
