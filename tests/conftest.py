"""Test set-up: virtual CPU devices, hardware markers, and the CPU as device of every test not marked for GPUs."""

import os
import pathlib

# Before JAX starts: eight CPU devices, and enough threads for the Mosaic interpreter's warpgroups on a small machine.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "16")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")  # of NumPy, in each worker of pytest-xdist
# On a GPU: several workers of pytest-xdist share its memory, and tuning matrix products would take most of the time.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"
HAS_NVIDIA_DRIVER = pathlib.Path("/dev/nvidiactl").exists()
if HAS_NVIDIA_DRIVER:
    # XLA ends the process where a GPU is late for its first collective, as it may be where workers share the GPUs.
    os.environ["XLA_FLAGS"] += " --xla_gpu_first_collective_call_terminate_timeout_seconds=300"
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import hypothesis
import jax
import numpy as np
import pytest

from tests.helpers import world
from tests.helpers.aot import missing_for_aot, put_ptxas_on_path

put_ptxas_on_path()

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")


def hopper_gpus() -> list[jax.Device]:
    try:
        return [device for device in jax.devices("gpu") if device.compute_capability == "9.0"]
    except RuntimeError:
        return []


def multi_devices(config) -> list[jax.Device]:
    """All Hopper GPUs of this host; with --virtual N, N virtual CPU devices."""
    virtual = config.getoption("--virtual")
    return jax.devices("cpu")[:virtual] if virtual else hopper_gpus()


def pytest_addoption(parser):
    help_text = "run tests marked multi_gpu on N virtual CPU devices (2..8), without kernels"
    parser.addoption("--virtual", type=int, default=0, metavar="N", help=help_text)


def pytest_collection_modifyitems(config, items):
    gpus = len(hopper_gpus())
    several = gpus > 1 or config.getoption("--virtual")
    lacking = {
        "gpu": None if gpus else "needs a Hopper GPU",
        "multi_gpu": None
        if several
        else f"needs two Hopper GPUs or more, there are {gpus}; --virtual N runs them on CPUs",
        "aot": (reason := missing_for_aot()) and f"ahead-of-time compilation needs {reason}",
    }
    for item in items:
        for marker, reason in lacking.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter, config):
    """Says at which sizes tests marked `multi_gpu` ran."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    sizes = {value for report in reports for name, value in report.user_properties if name == "cp_size"}
    if sizes:
        found = multi_devices(config)
        what = f"{len(found)} devices ({found[0].device_kind})"
        terminalreporter.write_line(f"multi_gpu: {what}, ran at cp_size {', '.join(map(str, sorted(sizes)))}")


@pytest.fixture(autouse=True)
def _device(request):
    """Tests marked `gpu` or `multi_gpu` run on GPUs, all others on the CPU, also where there is a GPU."""
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("multi_gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def fresh_caches():
    """For tests that replace parts of the code: what JAX compiled with them, or without, must not be used again."""
    jax.clear_caches()
    yield
    jax.clear_caches()
    world.entry.cache_clear()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
