"""The line between a program and its server, in the hands of a test: what goes over it can be seen, held up and cut.

    with Wire(dsn) as wire:
        wire.losing("shiftwork.take(")      # the statement arrives and is carried out; its answer does not come back
        app = App(wire.dsn)

A thread of its own carries the bytes, so that it goes on when the test's event loop is blocked. Statements are known by a
part of their text; lines by what was last said on them.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.pooler import PAST, WIRE, pooled

DONE = b"Z\x00\x00\x00\x05"
"""How the server says that it has answered."""


class Wire:
    """A server's second socket."""

    def __init__(self, dsn: str) -> None:
        self._ends = {5432: _address(pooled(dsn)), PAST: _address(dsn)}
        self._folder = Path(tempfile.mkdtemp(prefix=WIRE))
        given = conninfo_to_dict(dsn)
        given.pop("hostaddr", None)
        self.dsn = make_conninfo("", **{**given, "host": str(self._folder), "port": 5432})
        self.past = make_conninfo(self.dsn, port=PAST)
        """Where it leads to the server itself, whatever stands before it."""

        self.said: Counter[str] = Counter()
        """How often each text that is looked for was said."""

        self.calls = 0
        self._losing: dict[bytes, int] = {}
        self._cutting: dict[bytes, int] = {}
        self._silent: set[bytes] = set()
        self.delay = 0.0
        """Seconds that everything takes on its way, in either direction."""

        self._stalled = False
        self._refusing = False
        self._lines: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self._carrying: set[asyncio.Task[None]] = set()
        self._moved: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._now(self._closing.set)
        self._thread.join(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    # What can be done to it.

    def losing(self, text: str, times: int = 1) -> None:
        """Let the next statements with this text be carried out, and cut the line instead of telling their answer."""
        self._losing[text.encode()] = times

    def cutting(self, text: str, times: int = 1) -> None:
        """Cut the line instead of carrying the next statements with this text."""
        self._cutting[text.encode()] = times

    def silence(self, text: str) -> None:
        """Whoever says this gets no answer, and nobody else there hears it."""
        self._silent.add(text.encode())

    def listen_again(self) -> None:
        """Silence nobody any more; those who were hear nothing still, until they call again."""
        self._silent.clear()

    def stall(self) -> None:
        """Carry nothing, in neither direction, on no line, until told to go on."""
        self._now(self._set_stalled, True)

    def go_on(self) -> None:
        """Carry everything again."""
        self._now(self._set_stalled, False)

    def refuse(self) -> None:
        """Cut every line, and take no calls, until told to accept."""
        self._now(self._set_refusing, True)

    def accept(self) -> None:
        """Take calls again."""
        self._now(self._set_refusing, False)

    # How it does that.

    def _now(self, call: Callable[..., Any], *args: object) -> None:
        done = threading.Event()

        def act() -> None:
            call(*args)
            done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(10)

    def _set_stalled(self, stalled: bool) -> None:
        self._stalled = stalled
        self._moved.set()
        self._moved = asyncio.Event()

    def _set_refusing(self, refusing: bool) -> None:
        self._refusing = refusing
        if refusing:
            for one, other in list(self._lines.items()):
                one.transport.abort()
                other.transport.abort()

    async def _serve(self) -> None:
        self._loop, self._moved, self._closing = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        servers = []
        for port, address in self._ends.items():
            path = self._folder / f".s.PGSQL.{port}"
            servers.append(await asyncio.start_unix_server(partial(self._called, address), path))
            path.chmod(0o777)
        self._ready.set()
        await self._closing.wait()
        self._set_refusing(True)
        self._set_stalled(False)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # calls that are being taken, too
            for task in self._carrying:
                task.cancel()
            await asyncio.wait(others, timeout=5)
        for server in servers:
            server.close()  # not before: a call that is just being taken would be lost, and never closed
        await asyncio.sleep(0)  # in which what was aborted is closed

    def _called(
        self, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.calls += 1
        task = self._loop.create_task(self._carry(address, reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # even if it was cancelled before it began

    async def _carry(
        self, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        back: asyncio.StreamWriter | None = None
        ways: list[asyncio.Task[None]] = []
        try:
            while self._stalled:
                await self._moved.wait()
            if self._refusing:
                return
            host, port = address
            if host.startswith("/"):
                there, back = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
            else:
                there, back = await asyncio.open_connection(host, port)
            self._lines[writer] = back
            line = _Line()
            ways = [
                asyncio.create_task(self._forth(line, reader, back)),
                asyncio.create_task(self._back(line, there, writer)),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass
        finally:
            for way in ways:
                way.cancel()
            self._lines.pop(writer, None)
            writer.transport.abort()
            if back is not None:
                back.transport.abort()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _forth(self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await _read(reader):
            while self._stalled:
                await self._moved.wait()
            for text in self._silent:
                if text in data:
                    self.said[text.decode()] += 1
                    await asyncio.Event().wait()
            if any(self._counts(text, data, self._cutting) for text in self._cutting):
                return
            for text in self._losing:
                if self._counts(text, data, self._losing):
                    line.losing = True
            await asyncio.sleep(self.delay)
            writer.write(data)
            await writer.drain()

    def _counts(self, text: bytes, data: bytes, left: dict[bytes, int]) -> bool:
        """Whether this is said here, and is to be answered for now."""
        if left[text] <= 0 or text not in data:
            return False
        left[text] -= 1
        self.said[text.decode()] += 1
        return True

    async def _back(self, line: _Line, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await _read(reader):
            while self._stalled:
                await self._moved.wait()
            if line.losing:
                if DONE in data:
                    return
                continue
            await asyncio.sleep(self.delay)
            writer.write(data)
            await writer.drain()


def _address(dsn: str) -> tuple[str, int]:
    """Where this leads, with whatever was left to its environment."""
    with psycopg.connect(dsn) as connection:
        return connection.info.host, connection.info.port


class _Line:
    losing = False


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(1 << 18)
    except ConnectionError:
        return b""
