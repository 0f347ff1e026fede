"""Every message on the troubleshooting page is raised, word for word, by what the page says it comes from."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_cp_jax import DSAConfig, KVPool, PrefillChunk, dsa_prefill_attention, make_plan, validate
from dsa_cp_jax.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from pallas_kernels import KVLayout, gather_dequant, paged_mla_attention, sparse_mla_attention

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "troubleshooting.md"
MESSAGES = re.findall(r"```text\n(.*)\n```", PAGE.read_text())
CONFIG = DSAConfig.tiny()


def sparse(dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, h_q=2, index=np.int32, sm_scale=1.0, implementation=None):
    q, kv, indices = jnp.zeros((2, h_q, 512), dtype), jnp.zeros((9, 512), kv_dtype), np.zeros((2, 3), index)
    return sparse_mla_attention(q, kv, indices, sm_scale=sm_scale, implementation=implementation)


def chunk(seq_len=64, extend=64, capacity=64, slots=64, cp_size=4, swa=None, tables=None):
    return PrefillChunk.build(
        seq_lens=[seq_len], extend_lens=[extend], req_pool_indices=[0], req_to_token=np.arange(slots)[None],
        full_to_swa=np.arange(slots) if swa is None else swa, page_tables=tables or {}, token_capacity=capacity,
        cp_size=cp_size,
    )  # fmt: skip


def enter(kind="c0", rows=64, cp_size=4, path="auto", **kwargs):
    pool = KVPool.zeros(4, layout=KVLayout.V4, page_size=CONFIG.swa_page_size)
    c4 = KVPool.zeros(4, layout=KVLayout.V4, page_size=CONFIG.c4_page_size) if kind == "c4" else None
    plan = make_plan(chunk(tables={4: np.zeros((1, 4), int)}, **kwargs), CONFIG, cp_size=cp_size)
    mesh = jax.make_mesh((4,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])
    q = jnp.zeros((rows, CONFIG.h_q, 512))
    return dsa_prefill_attention(q, plan, pool, c4, kind=kind, config=CONFIG, mesh=mesh, path=path)


def hole(position: int) -> np.ndarray:
    slots = np.arange(64)
    slots[position] = -1
    return slots


PAGES = jnp.zeros((2, 37440), jnp.uint8)
RAISE = [
    lambda: sparse(index=np.int64),
    lambda: sparse(kv_dtype=jnp.float32),
    lambda: gather_dequant(PAGES[:, :37376], jnp.zeros(1, jnp.int32), layout=KVLayout.V4, page_size=64),
    lambda: paged_mla_attention(
        jnp.zeros((1, 2, 576)), PAGES, jnp.zeros((1, 3), jnp.int32), layout=KVLayout.V4, page_size=64, sm_scale=1.0
    ),
    lambda: jax.jit(lambda scale: sparse(sm_scale=scale))(1.0),
    lambda: sparse(h_q=160, implementation="mosaic_gpu"),
    lambda: sparse(jnp.float32, jnp.float32, implementation="mosaic_gpu"),
    lambda: sparse(implementation="mosaic_gpu"),
    lambda: chunk(capacity=130),
    lambda: chunk(seq_len=70, extend=70, slots=80),
    lambda: chunk(seq_len=50, extend=60),
    lambda: chunk(seq_len=70, extend=60),
    lambda: chunk(swa=hole(3)),
    lambda: enter(rows=60),
    lambda: enter("c4"),
    lambda: enter(cp_size=1),
    lambda: enter(seq_len=200, extend=10, slots=200, swa=np.where(np.arange(200) < 190, -1, np.arange(200) - 190)),
    lambda: enter(seq_len=63, extend=63, path="sparse"),
    lambda: flash_mla_with_kvcache(None, None, None, None, 512, None),
    lambda: validate.pick_devices(64),
]


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"torch is not installed: .* JAX arrays go to pallas_kernels"):
        flash_mla_sparse_fwd(*[np.zeros(1)] * 3, 1.0)


def test_as_many_as_there_are():
    assert len(MESSAGES) == len(RAISE) == 20


@pytest.mark.parametrize("message, cause", [*zip(MESSAGES, RAISE)], ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_message(message, cause):
    with pytest.raises(Exception) as raised:
        cause()
    assert str(raised.value) == message
