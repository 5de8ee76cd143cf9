"""Is fenceguard's schema there, and does it fit this version of the library."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

from fenceguard.errors import SchemaMissing, StoreUnreachable

HEAD: Final = "0001"
"""The revision that this version of the library needs: the newest in ``migrations/versions``."""

MIN_SERVER: Final = 15
"""The oldest major version of Postgres that is supported."""

_UP: Final = "run `fenceguard migrate up`"

_PRESENT: Final = text("""
    select has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute')
    from pg_catalog.pg_namespace n join pg_catalog.pg_proc p on p.pronamespace = n.oid
    where n.nspname = 'fenceguard' and p.proname = 'version'
""")


def check_dialect(connection: Connection) -> None:
    """Refuse a connection to something else than Postgres, without asking it anything.

    Raises:
        StoreUnreachable: it is one.
    """
    if connection.dialect.name != "postgresql":
        raise StoreUnreachable("postgres", f"the connection speaks {connection.dialect.name}, not postgresql")


def check_server(connection: Connection) -> None:
    """Refuse a server that is no Postgres or older than `MIN_SERVER`.

    Raises:
        StoreUnreachable: it is; nothing has been changed.
    """
    check_dialect(connection)
    number = int(connection.scalar(text("select current_setting('server_version_num')")) or 0)
    if number < MIN_SERVER * 10_000:
        raise StoreUnreachable(
            "postgres", f"the server is Postgres {number // 10_000}; fenceguard needs {MIN_SERVER} or newer"
        )


def check_version(connection: Connection) -> None:
    """Refuse a database whose fenceguard schema is not the one that this library needs; two quick queries.

    Raises:
        SchemaMissing: it is missing, older or newer, or this role may not use it; the error says what to do.
    """
    usable = connection.scalar(_PRESENT)
    where = f"database {connection.scalar(text('select current_database()'))!r}"
    if usable is None:
        raise SchemaMissing(f"{where} has no fenceguard schema", _UP)
    if not usable:
        role = connection.scalar(text("select current_user"))
        raise SchemaMissing(
            f"role {role!r} may not use the fenceguard schema of {where}",
            "grant it usage on the schema and execute on its functions, as the README shows",
        )
    found = str(connection.scalar(text("select fenceguard.version()")))
    if found < HEAD:
        raise SchemaMissing(f"the fenceguard schema of {where} is at {found}, this library needs {HEAD}", _UP)
    if found > HEAD:
        raise SchemaMissing(
            f"the fenceguard schema of {where} is at {found}, this library knows {HEAD}",
            f"upgrade the fenceguard package here, or run `fenceguard migrate down {HEAD}` with the newer one",
        )


def fenced_tables(connection: Connection) -> list[str]:
    """Return the tables that are fenced, as ``schema.table`` quoted where needed, partitions left out."""
    if connection.scalar(_PRESENT) is None:
        return []
    rows = connection.scalars(
        text(r"""
        select distinct format('%I.%I', n.nspname, c.relname) as name
        from pg_catalog.pg_trigger t
        join pg_catalog.pg_class c on c.oid = t.tgrelid
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where t.tgfoid = 'fenceguard.guard_statement()'\:\:regprocedure and not c.relispartition
        order by name
        """)
    )
    return list(rows)
