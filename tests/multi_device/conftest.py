"""What the tests marked `multi_gpu` run on, and a free port for processes to meet."""

import socket

import jax
import pytest

from tests.conftest import multi_devices


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
