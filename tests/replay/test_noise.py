"""The recipe of spec/noise.md: known answers, equal bytes everywhere, and the distribution it stands for."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollstore.replay import noise, noise_numba

SPEC = Path(__file__).parents[2] / "spec"
VECTORS: dict[str, Any] = json.loads((SPEC / "vectors" / "noise.json").read_text())
f32 = np.float32


def bits(value: Any) -> int:
    return int(f32(value).view(np.uint32))


def from_bits(value: int) -> Any:
    return np.uint32(value).view(f32)


def spec_log(t: Any, n: int) -> Any:
    """The logarithm of spec/noise.md, line by line, on single float32 numbers."""
    a0, a1, a2, a3, a4 = (from_bits(x) for x in (0x40000000, 0x3F2AAA71, 0x3ECCED0A, 0x3E8F2E7E, 0x3E902AF6))
    z = f32(t * t)
    y = f32(z * a4)
    for a in (a3, a2, a1):
        y = f32(y + a)
        y = f32(y * z)
    y = f32(y + a0)
    y = f32(y * t)
    return f32(y + f32(f32(n) * from_bits(0x3F317218)))


def spec_exponential(w: int) -> Any:
    s = w >= 2**31
    r = 2**32 - 1 - w if s else w
    h = f32(f32(f32(r) + f32(0.5)) * f32(2.0**-32))
    n, g = 0, h
    if s:
        n = 126 - bits(h) // 2**23
        g = f32(f32(1) - from_bits((bits(h) & 0x007FFFFF) | 0x3F000000))
    return spec_log(f32(g / f32(f32(2) - g)), n)


def spec_gumbel(exponential: Any) -> Any:
    e = (bits(exponential) - 0x3F3504F3) // 2**23
    m = from_bits(bits(exponential) - e * 2**23)
    return spec_log(f32(f32(f32(1) - m) / f32(m + f32(1))), -e)


def spec_word(key: int, sample: int, segment: int, position: int, token: int) -> int:
    c, k, mask = (token // 4, position, sample, segment), (key % 2**32, key // 2**32), 2**32 - 1
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = (p1 >> 32 ^ c[1] ^ k[0], p1 & mask, p0 >> 32 ^ c[3] ^ k[1], p0 & mask)
        k = (k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask)
    return c[token % 4]


def drawn(library: str, monkeypatch: pytest.MonkeyPatch, **where: Any) -> Any:
    """`gumbel` by numpy, by numba or by torch."""
    if library == "torch":
        return noise.gumbel_torch(**where).numpy()
    monkeypatch.setattr(noise, "_numba_is_installed", lambda: library == "numba")
    return noise.gumbel(**where)


@pytest.mark.parametrize("vector", VECTORS["philox"], ids=lambda vector: vector["words"][0])
def test_philox_gives_random123s_answers(vector: dict[str, list[str]]) -> None:
    counter, key = ([int(word, 16) for word in vector[name]] for name in ("counter", "key"))
    assert [f"0x{int(word):08x}" for word in noise.philox4x32(counter, key)] == vector["words"]


def test_the_first_known_answer_is_not_only_in_our_own_file() -> None:
    words = [int(word) for word in noise.philox4x32([0] * 4, [0] * 2)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("vector", VECTORS["words"], ids=lambda vector: vector["word"])
def test_the_spec_read_line_by_line_turns_a_word_into_its_vector(vector: dict[str, str]) -> None:
    exponential = spec_exponential(int(vector["word"], 16))
    assert f"0x{bits(exponential):08x}" == vector["exponential"]
    assert f"0x{bits(spec_gumbel(exponential)):08x}" == vector["gumbel"]


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda vector: vector["key"])
@pytest.mark.parametrize("library", ["numpy", "numba", "torch"])
def test_a_row_of_noise_is_its_vector_to_the_last_bit(
    vector: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {name: vector[name] for name in ("sample", "segment", "vocab_size")}
    where |= {"key": int(vector["key"], 16), "positions": [vector["position"]]}
    row = drawn(library, monkeypatch, **where)[0]
    assert hashlib.sha256(row.astype("<f4").tobytes()).hexdigest() == vector["sha256"]
    assert [f"0x{bits(row[token]):08x}" for token in vector["tokens"]] == vector["gumbel"]


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda vector: vector["key"])
def test_the_spec_read_line_by_line_gives_the_draws(vector: dict[str, Any]) -> None:
    where = int(vector["key"], 16), vector["sample"], vector["segment"], vector["position"]
    found = [spec_gumbel(spec_exponential(spec_word(*where, token))) for token in vector["tokens"]]
    assert [f"0x{bits(value):08x}" for value in found] == vector["gumbel"]


def test_the_constants_of_the_spec_are_those_of_the_code() -> None:
    text = (SPEC / "noise.md").read_text()
    for value in (*noise.COEFFICIENTS, noise.LN2):
        assert float(f32(value)) == value
        assert f"{value:g} | `0x{bits(value):08x}`" in text or f"{value!r} | `0x{bits(value):08x}`" in text


@pytest.mark.parametrize("library", ["numba", "torch"])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 49_152), (7, 201), (3, 60_000), (40, 37), (1, 1), (2, 4), (1, 4_097)])
def test_all_libraries_agree_with_numpy_to_the_last_bit_for_any_shape(
    rows: int, vocab: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"key": 2**64 - 3, "sample": 9, "segment": 1, "positions": np.arange(rows) * 13 + 2, "vocab_size": vocab}
    ours, theirs = drawn("numpy", monkeypatch, **where), drawn(library, monkeypatch, **where)
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == (rows, vocab)
    assert ours.tobytes() == theirs.tobytes()


def test_the_exponentials_of_numba_are_those_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    where: dict[str, Any] = {"key": 11, "sample": 2, "positions": [3, 2**31 - 1], "vocab_size": 5_003}
    found = []
    for installed in (True, False):
        monkeypatch.setattr(noise, "_numba_is_installed", lambda installed=installed: installed)
        found.append(noise.exponential(**where).tobytes())
    assert found[0] == found[1]


def test_numba_turns_every_word_into_what_numpy_makes_of_it() -> None:
    words = every_word_at(4_001).view(np.int32)
    out = np.empty(len(words), np.float32)
    for race in (True, False):
        noise_numba._values(words, race, out)
        exponential = noise._race(words.copy())
        assert out.tobytes() == (exponential if race else noise._gumbel(exponential)).tobytes()


def test_a_machine_without_numba_draws_with_numpy() -> None:
    script = (
        "import sys; sys.modules['numba'] = None; from rollstore.replay import noise;"
        "print(noise.gumbel(key=1, sample=0, positions=0, vocab_size=9).tobytes().hex())"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert shown.strip() == noise.gumbel(key=1, sample=0, positions=0, vocab_size=9).tobytes().hex()


def test_compiled_noise_needs_no_folder_to_keep_machine_code_in(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = noise_numba.numba.njit

    def nowhere(function: Any, *, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled(function, **options)

    monkeypatch.setattr(noise_numba.numba, "njit", nowhere)
    assert noise_numba._compiled(lambda x: x + 1)(2) == 3


def test_the_batch_the_vocabulary_and_the_order_change_nothing() -> None:
    whole = noise.gumbel(key=8, sample=1, positions=range(20), vocab_size=50_001)
    for position in (0, 7, 19):
        alone = noise.gumbel(key=8, sample=1, positions=position, vocab_size=50_001)
        assert alone.tobytes() == whole[position].tobytes()
    turned = noise.gumbel(key=8, sample=1, positions=[19, 0, 7], vocab_size=1_002)
    assert turned.tobytes() == np.ascontiguousarray(whole[[19, 0, 7], :1_002]).tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_torch_threads_changes_nothing(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = noise.gumbel_torch(key=4, sample=0, positions=range(3), vocab_size=70_000).numpy()
    finally:
        torch.set_num_threads(before)
    assert found.tobytes() == noise.gumbel(key=4, sample=0, positions=range(3), vocab_size=70_000).tobytes()


def test_a_compiled_function_leaves_the_noise_uncompiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def noised(logits: torch.Tensor) -> torch.Tensor:
        return logits * 2 + noise.gumbel_torch(key=5, sample=1, positions=[3, 4], vocab_size=50)

    logits = torch.ones(2, 50)
    assert torch.equal(torch.compile(noised, backend=count)(logits), noised(logits))
    assert sum(node.op == "call_function" for graph in graphs for node in graph.graph.nodes) <= 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bytes() -> None:
    where = {"key": 2**63 + 5, "sample": 3, "segment": 2, "positions": range(8), "vocab_size": 151_936}
    assert noise.gumbel_torch(**where, device="cuda").cpu().numpy().tobytes() == noise.gumbel(**where).tobytes()


def test_rows_may_have_their_own_key_sample_and_segment() -> None:
    keys, samples, segments = np.array([1, 2**64 - 1], dtype=np.uint64), [3, 4], [0, 6]
    where = {"positions": [10, 11], "vocab_size": 100}
    found = noise.gumbel(key=keys, sample=samples, segment=segments, **where)
    assert found.tobytes() == noise.gumbel_torch(key=keys, sample=samples, segment=segments, **where).numpy().tobytes()
    for row in range(2):
        alone = noise.gumbel(
            key=int(keys[row]), sample=samples[row], segment=segments[row], positions=10 + row, vocab_size=100
        )
        assert alone.tobytes() == found[row].tobytes()


def test_a_list_of_keys_on_both_sides_of_two_to_the_63_stays_exact() -> None:
    keys = [1, 2**63 + 1, 2**64 - 1]
    found = noise.gumbel(key=keys, sample=0, positions=[5, 5, 5], vocab_size=16)
    for row, key in enumerate(keys):
        assert noise.gumbel(key=key, sample=0, positions=5, vocab_size=16).tobytes() == found[row].tobytes()


def test_single_ids_get_the_noise_they_have_in_the_whole_row() -> None:
    ids = np.array([[0, 5, 1_000], [7, 999, 3]])
    whole = noise.gumbel(key=9, sample=3, segment=1, positions=[5, 6], vocab_size=1_001)
    some = noise.gumbel_at(key=9, sample=3, segment=1, positions=[5, 6], tokens=ids)
    assert some.tobytes() == np.take_along_axis(whole, ids, 1).tobytes()


def test_no_positions_give_no_rows() -> None:
    assert noise.gumbel(key=1, sample=0, positions=[], vocab_size=10).shape == (0, 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": 2**64}, "key: wanted integers from 0 to 2^64 - 1"),
        ({"key": -1}, "key: wanted integers"),
        ({"key": 1.0}, "key: wanted integers"),
        ({"key": [2**64]}, "key: wanted integers"),
        ({"sample": [1.0]}, "sample: wanted integers"),
        ({"sample": [True]}, "sample: wanted integers"),
        ({"sample": 2**31}, "sample: wanted integers from 0 to 2^31 - 1"),
        ({"sample": -1}, "sample: wanted integers"),
        ({"segment": -1}, "segment: wanted integers"),
        ({"segment": True}, "segment: wanted integers"),
        ({"positions": [3, -1]}, "positions: wanted integers"),
        ({"positions": [[1]]}, "positions: wanted integers"),
        ({"sample": [1, 2, 3]}, "sample: wanted one integer or 1"),
        ({"vocab_size": 0}, "vocab_size: wanted 1 to"),
        ({"vocab_size": 2.5}, "vocab_size: wanted 1 to"),
        ({"vocab_size": True}, "vocab_size: wanted 1 to"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    where = {"key": 1, "sample": 0, "segment": 0, "positions": [1], "vocab_size": 4} | change
    for function in (noise.gumbel, noise.gumbel_torch):
        with pytest.raises(ValueError, match="wanted") as caught:
            function(**where)
        assert str(caught.value).startswith(message)


def test_numpy_noise_needs_no_torch() -> None:
    script = "import sys; from rollstore.replay import noise; noise.gumbel(key=1, sample=0, positions=0, vocab_size=9)"
    subprocess.run([sys.executable, "-c", script + "; assert 'torch' not in sys.modules"], check=True)


def every_word_at(step: int) -> Any:
    words = np.concatenate([np.arange(0, 2**32, step), np.arange(2**32 - 2_000, 2**32), np.arange(2_000)])
    return np.unique(words.astype(np.uint32))


def test_the_noise_is_the_exact_function_of_its_word_within_three_in_ten_million() -> None:
    words = every_word_at(40_009)
    exact = -np.log1p(-(words + 0.5) / 2.0**32)
    exponential = noise._race(words.view(np.int32).copy())
    noised = noise._gumbel(exponential.copy())
    assert np.abs(exponential / exact - 1).max() < 3e-7
    gumbel = -np.log(exact)
    assert (np.abs(noised - gumbel) / np.maximum(1, np.abs(gumbel))).max() < 3e-7
    assert (np.diff(exponential) >= 0).all()
    assert (np.diff(noised) <= 0).all()


def test_the_smallest_and_largest_values_are_those_of_the_spec() -> None:
    ends = noise._race(np.array([0, -1], dtype=np.int32))
    assert ends[0] == 2.0**-33
    assert ends[1] == f32(22.873857)
    least = noise._gumbel(ends)
    assert least[1] == f32(-3.1299946)
    assert least[0] == f32(22.873857)


@pytest.fixture(scope="module")
def many() -> Any:
    """20 million draws over 100 positions, in float64."""
    return noise.gumbel(key=20_231, sample=4, positions=range(100), vocab_size=200_000).astype(np.float64)


def test_a_kolmogorov_smirnov_test_finds_a_standard_gumbel(many: Any) -> None:
    sample = np.sort(many[::10].ravel())
    expected = np.exp(-np.exp(-sample))
    n = len(sample)
    distance = max((np.arange(1, n + 1) / n - expected).max(), (expected - np.arange(n) / n).max())
    assert distance * math.sqrt(n) < 1.95  # passed by 999 of 1,000 true samples


@pytest.mark.parametrize("tail", [1e-3, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("side", ["upper", "lower"])
def test_both_tails_hold_what_they_should_down_to_one_in_ten_million(many: Any, tail: float, side: str) -> None:
    if side == "upper":
        count = int((many > -math.log(-math.log1p(-tail))).sum())
    else:
        count = int((many < -math.log(-math.log(tail))).sum())
    expected = many.size * tail
    assert abs(count - expected) < 4.5 * math.sqrt(expected) + 1


def test_of_all_words_exactly_the_right_share_lies_beyond_one_in_ten_million() -> None:
    # 429 or 430 of the 2^32 evenly spaced words belong beyond each 1e-7 quantile.
    first = noise._gumbel(noise._race(np.arange(1_000, dtype=np.uint32).view(np.int32).copy()))
    last = noise._gumbel(noise._race(np.arange(2**32 - 1_000, 2**32).astype(np.uint32).view(np.int32).copy()))
    assert abs(int((first > -math.log(-math.log1p(-1e-7))).sum()) - 429.5) <= 1
    assert abs(int((last < -math.log(-math.log(1e-7))).sum()) - 429.5) <= 1


@pytest.mark.parametrize("changed", ["key", "key_high", "sample", "segment", "position", "token"])
def test_draws_that_differ_in_one_coordinate_are_independent(changed: str) -> None:
    where = {"key": 77, "sample": 5, "segment": 1, "positions": range(50, 54), "vocab_size": 100_000}
    base = noise.gumbel(**where).ravel()
    moves: dict[str, dict[str, Any]] = {
        "key": {"key": 78},
        "key_high": {"key": 77 + 2**32},
        "sample": {"sample": 6},
        "segment": {"segment": 2},
        "position": {"positions": range(51, 55)},
        "token": {},
    }
    other = np.roll(base, 1) if changed == "token" else noise.gumbel(**(where | moves[changed])).ravel()
    n = base.size
    uniform = [np.exp(-np.exp(-values.astype(np.float64))) for values in (base, other)]
    assert abs(np.corrcoef(*uniform)[0, 1]) < 4.5 / math.sqrt(n)
    # The joint distribution too, on a grid of 10 by 10 equally likely cells.
    counts = np.histogram2d(*uniform, bins=10, range=[[0, 1], [0, 1]])[0]
    chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert chi_square < 99 + 4.5 * math.sqrt(2 * 99)


def test_sampling_with_the_noise_has_the_frequencies_of_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 0.7], dtype=np.float32)
    chosen = (logits + noise.gumbel(key=3, sample=0, positions=range(200_000), vocab_size=8)).argmax(1)
    expected = np.exp(logits) / np.exp(logits).sum() * len(chosen)
    chi_square = ((np.bincount(chosen, minlength=8) - expected) ** 2 / expected).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, 1 in 1,000


def test_the_exponential_race_and_the_gumbel_maximum_pick_the_same_winner_from_the_same_draws() -> None:
    logits = np.linspace(-3, 3, 1_000)
    logprobs = logits - np.log(np.exp(logits).sum())
    where = {"key": 12, "sample": 1, "positions": range(2_000), "vocab_size": 1_000}
    race = noise.exponential(**where).astype(np.float64) / np.exp(logprobs)
    scores = logprobs + noise.gumbel(**where).astype(np.float64)
    winners = race.argmin(1)
    assert (winners == scores.argmax(1)).all()
    assert len(np.unique(winners)) > 500
