"""Compiles functions for H200s that need not be there, down to machine code.

Needs the packages jax-cuda13-plugin and jax-cuda13-pjrt (of the installed jax's version) and a ptxas on PATH, and
JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 in the environment.
"""

import importlib.util
import math
import os
import pathlib
import re
import shutil

import jax
import numpy as np
from jax.experimental import topologies

TARGET = pathlib.Path(__file__).with_name("h200_target_config.txt")


def put_ptxas_on_path() -> None:
    """Appends the bin folder of the package nvidia-cuda-nvcc, if it is installed, to PATH."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for ptxas in pathlib.Path(folder).glob("cu*/bin/ptxas"):
            os.environ["PATH"] += os.pathsep + str(ptxas.parent)


def missing_for_aot() -> str | None:
    """What this machine lacks for ahead-of-time compilation, or None."""
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "the package jax-cuda13-plugin"
    return None if shutil.which("ptxas") else "ptxas"


def h200_mesh(shape=(1,), axis_names=("x",), axis_types=None) -> jax.sharding.Mesh:
    """A mesh of H200s of one host, for NamedSharding and jax.shard_map."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=f"1x1x{math.prod(shape)}"
    )
    return jax.sharding.Mesh(np.array(topology.devices).reshape(shape), axis_names, axis_types=axis_types)


def assert_few_spills(ptxas_log: str, most: int) -> None:
    """Of a MOSAIC_GPU_DUMP_PTXAS log: at most `most` bytes spilled, and no wgmma that ptxas serialises (C7510 to C7518)."""
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", ptxas_log)]
    assert stores and max(stores) <= most, ptxas_log
    assert not re.search(r"C751[0-8]|instructions are serialized", ptxas_log), ptxas_log


def compile_for_h200(fn, *args):
    """Compiles `fn` for the given ShapeDtypeStructs: all with a sharding over one `h200_mesh`, or none (one GPU).

    Returns the compiled object (memory_analysis(), cost_analysis(), as_text()).
    """
    if all(a.sharding is None for a in args):
        sharding = jax.sharding.NamedSharding(h200_mesh(), jax.sharding.PartitionSpec())
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args]
    return jax.jit(fn).lower(*args).compile()
