"""The fence, claims, entering, and tables fenced at the levels reject and enforce."""

from collections.abc import Callable

revision, down_revision = "0001", None


def upgrade(execute: Callable[[str], None]) -> None:
    """Install."""
    execute("0001_up")


def downgrade(execute: Callable[[str], None]) -> None:
    """Remove."""
    execute("0001_down")
