"""Placeholders of media keep their marks from the engine's reply to the padded batch, and ids decide nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollstore
from rollstore.batch import Medium, TokenBatch, collate, select, to_padded
from rollstore.readers.prefix import share_prefixes
from rollstore.readers.torch import RolloutLoader
from rollstore.schema import Media, Rollout, Span, to_table
from rollstore.schema.known import known
from rollstore.writers.conversation import rollout
from rollstore.writers.reply import Place, Reply

IMAGE = Media(kind="image", count=4, view="engine")


def reply(prompt: list[int], drawn: list[int], *places: Place) -> Reply:
    logprobs = known([-0.1 * (n + 1) for n in range(len(drawn))])
    return Reply(
        prompt=np.array(prompt), tokens=np.array(drawn), logprobs=logprobs, logprob_kind="behavior", media=places
    )


def rows() -> list[Rollout]:
    """One with an image of four placeholders, as the engine expanded it, and one without."""
    with_image = reply([1, 900, 900, 900, 900, 2], [50, 51], Place(1, 4, IMAGE))
    return [rollout(with_image, rollout_id="a"), rollout(reply([1, 2, 3], [52]), rollout_id="b")]


def marked(kinds: tuple[str | None, ...], tokens: int = 3) -> TokenBatch:
    """One row whose first two tokens are placeholders of media of these kinds."""
    media = tuple(Media(kind=kind) for kind in kinds)
    spans = (
        Span(start=0, length=2, is_action=False, media=media or None),
        Span(start=2, length=tokens - 2, is_action=True),
    )
    mask = [False, False] + [True] * (tokens - 2)
    made = Rollout(rollout_id="r", tokens=np.arange(tokens), action_mask=np.array(mask), spans=spans)
    return collate(to_table([made]))


def test_the_record_says_whose_ids_they_are_and_where_the_image_stands() -> None:
    (made, _) = rows()
    stored = to_table([made]).to_pylist()[0]
    assert (stored["spans"][1]["start"], stored["spans"][1]["length"]) == (1, 4)
    assert stored["spans"][1]["media"][0]["view"] == "engine"
    assert (len(stored["tokens"]), sum(stored["action_mask"])) == (8, 2)


@pytest.mark.parametrize("read", ["collate", "loader"])
def test_marks_move_with_the_padding_and_padding_is_marked_nothing(tmp_path: Path, read: str) -> None:
    if read == "collate":
        batch = collate(to_table(rows()))
    else:
        store = rollstore.open(tmp_path / "s", create=True)
        with store.writer() as writer:
            writer.append(rows())
        (batch,) = RolloutLoader(store, tokens_per_batch=64, seed=0)
        batch = select(batch, sorted(range(2), key=lambda row: batch.rollout_ids[row]))
    assert batch.media is not None
    left = to_padded(batch, side="left")
    assert left.of_tokens(batch.media).tolist() == [[0, 1, 1, 1, 1, 0, 0, 0], [0] * 8]
    assert left.attention_mask.sum(1).tolist() == [8, 4]
    right = to_padded(batch)
    assert right.of_tokens(batch.media).tolist() == [[0, 1, 1, 1, 1, 0, 0, 0], [0] * 8]


def test_rows_in_another_order_take_their_marks_along() -> None:
    batch = select(collate(to_table(rows())), [1, 0])
    assert batch.media is not None
    assert batch.media.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0]


def test_what_two_rows_share_is_marked_once() -> None:
    shared = share_prefixes(
        collate(to_table([*rows()[:1], rollout(reply([1, 900, 900, 900, 900, 2], [60]), rollout_id="c")])),
        within=torch.zeros(2, dtype=torch.int64),  # the same image: equal placeholders alone do not say so
    )
    assert shared.batch.media is not None
    assert len(shared.batch.media) == len(shared.batch.tokens) == 9
    assert torch.equal(shared.batch.media == Medium.image, shared.batch.tokens == 900)


def test_a_batch_without_media_has_no_marks() -> None:
    assert collate(to_table(rows()[1:])).media is None
    assert marked(()).media is None


@pytest.mark.parametrize(
    ("kinds", "mark"),
    [
        (("image",), Medium.image), (("audio",), Medium.audio), (("video",), Medium.video), (("scent",), Medium.other),
        ((None,), Medium.other), (("image", "image"), Medium.image), (("image", "audio"), Medium.other),
    ],
)  # fmt: skip
def test_a_mark_is_the_kind_of_the_spans_media(kinds: Any, mark: Medium) -> None:
    found = marked(kinds).media
    assert found is not None
    assert found.tolist() == [mark, mark, 0]


def test_ids_decide_nothing() -> None:
    made = Rollout(rollout_id="r", tokens=[900, 900, 5], action_mask=[False, False, True])
    assert collate(to_table([made])).media is None
