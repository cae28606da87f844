"""Telling systemd how a service fares: that it is ready, what it does, that it still turns, that it stops.

It is one datagram to the socket that NOTIFY_SOCKET names, so there is nothing to install; without that variable nothing is
said. Whoever takes the variables also takes them out of the environment: what this process starts is not the service.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress

from shiftwork.printable import clean


class Systemd:
    """Where to tell it, and how often it wants to hear that we are alive."""

    def __init__(self, address: str = "", watchdog: float | None = None) -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.watchdog = watchdog
        """Seconds after which a service counts as dead that has said nothing."""

    @classmethod
    def take(cls, environment: MutableMapping[str, str] = os.environ) -> Systemd:
        """What the environment of this process says, once."""
        address = environment.pop("NOTIFY_SOCKET", "")
        every, meant = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        ours = every.isdecimal() and int(every) > 0 and meant in {"", str(os.getpid())}
        return cls(address, int(every) / 1_000_000 if ours else None)

    def __bool__(self) -> bool:
        return bool(self._address)

    def ready(self, status: str) -> None:
        """The service has begun, or is done with renewing itself."""
        self._tell("READY=1", f"STATUS={clean(status)}")

    def reloading(self, status: str) -> None:
        """The service renews itself; `ready` ends that."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", f"STATUS={clean(status)}")

    def stopping(self, status: str) -> None:
        """The service ends."""
        self._tell("STOPPING=1", f"STATUS={clean(status)}")

    def status(self, status: str) -> None:
        """What it does, in a line."""
        self._tell(f"STATUS={clean(status)}")

    def alive(self) -> None:
        """It still turns."""
        self._tell("WATCHDOG=1")

    def _tell(self, *facts: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)  # nobody listens, or not now: no reason to fail or to wait
            line.sendto("\n".join(facts).encode(errors="replace"), self._address)
