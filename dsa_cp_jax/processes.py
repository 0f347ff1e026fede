"""Starts JAX over several processes, once they have met: a missing or wrong coordinator is an error, never an abort.

`jax.distributed.initialize` ends the whole process, from C++, where the coordinator does not answer or a process does
not come. So the processes first meet at the coordinator's address over plain sockets; JAX starts when all are there.
"""

import contextlib
import json
import os
import socket
import time

import jax

MEETING_SECONDS = 60
"""How long a process waits for the others."""
GREETING = "dsa-cp"
"""First word of every message, so that a stranger at the port is seen to be one."""


class ProcessError(RuntimeError):
    """The processes of a job do not come together."""


def parse_address(coordinator: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6 address]:port".

    Raises:
      ProcessError: it is no such thing.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ProcessError(f"The coordinator must be HOST:PORT with a port in 1..65535, got {coordinator!r}.")
    return host, int(port)


def start_processes(
    coordinator: str, num_processes: int, process_id: int, *, job: str, timeout: float = MEETING_SECONDS
) -> None:
    """Waits until all processes are there, then starts JAX's distributed runtime. Before any other use of JAX.

    Args:
      coordinator: "host:port", the same in every process; process 0 listens there.
      num_processes: processes of the job.
      process_id: this one, 0..num_processes - 1.
      job: what the processes must agree in, in words.
      timeout: seconds after which a process gives up.

    Raises:
      ProcessError: the address is wrong or taken, nobody or somebody else answers there, a process is missing, two have
        one id, or they do not agree in `job` or their number. `timeout` seconds after the start at the latest.
    """
    if not 0 <= process_id < num_processes:
        raise ProcessError(f"The process id must be in 0..{num_processes - 1}, got {process_id}.")
    address, deadline = parse_address(coordinator), time.monotonic() + timeout
    job = f"{num_processes} processes, {job}"
    if process_id == 0:
        _wait_for_others(address, num_processes, job, deadline)
    else:
        _join(address, process_id, job, deadline)
    jax.config.update("jax_enable_preemption_service", False)  # it would keep SIGTERM from ending the process
    jax.distributed.initialize(
        coordinator, num_processes, process_id, shutdown_timeout_seconds=MEETING_SECONDS,
        cluster_detection_method="deactivate",  # a cluster's own number for the process is not the number of its GPU
    )  # fmt: skip


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


def _send(peer: socket.socket, *message) -> None:
    with contextlib.suppress(OSError):  # a peer that is gone needs no answer
        peer.sendall(json.dumps([GREETING, *message]).encode() + b"\n")


def _receive(peer: socket.socket, seconds: float) -> list:
    """The values that came with a message; none from a stranger, or from nobody."""
    peer.settimeout(seconds)
    with contextlib.suppress(OSError, ValueError), peer.makefile("rb") as stream:
        match json.loads(stream.readline(1 << 16)):
            case [word, *values] if word == GREETING:
                return values
    return []


def _wait_for_others(address: tuple[str, int], num_processes: int, job: str, deadline: float) -> None:
    """Process 0: hears every other process, then answers all of them with the same word: what is wrong, or nothing."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        listener = socket.create_server(("", address[1]), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ProcessError(f"Process 0 cannot listen on port {address[1]}: {os.strerror(error.errno or 0)}.") from error
    peers, ids, failure = [], {0}, ""
    with listener, contextlib.ExitStack() as connections:
        while not failure and len(ids) < num_processes:
            listener.settimeout(_left(deadline))
            try:
                peer = connections.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(num_processes) if i not in ids)
                failure = f"Of {num_processes} processes, these did not come to {address[0]}:{address[1]}: {missing}."
                break
            match _receive(peer, min(5, _left(deadline))):
                case [int(process_id), str(theirs)]:
                    peers.append(peer)
                    if theirs != job:
                        failure = f"Process {process_id} was started for {theirs}; process 0 for {job}."
                    elif process_id in ids:
                        failure = f"Two processes have the id {process_id}."
                    ids.add(process_id)
        for peer in peers:
            _send(peer, failure)
    if failure:
        raise ProcessError(failure)


def _join(address: tuple[str, int], process_id: int, job: str, deadline: float) -> None:
    """Any other process: greets process 0 as soon as it listens, and waits for its word."""
    where = f"{address[0]}:{address[1]}"
    while True:
        try:
            peer = socket.create_connection(address, timeout=_left(deadline))
            break
        except OSError as error:
            if isinstance(error, socket.gaierror) or _left(deadline) < 0.5:
                raise ProcessError(f"No coordinator answers at {where}: {error.strerror or error}.") from error
            time.sleep(0.1)
    with peer:
        _send(peer, process_id, job)
        answer = _receive(peer, _left(deadline))
    if answer != [""]:
        raise ProcessError(answer[0] if answer else f"No coordinator of this program answers at {where}.")
