"""Names of resources, and the templates that make them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fenceguard.resources import ANY_RESOURCE, Template, check_owner, check_resource, field_text

# -- names


@pytest.mark.parametrize(
    "name", ["a", "account:42", "größe/ß", "日本", "x" * 512, "ß" * 256, "a b", "%{}", ANY_RESOURCE]
)
def test_printable_names_up_to_512_bytes_are_taken_as_they_are(name: str) -> None:
    assert (check_resource(name), check_owner(name)) == (name, name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "1 to 512 bytes of UTF-8, not 0"),
        ("x" * 513, "not 513"),
        ("ß" * 257, "not 514"),
        ("a\x00b", "control character"),
        ("a\nb", "control character"),
        ("a\x7fb", "control character"),
        ("a\x85b", "control character"),
        ("a\ud800b", "lone surrogate"),
    ],
)
@pytest.mark.parametrize(("check", "kind"), [(check_resource, "resource"), (check_owner, "owner")])
def test_a_name_that_breaks_the_rule_is_refused_with_the_rule(check: Any, kind: str, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        check(name)
    assert str(caught.value).startswith(kind)


@pytest.mark.parametrize("bad", ["\n" * 10**6, "\ud800" * 10**6, "x" * 10**6])
def test_the_message_about_an_endless_name_is_short(bad: str) -> None:
    with pytest.raises(ValueError, match="resource") as caught:
        check_resource(bad)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", [None, 42, b"account:42"])
def test_a_name_that_is_no_text_is_a_type_error(name: Any) -> None:
    with pytest.raises(TypeError, match="resource must be a str, not"):
        check_resource(name)


# -- values of fields


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return self.upper()


ID = UUID("0188c5f6-7b9a-7cc2-8d5e-0123456789ab")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-7, "-7"),
        (10**30, "1" + "0" * 30),
        ("a b", "a b"),
        (ID, "0188c5f6-7b9a-7cc2-8d5e-0123456789ab"),
        (Colour.RED, "red"),
        (Size.BIG, "3"),
        (Loud("quiet"), "quiet"),
    ],
)
def test_integers_texts_and_uuids_are_written_as_postgres_writes_them(value: object, text: str) -> None:
    written = field_text(value)
    assert (written, type(written)) == (text, str)


class Plain(Enum):
    ONE = 1


@pytest.mark.parametrize("value", [True, False, 1.5, None, b"x", Plain.ONE, object, (1,)])
def test_a_value_whose_text_differs_between_python_and_postgres_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="int, str or UUID values, not"):
        field_text(value)


# -- templates


@pytest.mark.parametrize(
    ("source", "literals", "fields"),
    [
        ("nightly", ("nightly",), ()),
        ("{id}", ("", ""), ("id",)),
        ("account:{id}", ("account:", ""), ("id",)),
        ("{order.tenant}/{order.id}", ("", "/", ""), ("order.tenant", "order.id")),
        ("a{x}b{y}c{z}d", ("a", "b", "c", "d"), ("x", "y", "z")),
        ("{{id}}", ("{id}",), ()),
        ("{{{id}}}", ("{", "}"), ("id",)),
        ("{größe}", ("", ""), ("größe",)),
        ("{_1}", ("", ""), ("_1",)),
        ("{a}{{{b}", ("", "{", ""), ("a", "b")),
    ],
)
def test_a_template_is_read_as_texts_and_fields(
    source: str, literals: tuple[str, ...], fields: tuple[str, ...]
) -> None:
    template = Template.parse(source)
    assert (template.source, template.literals, template.fields) == (source, literals, fields)
    assert template.separators == literals[1:-1]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{}", "'{}' is not a field"),
        ("{1}", "is not a field"),
        ("{a b}", "is not a field"),
        ("{a.}", "is not a field"),
        ("{.a}", "is not a field"),
        ("{a..b}", "is not a field"),
        ("{a[0]}", "is not a field"),
        ("{a!r}", "is not a field"),
        ("{a:d}", "is not a field"),
        ("{ a }", "is not a field"),
        ("{a\u00b7}", "is not a field"),
        ("{a", "unmatched '{'"),
        ("a}", "unmatched '}'"),
        ("{{a}", "unmatched '}'"),
        ("{a{b}}", "unmatched '{'"),
        ("{a}{b}", "put text between two fields"),
        ("", "1 to 512 bytes"),
        ("{a}\n", "control character"),
        ("x" * 513, "1 to 512 bytes"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_where_it_is_declared(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Template.parse(source)


def test_a_template_that_is_no_text_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="must be a str"):
        Template.parse(42)


def test_values_come_from_a_mapping_or_from_a_function() -> None:
    template = Template.parse("{a.b}/{c}")
    values = {"a.b": 1, "c": ID}
    assert template.render(values) == template.render(values.__getitem__) == f"1/{ID}"


def test_a_template_without_fields_names_one_resource() -> None:
    assert Template.parse("{{nightly}}").render({}) == "{nightly}"


@pytest.mark.parametrize("value", [True, 1.5, Decimal("1.50"), datetime(2027, 1, 1, tzinfo=UTC), None])
def test_case_44_a_field_of_another_type_is_refused_and_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"template 'account:\{id\}', field 'id': .* int, str or UUID"):
        Template.parse("account:{id}").render({"id": value})


@pytest.mark.parametrize(
    ("source", "values", "why"),
    [
        ("account:{id}", {"id": ""}, "field 'id' is empty"),
        ("account:{id}", {"id": "a\nb"}, "control character"),
        ("account:{id}", {"id": "x" * 505}, "1 to 512 bytes of UTF-8, not 513"),
        ("{a}/{b}", {"a": "x/y", "b": 1}, "the value 'x/y' of field 'a' holds the separator '/'"),
        ("{a}/{b}", {"a": 1, "b": "x/y"}, "of field 'b' holds the separator"),
        ("{a}--{b}", {"a": "x-", "b": 1}, "the value 'x-' of field 'a' holds the separator '--'"),
        ("{a}-{b}/{c}", {"a": 1, "b": 2, "c": "x-y"}, "of field 'c' holds the separator '-'"),
        ("{a}-{b}", {"a": 1, "b": -1}, "the value '-1' of field 'b' holds the separator '-'"),
    ],
)
def test_a_value_that_could_name_another_row_s_resource_is_refused(
    source: str, values: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Template.parse(source).render(values)


def test_a_single_field_may_hold_whatever_a_resource_may() -> None:
    assert Template.parse("a/{id}/b").render({"id": "x/b/a"}) == "a/x/b/a/b"


# Few characters, so that values, separators and what lies around them meet often.
texts = st.text("ab-", max_size=3)
separators = st.text("ab-", min_size=1, max_size=3)
values = st.text("ab-", min_size=1, max_size=4)


@st.composite
def named(draw: st.DrawFn) -> tuple[Template, str]:
    """A template with one to four fields, and a name that some values give it, be they allowed or not."""
    count = draw(st.integers(1, 4))
    literals = [draw(texts), *draw(st.lists(separators, min_size=count - 1, max_size=count - 1)), draw(texts)]
    source = "".join(f"{literal}{{f{n}}}" for n, literal in enumerate(literals[:-1])) + literals[-1]
    name = "".join(literal + draw(values) for literal in literals[:-1]) + literals[-1]
    return Template.parse(source), name


def readings(name: str, literals: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield every list of values that `literals` around and between them make `name` of."""
    first, second, *rest = literals
    for end in range(len(first) + 1, len(name) + 1):
        if not rest:
            yield from [[name[len(first) : end]]] if name[end:] == second else []
        elif name.startswith(second, end):
            yield from ([name[len(first) : end], *more] for more in readings(name[end:], literals[1:]))


def rendered(template: Template, values: list[str]) -> str | None:
    """Return the resource, or `None` when the values are refused."""
    try:
        return template.render(dict(zip(template.fields, values, strict=True)))
    except ValueError:
        return None


@given(named())
@example((Template.parse("{f0}-{f1}"), "a-b-c"))
@example((Template.parse("{f0}--{f1}"), "a---b"))
@example((Template.parse("{f0}ab{f1}b{f2}"), "aabababb"))
def test_of_all_values_that_would_give_one_name_at_most_one_tuple_is_allowed(case: tuple[Template, str]) -> None:
    template, name = case
    ways = list(readings(name, template.literals))
    assert ways, "the control: the name was made of values"
    assert len([way for way in ways if rendered(template, way) == name]) <= 1


def test_the_control_some_names_are_made_of_several_tuples_of_values() -> None:
    assert sorted(readings("a-b-c", ("", "-", ""))) == [["a", "b-c"], ["a-b", "c"]]


printable = st.text("aZ09é日😀:%{}- _.\u00a0\u2028", min_size=1, max_size=60)


@given(printable, printable)
def test_values_without_separator_and_control_characters_are_taken(one: str, other: str) -> None:
    assert rendered(Template.parse("{a}/{b}"), [one, other]) == f"{one}/{other}"
