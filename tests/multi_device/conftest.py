"""What the tests marked `multi_gpu` run on, and a line that says which sizes ran."""

import socket

import jax
import pytest

from tests.conftest import hopper_gpus


def multi_devices(config) -> list[jax.Device]:
    """All Hopper GPUs of this host; with --virtual N, N virtual CPU devices."""
    virtual = config.getoption("--virtual")
    return jax.devices("cpu")[:virtual] if virtual else hopper_gpus()


def pytest_generate_tests(metafunc):
    """A test with a parameter `cp` runs at every size from 2 to the number of devices."""
    if "cp" in metafunc.fixturenames:
        metafunc.parametrize("cp", range(2, max(len(multi_devices(metafunc.config)), 2) + 1))


@pytest.fixture
def devices(request) -> list[jax.Device]:
    """All devices; the first of them is where new arrays go."""
    found = multi_devices(request.config)
    if "cp" in request.fixturenames:
        request.node.user_properties.append(("cp_size", request.getfixturevalue("cp")))
    with jax.default_device(found[0]):
        yield found


@pytest.fixture
def port() -> int:
    """A free TCP port."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def pytest_terminal_summary(terminalreporter, config):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    sizes = {value for report in reports for name, value in report.user_properties if name == "cp_size"}
    if sizes:
        found = multi_devices(config)
        what = f"{len(found)} devices ({found[0].device_kind})"
        terminalreporter.write_line(f"multi_gpu: {what}, ran at cp_size {', '.join(map(str, sorted(sizes)))}")
