"""Owns ``/v1/chat/completions``: messages to a prompt, an answer to JSON. Sends nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds4q.runtime.errors import ControlTokenError, EffortError, ResponseFormatError, RunError
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.respond import Object
from ds4q.runtime.serve.schema import ChatRequest, Effort
from ds4q.runtime.serve.serving import Plan, Serving
from ds4q.runtime.serve.transcript import Piece, Scored
from ds4q.runtime.text.chat import attach_response_format, attach_tools, encode_chat
from ds4q.runtime.text.pieces import DSML
from ds4q.runtime.text.tokenizer import Tokenizer

ENDPOINT = "/v1/chat/completions"
LEAST_LOGPROB = -9999.0  # OpenAI's, for what JSON has no number for

_EFFORTS: dict[Effort, str] = {  # what a client may ask for: what the format knows
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}


def thinks(request: ChatRequest) -> bool:
    """Whether the model reasons first: it does unless one of two fields says otherwise."""
    disabled = request.thinking is not None and request.thinking.type == "disabled"
    return not disabled and request.reasoning_effort != "none"


def plan_chat(serving: Serving, request: ChatRequest, body: Mapping[str, Any]) -> Plan:
    """What to do for a request.

    Parameters
    ----------
    body : the request as it was sent: tools are shown to the model word for word

    Raises
    ------
    Refusal : it cannot be served
    """
    serving.check_model(request.model)
    serving.scheduler()  # as long as there is none, nothing is worth doing
    has_tools = bool(request.tools) and request.tool_choice != "none"
    messages: Sequence[Any] = [_without_nulls(each) for each in body["messages"]]
    if has_tools:
        messages = attach_tools(messages, body["tools"])
    messages = attach_response_format(messages, body.get("response_format"))
    try:
        prompt = encode_chat(
            serving.config,
            serving.tokenizer,
            messages,
            thinking=thinks(request),
            effort=_EFFORTS[request.reasoning_effort or "low"],
            encoding=serving.encoding,
            fewer_than=serving.max_context,
        )
        job = serving.job(
            request,
            prompt.ids,
            marks=prompt.marks,
            most_tokens=request.most_tokens,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
    except RunError as error:
        raise Refusal.of(error, param=_field(error, has_tools=has_tools)) from error
    return Plan(job, thinking=prompt.thinking, tools=has_tools)


def _field(error: RunError, *, has_tools: bool) -> str:
    """The field of a request that an error of its prompt is about."""
    if isinstance(error, EffortError):
        return "reasoning_effort"
    if isinstance(error, ResponseFormatError):
        return "response_format"
    if has_tools and isinstance(error, ControlTokenError) and error.expected == DSML:
        return "tools"
    return "messages"


def _without_nulls(message: Any) -> Any:
    return {key: value for key, value in message.items() if value is not None}


class ChatForm:
    """Answers to one chat request.

    Parameters
    ----------
    model : the name that the answer is by
    """

    endpoint = ENDPOINT

    def __init__(self, request: ChatRequest, model: str, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        stream = request.stream
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = {"usage": None} if request.include_usage else {}

    def opening(self) -> Object:
        """The chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""}, None, {})

    def chunk(self, piece: Piece, finish_reason: str | None) -> Object:
        """The chunk of a piece."""
        delta: Object = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.calls:  # all of an answer's, at its end
            delta["tool_calls"] = [
                {"index": number, **_call(call)} for number, call in enumerate(piece.calls)
            ]
        return self._chunk(delta, finish_reason, self._extras(piece))

    def usage_chunk(self, counts: Object) -> Object | None:
        """The chunk without choices that has the counts."""
        return {**self._head, "choices": [], "usage": counts} if self._usage else None

    def whole(self, piece: Piece, finish_reason: str | None, counts: Object) -> Object:
        """The answer in one; ``content`` is null where there are only tool calls."""
        message: Object = {"role": "assistant", "content": piece.content or None}
        if not piece.calls:
            message["content"] = piece.content
        if piece.reasoning or counts["completion_tokens_details"]["reasoning_tokens"]:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [_call(call) for call in piece.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            **self._extras(piece),
        }
        return {**self._head, "choices": [choice], "usage": counts}

    def _chunk(self, delta: Object, finish_reason: str | None, extras: Object) -> Object:
        choice = {
            "index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **extras
        }  # fmt: skip
        return {**self._head, "choices": [choice], **self._usage}

    def _extras(self, piece: Piece) -> Object:
        extras: Object = {}
        if self._request.logprobs:
            extras["logprobs"] = _logprobs(piece.scored, self._tokenizer)
        if self._request.return_token_ids:
            extras["token_ids"] = piece.ids
        return extras


def _call(call: Any) -> Object:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprobs(scored: Iterable[Scored], tokenizer: Tokenizer) -> Object:
    """OpenAI's object; tokens of the reasoning in a list of their own, as DeepSeek's API has it."""
    lists: dict[str, list[Object]] = {"content": [], "reasoning": []}
    for each in scored:
        entry = _token(each.id, each.logprob, tokenizer)
        entry["top_logprobs"] = [_token(id_, value, tokenizer) for id_, value in each.top]
        lists[each.channel].append(entry)
    return {"content": lists["content"], "reasoning_content": lists["reasoning"]}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> Object:
    raw = tokenizer.token_bytes(token)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(raw),
    }
