"""Runs a function in several processes that form a gloo group, forked so that nothing is imported again."""

import os
import socket
import traceback

import torch
import torch.multiprocessing as mp


def _run(rank, size, port, function, folder, arguments):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        result = function(*arguments)
    except BaseException as error:
        traceback.print_exc()
        result = error
    torch.save(result, f"{folder}/{rank}")


def free_port():
    """A port for a group's first process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def on_ranks(size, folder, function, *arguments):
    """What ``function(*arguments)`` returned (or raised) on every rank, in order."""
    folder.mkdir(exist_ok=True)
    mp.start_processes(_run, (size, free_port(), function, folder, arguments), nprocs=size, start_method="fork")
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(size)]
