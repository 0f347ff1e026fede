"""Several processes: how they meet, every way that it can fail, and the main job over two of them on CPU devices."""

import concurrent.futures
import contextlib
import functools
import json
import socket
import threading
import time

import jax
import pytest

from dsa_cp_jax import validate
from dsa_cp_jax.processes import ProcessError, parse_address, start_processes
from dsa_cp_jax.validate import main
from tests.helpers.processes import run_processes


@pytest.fixture
def started(monkeypatch) -> list:
    """Instead of JAX's runtime: the arguments that it was started with."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append(args))
    monkeypatch.setattr(jax.config, "update", lambda *args: None)
    return calls


def meet(port, *processes, timeout=10.0) -> list[str]:
    """Processes (num_processes, process_id, job), started a little apart. Returns what each fails with, "" for nothing."""

    def run(num_processes, process_id, job):
        try:
            start_processes(f"localhost:{port}", num_processes, process_id, job=job, timeout=timeout)
        except ProcessError as error:
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = []
        for process in processes:
            futures.append(pool.submit(run, *process))
            time.sleep(0.2)
        return [future.result(timeout=30) for future in futures]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_they_meet(port, started, order):
    assert meet(port, *[(3, i, "job") for i in order]) == ["", "", ""]
    assert sorted(started) == [(f"localhost:{port}", 3, i) for i in range(3)]
    assert meet(port, (1, 0, "job")) == [""]  # the port is free again, and one process is alone at once


@pytest.mark.parametrize(
    "processes, message",
    [
        ([(3, 0, "job"), (3, 1, "job"), (3, 1, "job")], "Two processes have the id 1."),
        (
            [(2, 0, "cp 2"), (2, 1, "cp 4")],
            "Process 1 was started for 2 processes, cp 4; process 0 for 2 processes, cp 2.",
        ),
        ([(3, 0, "a"), (2, 1, "a")], "Process 1 was started for 2 processes, a; process 0 for 3 processes, a."),
    ],
)
def test_they_do_not_agree(port, started, processes, message):
    """Every process that came fails, with the same words."""
    assert meet(port, *processes) == [message] * len(processes)
    assert not started


def test_one_does_not_come(port, started):
    begin = time.monotonic()
    message = f"Of 4 processes, these did not come to localhost:{port}: 1, 3."
    assert meet(port, (4, 0, "job"), (4, 2, "job"), timeout=1.5) == [message] * 2
    assert time.monotonic() - begin < 4 and not started


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"[1]\n", b'["other", ""]\n'])
def test_somebody_else_at_the_address(started, reply):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]

        def serve():
            with server.accept()[0] as peer:
                peer.recv(1024)
                peer.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert meet(port, (2, 1, "job")) == [f"No coordinator of this program answers at localhost:{port}."]
        thread.join()
    assert not started


def test_strangers_at_process_0(port, started):
    """Somebody who says nothing, or something else, keeps nobody from meeting."""

    def disturb():
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b'["dsa-cp", "x"]\n'):
            with contextlib.suppress(OSError), socket.create_connection(("localhost", port)) as peer:
                peer.sendall(words)

    timer = threading.Timer(0.3, disturb)
    timer.start()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(meet, port, (2, 0, "job"))
        time.sleep(0.6)
        assert meet(port, (2, 1, "job")) == [""] and first.result(timeout=20) == [""]
    timer.join()


def test_port_that_is_taken(started):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert meet(port, (2, 0, "job")) == [f"Process 0 cannot listen on port {port}: Address already in use."]


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":1234", "localhost:0", "localhost:65536", "localhost:x"]
)
def test_address_that_is_none(address):
    with pytest.raises(ProcessError, match=r"must be HOST:PORT with a port in 1\.\.65535, got '.*'"):
        start_processes(address, 2, 1, job="job")


def test_ipv6_address_and_bad_id():
    assert parse_address("[::1]:80") == ("::1", 80) and parse_address("node-1:80") == ("node-1", 80)
    with pytest.raises(ProcessError, match=r"The process id must be in 0\.\.1, got 2"):
        start_processes("localhost:1", 2, 2, job="job")


def test_host_that_does_not_exist(started):
    begin = time.monotonic()
    with pytest.raises(ProcessError, match=r"No coordinator answers at no-such-host\.invalid:1234: "):
        start_processes("no-such-host.invalid:1234", 2, 1, job="job", timeout=60)
    assert time.monotonic() - begin < 30  # at once, as fast as names are looked up


def test_command_without_coordinator(port, capsys, monkeypatch):
    """A clear error and exit code 2 within the stated time; nothing of JAX has run."""
    monkeypatch.setattr(validate, "start_processes", functools.partial(start_processes, timeout=1))
    arguments = ["--coordinator", f"localhost:{port}", "--num-processes", "2"]
    assert main(["validate", *arguments, "--process-id", "1"]) == 2
    assert f"dsa-cp: No coordinator answers at localhost:{port}: Connection refused" in capsys.readouterr().err
    assert main(["validate", *arguments, "--process-id", "0"]) == 2
    assert "Of 2 processes, these did not come to" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["validate", *arguments])
    assert "must be given together" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_of_two_cpu_devices(port, tmp_path):
    """The main job at cp 4 over two processes (gloo): equal tokens, one report, one voice."""
    (tmp_path / "even.txt").write_text(("context parallelism, " * 50)[:1032])
    (tmp_path / "odd.txt").write_text("sparse attention, " * 3)
    files = [f"--prompt-file={tmp_path / name}" for name in ("even.txt", "odd.txt")]
    setup = "validate.NEW_TOKENS = 4"
    cpu = dict(JAX_PLATFORMS="cpu", XLA_FLAGS="")
    arguments = ["--cp=4", "--pages=6", f"--json={tmp_path / 'report.json'}", *files]
    (code, out, err), (other_code, other_out, other_err) = run_processes(
        port, 2, arguments, setup=setup, env=lambda i: cpu
    )
    assert (code, other_code) == (0, 0), out + err + other_err
    said, other_said = ([line for line in x.splitlines() if "Gloo" not in line] for x in (out, other_out))
    assert said[-1].startswith("passed: 2 prompts") and "sparse + cp 4, dense + cp 4: 8 steps" in said[-1]
    assert not other_said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] and report["cp_size"] == 4 and report["processes"] == 2
    paths = {p["name"]: [c["path"] for c in p["chunks"]] for p in report["prompts"]}
    assert paths == {"even.txt": ["sparse", "sparse"], "odd.txt": ["dense"]}
