"""Connects a stage of the pipeline to a running Ray instance, or starts a new instance on this machine.

A new instance ends with the stage. It listens on 127.0.0.1 only, requires a secret token, keeps its files in a private
folder, and has no dashboard. If the stage is killed, Linux ends most of Ray's processes. The program ``watch.py`` ends
the rest."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cuda_agent.errors import BadConfiguration, TryAgain
from cuda_agent.rl.ray import watch
from cuda_agent.sandbox.jail.scratch import make_folder, sweep

STORE_BYTES = 128 << 20  # smallest size of Ray's object store; Ray spills the rest to disk
STARTS = 3
_TOKEN = secrets.token_hex(32)  # one per process: Ray reads it once


@contextmanager
def open_ray(address: str | None, cpus: float, gpus: int, store_bytes: int) -> Iterator[None]:
    """Connects this process to the Ray instance at ``address``. If ``address`` is None, starts a new instance with
    ``cpus`` CPU cores and ``gpus`` GPUs for actors, and an object store of at least ``store_bytes`` bytes.

    Raises:
        TryAgain: There is no Ray at ``address``, or a new instance does not start.
        BadConfiguration: Ray is not installed."""
    if find_spec("ray") is None:
        raise BadConfiguration("runtime=ray needs Ray: pip install '.[ray]'")
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor without a GPU from Ray sees this process's GPUs
    }
    where: dict[str, Any] = {"address": address}
    watcher: subprocess.Popen[bytes] | None = None
    if address is None:
        folder = make_folder("ray")
        folder.chmod(0o700)
        (folder / "token").write_text(_TOKEN)
        settings |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray replaces 127.0.0.1 by another address
        }
        where = {
            "address": "local",
            "num_cpus": cpus,
            "num_gpus": gpus,
            "object_store_memory": max(STORE_BYTES, store_bytes),
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(folder),
        }
        program = [sys.executable, "-I", "-S", str(Path(watch.__file__)), str(folder)]
        watcher = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    import ray

    try:
        for attempt in range(STARTS):
            try:
                ray.init(**where, namespace=f"cuda-agent-{secrets.token_hex(4)}", configure_logging=False)
                break
            except Exception as error:  # Ray raises a plain exception if a node takes over 30 seconds on a busy machine
                ray.shutdown()
                if attempt + 1 == STARTS:
                    raise TryAgain(f"Ray ({address or 'of this stage'}) does not start: {error}") from error
        if threading.current_thread() is threading.main_thread():  # the import of Ray installs a SIGTERM handler
            for number, handler in signals.items():
                signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        if watcher is not None:
            watcher.communicate()
        sweep()  # files of killed actors


def on_bundle(group: Any, bundle: int, cpus: float, gpus: float) -> dict[str, Any]:
    """Returns Ray's options for an actor that runs on bundle number ``bundle`` of the placement group ``group``. A
    bundle is a set of resources that Ray has reserved on one machine. ``cpus`` and ``gpus`` are the actor's
    resources."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": strategy}


def raise_if_init_failed(error: BaseException | None) -> None:
    """Raises RuntimeError if ``error`` says that an actor's constructor failed. A replacement of the actor would be
    useless, because its constructor would fail too."""
    if getattr(error, "actor_init_failed", False):
        raise RuntimeError(f"an actor could not be made: {error}") from error
