"""Owns the shape of answers, for the OpenAPI document. They are made elsewhere, as plain objects.

Fields that OpenAI's API does not have are those of DeepSeek's (``reasoning_content``) and vLLM's
(``token_ids``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """A part of an answer: nothing but its fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorObject(Document):
    """What is wrong, in which field, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(Document):
    """Any answer that is no result."""

    error: ErrorObject


class PromptDetails(Document):
    """Prompt tokens that needed no computing."""

    cached_tokens: int


class CompletionDetails(Document):
    """New tokens that belong to the reasoning."""

    reasoning_tokens: int


class Usage(Document):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Alternative(Document):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A token of the answer, with the likeliest ones at its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Document):
    """Log probabilities of the answer's tokens, and of its reasoning's."""

    content: list[TokenLogprob]
    reasoning_content: list[TokenLogprob]


class CalledFunction(Document):
    """A function's name, and its arguments as a JSON object."""

    name: str
    arguments: str


class ToolCallDocument(Document):
    """A call that the model wants made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCallDocument):
    """A call in a stream, whole, with its number in the answer."""

    index: int


class AnswerMessage(Document):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDocument] | None = None


class ChatChoice(Document):
    """The answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Document):
    """The answer to a chat request; with ``stream``, server-sent events of ``ChatChunk``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(Document):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Document):
    """A piece of the answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatChunk(Document):
    """The data of one event of a stream; the last one before ``[DONE]`` may hold only ``usage``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class TextLogprobs(Document):
    """Log probabilities in the older form; a token that is no text alone reads ``bytes:\\xNN``."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Document):
    """The continuation, or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class Completion(Document):
    """The continuation of a prompt, and the data of the events of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class Model(Document):
    """The model; ``context_length`` is null until it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int | None


class ModelList(Document):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[Model]


class LoadProgress(Document):
    """Bytes of the model that have been read, of those that are to be."""

    done: int
    total: int


class Health(Document):
    """Whether requests are answered: with status 200 they are."""

    status: Literal["loading", "ready", "failed", "draining"]
    progress: LoadProgress
    error: str | None


class Live(Document):
    """What the page shows, as of now."""

    state: Literal["loading", "ready", "failed", "draining"]
    error: str | None
    progress: list[int]
    model: str
    uptime_s: float
    device: str | None
    kv_type: str | None
    max_context: int | None
    default_max_tokens: int
    sampling: dict[str, float]
    efforts: list[str]
    running: int
    waiting: int
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefix: dict[str, int] | None
    experts: dict[str, Any] | None
