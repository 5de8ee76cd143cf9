from pathlib import Path
from typing import Literal

import pytest

from fenceguard.cli._settings import UsageError, find, need, parse

PASSWORD = "s3cr3t/#?@ä"
ENCODED = "s3cr3t%2F%23%3F%40%C3%A4"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for store in ("POSTGRES", "REDIS"):
        monkeypatch.delenv(f"FENCEGUARD_{store}_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_option_goes_before_the_environment_which_goes_before_pyproject(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty_folder / "pyproject.toml").write_text('[tool.fenceguard]\npostgres = "postgresql://file/db"\n')
    from_file = find("postgres", None)
    monkeypatch.setenv("FENCEGUARD_POSTGRES_URL", "postgresql://variable/db")
    from_variable = find("postgres", None)
    from_option = find("postgres", "postgresql://option/db")
    found = [url and (url.text, url.source) for url in (from_file, from_variable, from_option)]
    assert found == [
        ("postgresql://file/db", "[tool.fenceguard] of ./pyproject.toml"),
        ("postgresql://variable/db", "FENCEGUARD_POSTGRES_URL"),
        ("postgresql://option/db", "--postgres"),
    ]


@pytest.mark.parametrize(
    "text", ["", "[project]\nname = 'x'\n", "[tool.other]\nredis = 'x'\n", "[tool.fenceguard]\n"]
)
def test_a_pyproject_without_the_url_says_nothing(text: str, empty_folder: Path) -> None:
    (empty_folder / "pyproject.toml").write_text(text)
    assert find("redis", None) is None


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEGUARD_REDIS_URL", "")
    assert find("redis", None) is None


@pytest.mark.parametrize("store", ["postgres", "redis"])
def test_a_missing_url_names_the_three_ways_to_give_it(store: Literal["postgres", "redis"]) -> None:
    with pytest.raises(UsageError) as raised:
        need(store, None)
    message = str(raised.value)
    assert f"--{store} " in message
    assert f"FENCEGUARD_{store.upper()}_URL" in message
    assert "[tool.fenceguard] in ./pyproject.toml" in message


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("[tool.fenceguard", "TOMLDecodeError"),
        ("[tool.fenceguard]\npostgres = 5432\n", "must be a string"),
        ("[tool]\nfenceguard = 'postgresql://u:secret@h/db'\n", "must be a string"),
    ],
)
def test_a_malformed_pyproject_is_named_and_not_repeated(text: str, about: str, empty_folder: Path) -> None:
    (empty_folder / "pyproject.toml").write_text(text)
    with pytest.raises(UsageError) as raised:
        find("postgres", None)
    assert about in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("store", "text", "shown"),
    [
        ("postgres", f"postgresql://app:{ENCODED}@db.example:5433/shop", "app@db.example:5433/shop"),
        ("postgres", f"postgresql+asyncpg://app:{ENCODED}@db.example/shop", "app@db.example/shop"),
        ("postgres", f"postgres://[::1]:5432/shop?password={ENCODED}", "[::1]:5432/shop"),
        ("postgres", "postgresql:///shop", "/shop"),
        ("redis", f"rediss://:{ENCODED}@cache:6380/2", "cache:6380/2"),
        ("redis", f"redis://cache?password={ENCODED}", "cache"),
        ("redis", "unix:///run/redis.sock", "/run/redis.sock"),
    ],
)
def test_a_url_shows_its_server_and_never_its_password(
    store: Literal["postgres", "redis"], text: str, shown: str
) -> None:
    url = parse(store, text, source="--x")
    assert url.shown == shown
    assert "s3cr3t" not in f"{url!r}{url.shown}"
    assert "s3cr3t" not in url.scrub(f"cannot connect to {text}")


@pytest.mark.parametrize("text", [f"login as app with {PASSWORD} failed", f"dsn postgresql://app:{ENCODED}@h/db"])
def test_texts_of_drivers_lose_the_password_in_every_spelling(text: str) -> None:
    url = parse("postgres", f"postgresql://app:{ENCODED}@h/db", source="--postgres")
    scrubbed = url.scrub(text)
    assert "s3cr3t" not in scrubbed
    assert "***" in scrubbed


def test_a_text_of_several_lines_becomes_one() -> None:
    url = parse("redis", "redis://h", source="--redis")
    assert url.scrub("no connection\n\tis it running?\n") == "no connection; is it running?"


@pytest.mark.parametrize(
    ("store", "text"),
    [
        ("postgres", "mysql://app:s3cr3t@h/db"),
        ("postgres", "redis://app:s3cr3t@h/0"),
        ("postgres", "app:s3cr3t@h/db"),
        ("postgres", "postgresql://app:s3cr3t@x@h/db"),
        ("postgres", "postgresql://app:s3cr3t/x@h/db"),
        ("postgres", "postgresql://app:12/s3cr3t@h/db"),
        ("postgres", "postgresql://app:s3cr3t#x@h/db"),
        ("postgres", "postgresql://app:12?s3cr3t@h/db"),
        ("postgres", "postgresql://app:x@h:s3cr3t/db"),
        ("postgres", "postgresql://app:s3cr3t@[::1/db"),
        ("redis", "postgresql://app:s3cr3t@h/db"),
        ("redis", "redis://:s3cr3t/x@h:6379/0"),
        ("redis", "redis://:s3cr3t#x@h:6379/0"),
        ("redis", "redis://:s3cr3t?x@h:6379/0"),
        ("redis", "redis://:x@h:s3cr3t"),
        ("redis", "h:6379"),
    ],
)
def test_a_malformed_url_is_refused_without_being_repeated(store: Literal["postgres", "redis"], text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(store, text, source="--the-option")
    assert "--the-option" in str(raised.value)
    assert "percent-encoded" in str(raised.value)
    assert "s3cr3t" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
