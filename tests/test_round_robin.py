"""Round-robin geometry: split, merge, ranks, positions."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType

from dsa_cp_jax import merge_round_robin, query_start_loc, split_round_robin
from dsa_cp_jax.round_robin import rank_rows
from tests.helpers.world import cpu_mesh


@given(n=st.integers(0, 70), cp=st.integers(1, 9), width=st.integers(0, 3))
def test_merge_inverts_split(n, cp, width):
    x = jnp.arange(n * width).reshape(n, width)
    y = split_round_robin(x, cp)
    assert y.shape == (cp * -(-n // cp), width)
    np.testing.assert_array_equal(merge_round_robin(y, cp, n), x)


@given(n=st.integers(0, 70), cp=st.integers(1, 9))
def test_rank_order(n, cp):
    """Row r * rows + k of the split is chunk row r + cp k, zero past n."""
    x = np.arange(1, n + 1)
    y = np.asarray(split_round_robin(jnp.asarray(x), cp)).reshape(cp, -(-n // cp))
    for r in range(cp):
        for k in range(y.shape[1]):
            g = r + cp * k
            assert y[r, k] == (x[g] if g < n else 0)
    padded = jnp.pad(jnp.asarray(x), (0, -n % cp))
    for r in range(cp):
        np.testing.assert_array_equal(rank_rows(padded, cp, jnp.int32(r)), y[r])


@given(lens=st.lists(st.integers(0, 9), min_size=1, max_size=5), cp=st.integers(1, 8))
def test_query_start_loc_counts_rows(lens, cp):
    req = np.repeat(np.arange(len(lens)), lens)
    for r in range(cp):
        counts = np.bincount(req[r::cp], minlength=len(lens))
        np.testing.assert_array_equal(jnp.diff(query_start_loc(jnp.asarray(lens), cp, r)), counts)


def test_last_token_survives_padding():
    """Prefix 1, extend 7, cp 2: the seventh token sits on rank 0; rank 1 ends in a padding row."""
    y = split_round_robin(jnp.arange(1, 8), 2)
    np.testing.assert_array_equal(y, [1, 3, 5, 7, 2, 4, 6, 0])
    assert merge_round_robin(y, 2, 7)[-1] == 7


@pytest.mark.parametrize("jit", [False, True])
def test_explicit_axes(jit):
    """Rows that are sharded over an Explicit axis can be split and merged, too."""
    mesh = cpu_mesh((4,), ("cp",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.arange(24).reshape(12, 2), jax.NamedSharding(mesh, jax.P("cp")))

    def there_and_back(x):
        return merge_round_robin(split_round_robin(x, 4), 4, 12)

    np.testing.assert_array_equal((jax.jit(there_and_back) if jit else there_and_back)(x), x)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: split_round_robin(jnp.zeros(4), 0), "`cp_size` must be an int >= 1, got 0"),
        (lambda: split_round_robin(jnp.zeros(4), 2.0), "`cp_size` must be an int >= 1, got 2.0"),
        (lambda: split_round_robin([1, 2], 2), r"`x` must be an array \[rows, ...\], got \[1, 2\]"),
        (lambda: merge_round_robin(jnp.zeros(()), 2, 1), r"`x` must be an array \[rows, ...\], got \(\)"),
        (lambda: query_start_loc(jnp.zeros(3, jnp.int32), 0, 0), "`cp_size` must be an int >= 1, got 0"),
        (lambda: split_round_robin(np.array([2**40]), 2), "`x` must have a dtype that JAX keeps, got int64, .* int32"),
        (lambda: merge_round_robin(np.zeros(2), 2, 1), "`x` must have a dtype that JAX keeps, got float64, .* float32"),
        (lambda: query_start_loc(jnp.zeros(3, jnp.int32), 4, 4), r"`cp_rank` must be in 0..3, got 4"),
        (lambda: query_start_loc(jnp.zeros(3, jnp.int32), 4, -1), "`cp_rank` must be an int >= 0, got -1"),
        (lambda: query_start_loc(jnp.zeros(3, jnp.int32), 4, jnp.float32(1)), "`cp_rank` must have dtype int32"),
        (lambda: merge_round_robin(jnp.zeros(5), 2, 5), "`x` must have a row count divisible by cp_size=2, got 5 rows"),
        (lambda: merge_round_robin(jnp.zeros(4), 2, 5), r"`n` must be in 0..4 \(the rows of `x`\), got 5"),
        (lambda: merge_round_robin(jnp.zeros(4), 2, -1), r"`n` must be an int >= 0, got -1"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
