"""Owns what is answered in place of a result: HTTP status and OpenAI's error object. Decides none.

Whatever goes wrong, a client gets ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from ds4q.artifact.errors import Ds4qError, one_line
from ds4q.runtime.errors import (
    ChatError,
    ContextError,
    ControlTokenError,
    DrainingError,
    PromptError,
    QueueFullError,
    SamplingError,
    TokenError,
)
from ds4q.runtime.serve.schema import ONLY

SHOWN_CHARACTERS = 80
DRAIN_RETRY_S = 30.0

_TYPES = {  # of the error object, by status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_WORDS = {  # for faults whose words in pydantic are of Python, by their type
    "dict_type": "should be an object",
    "model_type": "should be an object",
    "too_short": "should have at least {min_length}",
    "too_long": "should have at most {max_length}",
}

_CALLERS = (ChatError, ControlTokenError, PromptError, SamplingError, TokenError)
"""Errors that tell of a request, not of the model or the machine."""


class Refusal(Exception):
    """An answer that is no result.

    Parameters
    ----------
    status : of HTTP
    message : one line that says what is wrong and what to do
    param : the field of the request that it is about
    code : a word for programs
    headers : further ones of the response
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @classmethod
    def busy(cls, message: str, retry_after_s: float, *, code: str) -> Self:
        """503, to be asked again after so many seconds."""
        return cls(
            503, message, code=code, headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        )

    @classmethod
    def of(cls, error: Ds4qError, *, param: str | None = None) -> Self:
        """What ``error`` comes to for a client; ``param``: the field that holds the prompt.

        Paths are not told: they are the server's.
        """
        if isinstance(error, QueueFullError):
            return cls.busy(str(error), error.retry_after_s, code="queue_full")
        if isinstance(error, DrainingError):
            return cls.busy(str(error), DRAIN_RETRY_S, code="draining")
        if isinstance(error, ContextError):
            return cls(400, _words(error), param=param, code="context_length_exceeded")
        if isinstance(error, _CALLERS):
            return cls(400, _words(error), param=param)
        return cls(500, _words(error), code=type(error).__name__)

    @classmethod
    def of_request(cls, error: ValidationError) -> Self:
        """What the first fault of a request comes to."""
        fault = error.errors(include_url=False)[0]
        place, kind, given = fault["loc"], fault["type"], fault["input"]
        if kind == "role" and not isinstance(given, dict):  # a message, whose role is looked for
            kind = "dict_type"
        elif kind == "role":
            place, given = (*place, "role"), given.get("role")
            kind = "missing" if given is None else "role"
        param = _path(place) or None
        if kind == "extra_forbidden":
            return cls(400, f"unsupported field: {param}", param=param, code="unsupported_field")
        if kind == "missing":
            return cls(400, f"{param} is missing", param=param, code="missing_field")
        found = _shown(given)
        if param in ONLY:
            message = f"unsupported value of {param}: {found}; only {ONLY[param]} is served"
            return cls(400, message, param=param, code="unsupported_value")
        facts = fault.get("ctx", {})
        if kind == "together":  # what a field needs of another one
            return cls(400, fault["msg"], param=facts["param"])
        words = _WORDS.get(kind, "").format_map(facts) or fault["msg"]
        message = words.removeprefix("Value error, ").removeprefix("Input ")
        if kind in ("too_short", "string_too_short") and facts["min_length"] == 1:
            message = "should not be empty"
        elif kind == "too_long" and facts["max_length"] == 1:
            message = "a request may have one"
        elif kind == "literal_error":
            message = message.replace("True", "true").replace("False", "false")  # in JSON's words
        if kind not in ("value_error", "too_short", "string_too_short"):
            message += f", not {found}"
        code = "unsupported_value" if kind in ("literal_error", "role") else None
        return cls(400, f"{param}: {message}" if param else message, param=param, code=code)


def shutting_down() -> Refusal:
    """The refusal of a request that the server does not begin, or not end, since it ends itself."""
    return Refusal.busy("the server is shutting down", DRAIN_RETRY_S, code="draining")


def _words(error: Ds4qError) -> str:
    """The message of an error, without the path that it begins with."""
    return str(error).removeprefix(f"{one_line(error.path)}: " if error.path else "")


def _path(place: tuple[int | str, ...]) -> str:
    """``messages[0].content`` of a place in a request; names of alternatives (<...>) left out."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{cut(part)}" if text else cut(part)
    return text


def cut(text: str) -> str:
    """Text of a request for a message, which need not be as long."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _shown(value: Any) -> str:
    """A value of a request for its message: as JSON, cut where it is long."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return cut(json.dumps(value, ensure_ascii=False))
