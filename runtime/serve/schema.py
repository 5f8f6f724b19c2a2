"""Owns the shape of requests: which fields there are, their types and ranges. Answers nothing.

Types are strict: a number in quotes, a fraction or a boolean is no count. A field that is not here
is refused by name; one whose value is null counts as absent, since client libraries send such.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

MOST_ALTERNATIVES = 20
MOST_LEGACY_ALTERNATIVES = 5
MOST_STOPS = 16
SEED_LIMIT = 1 << 63
MOST_IDS = 1 << 20  # of a prompt: DeepSeek-V4 has no position beyond
TOKEN_LIMIT = 1 << 63  # of any vocabulary; what is beyond it is no id
NAME_PATTERN = r"^[a-zA-Z0-9_-]{1,64}$"


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 1e9 and 1000000000.0 are the integer that they equal."""
    if type(value) is float and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _whole_each(values: Any) -> Any:
    """As ``_whole``, for each of a list, most of which are integers already."""
    if isinstance(values, list) and any(type(each) is float for each in values):
        return [_whole(each) for each in values]
    return values


def _boolean(value: Any) -> Any:
    """In Python 1 and 0.0 are among the values ``True`` and ``False``; in JSON they are not."""
    if type(value) is not bool:
        raise ValueError("should be a boolean")
    return value


def _together(param: str, message: str) -> PydanticCustomError:
    """The error of a field that does not go with another one."""
    return PydanticCustomError("together", "{message}", {"message": message, "param": param})


def _json(value: Any) -> Any:
    """JSON has no number for infinity, which 1e400 is read as."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("holds a number that is too large") from None
    return value


Count = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT), BeforeValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_LIMIT), BeforeValidator(_whole)]
Stop = Annotated[str, Field(min_length=1)]

# A list with a million faults would take minutes and gigabytes to tell them all; one is told.
First = Field(fail_fast=True)

OnlyTrue = Annotated[Literal[True], BeforeValidator(_boolean)]
OnlyFalse = Annotated[Literal[False], BeforeValidator(_boolean)]
Zero = Annotated[float, Field(ge=0, le=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        """Leave out what is null, and all but one of the fields that there are not: one is told."""
        if not isinstance(value, dict):
            return value
        given = {key: each for key, each in value.items() if each is not None}
        unknown = [key for key in given if key not in cls.model_fields]
        for key in unknown[1:]:
            del given[key]
        return given


def _by_type(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


class TextPart(_Strict):
    """A part of a message's content; DeepSeek-V4 reads text only."""

    type: Literal["text"]
    text: str


class ResultPart(BaseModel):
    """A part of a tool's result; one that is not text is named in its place."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], First, Tag("<parts>")],
    Discriminator(_by_type),
]
ResultContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ResultPart], First, Tag("<parts>")],
    Discriminator(_by_type),
]


class FunctionCall(_Strict):
    """Which function an assistant message calls, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallInput(_Strict):
    """A call in an assistant message; ``index``, which streams number calls with, may stay."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: TokenId | None = None


class SystemMessage(_Strict):
    """Instructions."""

    role: Literal["system"]
    content: Content


class UserMessage(_Strict):
    """What is asked."""

    role: Literal["user"]
    content: Content


class AssistantMessage(_Strict):
    """An earlier answer; as the last message, with ``prefix``, the beginning of the answer."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallInput], First] | None = None
    prefix: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("content may be absent only beside tool_calls")
        return self


class ToolMessage(_Strict):
    """What a called tool returned."""

    role: Literal["tool"]
    content: ResultContent
    tool_call_id: str


def _by_role(value: Any) -> str:
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if isinstance(role, str) else "<none>"


Message = Annotated[
    Annotated[SystemMessage, Tag("<system>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(
        _by_role,
        custom_error_type="role",
        custom_error_message="role must be system, user, assistant or tool",
    ),
]


class Function(_Strict):
    """A function that the model may call; what is here is shown to the model as it stands."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_json)] | None = None
    strict: OnlyFalse | None = None


class Tool(_Strict):
    """A tool; functions are all that there are."""

    type: Literal["function"]
    function: Function


class Thinking(_Strict):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled"]


class ResponseFormat(_Strict):
    """``json_object`` tells the model to answer with JSON; its answer is not forced to be any."""

    type: Literal["text", "json_object"]


class StreamOptions(_Strict):
    """What a stream tells beside the answer."""

    include_usage: bool = False


ONLY = {
    "n": "1",
    "best_of": "1",
    "frequency_penalty": "0",
    "presence_penalty": "0",
    "logit_bias": "{}",
    "parallel_tool_calls": "true",
    "store": "false",
    "echo": "false",
}
"""Fields of OpenAI's API that are taken with one value only: that of not using them."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]


class Generation(_Strict):
    """What both ways to ask have in common.

    Those with one value only are parts of OpenAI's API that clients send without meaning them.
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[
            Annotated[Stop, Tag("<text>")]
            | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True), Tag("<parts>")],
            Discriminator(_by_type),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1, le=1), BeforeValidator(_whole)] = 1
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = Field(None, description="A label of the caller's; it changes nothing.")
    return_token_ids: bool = Field(False, description="Also tell the ids of the answer's tokens.")

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise _together("stream_options", "stream_options belongs to stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(Generation):
    """A request to ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: (
        Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES), BeforeValidator(_whole)] | None
    ) = None
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], First] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: OnlyTrue | None = None
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _together("top_logprobs", "top_logprobs belongs to logprobs: true")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise _together(
                "max_tokens", "max_tokens and max_completion_tokens differ; send one of them"
            )
        return self

    @property
    def most_tokens(self) -> int | None:
        """The limit on new tokens, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _by_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    return "<list>" if value and isinstance(value[0], str | list) else "<ids>"


def _by_first(value: Any) -> str:
    return "<ids>" if isinstance(value, list) else "<text>"


Ids = Annotated[
    list[Annotated[int, Field(ge=0, lt=TOKEN_LIMIT)]],
    Field(min_length=1, max_length=MOST_IDS, fail_fast=True),
    BeforeValidator(_whole_each),
]


class CompletionRequest(Generation):
    """A request to ``/v1/completions``: text goes on, without a chat format.

    ``prompt`` is one text, which begins a document, or the ids of all its tokens, taken as they
    are; a list may hold one such prompt.
    """

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[Ids, Tag("<ids>")]
        | Annotated[
            list[
                Annotated[
                    Annotated[str, Tag("<text>")] | Annotated[Ids, Tag("<ids>")],
                    Discriminator(_by_first),
                ]
            ],
            Field(min_length=1, max_length=1, fail_fast=True),
            Tag("<list>"),
        ],
        Discriminator(_by_prompt),
    ]
    logprobs: (
        Annotated[int, Field(ge=0, le=MOST_LEGACY_ALTERNATIVES), BeforeValidator(_whole)] | None
    ) = None
    echo: OnlyFalse | None = None
    best_of: Annotated[int, Field(ge=1, le=1), BeforeValidator(_whole)] | None = None

    @property
    def text_or_ids(self) -> str | list[int]:
        """The one prompt."""
        if isinstance(self.prompt, list) and isinstance(self.prompt[0], str | list):
            return self.prompt[0]
        return self.prompt
