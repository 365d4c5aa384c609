"""Where ids would have come back as others on a way through text, told by kind; the record is never changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import rollstore
from rollstore import Rollout, Span
from rollstore.cli import app
from rollstore.replay.tokens import RoundTrip, check_tokens, template_fingerprint, tokenizer_fingerprint

CORPUS = ["the cat sat on the mat. return 42 return 43   if x:\n        return x 你好世界 你好 你"] * 20


def bytes_tokenizer(normalizer: Any = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few merges, as those of most models are."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


TOKENIZER = bytes_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def pieces(text: str) -> list[int]:
    """A text byte by byte, which no encoder would write so."""
    return [found for byte in text.encode() for found in [_byte(byte)]]


def _byte(byte: int) -> int:
    character = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str(bytes([byte]).decode("latin-1"))
    if byte < 128:
        return TOKENIZER.convert_tokens_to_ids(character[0][0])
    whole = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str("你好世界")[0][0]
    return TOKENIZER.convert_tokens_to_ids(whole["你好世界".encode().index(byte)])


def rollout(prompt: list[int], drawn: list[int], **fields: Any) -> Rollout:
    mask = [False] * len(prompt) + [True] * len(drawn)
    return Rollout(rollout_id="r", tokens=[*prompt, *drawn], action_mask=mask, **fields)


def only(found: RoundTrip) -> Any:
    (changed,) = found.examples
    (change,) = changed.changes
    return change


PROMPT = ids("the cat")


@pytest.mark.parametrize("text", [" sat on the mat.", " if x:\n        return x", " 你好世界", " sat<|end|>"])
def test_what_the_tokenizer_itself_would_write_comes_back(text: str) -> None:
    found = check_tokens(rollout(PROMPT, ids(text)), TOKENIZER)
    assert (found.segments, found.changed, found.share, found.kinds) == (1, 0, 0.0, {})


@pytest.mark.parametrize("text", ["return", "你好"])
def test_a_word_drawn_in_pieces_comes_back_merged(text: str) -> None:
    drawn = pieces(text)
    assert len(ids(text)) < len(drawn)
    change = only(check_tokens(rollout(PROMPT, drawn), TOKENIZER))
    assert (change.kind, change.position, change.is_action) == ("merge", len(PROMPT), True)
    assert change.ids == tuple(drawn[:3])
    assert change.became == tuple(ids(text)[:3])


def test_a_character_that_was_cut_cannot_come_back() -> None:
    change = only(check_tokens(rollout(PROMPT, [*ids(" sat"), *pieces("你")[:2]]), TOKENIZER))
    assert (change.kind, change.position) == ("bytes", len(PROMPT) + len(ids(" sat")))


def test_a_special_token_that_was_spelled_out_comes_back_as_one() -> None:
    drawn = pieces("<|end|>")
    change = only(check_tokens(rollout(PROMPT, drawn), TOKENIZER))
    assert (change.kind, change.became) == ("special", (TOKENIZER.eos_token_id,))


def test_an_id_that_the_tokenizer_lacks_is_told_and_nothing_crashes() -> None:
    change = only(check_tokens(rollout(PROMPT, [5, len(TOKENIZER) + 17]), TOKENIZER))
    assert (change.kind, change.position, change.ids) == ("unknown_id", len(PROMPT) + 1, (len(TOKENIZER) + 17,))


def test_a_text_that_the_tokenizer_rewrites_is_told_apart_from_a_merge() -> None:
    lowering = bytes_tokenizer(normalizers.Lowercase())
    drawn = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "CAT"]
    change = only(check_tokens(rollout(PROMPT, drawn), lowering))
    assert change.kind == "text"


def test_tokens_that_merge_over_the_border_of_two_spans_are_told() -> None:
    whole = ids(" return")
    assert len(whole) == 1
    prompt, drawn = ids(" retu"), ids("rn")
    assert ids(" retu") + ids("rn") != whole
    change = only(check_tokens(rollout(prompt, drawn), TOKENIZER))
    assert (change.kind, change.position, change.is_action) == ("boundary", 0, False)


def spans_over(*parts: list[int]) -> tuple[Span, ...]:
    """One span a part, the prompt first and then drawn and observed in turn."""
    starts = [sum(map(len, parts[:n])) for n in range(len(parts))]
    return tuple(
        Span(start=start, length=len(part), role="assistant" if n % 2 else "user", is_action=bool(n % 2))
        for n, (start, part) in enumerate(zip(starts, parts, strict=True))
    )


def told(*parts: list[int]) -> list[tuple[str, int, str | None]]:
    """(kind, position, role) of every change in a segment of these spans."""
    row = Rollout(
        rollout_id="r", tokens=[token for part in parts for token in part], spans=spans_over(*parts),
        action_mask=[bool(n % 2) for n, part in enumerate(parts) for _ in part],
    )  # fmt: skip
    return [(c.kind, c.position, c.role) for one in check_tokens(row, TOKENIZER).examples for c in one.changes]


def test_a_border_is_told_beside_a_change_within_a_span() -> None:
    split, left, right = pieces("cat"), ids(" retu"), ids("rn")
    prompt = [*split, *left]
    assert told(prompt, right) == [("merge", 0, "user"), ("boundary", len(split), "user")]
    drawn = [*right, *pieces("return")]
    assert told(left, drawn) == [("merge", len(left) + len(right), "assistant"), ("boundary", 0, "user")]


def test_each_border_is_told_and_those_where_nothing_happens_are_not() -> None:
    left, right, plain = ids(" retu"), ids("rn"), ids(" sat")
    parts = (left, right, plain, left, right)
    assert told(*parts) == [
        ("boundary", 0, "user"),
        ("boundary", len(left + right + plain), "assistant"),
    ]
    assert told(plain, plain, plain) == []


def test_a_change_inside_a_span_is_no_change_at_its_border() -> None:
    assert told(pieces("cat"), ids(" sat")) == [("merge", 0, "user")]
    assert told(ids(" sat"), pieces("cat"), ids(" sat")) == [("merge", len(ids(" sat")), "assistant")]


def test_a_character_cut_by_a_border_is_no_merge_there() -> None:
    first, second = ids("é")
    assert [kind for kind, _, _ in told([first], [second])] == ["bytes", "bytes"]


def test_a_border_beside_an_id_that_the_tokenizer_lacks_is_left_out_and_the_others_are_told() -> None:
    left, right = ids(" retu"), ids("rn")
    strange = [len(TOKENIZER) + 1]
    found = told(left, right, strange, left, right)
    assert found == [("unknown_id", len(left + right), "user"), ("boundary", 0, "user"),
                     ("boundary", len(left + right) + 1, "assistant")]  # fmt: skip


class Whole:
    """A tokenizer of letters that has a token for `abc` and none for a part of it."""

    all_special_ids: list[int] = []  # noqa: RUF012  an attribute as transformers has it

    def __len__(self) -> int:
        return 4

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1, "c": 2, "abc": 3}

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(["a", "b", "c", "abc"][token] for token in token_ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        found = text.replace("abc", "d")
        return ["abcd".index(letter) for letter in found]


def test_tokens_that_merge_over_more_than_one_border_are_told() -> None:
    parts: list[list[int]] = [[2, 0], [1], [2]]
    tokens = [token for part in parts for token in part]
    row = Rollout(rollout_id="r", tokens=tokens, spans=spans_over(*parts), action_mask=[False, False, True, False])
    change = only(check_tokens(row, Whole()))
    assert (change.kind, change.position, change.ids, change.became) == ("boundary", 1, (0, 1, 2), (3,))


def test_each_span_is_told_with_its_role_and_only_drawn_ones_count_as_drawn() -> None:
    spans = (
        Span(start=0, length=len(pieces("cat")), role="user", is_action=False),
        Span(start=3, length=1, role="assistant", is_action=True),
    )
    found = check_tokens(rollout(pieces("cat"), ids("."), spans=spans), TOKENIZER)
    assert (only(found).role, only(found).is_action, found.changed, found.drawn_changed) == ("user", False, 1, 0)


def test_fingerprints_are_compared_first_and_ids_of_another_tokenizer_are_not_read() -> None:
    name = tokenizer_fingerprint(TOKENIZER)
    rows = [
        rollout(PROMPT, pieces("return"), tokenizer="another"),
        rollout(PROMPT, ids(" sat"), tokenizer=name, chat_template="another"),
        rollout(PROMPT, ids(" sat")),
    ]
    found = check_tokens(rows, TOKENIZER)
    assert (found.segments, found.changed, found.unknown_tokenizer) == (2, 0, 1)
    assert (found.other_tokenizer, found.other_template) == ({"another": 1}, {"another": 1})


def test_a_fingerprint_follows_what_decides_ids_and_nothing_else() -> None:
    other, padded, longer = bytes_tokenizer(normalizers.Lowercase()), bytes_tokenizer(), bytes_tokenizer()
    padded(
        "a b", padding="max_length", max_length=9, truncation=True, pad_to_multiple_of=None
    ) if padded.pad_token else (padded.backend_tokenizer.enable_padding(length=9))
    longer.add_tokens(["<tool>"])
    name = tokenizer_fingerprint(TOKENIZER)
    assert tokenizer_fingerprint(bytes_tokenizer()) == tokenizer_fingerprint(padded) == name
    assert len({name, tokenizer_fingerprint(other), tokenizer_fingerprint(longer)}) == 3
    assert template_fingerprint(TOKENIZER) is None
    longer.chat_template = "{{ messages }}"
    assert template_fingerprint(longer) is not None
    assert tokenizer_fingerprint(longer) != template_fingerprint(longer)


def test_the_command_fails_beyond_the_share_that_is_allowed_and_changes_nothing(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "t")
    store = rollstore.open(tmp_path / "s", create=True)
    with store.writer() as writer:
        for n, drawn in enumerate([ids(" sat"), pieces("return")]):
            mask = [False] * len(PROMPT) + [True] * len(drawn)
            writer.append(Rollout(rollout_id=str(n), tokens=[*PROMPT, *drawn], action_mask=mask))
    before = store.scan("rollouts").read_all()

    def run(*options: str) -> Any:
        return CliRunner().invoke(
            app, ["check-tokens", str(tmp_path / "s"), "--tokenizer", str(tmp_path / "t"), *options]
        )

    failed, passed = run(), run("--most", "0.5", "--json")
    assert (failed.exit_code, passed.exit_code) == (1, 0)
    assert (
        "1 of 2 segments (50.00%) would come back with other ids, 1 of them in drawn tokens: merge 1" in failed.stdout
    )
    assert json.loads(passed.stdout)["changed"] == 1
    assert store.scan("rollouts").read_all().equals(before)


def test_a_segment_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    store = rollstore.open(tmp_path / "s", create=True)
    for _ in range(2):  # as a writer does that was not told that its first try succeeded
        with store.writer() as writer:
            writer.append(rollout(PROMPT, pieces("return")))
            writer.append(rollout(PROMPT, ids(" sat"), segment=1))
    found = check_tokens(store, TOKENIZER)
    assert (found.segments, found.changed, found.share, found.unknown_tokenizer) == (2, 1, 0.5, 2)
