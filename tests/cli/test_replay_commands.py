"""`replay` and `diff`, and reading ids with a tokenizer: with a tiny model, saved and loaded as any other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollstore import Engine, Numerics, Rollout, Sampler, Span
from rollstore.cli.transformers import token_texts
from rollstore.replay.noise import RECIPE
from rollstore.replay.samplers.transformers import generate
from rollstore.store.store import open as open_store
from tests.cli.story import Run

PROMPT = [3, 1, 4, 1, 5]


def save(path: Path, seed: int) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return save(folder / "0", 0), save(folder / "1", 1)


@pytest.fixture(scope="module")
def keyed_store(tmp_path_factory: pytest.TempPathFactory, checkpoints: tuple[str, str]) -> str:
    """A keyed rollout of the first model, and the same one with another last token."""
    model = LlamaForCausalLM.from_pretrained(checkpoints[0])
    (turn,) = generate(
        model, [PROMPT], keys=[2**64 - 1], samples=[2], sampler=Sampler(temperature=0.9), max_new_tokens=8, head_size=4
    )
    drawn = turn.tokens.tolist()
    fields = {
        "action_mask": [False] * 5 + [True] * 8, "logprobs": turn.logprobs, "logprob_kind": "behavior",
        "head_kind": "behavior", "heads": turn.heads, "samplers": (turn.sampler,), "weight_versions": [0] * 8,
        "replay_key": 2**64 - 1, "replay_sample": 2, "noise": RECIPE,
        "engine": Engine(name="transformers", numerics=Numerics(weights="float32")),
        "spans": (
            Span(start=0, length=5, is_action=False, role="user"),
            Span(start=5, length=8, is_action=True, role="assistant", sampler=0),
        ),
    }  # fmt: skip
    path = str(tmp_path_factory.mktemp("keyed") / "store")
    with open_store(path, create=True).writer() as writer:
        writer.append(Rollout(rollout_id="keyed", tokens=PROMPT + drawn, **fields))
        other = fields | {"heads": None, "head_kind": None}
        writer.append(Rollout(rollout_id="other", tokens=[*PROMPT, *drawn[:-1], (drawn[-1] + 1) % 64], **other))
        bare = Span(start=0, length=4, is_action=False), Span(start=4, length=1, is_action=True, sampler=0)
        mask = [False] * 4 + [True]
        settings = (turn.sampler,)
        writer.append(
            Rollout(rollout_id="bare", tokens=PROMPT, action_mask=mask, samplers=settings, spans=bare, logprobs=[-1.0])
        )
    return path


def test_replay_under_the_recorded_weights_is_the_same_to_the_token(
    keyed_store: str, checkpoints: tuple[str, str], run: Run
) -> None:
    result = run("replay", keyed_store, "keyed", "--model", checkpoints[0])
    assert result.exit_code == 0
    assert "identical" in result.stdout
    read = json.loads(run("replay", keyed_store, "keyed", "--model", checkpoints[0], "--json").stdout)
    assert (read["identical"], read["draws"]) == (True, 8)


def test_replay_under_other_weights_fails_and_names_the_first_difference(
    keyed_store: str, checkpoints: tuple[str, str], run: Run
) -> None:
    arguments = ("replay", keyed_store, "keyed", "--model", checkpoints[1], "--against", checkpoints[0])
    result = run(*arguments, "--weight-version", "1")
    assert result.exit_code == 1
    assert "first difference at token" in result.stdout
    read = json.loads(run(*arguments, "--json").stdout)
    (first,) = [segment["first"] for segment in read["segments"]]
    assert first["token_a"] != first["token_b"]
    assert first["position"] >= 5
    assert None not in (first["margin_a"], first["margin_b"])


def test_replay_of_a_rollout_without_a_key_scores_it_and_is_no_success(
    keyed_store: str, checkpoints: tuple[str, str], run: Run
) -> None:
    result = run("replay", keyed_store, "bare", "--model", checkpoints[0])
    assert result.exit_code == 1
    assert "not keyed, scored instead" in result.stdout


def test_replay_needs_a_rollout_and_a_model_that_are_there(
    keyed_store: str, checkpoints: tuple[str, str], tmp_path: Path, run: Run
) -> None:
    for arguments, said in (
        (("nobody", "--model", checkpoints[0]), "'nobody'"),
        (("keyed", "--model", str(tmp_path / "none")), "wanted a folder with a checkpoint, found none"),
        (("keyed", "--model", checkpoints[0], "--segment", "3"), "segment 3"),
        (("keyed",), "--model"),
    ):
        result = run("replay", keyed_store, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_replay_says_which_weights_gave_the_same_tokens_with_other_log_probs(
    keyed_store: str, checkpoints: tuple[str, str], tmp_path: Path, run: Run
) -> None:
    moved = LlamaForCausalLM.from_pretrained(checkpoints[0])
    with torch.no_grad():
        moved.lm_head.weight.mul_(1.02)
    moved.save_pretrained(tmp_path / "moved")
    arguments = ("replay", keyed_store, "keyed", "--model", str(tmp_path / "moved"), "--weight-version", "1")
    result = run(*arguments)
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert re.fullmatch(
        r"keyed: identical tokens, but log-probs differ by up to 0\.\d+: not the recorded distribution "
        r"\(8 drawn again, tolerance 0\.001\)",
        first,
    )
    assert "  weight version differs: recorded 0, now 1" in rest
    read = json.loads(run(*arguments, "--json").stdout)
    assert (read["identical"], read["same_distribution"], read["tolerance"]) == (True, False, 0.001)
    assert read["max_logprob_difference"] > 0.001
    assert {"name": "weight version", "a": "0", "b": "1", "status": "differ"} in read["differ"]
    assert json.loads(run(*arguments, "--json", "--tolerance", "5").stdout)["same_distribution"] is True


@pytest.mark.parametrize("option", ["--model", "--against"])
def test_a_checkpoint_is_a_folder_and_never_a_name_to_look_up(
    option: str, keyed_store: str, checkpoints: tuple[str, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstore.cli.transformers.model", lambda *_: pytest.fail("looked for a checkpoint"))
    rest = [] if option == "--model" else ["--model", checkpoints[0]]
    result = run("replay", keyed_store, "keyed", *rest, option, "someone/something")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "rollstore: someone/something: wanted a folder with a checkpoint, found none\n"


def test_replay_without_a_recorded_sampler_is_refused_as_its_help_says(
    keyed_store: str, checkpoints: tuple[str, str], tmp_path: Path, run: Run
) -> None:
    path = str(tmp_path / "unsettled")
    with open_store(path, create=True).writer() as writer:
        writer.append(Rollout(rollout_id="r", tokens=PROMPT, action_mask=[False] * 4 + [True]))
    result = run("replay", path, "r", "--model", checkpoints[0])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "wanted a recorded sampler" in result.stderr
    assert "without a recorded sampler it is refused with exit status 2" in " ".join(
        run("replay", "--help").stdout.replace("│", " ").split()
    )


def test_diff_of_a_run_that_is_not_there_is_bad_use(keyed_store: str, run: Run) -> None:
    for side, option in (("a", "--run-a"), ("b", "--run-b")):
        result = run("diff", keyed_store, keyed_store, option, "zzz")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"rollstore: {side}: no rollouts of run 'zzz'\n"


def test_diff_of_two_rollouts_names_the_first_token_that_differs(keyed_store: str, run: Run) -> None:
    result = run("diff", keyed_store, "keyed", "other")
    assert result.exit_code == 1
    assert "earliest difference at token 12" in result.stdout
    read = json.loads(run("diff", keyed_store, "keyed", "other", "--json").stdout)
    assert (read["changed"], read["earliest"], read["flipped_first"]) == (1, 12, 1)


def test_diff_of_what_is_the_same_succeeds(keyed_store: str, run: Run) -> None:
    assert run("diff", keyed_store, "keyed", "keyed").exit_code == 0
    result = run("diff", keyed_store, keyed_store)
    assert result.exit_code == 0
    assert "0 of 3 segments changed" in result.stdout


def test_diff_of_stores_that_do_not_hold_the_same_rollouts_fails(keyed_store: str, tmp_path: Path, run: Run) -> None:
    run("init", str(tmp_path / "empty"))
    result = run("diff", keyed_store, str(tmp_path / "empty"), "--json")
    assert result.exit_code == 1
    read = json.loads(result.stdout)
    assert (set(read["only_a"]), read["changed"]) == ({"keyed", "other", "bare"}, 0)


def test_diff_with_an_id_that_is_not_there_is_bad_use(keyed_store: str, run: Run) -> None:
    result = run("diff", keyed_store, "keyed", "nobody")
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with one token a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    path = str(tmp_path_factory.mktemp("tokenizer"))
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(path)
    return path


def test_ids_are_read_with_a_tokenizer_character_by_character(tokenizer: str) -> None:
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    text = "a ☃é\nb"
    ids = loaded(text)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert texts == ["a", " ", "", "", "☃", "", "é", "\n", "b"]
    assert token_texts(tokenizer, [ids[0], 10_000, ids[-1]]) == ["a", None, "b"]
    assert "".join(t or "" for t in token_texts(tokenizer, [ids[2], ids[0], ids[8]])).endswith("ab")


def test_show_reads_ids_with_a_tokenizer(tokenizer: str, store: str, run: Run) -> None:
    ids = PreTrainedTokenizerFast.from_pretrained(tokenizer)("hi!")["input_ids"]
    with open_store(store).writer() as writer:
        writer.append(Rollout(rollout_id="hi", tokens=ids, action_mask=[False, True, True]))
    assert "── action · 2 actions\ni!\n" in run("show", store, "hi", "--tokenizer", tokenizer).stdout
    nowhere = run("show", store, "hi", "--tokenizer", "someone/something")
    assert (nowhere.exit_code, nowhere.stdout) == (2, "")
    assert nowhere.stderr == "rollstore: someone/something: wanted a folder with a tokenizer, found none\n"
    missing = run("show", store, "hi", "--tokenizer", store)
    assert missing.exit_code == 2
    assert "wanted a tokenizer" in missing.stderr
    assert missing.stderr.count("\n") == 1
