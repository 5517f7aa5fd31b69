"""How the documentation site reads our code: examples in docstrings, one-line sections, links, defaults of settings."""

import re
from typing import Any

import griffe

import penstock
from penstock import schedule

_EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1(?! *$).*\n?)*", re.MULTILINE)
_HEAD = re.compile(r"^(Raises|Returns|Source|Note): (?=\S)", re.MULTILINE)
#: names with a place in the reference -> that place; functions of schedules are words of other meanings, too
_PLACES = {name: f"penstock.{name}" for name in penstock.__all__ if not name.startswith("__")}
_PLACES |= {name: f"penstock.schedule.{name}" for name in schedule.__all__ if name[0].isupper()}
_NAMED = re.compile(r"(?<!`)`(\w+)((?:\.\w+)*)`(?!`)")


class Docstrings(griffe.Extension):
    """Rewrites each docstring as it is read, and leaves of a declared setting its default alone."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """End an enum's docstring with its members. Called by griffe."""
        is_enum = any(str(base).endswith(("Enum", "NamedValue")) for base in cls.bases)
        members = [name for name, member in cls.members.items() if member.is_attribute and name.isupper()]
        if cls.docstring is not None and members and is_enum:
            values = (f"`{name}`" for name in members)
            cls.docstring.value += f"\n\n**Values:** {', '.join(values)}"

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let the engine begin with its own methods, and end with those that it inherits. Called by griffe."""
        engine = pkg["engine.engine.Engine"]
        for base in engine.mro():
            for name, member in base.members.items():
                if name not in engine.members:
                    engine.members[name] = griffe.Alias(name, target=member, parent=engine)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Shorten `setting(default, help, bounds)` to the default, `same_as(Kind, "name")` to Kind.name.

        Called by griffe.
        """
        call = attr.value
        if not isinstance(call, griffe.ExprCall):
            return
        if str(call.function) in ("setting", "argument"):
            default = call.arguments[0]
            attr.value = default.value if isinstance(default, griffe.ExprKeyword) else default
        elif str(call.function) == "same_as":
            kind, name = map(str, call.arguments)
            attr.value = f"{kind}.{name[1:-1]}"

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite an object's docstring. Called by griffe."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring with its examples fenced, its one-line sections marked, and links to public names."""
    fenced = _EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n", text + "\n")
    return _NAMED.sub(_linked, _HEAD.sub(r"**\1:** ", fenced)).rstrip("\n")


def _linked(name: re.Match[str]) -> str:
    """A name as a link to its place. Of the engine's methods each has its own; attributes are told with their class."""
    if name[1] not in _PLACES:
        return name[0]
    return f"[{name[0]}][{_PLACES[name[1]]}{name[2] if name[1] == 'Engine' else ''}]"
