"""The strided combine, plain jnp: SGLang's golden rows, hard cases, and a loop written from the formula."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from pallas_kernels import combine_swa_indices
from tests.helpers.oracles import GOLDEN, combine_row, golden


def i32(x):
    return jnp.asarray(np.asarray(x), jnp.int32)


@pytest.mark.parametrize("path", sorted(p.name for p in (GOLDEN / "index").glob("*.npz")))
def test_sglang_rows(path):
    z = golden(f"index/{path}")
    got = combine_swa_indices(
        i32(z["topk_indices"][:, : int(z["topk"])]),
        *(i32(z[k]) for k in ("query_pos", "query_req", "compressed_base", "swa_base", "swa_first_pos")),
        compress_ratio=int(z["compress_ratio"]),
        window=int(z["window"]),
    )
    np.testing.assert_array_equal(got.indices, z["combined_indices"])
    np.testing.assert_array_equal(got.lengths, z["combined_lens"])


# id, prefix, extend, cp, ratio (0: none), topk, rank, k, pos, topk_len, first and last SWA id, length, width, first_pos,
# workspace rows, position of the contiguous (wrong) geometry
GOLDEN_ROWS = [
    ("G1", 0, 8, 4, 4, 512, 1, 1, 5, 1, 2, 7, 7, 640, 0, 10, 1),
    ("G2", 5, 8, 4, 4, 512, 0, 1, 9, 2, 3, 12, 12, 640, 0, 16, 6),
    ("G3", 1000, 64, 8, 4, 512, 3, 2, 1019, 255, 285, 412, 383, 640, 873, 457, 1002),
    ("G4", 1000, 64, 8, 128, 8, 3, 2, 1019, 7, 27, 154, 135, 256, 873, 199, 1002),
    ("G5", 1000, 64, 8, 0, 0, 3, 2, 1019, 0, 19, 146, 128, 128, 873, 191, 1002),
    ("G6", 0, 4096, 8, 4, 512, 7, 511, 4095, 512, 4992, 5119, 640, 640, 0, 5120, 511),
    ("G7", 0, 4096, 8, 128, 32, 7, 511, 4095, 32, 4000, 4127, 160, 256, 0, 4128, 511),
    ("G8", 126, 1024, 2, 128, 8, 0, 0, 126, 0, 8, 134, 127, 256, 0, 1158, 126),
    ("G9", 126, 1024, 2, 128, 8, 1, 0, 127, 1, 8, 135, 129, 256, 0, 1158, 126),
    ("G10", 0, 2048, 2, 4, 512, 1, 1023, 2047, 512, 2432, 2559, 640, 640, 0, 2560, 1023),
    ("G11", 0, 4, 4, 4, 512, 3, 0, 3, 1, 1, 4, 5, 640, 0, 5, 0),
]


@pytest.mark.parametrize("row", GOLDEN_ROWS, ids=[r[0] for r in GOLDEN_ROWS])
def test_hard_case_rows(row):
    _, prefix, extend, cp, ratio, topk, rank, k, pos, topk_len, first, last, length, width, first_pos, rows, wrong = row
    seq = prefix + extend
    gather_len = min(seq, extend + 127)
    c_max = max(seq // ratio, 1) if ratio else 0
    assert pos == prefix + rank + cp * k and wrong == prefix + k
    assert first_pos == seq - gather_len and rows == c_max + gather_len

    def combine(pos):
        return combine_swa_indices(
            jnp.arange(topk, dtype=jnp.int32)[None],
            *(i32([x]) for x in (pos, 0, 0, c_max, first_pos)),
            compress_ratio=ratio,
        )

    got = combine(pos)
    want = [*range(topk_len), *range(first, last + 1)]
    assert got.indices.shape == (1, width) and got.lengths[0] == length == len(want)
    np.testing.assert_array_equal(got.indices[0], want + [-1] * (width - length))
    if wrong != pos:
        assert not np.array_equal(combine(wrong).indices, got.indices)


@pytest.mark.parametrize("row", GOLDEN_ROWS, ids=[r[0] for r in GOLDEN_ROWS])
def test_hard_case_rows_of_every_rank(row):
    """The first, a middle and the last local row of every rank, against the formula at that row's own position."""
    _, prefix, extend, cp, ratio, topk, *_ = row
    first_pos = max(0, prefix - 127)
    c_max = max((prefix + extend) // ratio, 1) if ratio else 0
    k = np.array([0, (extend // cp) // 2, extend // cp - 1])
    pos = (prefix + np.arange(cp)[:, None] + cp * k).reshape(-1)
    entries = np.broadcast_to(np.arange(topk), (len(pos), topk))
    got = combine_swa_indices(
        i32(entries), i32(pos), i32(0 * pos), i32([0]), i32([c_max]), i32([first_pos]), compress_ratio=ratio
    )
    for t, p in enumerate(pos):
        want, length = combine_row(entries[t], p, 0, [0], [c_max], [first_pos], ratio, got.indices.shape[1])
        np.testing.assert_array_equal(got.indices[t], want)
        assert got.lengths[t] == length


@st.composite
def batches(draw):
    num_reqs = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 12))
    topk = draw(st.sampled_from([0, 1, 5, 128, 200]))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    return dict(
        topk=np.where(rng.random((rows, topk)) < 0.2, -1, rng.integers(0, 1000, (rows, topk))),
        pos=rng.integers(0, draw(st.sampled_from([4, 130, 5000])), rows),
        req=rng.integers(-1, num_reqs + 1, rows),  # -1: padding; num_reqs: past the last request
        bases=rng.integers(0, 10**6, (3, num_reqs)),
        ratio=draw(st.sampled_from([1, 4, 128])),
        window=draw(st.sampled_from([1, 7, 128])),
    )


@given(batches())
def test_matches_the_formula(b):
    topk = b["topk"].shape[1]
    bases = b["bases"].copy()
    bases[2] = np.minimum(bases[2], 3)  # first positions
    got = combine_swa_indices(
        i32(b["topk"]), i32(b["pos"]), i32(b["req"]), *map(i32, bases), compress_ratio=b["ratio"], window=b["window"]
    )
    width = -(-(topk + b["window"]) // 128) * 128
    for t in range(len(b["pos"])):
        want, length = combine_row(b["topk"][t], b["pos"][t], b["req"][t], *bases, b["ratio"], width, b["window"])
        np.testing.assert_array_equal(got.indices[t], want)
        assert got.lengths[t] == length


def test_holes_stay_holes():
    """Hard case 6: [7, -1, 3, -1] plus base 1000 is [1007, -1, 1003, -1]; row 999 is never named."""
    got = combine_swa_indices(i32([[7, -1, 3, -1]]), *(i32([x]) for x in (600, 0, 1000, 5000, 473)), compress_ratio=4)
    np.testing.assert_array_equal(got.indices[0, :4], [1007, -1, 1003, -1])
    assert got.lengths[0] == 4 + 128 and (got.indices[0, 132:] == -1).all() and 999 not in np.asarray(got.indices)


@pytest.mark.parametrize("topk", [0, 3, 40])
def test_every_entry_form(topk):
    """topk_indices None is entry j = j."""
    rest = [i32([0, 127, 1000, 5000, 9]), i32([0, 1, 0, 1, -1]), i32([10, 900]), i32([2000, 3000]), i32([0, 5])]
    got = combine_swa_indices(None, *rest, compress_ratio=128, topk=topk)
    entries = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32), (5, topk))
    want = combine_swa_indices(entries, *rest, compress_ratio=128)
    np.testing.assert_array_equal(got.indices, want.indices)
    np.testing.assert_array_equal(got.lengths, want.lengths)


def test_strange_positions_select_nothing_strange():
    """A position outside any sequence is the caller's fault, but never a length outside 0..width or an id from nowhere."""
    pos = i32([-(2**31), -5, -1, 2**31 - 1])
    got = combine_swa_indices(
        jnp.zeros((4, 2), jnp.int32), pos, i32([0] * 4), i32([0]), i32([9]), i32([0]), compress_ratio=4
    )
    assert (got.lengths == 0).all() and (got.indices == -1).all()


def test_no_requests():
    none, rows = jnp.zeros(0, jnp.int32), i32([0, 3])
    got = combine_swa_indices(jnp.zeros((2, 4), jnp.int32), rows, rows, none, none, none, compress_ratio=4)
    assert got.indices.shape == (2, 256) and (got.indices == -1).all() and (got.lengths == 0).all()


@pytest.mark.parametrize("rows", [0, 1, 70000, 131072])
def test_row_counts(rows):
    pos = jnp.arange(rows, dtype=jnp.int32)
    got = combine_swa_indices(
        jnp.zeros((rows, 2), jnp.int32), pos, jnp.zeros_like(pos), i32([0]), i32([9]), i32([0]), compress_ratio=4
    )
    assert got.indices.shape == (rows, 256) and got.lengths.shape == (rows,)
    if rows:
        assert got.indices[-1, got.lengths[-1] - 1] == 9 + rows - 1


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(query_pos=jnp.zeros((3, 1), jnp.int32)), r"`query_pos` must have shape \[rows\], got \(3, 1\)"),
        (dict(query_req=jnp.zeros(2, jnp.int32)), r"`query_req` must have shape \[rows=3\], got \(2,\)"),
        (dict(query_req=jnp.zeros(3, jnp.float32)), r"`query_req` must have dtype int32, got float32"),
        (dict(compressed_base=jnp.zeros(2, jnp.int32)), r"`compressed_base` must have shape \[num_reqs=1\]"),
        (dict(topk_indices=jnp.zeros((2, 4), jnp.int32)), r"`topk_indices` must have shape \[rows=3, topk\]"),
        (dict(topk=5), r"`topk_indices` must have shape \[rows=3, topk=5\], got \(3, 4\)"),
        (dict(topk_indices=None), r"`topk` must be an int >= 0, got None"),
        (dict(topk_indices=None, topk=4.0), r"`topk` must be an int >= 0, got 4.0"),
        (dict(compress_ratio=0), r"`compress_ratio` must be an int >= 1, got 0"),
        (dict(compress_ratio=None), r"`compress_ratio` must be an int >= 1, got None"),
        (dict(window=0), r"`window` must be an int >= 1, got 0"),
    ],
)
def test_bad_arguments(change, message):
    one, three = jnp.zeros(1, jnp.int32), jnp.zeros(3, jnp.int32)
    kwargs = dict(
        topk_indices=jnp.zeros((3, 4), jnp.int32),
        query_pos=three,
        query_req=three,
        compressed_base=one,
        swa_base=one,
        swa_first_pos=one,
        compress_ratio=4,
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: combine_swa_indices(**(kwargs | change)))
