"""The fields of a request's JSON object: each taken once with its kind and bounds; what is left over is refused."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from penstock.serve.refusals import invalid, quoted


class Fields:
    """A JSON object from a client, whose fields are taken one by one.

    Raises:
        RefusalError: it is no object.
    """

    #: fields that have not been taken
    _left: dict[str, Any]
    #: the names of those that could be taken
    _known: list[str]

    def __init__(self, content: Any) -> None:
        if not isinstance(content, dict):
            raise invalid(None, f"the body is {quoted(content)}; a JSON object is expected")
        self._left, self._known = dict(content), []

    def take(self, name: str) -> Any:
        """A field of any kind; None where it is null or missing."""
        self._known.append(name)
        return self._left.pop(name, None)

    def ignore(self, names: Iterable[str]) -> None:
        """Take fields that change nothing here."""
        for name in names:
            self.take(name)

    def truth(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(name, f"{name} is {quoted(value)}; true or false is expected")
        return default if value is None else value

    def whole(self, name: str, least: int, most: int, why: str = "") -> int | None:
        """A whole number within bounds; `why` is put behind the upper one."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise invalid(name, f"{name} is {quoted(value)}; a whole number from {least} to {most}{why} is expected")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number within bounds."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise invalid(name, f"{name} is {quoted(value)}; a number from {least:g} to {most:g} is expected")
        return float(value)

    def word(self, name: str) -> str | None:
        """A string."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(name, f"{name} is {quoted(value)}; a string is expected")
        return value

    def unsupported(self, name: str, *harmless: Any) -> None:
        """Refuse a field of OpenAI's interface that this server lacks, unless its value asks for nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise invalid(name, f"{name} is {quoted(value)}; this server does not have it, leave it out")

    def end(self) -> None:
        """Refuse fields that were not taken."""
        for name in self._left:
            near = get_close_matches(name, self._known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(self._known)}"
            raise invalid(name[:80], f"there is no field {quoted(name)}; {hint}")


def text_in(name: str, value: Any) -> str:
    """A string that can be written as UTF-8. Raises: RefusalError for anything else."""
    if not isinstance(value, str):
        raise invalid(name, f"{name} is {quoted(value)}; a string is expected")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, f"{name} cannot be written as UTF-8 ({error.reason}); give whole characters") from None
    return value
