"""What Postgres said: the one place that reads a driver's exception.

An exception is read by its attributes, never by its class or text, so that psycopg 2 and 3, asyncpg and
SQLAlchemy's wrappers around them are understood without importing any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error of the server, whichever driver brought it; all `None` where the server has not spoken.

    Attributes:
        sqlstate: five characters.
        message: the primary one.
        detail: its DETAIL.
        hint: its HINT.
        position: where in the statement, in characters from 1.
    """

    sqlstate: str | None
    message: str | None
    detail: str | None
    hint: str | None
    position: int | None


def server_error(error: BaseException) -> ServerError:
    """Read an exception of a driver, or SQLAlchemy's wrapper around one."""
    raised: Any = getattr(error, "orig", None) or error
    diagnosis = getattr(raised, "diag", None)
    if diagnosis is not None:  # psycopg
        return ServerError(
            diagnosis.sqlstate,
            diagnosis.message_primary,
            diagnosis.message_detail,
            diagnosis.message_hint,
            _number(diagnosis.statement_position),
        )
    # SQLAlchemy's adapter of asyncpg keeps the driver's own exception as the cause.
    said = raised if hasattr(raised, "position") else raised.__cause__ or raised
    return ServerError(
        getattr(raised, "sqlstate", None),
        getattr(said, "message", None),
        getattr(said, "detail", None),
        getattr(said, "hint", None),
        _number(getattr(said, "position", None)),
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
