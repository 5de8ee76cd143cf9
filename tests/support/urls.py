"""Small changes to database and Redis URLs."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def driver(url: str, name: str) -> str:
    """Return a `postgresql://` URL as SQLAlchemy wants it: ``driver(url, "asyncpg")``."""
    return url.replace("postgresql://", f"postgresql+{name}://", 1)


def at_database(url: str, name: str) -> str:
    """Return the URL with another database (Postgres) or database number (Redis)."""
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def at_port(url: str, port: int, host: str = "127.0.0.1") -> str:
    """Return the URL with another host and port, such as a proxy's."""
    return _with_netloc(urlsplit(url), f"{host}:{port}")


def with_password(url: str, password: str) -> str:
    """Return the URL with another password."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.username or ''}:{password}@{parts.hostname}:{parts.port}").geturl()


def without_password(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.hostname}:{parts.port}").geturl()


def _with_netloc(parts: SplitResult, place: str) -> str:
    login, at, _ = parts.netloc.rpartition("@")
    return parts._replace(netloc=login + at + place).geturl()


def place(url: str) -> tuple[str, int]:
    """Return host and port."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or {"redis": 6379}.get(parts.scheme, 5432)
