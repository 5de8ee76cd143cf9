"""fenceguard's own chain; `fenceguard.schema` runs it, and so does Alembic on a connection that it is handed."""

from alembic import context

from fenceguard.schema import chain

context.configure(connection=context.config.attributes["connection"], **chain.OPTIONS)
with context.begin_transaction():
    chain.run(context.get_context())
