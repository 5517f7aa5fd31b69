"""Refusals: errors in the form that clients of OpenAI's interface expect, each with one sentence."""

import json
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

_MOST_QUOTED = 80

json_text = json.JSONEncoder(allow_nan=False).encode
"""JSON in ASCII, which has a form for every character that a request may hold."""


@dataclass(eq=False)
class RefusalError(Exception):
    """A request that is not answered.

    status: HTTP's. message: one sentence. param: the field at fault, if it is one. code: a word for programs.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The JSON that a client gets."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str) -> RefusalError:
    """The refusal of a request that no server could answer."""
    return RefusalError(400, message, param, "invalid_value")


def quoted(value: object) -> str:
    """A value as messages show it, cut short."""
    text = ascii(value)
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def refusal_response(refusal: RefusalError) -> Response:
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(refusal.content, refusal.status, headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_text(content), status, headers, "application/json")
