"""How processes find each other, and every mistake that is refused. Processes that did: test_several_processes."""

import socket

import jax
import pytest

from flax_transformer import distributed


def test_one_process_is_the_main_process():
    distributed.initialise_distributed()
    assert distributed.is_main_process()


@pytest.fixture
def no_initialisation(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("jax.distributed was initialised")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)


@pytest.mark.usefixtures("no_initialisation")
@pytest.mark.parametrize(
    ("mode", "options", "words"),
    [
        ("auto", dict(coordinator="host:1", process_id=0), "got coordinator, process_id too"),
        ("of", dict(), "one of off, auto, got 'of'"),
        ("off", dict(coordinator="host:1", process_id=1), "num_processes is missing"),
        ("off", dict(num_processes=2), "coordinator, process_id is missing"),
        ("off", dict(coordinator="host", num_processes=2, process_id=1), "must be HOST:PORT.*got 'host'"),
        ("off", dict(coordinator=":12", num_processes=2, process_id=1), "must be HOST:PORT"),
        ("off", dict(coordinator="host:0", num_processes=2, process_id=1), "from 1 to 65535"),
        ("off", dict(coordinator="host:65536", num_processes=2, process_id=1), "from 1 to 65535"),
        ("off", dict(coordinator="host:12", num_processes=2, process_id=2), "below num_processes, got 2 of 2"),
        ("off", dict(coordinator="host:12", num_processes=2, process_id=-1), "got -1 of 2"),
        ("off", dict(coordinator="host:12", num_processes=0, process_id=0), "got 0 of 0"),
    ],
)
def test_arguments_that_name_no_set_of_processes_are_refused(mode, options, words):
    with pytest.raises(ValueError, match=words):
        distributed.initialise_distributed(mode, **options)


@pytest.mark.usefixtures("no_initialisation")
def test_a_taken_port_is_refused_before_jax_would_abort():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on port {port}"):
            distributed.initialise_distributed(coordinator=f"localhost:{port}", num_processes=2, process_id=0)


@pytest.mark.usefixtures("no_initialisation")
def test_a_coordinator_that_does_not_answer_is_refused_before_jax_would_abort():
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ValueError, match=f"no coordinator answers at localhost:{port} after 0 s"):
        distributed.initialise_distributed(
            coordinator=f"localhost:{port}", num_processes=2, process_id=1, timeout_seconds=0
        )


def test_automatic_without_surroundings_to_find_is_refused(monkeypatch):
    def find_nothing(**options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", find_nothing)
    with pytest.raises(ValueError, match=r"found no TPU pod, SLURM.*give coordinator, num_processes and process_id"):
        distributed.initialise_distributed("auto")
