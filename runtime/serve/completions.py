"""Owns ``/v1/completions``: text or token ids go on, in OpenAI's older JSON. Sends nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from ds4q.runtime.errors import RunError
from ds4q.runtime.serve.chat_api import LEAST_LOGPROB
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.serve.respond import Object
from ds4q.runtime.serve.schema import CompletionRequest
from ds4q.runtime.serve.serving import Plan, Serving
from ds4q.runtime.serve.transcript import Piece, Scored
from ds4q.runtime.text.chat import encode_raw
from ds4q.runtime.text.decode import TextStream
from ds4q.runtime.text.tokenizer import Tokenizer

ENDPOINT = "/v1/completions"


def plan_completion(serving: Serving, request: CompletionRequest) -> Plan:
    """What to do for a request; raises ``Refusal`` where it cannot be served."""
    serving.check_model(request.model)
    serving.scheduler()  # as long as there is none, nothing is worth doing
    prompt = request.text_or_ids
    try:
        ids = (
            encode_raw(serving.tokenizer, prompt, fewer_than=serving.max_context)
            if isinstance(prompt, str)
            else prompt
        )
        job = serving.job(
            request, ids, most_tokens=request.max_tokens, top_logprobs=request.logprobs
        )
    except RunError as error:
        raise Refusal.of(error, param="prompt") from error
    return Plan(job)


class CompletionForm:
    """Answers to one request; chunks of a stream look like the whole."""

    endpoint = ENDPOINT

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer.token_bytes)
        self._characters = 0
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._usage = {"usage": None} if request.include_usage else {}

    def opening(self) -> None:
        """Nothing: a text has no role."""

    def chunk(self, piece: Piece, finish_reason: str | None) -> Object:
        """The chunk of a piece."""
        return {**self._head, "choices": [self._choice(piece, finish_reason)], **self._usage}

    def usage_chunk(self, counts: Object) -> Object | None:
        """The chunk without choices that has the counts."""
        return {**self._head, "choices": [], "usage": counts} if self._usage else None

    def whole(self, piece: Piece, finish_reason: str | None, counts: Object) -> Object:
        """The answer in one."""
        return {**self._head, "choices": [self._choice(piece, finish_reason)], "usage": counts}

    def _choice(self, piece: Piece, finish_reason: str | None) -> Object:
        choice: Object = {
            "index": 0,
            "text": piece.content,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if self._request.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.scored)
        if self._request.return_token_ids:
            choice["token_ids"] = piece.ids
        return choice

    def _logprobs(self, scored: Sequence[Scored]) -> Object:
        tokens = [self._name(each.id) for each in scored]
        offsets = []
        for each in scored:
            offsets.append(self._characters)
            self._characters += len(self._text.push(each.id))
        return {
            "tokens": tokens,
            "token_logprobs": [max(each.logprob, LEAST_LOGPROB) for each in scored],
            "top_logprobs": [
                {self._name(token): max(value, LEAST_LOGPROB) for token, value in each.top}
                for each in scored
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token's text, or its bytes where they are no text alone, as OpenAI writes them."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
