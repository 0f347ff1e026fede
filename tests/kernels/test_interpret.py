"""Which implementation runs: the interpreter with its default parameters, and what the device decides."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVLayout, combine_swa_indices, common, gather_dequant, quantize_pages, sparse_mla_attention


def test_interpret_true(rng):
    pages = quantize_pages(rng.standard_normal((2, 4, 512)).astype(np.float32), layout=KVLayout.V4, page_size=4)
    slots = jnp.array([7, -1, 0], jnp.int32)
    one = jnp.array([5], jnp.int32)
    q = jnp.asarray(rng.standard_normal((1, 2, 512)), jnp.bfloat16)
    calls = [
        lambda **how: gather_dequant(pages, slots, layout=KVLayout.V4, page_size=4, **how),
        lambda **how: combine_swa_indices(None, one, one * 0, one, one, one * 0, compress_ratio=4, topk=3, **how),
        lambda **how: sparse_mla_attention(
            q, gather_dequant(pages, slots, layout=KVLayout.V4, page_size=4), slots[None], sm_scale=0.1, **how
        ),
    ]
    for call in calls:
        got, want = call(interpret=True), call(implementation="xla")
        for a, b in zip(got, want) if isinstance(got, tuple) else [(got, want)]:
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=8e-4, rtol=2e-2)


def test_the_device_decides(monkeypatch):
    """Mosaic kernels for what lies on a Hopper GPU, or where new arrays go to one; plain JAX for all else."""

    class Device:
        platform, compute_capability = "gpu", "9.0"

    x = jnp.zeros(3)
    monkeypatch.setattr(jax, "devices", lambda platform=None: [Device] if platform in (None, "gpu") else ["cpu"])
    for default, hopper in ((None, True), ("gpu", True), ("cpu", False)):
        with jax.default_device(default):
            assert common.runs_on_hopper() is hopper and not common.runs_on_hopper(x)  # x lies on the CPU
