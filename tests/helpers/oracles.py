"""NumPy float64 oracles, written from the formulas of the specification, and the comparison rule of FlashMLA."""

import json
import pathlib

import ml_dtypes
import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
BF16 = ml_dtypes.bfloat16


def golden(path: str) -> dict:
    """The arrays of a golden file; bfloat16 bit patterns (uint16) as bfloat16, `meta` parsed."""
    with np.load(GOLDEN / path) as z:
        arrays = {k: z[k] for k in z.files}
    for name in ("q", "kv", "out"):
        if name in arrays and arrays[name].dtype == np.uint16:
            arrays[name] = arrays[name].view(BF16)
    if "meta" in arrays:
        arrays["meta"] = json.loads(str(arrays["meta"]))
    return arrays


def attention(q, keys, sm_scale: float, sink=None, d_v: int = 512, *, counts=None, absolute=False):
    """One row: q [h, d_qk], keys [n, d_qk] the valid ones. Returns out [h, d_v], max_logits and lse [h] in float64.

    `counts` [n]: how many times each key is selected (default: once). With `absolute`, out is the weighted sum of the
    values' magnitudes.
    """
    q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
    if len(keys) == 0:
        h = len(q)
        return np.zeros((h, d_v)), np.full(h, -np.inf), np.full(h, np.inf)
    logits = q @ keys.T * sm_scale
    max_logits = logits.max(1)
    counts = np.ones(len(keys)) if counts is None else counts
    lse = max_logits + np.log(np.exp(logits - max_logits[:, None]) @ counts)
    share = 1.0
    if sink is not None:
        sink = np.asarray(sink, np.float64)
        share = np.where(sink < np.inf, 1 / (1 + np.exp(np.minimum(sink - lse, 700.0))), 0.0)[:, None]
    values = np.abs(keys[:, :d_v]) if absolute else keys[:, :d_v]
    return counts * np.exp(logits - lse[:, None]) @ values * share, max_logits, lse


def sparse_attention(q, kv, indices, sm_scale, topk_length=None, sink=None, d_v: int = 512):
    """`sparse_mla_attention`, row by row."""
    kv, s_kv, rows = np.asarray(kv), len(kv), []
    for t, row in enumerate(np.asarray(indices)):
        n = len(row) if topk_length is None else int(np.clip(topk_length[t], 0, len(row)))
        row, counts = np.unique(row[:n], return_counts=True)
        valid = (row >= 0) & (row < s_kv)
        rows.append(attention(q[t], kv[row[valid]], sm_scale, sink, d_v, counts=counts[valid]))
    return (
        tuple(np.stack(x) for x in zip(*rows))
        if rows
        else (np.zeros((0, q.shape[1], d_v)),) + 2 * (np.zeros((0, q.shape[1])),)
    )


def read_row(page_bytes: np.ndarray, token: int, page_size: int, layout: str) -> np.ndarray:
    """Dequantised row `token` of one page, byte by byte from the table of the specification (float32 values)."""
    page = page_bytes.tobytes()
    if layout == "V4":
        data, scale = page[token * 576 : token * 576 + 576], page[page_size * 576 + token * 8 :][:7]
        values = np.frombuffer(data[:448], ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(7, 64)
        factors = np.array([np.nan if b == 255 else 2.0 ** (b - 127) for b in scale])
        rope = np.frombuffer(data[448:], BF16)
    elif layout == "V32":
        data = page[token * 656 : token * 656 + 656]
        values = np.frombuffer(data[:512], ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(4, 128)
        factors = np.frombuffer(data[512:528], np.float32).astype(np.float64)
        rope = np.frombuffer(data[528:], BF16)
    else:
        width, dtype = {"BF16": (1024, BF16), "F32": (2048, np.float32)}[layout]
        return np.frombuffer(page[token * width : (token + 1) * width], dtype).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        nope = (values * factors[:, None]).reshape(-1).astype(np.float32).astype(BF16)
    return np.concatenate([nope, rope]).astype(np.float32)


def combine_row(topk, pos, req, compressed_base, swa_base, first_pos, ratio, width, window=128):
    """One combined row and its length: the formula of the specification."""
    row = np.full(width, -1, np.int64)
    if not 0 <= req < len(swa_base):
        return row, 0
    topk_len = min((pos + 1) // ratio, len(topk)) if len(topk) else 0
    swa_len = min(pos + 1, window)
    for j in range(topk_len):
        row[j] = topk[j] + compressed_base[req] if topk[j] >= 0 else -1
    for j in range(swa_len):
        row[topk_len + j] = swa_base[req] + (pos - swa_len + 1 - first_pos[req]) + j
    return row, topk_len + swa_len


def one_hot_kv(s_kv: int, d: int = 512):
    """kv[j, j % 512] = 1: with q = 0 every valid key weighs 1/n and names itself in the output."""
    kv = np.zeros((s_kv, d), np.float32)
    kv[np.arange(s_kv), np.arange(s_kv) % 512] = 1
    return kv


def one_hot_out(valid_ids, n=None) -> np.ndarray:
    """The output row that `one_hot_kv` gives for these valid keys (bfloat16)."""
    valid_ids = np.asarray(valid_ids)
    return (np.bincount(valid_ids % 512, minlength=512) / (n or len(valid_ids))).astype(BF16)


def assert_close(name: str, got, want, *, abs_tol: float, rel_tol: float, cosine: float | None = None):
    """FlashMLA's rule: infinities equal first; then per element abs error < abs_tol or error / |want| < rel_tol."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    for infinity in (np.inf, -np.inf):
        np.testing.assert_array_equal(got == infinity, want == infinity, err_msg=f"{name}: {infinity}")
    finite = np.isfinite(want)
    got, want = got[finite], want[finite]
    error = np.abs(got - want)
    bad = ~((error < abs_tol) | (error / (np.abs(want) + 1e-6) < rel_tol))  # NaN is bad
    assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} elements differ, largest error {np.nanmax(error)}"
    if cosine is not None and want.size and (norm := (got**2 + want**2).sum()):
        assert 1 - 2 * (got * want).sum() / norm < cosine, f"{name}: cosine difference"


def assert_sparse_close(got, want):
    """`(out, max_logits, lse)` within the tolerances of FlashMLA's sparse prefill tests."""
    assert_close("out", got[0], want[0], abs_tol=8e-4, rel_tol=3.01 / 128, cosine=7e-6)
    assert_close("max_logits", got[1], want[1], abs_tol=1e-6, rel_tol=2.01 / 65536)
    assert_close("lse", got[2], want[2], abs_tol=1e-6, rel_tol=2.01 / 65536)


def assert_paged_close(got, want):
    """`(out, lse)` within the tolerances of FlashMLA's paged tests."""
    assert_close("out", got[0], want[0], abs_tol=1e-3, rel_tol=2.01 / 128, cosine=5e-6)
    assert_close("lse", got[1], want[1], abs_tol=1e-6, rel_tol=8.01 / 65536)
