"""`@guard.fenced(template)`: what both guards' decorators have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fenceguard.resources import Template

OnUnavailable: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class Call:
    """How the calls of one decorated function name what they need.

    Attributes:
        signature: of the function.
        template: the resource, over the function's parameters and their attributes.
        session: path to the caller's open session (``"self.session"``), or `None`.
    """

    signature: inspect.Signature
    template: Template
    session: str | None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Return the resource and the session of one call; raises `TypeError` or `ValueError` as `Template`."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def value_of(path: str) -> Any:
            root, *attributes = path.split(".")
            value = bound.arguments[root]
            for name in attributes:
                value = getattr(value, name)
            return value

        return self.template.render(value_of), None if self.session is None else value_of(self.session)


def check_template(template: object) -> None:
    """Refuse what is no template, above all the function itself; raises `TypeError`."""
    if not isinstance(template, str):
        raise TypeError(f'write @guard.fenced("account:{{account_id}}"), with a template, not {template!r}')


def unwrap(function: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the function of a class or static method, and what makes such a method of a function again."""
    kind: Any = function.__class__
    if kind is classmethod or kind is staticmethod:
        return function.__func__, kind
    return function, _same


def _same(function: Any) -> Any:
    return function


def parse_call(
    function: Callable[..., Any],
    template: str,
    *,
    session: str | None,
    on_unavailable: OnUnavailable,
    is_async: bool,
) -> Call:
    """Check at decoration what would otherwise fail at the first call.

    Raises:
        TypeError: the function is of the wrong kind, or lacks a parameter that the template names.
        ValueError: the template is malformed, or `on_unavailable` is neither ``"raise"`` nor ``"skip"``.
    """
    name = getattr(function, "__qualname__", repr(function))
    if on_unavailable not in ("raise", "skip"):
        raise ValueError(f"fenced({template!r}): on_unavailable must be 'raise' or 'skip', not {on_unavailable!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name} is a generator, whose body runs after the call: use hold() around its use")
    if inspect.iscoroutinefunction(function) != is_async:
        if is_async:
            raise TypeError(f"{name} is sync, and AsyncGuard takes async functions; use Guard")
        raise TypeError(f"{name} is async, and Guard takes sync functions; use AsyncGuard")
    signature = inspect.signature(function)
    parsed = Template.parse(template)
    for path in (*parsed.fields, *([] if session is None else [session])):
        root = path.split(".")[0]
        parameter = signature.parameters.get(root)
        if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"fenced({template!r}): {name}{signature} has no parameter {root!r}")
    return Call(signature, parsed, session)
