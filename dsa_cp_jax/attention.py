"""dsa_prefill_attention: the one entry. Gate, shard_map, specs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dsa_cp_jax.chunk import ChunkPlan, visible_entries
from dsa_cp_jax.config import DSAConfig, compress_ratio
from dsa_cp_jax.kv_cache import KVPool, check_pool
from dsa_cp_jax.paths import dense_prefill, sparse_prefill
from dsa_cp_jax.round_robin import rank_rows
from pallas_kernels.common import check_array, check_type, match_varying

PATHS = ("auto", "sparse", "dense")


def _check(q, plan: ChunkPlan, swa_pool, compressed_pool, topk_indices, attn_sink, *, rows, h_q, kind, config, path):
    """Checks of both entries: everything that shapes, dtypes and statics tell, and values that are not traced."""
    ratio = compress_ratio(kind)
    if config != plan.config:
        fields = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(plan.config, f.name)]
        raise ValueError(f"`config` must be the one that `plan` was made with, they differ in: {', '.join(fields)}.")
    if path not in PATHS:
        raise ValueError(f"`path` must be one of {', '.join(map(repr, PATHS))}, got {path!r}.")
    came, _, _ = check_array("q", q, (jnp.bfloat16, jnp.float32), rows=None, h_q=h_q, d_qk=config.d_qk)
    if came != rows:
        raise ValueError(
            f"`q` must have {rows} rows (token_capacity={plan.token_capacity}, cp_size={plan.cp_size}; "
            f"split_round_robin of the chunk padded to its capacity), got {came}."
        )
    pools = [("swa_pool", swa_pool, config.swa_page_size)]
    if not ratio:
        for name, value in (("compressed_pool", compressed_pool), ("topk_indices", topk_indices)):
            if value is not None:
                raise ValueError(f"`{name}` must be None for a c0 layer (SWA only), got a value.")
    else:
        if compressed_pool is None:
            raise ValueError(f"`compressed_pool` must be given for a {kind} layer, got None.")
        if kind not in plan.compressed:
            raise ValueError(f"`plan` must be made from page_tables[{ratio}] for a {kind} layer, its chunk has none.")
        pools.append(("compressed_pool", compressed_pool, config.compressed_page_size(kind)))
        if kind == "c4" and topk_indices is None:
            raise ValueError("`topk_indices` must be given for a c4 layer, got None.")
        if kind == "c128" and topk_indices is not None:
            raise ValueError("`topk_indices` must be None for a c128 layer (it attends to every entry), got a value.")
    for name, pool, page_size in pools:
        check_pool(name, pool, page_size, config.d_qk)
    if topk_indices is not None:
        check_array("topk_indices", topk_indices, jnp.int32, rows=rows, topk=None)
    if attn_sink is not None:
        check_array("attn_sink", attn_sink, jnp.float32, h_q=h_q)
    if isinstance(plan.use_sparse, jax.core.Tracer):
        return
    if plan.overflow:
        raise ValueError(
            "`plan` must fit its capacities, and every key that the chunk sees must have a slot (`validate_chunk` says "
            "which one has none), got plan.overflow=True."
        )
    if path == "sparse" and not plan.use_sparse:
        raise ValueError(
            "`path='sparse'` must not be forced on a chunk that the gate sends to the dense path "
            f"(num_reqs={int(plan.chunk.num_reqs)}, num_tokens={int(plan.num_tokens)}, cp_size={plan.cp_size})."
        )
    regions = [plan.swa] if not ratio else [plan.swa, plan.compressed[kind]]
    for (name, pool, _), region in zip(pools, regions):
        highest = int(np.asarray(region.slots).max(initial=-1))  # NumPy: this may be traced, with a plan that is not
        if highest >= pool.num_slots:
            raise ValueError(f"`{name}` must hold slot {highest} of the chunk's KV, got {pool.num_slots} slots.")


def check_cp(plan: ChunkPlan, cp_axis: str | None):
    """This rank's number on `cp_axis`, 0 without one; ValueError unless the plan is made for an axis of that size."""
    check_type("plan", plan, ChunkPlan)
    cp_size, cp_rank = 1, 0
    if cp_axis is not None:
        try:
            cp_size, cp_rank = lax.axis_size(cp_axis), lax.axis_index(cp_axis)
        except NameError:
            raise ValueError(f"`cp_axis` must be a manual axis of a surrounding shard_map, got {cp_axis!r}.") from None
    if cp_size != plan.cp_size:
        raise ValueError(f"`plan` must be made for cp_size={cp_size} (axis {cp_axis!r}), got cp_size={plan.cp_size}.")
    return cp_rank


def hide_unseen(topk_indices: jax.Array, query_pos: jax.Array, kind: str) -> jax.Array:
    """topk_indices [rows, topk] int32, -1 for each entry that its query must not see, whatever the indexer says.

    Args:
      query_pos: [rows] int32 positions of the queries.
      kind: "c4".
    """
    return jnp.where(topk_indices < visible_entries(query_pos, kind)[:, None], topk_indices, -1)


def dsa_prefill_attention_local(
    q,
    plan: ChunkPlan,
    swa_pool: KVPool,
    compressed_pool: KVPool | None = None,
    topk_indices=None,
    attn_sink=None,
    *,
    kind: str,
    config: DSAConfig,
    cp_axis: str | None = "cp",
    path: str = "auto",
    implementation=None,
    interpret=False,
) -> jax.Array:
    """`dsa_prefill_attention` for one rank, inside the caller's own shard_map. No collective is in it.

    Args:
      q: [token_capacity / cp_size, h, d_qk], this rank's rows: local row k is chunk row cp_rank + cp_size * k. h may be
        a rank's slice of the heads.
      plan, swa_pool, compressed_pool: replicated over cp_axis.
      topk_indices: [token_capacity / cp_size, topk] int32, this rank's rows (c4 only).
      attn_sink: [h] float32, or None.
      cp_axis: manual mesh axis of the ranks; None: no context parallelism (plan.cp_size is 1), no shard_map needed.
      kind, config, path, implementation, interpret: as in `dsa_prefill_attention`.

    Returns:
      [token_capacity / cp_size, h, d_v] in q's dtype; 0 in padding and slack rows.

    Raises:
      ValueError: as `dsa_prefill_attention`, or an axis whose size is not plan.cp_size.
    """
    cp_rank = check_cp(plan, cp_axis)
    check_type("config", config, DSAConfig)
    cp_size = plan.cp_size
    _check(
        q,
        plan,
        swa_pool,
        compressed_pool,
        topk_indices,
        attn_sink,
        rows=plan.token_capacity // cp_size,
        h_q=None,
        kind=kind,
        config=config,
        path=path,
    )
    query_pos, query_req = (rank_rows(x, cp_size, cp_rank) for x in (plan.query_pos, plan.query_req))
    if topk_indices is not None:
        topk_indices = hide_unseen(topk_indices, query_pos, kind)

    def run(prefill):
        out = prefill(
            q,
            query_pos,
            query_req,
            plan,
            swa_pool,
            compressed_pool,
            topk_indices,
            attn_sink,
            kind=kind,
            config=config,
            implementation=implementation,
            interpret=interpret,
        )
        return match_varying(out, q, query_pos, swa_pool.pages)

    if path == "auto":
        return lax.cond(plan.use_sparse, lambda: run(sparse_prefill), lambda: run(dense_prefill))
    return run(sparse_prefill if path == "sparse" else dense_prefill)


def dsa_prefill_attention(
    q,
    plan: ChunkPlan,
    swa_pool: KVPool,
    compressed_pool: KVPool | None = None,
    topk_indices=None,
    attn_sink=None,
    *,
    kind: str,
    config: DSAConfig,
    mesh: Mesh,
    cp_axis: str = "cp",
    head_axis: str | None = None,
    path: str = "auto",
    implementation=None,
    interpret=False,
) -> jax.Array:
    """Attention of a prefill chunk over its window and its compressed KV, under round-robin context parallelism.

    Every row attends to the last swa_window positions of its request and (c4) to the entries that topk_indices names or
    (c128) to all compressed entries so far, never to a later token. The pools hold the chunk's own KV already. The gate
    (plan.use_sparse) chooses between the sparse and the dense path inside the computation; lengths never recompile.

    Rows are in RANK order: `split_round_robin` of the token_capacity rows in chunk order; `merge_round_robin` of the
    result is chunk order again. Nothing is communicated.

    Args:
      q: [token_capacity, h_q, d_qk] bfloat16 or float32; P(cp_axis, head_axis).
      plan: from `make_plan`; P().
      swa_pool: the SWA pool, page_size config.swa_page_size; P().
      compressed_pool: the pool of the layer's compressed KV, None for c0; P().
      topk_indices: [token_capacity, topk] int32 entries, request-local, any topk; c4 only; P(cp_axis). Of a row at
        position pos the first min((pos + 1) // 4, topk) columns count, as many as there are entries to see, in any
        order: a selection has to stand first. There -1 is none, and so is an entry that the query must not see.
      attn_sink: [h_q] float32, natural units, or None; P(head_axis).
      kind: "c0" (SWA only), "c4" (CSA) or "c128" (HCA).
      config: the model's DSAConfig.
      mesh: the mesh; all its axes become manual, so axes beside cp_axis and head_axis see replicas.
      cp_axis: mesh axis of the ranks; its size must be plan.cp_size.
      head_axis: mesh axis that heads are split over, or None.
      path: "auto" takes the gate. A model should rather take the gate once around its layers, with
        `lax.cond(plan.use_sparse, ...)`, and say "sparse" and "dense" in the branches. "sparse" on a chunk that the
        gate refuses raises where the plan is concrete. Under jit that cannot be seen: then the sparse path runs, and is
        right as long as plan.overflow is False, because every row carries its own request and position.
      implementation: None, "xla" or "mosaic_gpu", for every op.
      interpret: run the Mosaic kernels in Pallas' interpreter on CPU.

    Returns:
      [token_capacity, h_q, d_v] in q's dtype, rank order, P(cp_axis, head_axis); 0 in padding and slack rows.

    Raises:
      ValueError: naming the argument: unknown kind or path, a wrong shape, dtype, page size or row count, a missing
        mesh axis, pool or top-k, a cp_size or config that differs from the plan's; where the plan is concrete, also a
        chunk that overflows its capacities or a pool.
      NotImplementedError: "mosaic_gpu" was named and a kernel does not serve the arguments.
    """
    check_type("plan", plan, ChunkPlan)
    check_type("config", config, DSAConfig)
    check_type("mesh", mesh, Mesh, AbstractMesh)
    if head_axis is not None and head_axis == cp_axis:
        raise ValueError(f"`head_axis` must be another axis than `cp_axis`, got {head_axis!r} for both.")
    for name, axis in (("cp_axis", cp_axis), ("head_axis", head_axis)):
        if axis not in mesh.shape and not (name == "head_axis" and axis is None):
            raise ValueError(f"`{name}` must be an axis of `mesh` {tuple(mesh.shape)}, got {axis!r}.")
    if mesh.shape[cp_axis] != plan.cp_size:
        raise ValueError(f"`plan` must be made for cp_size={mesh.shape[cp_axis]} (`mesh`), got cp_size={plan.cp_size}.")
    if head_axis is not None and config.h_q % mesh.shape[head_axis]:
        raise ValueError(f"`head_axis` of size {mesh.shape[head_axis]} must divide h_q={config.h_q}.")
    args = (q, plan, swa_pool, compressed_pool, topk_indices, attn_sink)
    _check(*args, rows=plan.token_capacity, h_q=config.h_q, kind=kind, config=config, path=path)
    return _sharded(
        *args,
        mesh=mesh,
        cp_axis=cp_axis,
        head_axis=head_axis,
        kind=kind,
        config=config,
        path=path,
        implementation=implementation,
        interpret=interpret,
    )


@functools.partial(
    jax.jit,
    static_argnames=("mesh", "cp_axis", "head_axis", "kind", "config", "path", "implementation", "interpret"),
)
def _sharded(*args, mesh: Mesh, cp_axis: str, head_axis: str | None, **statics):
    # Under jit, because an eager shard_map runs operation by operation.
    P = PartitionSpec
    specs = (P(cp_axis, head_axis), P(), P(), P(), P(cp_axis), P(head_axis))
    args = tuple(_place(arg, mesh, spec) for arg, spec in zip(args, specs))
    local = functools.partial(dsa_prefill_attention_local, cp_axis=cp_axis, **statics)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(cp_axis, head_axis))(*args)


def _place(tree, mesh: Mesh, spec: PartitionSpec):
    """`tree` with its Explicit mesh axes sharded as `spec` says; XLA itself sees to Auto ones."""
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    if not explicit:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec(*(name if name in explicit else None for name in spec)))
    return jax.tree.map(lambda x: jax.reshard(x, sharding), tree)
