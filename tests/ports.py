"""Finds a free port for a server that cannot choose one itself."""

import random
import socket

# Below those that the system picks for connections (net.ipv4.ip_local_port_range): no client of another test takes it
# between here and the server's start.
_LOWEST, _HIGHEST = 20000, 32767
_chance = random.SystemRandom()


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            port = _chance.randint(_LOWEST, _HIGHEST)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
