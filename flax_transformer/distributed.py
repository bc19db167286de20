"""How processes that train one model find each other, and which of them speaks for all.

distributed.initialise_distributed("auto")          # before anything else of JAX
if distributed.is_main_process():
    print("one of us")
"""

import socket
import time
from typing import Literal

import jax


def initialise_distributed(
    mode: Literal["off", "auto"] = "off",
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> None:
    """Joins this process to those that train the same model. Before anything else of JAX: it decides what devices are.

    Args:
        mode: "auto" takes everything from the surroundings: a TPU pod, SLURM, Open MPI, or Kubernetes with its Python
            package. "off": one process, or what the next three say.
        coordinator: HOST:PORT, where process 0 is to be reached; the port must be free there.
        num_processes: how many processes there are. The three are given together.
        process_id: which of them this is, from 0.
        timeout_seconds: how long to wait for the others. If process 0 has waited in vain, JAX ends it with a message
            that says DEADLINE_EXCEEDED and RegisterTask.

    Raises:
        ValueError: arguments that do not fit together, nothing to find for "auto", a coordinator that cannot be
            reached, or a port that is taken.
        RuntimeError: JAX has been used already.
    """
    if mode not in ("off", "auto"):
        raise ValueError(f"the distributed mode must be one of off, auto, got {mode!r}.")
    explicit = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    given = [name for name, value in explicit.items() if value is not None]
    if mode == "auto" and given:
        raise ValueError(
            f"distributed mode auto finds {', '.join(explicit)} by itself, got {', '.join(given)} too; leave either out."
        )
    if mode == "off" and not given:
        return
    # The collectives of CPU devices. Devices of other kinds bring their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM, and a process that waits for that alone could not be ended by it.
    jax.config.update("jax_enable_preemption_service", False)
    if mode == "auto":
        try:
            jax.distributed.initialize(initialization_timeout=timeout_seconds)
        except ValueError as error:
            raise ValueError(
                f"distributed mode auto found no TPU pod, SLURM, Open MPI or Kubernetes job around it ({error}); give "
                "coordinator, num_processes and process_id, or leave distributed off for one process."
            ) from error
        return

    if coordinator is None or num_processes is None or process_id is None:
        missing = [name for name in explicit if name not in given]
        raise ValueError(
            f"coordinator, num_processes and process_id are given together, {', '.join(missing)} is missing; give all "
            "three, or none for one process."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator must be HOST:PORT with a port from 1 to 65535, got {coordinator!r}.")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must be at least 0 and below num_processes, got {process_id} of {num_processes}; the processes "
            "are counted from 0."
        )
    # JAX would not raise, but abort the process in both cases.
    if process_id == 0:
        _check_port_is_free(int(port))
    else:
        _wait_for_port(host.strip("[]"), int(port), timeout_seconds=timeout_seconds)
    jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=timeout_seconds)
    if jax.process_count() != num_processes:
        raise ValueError(
            f"{num_processes} processes were to join, but the {jax.default_backend()} devices know of "
            f"{jax.process_count()}; choose another kind of device with JAX_PLATFORMS."
        )


def is_main_process() -> bool:
    """Whether this is the one process that prints and writes."""
    return jax.process_index() == 0


def _check_port_is_free(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen on port {port} ({error}); give a coordinator with a free port to all "
            "processes, and check that no other has process_id 0."
        ) from error


def _wait_for_port(host: str, port: int, *, timeout_seconds: float) -> None:
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise ValueError(
                    f"no coordinator answers at {host}:{port} after {timeout_seconds:g} s ({error}); check that process 0 "
                    "runs, that the address is that of its machine, and that no firewall is between."
                ) from error
            time.sleep(0.2)
