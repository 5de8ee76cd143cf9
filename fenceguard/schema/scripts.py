"""The SQL of the migrations: files in ``sql/``, or folders of them, taken apart into single statements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from sqlalchemy import TextClause, text

_SQL: Final = Path(__file__).with_name("sql")

_STATEMENT: Final = re.compile(
    r"""
    (?: --[^\n]*                        # a comment,
    |   '(?:[^']|'')*'                  # a string,
    |   \$(?P<tag>\w*)\$.*?\$(?P=tag)\$ # a body in dollar quotes, none of which ends the statement;
    |   begin[ ]atomic\b.*?\bend(?=;)   # nor does a body in standard SQL
    |   [^;]
    )+
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENTS: Final = re.compile(r"\A(?:\s*--[^\n]*\n)*\s*")


def statements(name: str) -> list[str]:
    """Return the statements of one step, as ``"0001_up"``, in order and without their semicolons.

    A step is ``sql/<name>.sql``, or the files of the folder ``sql/<name>`` by name. A driver that prepares
    statements (asyncpg) takes one at a time.
    """
    step = _SQL / name
    files = sorted(step.glob("*.sql")) if step.is_dir() else [step.with_suffix(".sql")]
    found = [match.group() for file in files for match in _STATEMENT.finditer(file.read_text("utf-8"))]
    return [statement.strip() for statement in found if _COMMENTS.sub("", statement)]


def literal_text(statement: str) -> TextClause:
    """Return `statement` as SQLAlchemy text in which no colon begins a parameter."""
    return text(statement.replace(":", r"\:"))


def quote_literal(value: str) -> str:
    r"""Return `value` as an SQL string that reads the same on every path.

    A percent sign becomes ``\x25``: some drivers, and Alembic's ``--sql`` without the right paramstyle, double it.
    """
    quoted = value.replace("'", "''")
    if "\\" in value or "%" in value:
        escaped = quoted.replace("\\", "\\\\").replace("%", r"\x25")
        return f"E'{escaped}'"
    return f"'{quoted}'"


def quote_name(name: str) -> str:
    """Return `name` as a quoted SQL identifier."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
