"""A small decoder of DeepSeek-V4 attention blocks: pre-norm, gated MLP, tokens in, logits out."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsa_cp_jax.attention import dsa_prefill_attention_local
from dsa_cp_jax.chunk import ChunkPlan
from dsa_cp_jax.config import DSAConfig
from dsa_cp_jax.layers import RMSNorm
from dsa_cp_jax.modules import DSAAttention, LayerCache


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)) with MLP(y) = (silu(y Wgate) * y Wup) Wdown."""

    def __init__(self, config: DSAConfig, kind: str, mlp_size: int, *, param_dtype, rngs: nnx.Rngs):
        """Makes a layer; arguments as in `Decoder`."""
        linear = dict(use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = DSAAttention(config, kind, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate_proj = nnx.Linear(config.hidden_size, mlp_size, **linear)
        self.up_proj = nnx.Linear(config.hidden_size, mlp_size, **linear)
        self.down_proj = nnx.Linear(mlp_size, config.hidden_size, **linear)

    def __call__(self, x: jax.Array, plan: ChunkPlan, cache: LayerCache, **options) -> tuple[jax.Array, LayerCache]:
        """Runs the layer; arguments and result as in `DSAAttention`."""
        y, cache = self.attention(self.attention_norm(x), plan, cache, **options)
        x = x + y
        y = self.mlp_norm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(y)) * self.up_proj(y)), cache


class Decoder(nnx.Module):
    """A decoder over pools: embedding, layers of the given kinds, norm, output projection."""

    def __init__(
        self, config: DSAConfig, kinds: Sequence[str], *, vocab_size: int, mlp_size: int, param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        """Makes a decoder.

        Args:
          config: the model's DSAConfig.
          kinds: kind of every layer, "c0", "c4" or "c128".
          vocab_size: token ids.
          mlp_size: inner width of the MLPs.
          param_dtype: dtype of the embedding and the projections, and so of the computation.
          rngs: for the initial parameters.
        """
        self.embedding = nnx.Embed(vocab_size, config.hidden_size, param_dtype=param_dtype, rngs=rngs)
        layer = dict(param_dtype=param_dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, kind, mlp_size, **layer) for kind in kinds])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nnx.Linear(config.hidden_size, vocab_size, use_bias=False, **layer)

    def init_caches(self, *, compressed_pages: dict[str, int], **options) -> list[LayerCache]:
        """Empty caches of all layers: `DSAAttention.init_cache`, with pages of compressed pools for each layer kind."""
        return [
            layer.attention.init_cache(compressed_pages=compressed_pages.get(layer.attention.kind, 0), **options)
            for layer in self.layers
        ]

    def __call__(
        self, tokens: jax.Array, plan: ChunkPlan, caches: list[LayerCache], *,
        cp_axis: str | None = "cp", path: str = "auto", attend: Callable = dsa_prefill_attention_local,
        implementation=None, interpret=False,
    ) -> tuple[jax.Array, list[LayerCache], jax.Array]:  # fmt: skip
        """Runs a chunk, for one rank.

        Args:
          tokens: [token_capacity / cp_size] int32, this rank's rows.
          plan: from `make_plan`, replicated.
          caches: from `init_caches` or the chunk before, replicated.
          path: "auto" takes the gate here, once around the layers; "sparse" or "dense" compile that branch alone.
          cp_axis, attend, implementation, interpret: as in `DSAAttention`.

        Returns:
          logits [token_capacity / cp_size, vocab_size] float32 of this rank's rows, the new caches, and which branch
          ran: bool scalar, True is sparse.
        """

        def layers(path: str, x, caches):
            new = []
            for layer, cache in zip(self.layers, caches, strict=True):
                x, cache = layer(
                    x, plan, cache,
                    cp_axis=cp_axis, path=path, attend=attend, implementation=implementation, interpret=interpret,
                )  # fmt: skip
                new.append(cache)
            return x, new, jnp.bool_(path == "sparse")

        x = self.embedding(tokens)
        if path == "auto":
            branches = (lambda *args: layers("sparse", *args), lambda *args: layers("dense", *args))
            x, caches, ran_sparse = lax.cond(plan.use_sparse, *branches, x, caches)
        else:
            x, caches, ran_sparse = layers(path, x, caches)
        return self.head(self.norm(x)).astype(jnp.float32), caches, ran_sparse
