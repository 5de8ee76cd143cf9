"""A loopback TCP proxy whose links can be delayed, frozen (a partition: no FIN, no RST) or cut (RST)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

RST = struct.pack("ii", 1, 0)


class Proxy:
    """Passes bytes between its port and an upstream server, in a thread of its own.

    Attributes:
        port: where it listens on 127.0.0.1.
        delay: seconds that each piece of data waits, in both directions.
    """

    def __init__(self, host: str, port: int) -> None:
        self.upstream = host, port
        self.delay = 0.0
        self._swallow = 0
        self._swallowed = threading.Event()
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.port: int = self._call(self._open)

    def freeze(self) -> None:
        """Hold all bytes back, in both directions; connections stay open, new ones get no answer."""
        self._call(self._flowing.clear)

    def thaw(self) -> None:
        """Let the held bytes pass."""
        self._call(self._flowing.set)

    def cut(self) -> None:
        """Reset every connection; new ones are served."""
        self._call(self._cut)

    def swallow_next_reply(self) -> None:
        """Pass the next request upstream, drop the reply to it, then reset that connection."""
        self._swallowed.clear()
        self._call(self._arm)

    def wait_swallowed(self, within: float = 10.0) -> None:
        """Wait until a reply has been dropped."""
        assert self._swallowed.wait(within), "no reply came to be swallowed"

    def close(self) -> None:
        """Cut all and end."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, act: Callable[[], object]) -> Any:
        """Do `act` in the proxy's loop and wait for it."""

        async def run() -> object:
            result = act()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    async def _open(self) -> int:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def _arm(self) -> None:
        self._swallow = 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._link(reader, writer)
        except (OSError, asyncio.CancelledError):
            self._reset(writer)
        finally:
            self._tasks.discard(task)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        self._links |= {writer, up_writer}
        link = _Link()
        pumps = [
            asyncio.ensure_future(self._requests(reader, up_writer, link)),
            asyncio.ensure_future(self._replies(up_reader, writer, link)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, up_writer):
                self._links.discard(end)
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        while data := await reader.read(65536):
            await self._hold()
            if self._swallow:
                self._swallow, link.doomed = 0, True
            writer.write(data)
            await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        while data := await reader.read(65536):
            await self._hold()
            if link.doomed:
                self._reset(writer)
                self._swallowed.set()
                return
            writer.write(data)
            await writer.drain()

    async def _hold(self) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._flowing.wait()

    def _cut(self) -> None:
        for writer in list(self._links):
            self._reset(writer)

    @staticmethod
    def _reset(writer: asyncio.StreamWriter) -> None:
        sock: socket.socket | None = writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn


class _Link:
    """What is known about one connection."""

    doomed = False
