"""What every op shares: integer helpers, argument checks, and the choice of an implementation."""

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Implementation = Literal["xla", "mosaic_gpu"]


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for integers."""
    return -(-a // b)


def check_array(name: str, x: Any, dtype: Any, /, **dims: int | None) -> tuple[int, ...]:
    """Checks an array argument at trace time.

    Args:
      name: the argument's name in the caller's signature.
      x: the argument.
      dtype: the dtype asked for, or a tuple of those allowed.
      **dims: one keyword per dimension, in order: its symbol and its size (None: any).

    Returns:
      The shape.

    Raises:
      ValueError: naming the argument, what was expected and what came.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"`{name}` must be an array, got {type(x).__name__}.")
    if len(x.shape) != len(dims) or any(n is not None and n != m for n, m in zip(dims.values(), x.shape)):
        wanted = ", ".join(symbol if n is None else f"{symbol}={n}" for symbol, n in dims.items())
        raise ValueError(f"`{name}` must have shape [{wanted}], got {tuple(x.shape)}.")
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in [jnp.dtype(t) for t in allowed]:
        raise ValueError(f"`{name}` must have dtype {' or '.join(jnp.dtype(t).name for t in allowed)}, got {x.dtype}.")
    return tuple(x.shape)


def check_type(name: str, value: Any, *wanted: type) -> None:
    """ValueError, naming the argument, unless `value` is an instance of one of the classes `wanted`."""
    if not isinstance(value, wanted):
        raise ValueError(f"`{name}` must be a {' or '.join(t.__name__ for t in wanted)}, got {type(value).__name__}.")


def check_int(name: str, value: Any, low: int = 1) -> int:
    """`value` as an int; ValueError, naming the argument, unless it is a Python or NumPy integer >= low."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or isinstance(value, bool | np.ndarray | jax.Array):
        raise ValueError(f"`{name}` must be an int >= {low}, got {value!r}.")
    return number


def check_real(name: str, value: Any) -> float:
    """`value` as a float; ValueError, naming the argument, unless it is a finite Python or NumPy number."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number known when the function is traced, got {value!r}.")
    return float(value)


def as_count(name: str, value: Any) -> jax.Array | None:
    """A count of live rows: an int becomes int32 whatever the x64 mode, arrays stay what they are."""
    if value is None or hasattr(value, "dtype"):
        return value
    return jnp.int32(min(check_int(name, value, 0), 2**31 - 1))


def resolve_implementation(
    op: str, implementation: str | None, interpret: Any, unsupported: Callable[[], str | None], argument: Any
) -> Implementation:
    """Chooses how an op runs. A named implementation never falls back; None picks the best that works.

    Args:
      op: the op's name, for errors.
      implementation: None, "xla" or "mosaic_gpu".
      interpret: False, or how to run the Mosaic kernel in Pallas' interpreter (None then means "mosaic_gpu").
      unsupported: says why the Mosaic kernel cannot serve these arguments, or None if it can; called, and so Mosaic
        imported, only where it matters.
      argument: one of the op's arrays: where it is not traced, it tells the device.

    Raises:
      ValueError: unknown name, or `interpret` together with "xla".
      NotImplementedError: "mosaic_gpu" was named and cannot serve these arguments, or is known to run elsewhere.
    """
    if implementation not in (None, "xla", "mosaic_gpu"):
        raise ValueError(f"`implementation` of {op} must be None, 'xla' or 'mosaic_gpu', got {implementation!r}.")
    if interpret:
        if implementation == "xla":
            raise ValueError(f"`interpret` of {op} runs the Mosaic kernel; implementation='xla' has none.")
        implementation = "mosaic_gpu"
    if implementation == "mosaic_gpu":
        reason = unsupported()
        if reason is None and not interpret and (platform := _known_platform(argument)) in ("cpu", "tpu"):
            reason = (
                f"it needs a Hopper GPU, and this runs on {platform} (interpret=True: Pallas' interpreter does it)."
            )
        if reason is not None:
            raise NotImplementedError(f"implementation='mosaic_gpu' of {op}: {reason}")
        return "mosaic_gpu"
    if implementation is None and runs_on_hopper(argument) and unsupported() is None:
        return "mosaic_gpu"
    return "xla"


def _known_platform(argument: Any) -> str | None:
    """The platform of an argument that is not traced, or of a surrounding shard_map's mesh; None where not known."""
    if isinstance(argument, jax.Array) and not isinstance(argument, jax.core.Tracer):
        return next(iter(argument.devices())).platform
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def runs_on_hopper(argument: Any = None) -> bool:
    """Whether what is traced now will run on a Hopper GPU (compute capability 9.0), as far as can be known.

    An argument that is not traced lies on a device. Inside a shard_map the mesh says what its devices are; elsewhere it
    is the device JAX places new arrays on.
    """
    if isinstance(argument, jax.Array) and not isinstance(argument, jax.core.Tracer):
        return all(getattr(device, "compute_capability", None) == "9.0" for device in argument.devices())
    if _known_platform(argument) in ("cpu", "tpu"):
        return False
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):  # a platform
        device = jax.devices(device)[0]
    return getattr(device, "compute_capability", None) == "9.0"


def interpreter(interpret: Any) -> Any:
    """What `plgpu.kernel` takes as `interpret`: True stands for the interpreter with its default parameters."""
    if interpret is not True:
        return interpret
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def match_varying(x: jax.Array, *like: Any) -> jax.Array:
    """`x`, marked as varying over every manual mesh axis that one of `like` (arrays, their types, or None) varies over.

    Outside shard_map, and with check_vma=False, it is `x` itself. Loop carries and the branches of a cond must agree in
    this mark; freshly made zeros and the results of `plgpu.kernel` carry none.
    """

    def varying(y):
        kind = y if isinstance(y, jax.ShapeDtypeStruct) else jax.typeof(y)
        return getattr(kind.manual_axis_type, "varying", frozenset())

    missing = frozenset().union(*(varying(y) for y in like if y is not None)) - varying(x)
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def vary_alike(*args: Any) -> tuple:
    """These pytrees as JAX arrays, all marked as varying over every manual mesh axis that one of them varies over.

    Done before a custom_vjp: gradients of a replicated input then leave it varying, and JAX sums them over the axes.
    """
    args = jax.tree.map(jnp.asarray, args)
    leaves = jax.tree.leaves(args)
    return jax.tree.map(lambda x: match_varying(x, *leaves), args)
