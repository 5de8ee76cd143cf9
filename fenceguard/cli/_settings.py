"""Which servers a command talks to: an option, the environment, or ``pyproject.toml``, in this order.

A URL may hold a password. It is kept out of every `repr`, nothing here prints more of it than `Url.shown`, and
texts of drivers go through `Url.scrub`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast
from urllib.parse import SplitResult, parse_qsl, quote, quote_plus, unquote, urlsplit

from fenceguard.cli._output import one_line

Store: TypeAlias = Literal["postgres", "redis"]

_SCHEMES: Final[dict[Store, tuple[str, ...]]] = {
    "postgres": ("postgresql", "postgres"),
    "redis": ("redis", "rediss", "unix"),
}
_SECRET_PARAMETERS: Final = frozenset({"password", "passfile", "sslpassword"})
_FILE: Final = "pyproject.toml"


class UsageError(Exception):
    """The command was called in a way that cannot work; ends it with exit code 2."""


@dataclass(frozen=True, slots=True)
class Url:
    """The address of a server.

    Attributes:
        store: what runs there.
        text: the URL as given; may hold a password.
        source: where it was given, for messages.
        shown: user, host, port and database, fit to be printed.
        secrets: what may not be printed, in every spelling that a driver could use.
    """

    store: Store
    text: str = field(repr=False)
    source: str
    shown: str
    secrets: tuple[str, ...] = field(repr=False)

    @property
    def driver(self) -> str:
        """The driver that the URL asks for (``postgresql+psycopg://``); empty when it asks for none."""
        return self.text.partition("://")[0].partition("+")[2]

    def scrub(self, text: object) -> str:
        """Return `text` as one line without the URL's passwords."""
        line = one_line(text)
        for secret in self.secrets:
            line = line.replace(secret, "***")
        return line


def find(store: Store, option: str | None) -> Url | None:
    """Return the URL of `store`, or `None` when none of the three places has one.

    Args:
        store: ``"postgres"`` or ``"redis"``.
        option: what ``--postgres`` or ``--redis`` said.

    Raises:
        UsageError: the URL or ``pyproject.toml`` is malformed; the message does not repeat it.
    """
    places: list[tuple[str, Callable[[], str | None]]] = [
        (f"--{store}", lambda: option),
        (variable(store), lambda: os.environ.get(variable(store))),
        (f"[tool.fenceguard] of ./{_FILE}", lambda: _from_file(store)),
    ]
    for source, read in places:
        text = read()
        if text:
            return parse(store, text, source=source)
    return None


def need(store: Store, option: str | None) -> Url:
    """Return the URL of `store`; raises `UsageError` as `find` does, and when there is none."""
    url = find(store, option)
    if url is None:
        raise UsageError(
            f"no {store} URL: give --{store} {_example(store)}, set {variable(store)}, or put "
            f'{store} = "{_example(store)}" under [tool.fenceguard] in ./{_FILE}'
        )
    return url


def variable(store: Store) -> str:
    """Return the name of the environment variable that holds the URL of `store`."""
    return f"FENCEGUARD_{store.upper()}_URL"


def parse(store: Store, text: str, *, source: str) -> Url:
    """Read a URL; raises `UsageError` when it is malformed, without repeating it."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        # Not `from error`: what the parser took for a port or a host may be a piece of the password.
        raise UsageError(_malformed(store, source)) from None
    if parts.scheme.partition("+")[0] not in _SCHEMES[store] or _has_stray_at(parts):
        raise UsageError(_malformed(store, source))
    parameters = parse_qsl(parts.query)
    secrets = [unquote(parts.password or ""), *(value for name, value in parameters if name in _SECRET_PARAMETERS)]
    user = f"{unquote(parts.username)}@" if parts.username else ""
    at_port = "" if port is None else f":{port}"
    place = f"{user}{_bracketed(host)}{at_port}{parts.path}"
    return Url(store, text, source, place or "the default server", _spellings(secrets))


def _has_stray_at(parts: SplitResult) -> bool:
    """Tell whether an unescaped character of a password has split the URL at a wrong place."""
    where = parts.netloc.count("@")
    return where > 1 or "@" in parts.path + parts.fragment or (where == 0 and "@" in parts.query)


def _bracketed(host: str | None) -> str:
    return f"[{host}]" if host and ":" in host else host or ""


def _spellings(secrets: list[str]) -> tuple[str, ...]:
    spelled = {spell(secret) for secret in secrets if secret for spell in (str, quote, quote_plus)}
    return tuple(sorted(spelled, key=len, reverse=True))


def _from_file(store: Store) -> str | None:
    try:
        content = tomllib.loads(Path(_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"./{_FILE} cannot be read: {type(error).__name__}; mend it or give --{store}") from None
    value: Any = content
    for name in ("tool", "fenceguard", store):
        value = cast("dict[str, Any]", value).get(name, {}) if isinstance(value, dict) else None
    if value == {}:
        return None
    if not isinstance(value, str):
        raise UsageError(f"[tool.fenceguard] of ./{_FILE}: {store} must be a string that holds a URL")
    return value


def _example(store: Store) -> str:
    return "postgresql://user@host/database" if store == "postgres" else "redis://host:6379/0"


def _malformed(store: Store, source: str) -> str:
    return (
        f"the {store} URL from {source} is malformed: write it as {_example(store)}, with special characters of "
        "a password percent-encoded"
    )
