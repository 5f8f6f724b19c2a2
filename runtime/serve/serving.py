"""Owns what every endpoint needs to turn a request into a job. Writes no answer.

What a request does not say comes from the model's generation_config and from the limits.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4q.quantize.encoding import Encoding
from ds4q.runtime.errors import DrainingError, RunError
from ds4q.runtime.generate import metadata_object, room_after, stop_ids
from ds4q.runtime.sampling import sampling_defaults
from ds4q.runtime.serve.follow import Follower
from ds4q.runtime.serve.job import Job
from ds4q.runtime.serve.limits import Limits
from ds4q.runtime.serve.metrics import Metrics
from ds4q.runtime.serve.refusal import Refusal, cut, shutting_down
from ds4q.runtime.serve.scheduler import Scheduler
from ds4q.runtime.serve.schema import Generation
from ds4q.runtime.serve.service import Service
from ds4q.runtime.serve.transcript import Transcript
from ds4q.runtime.text.tokenizer import Tokenizer

LOADING_RETRY_S = 2.0
DRAWN_SEEDS = 1 << 32  # short to send again, and exact in every JSON reader


@dataclass(frozen=True, slots=True)
class Plan:
    """A job, and how to read its answer.

    Attributes
    ----------
    thinking : it begins inside the reasoning
    tools : it may call tools
    """

    job: Job
    thinking: bool = False
    tools: bool = False


class Serving:
    """A model that requests are turned into jobs for.

    Parameters
    ----------
    service : loads the model and holds its scheduler
    model_name : what clients call it
    metadata : the artifact's
    encoding : texts of the release's prompt format; None where there are none
    """

    def __init__(
        self,
        service: Service,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        metadata: Mapping[str, Any],
        limits: Limits,
        encoding: Encoding | None,
    ) -> None:
        self.service = service
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.config = metadata_object(metadata, "config")
        self.limits = limits
        self.encoding = encoding
        self.created = int(time.time())
        generation = metadata_object(metadata, "generation_config")
        self.sampling = sampling_defaults(generation)
        self.stop_ids = stop_ids(metadata, tokenizer)
        self.metrics = Metrics(service)

    @property
    def max_context(self) -> int | None:
        """Most tokens of a prompt and its answer; None while the model is loading."""
        engine = self.service.engine
        if engine is None:
            return None
        limit = self.limits.max_context
        return engine.max_context if limit is None else min(limit, engine.max_context)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; no name means the one that is."""
        if name is not None and name != self.model_name:
            raise Refusal(
                404,
                f"there is no model {cut(name)!r}; {self.model_name!r} is served here",
                param="model",
                code="model_not_found",
            )

    def scheduler(self) -> Scheduler:
        """What takes jobs; refused as long as there is none."""
        service = self.service
        if service.state == "loading" or service.scheduler is None:
            done, total = service.progress
            told = f" ({100 * done // total} %)" if total else ""
            raise Refusal.busy(f"the model is loading{told}", LOADING_RETRY_S, code="model_loading")
        if service.state != "ready":
            raise shutting_down()
        return service.scheduler

    def job(
        self,
        request: Generation,
        prompt_ids: Sequence[int],
        *,
        marks: Sequence[int] = (),
        most_tokens: int | None,
        top_logprobs: int | None,
    ) -> Job:
        """The job of a request.

        Raises ``TokenError`` or ``ContextError`` for a prompt that cannot be gone on from.
        """
        engine, context = self.service.engine, self.max_context
        if engine is None or context is None:  # closed since the scheduler was asked for
            raise DrainingError
        room = room_after(prompt_ids, engine.vocab_size, context)
        seed = secrets.randbelow(DRAWN_SEEDS) if request.seed is None else request.seed
        given_temperature, given_top_p = request.temperature, request.top_p
        return Job(
            prompt_ids=prompt_ids,
            marks=marks,
            max_tokens=min(most_tokens or self.limits.default_max_tokens, room),
            temperature=(
                self.sampling["temperature"] if given_temperature is None else given_temperature
            ),
            top_p=self.sampling["top_p"] if given_top_p is None else given_top_p,
            seed=seed % (1 << 64),  # a negative one is as good as any other
            stop_ids=self.stop_ids,
            top_logprobs=top_logprobs,
        )

    def follow(self, request: Generation, plan: Plan, began: float) -> Follower:
        """Queue a job of a request that came at ``began``; what comes of it the follower tells.

        Raises ``Refusal`` where it cannot be queued.
        """
        scheduler, job = self.scheduler(), plan.job
        transcript = Transcript(
            self.tokenizer,
            stop_ids=job.stop_ids,
            thinking=plan.thinking,
            tools=plan.tools,
            stops=request.stops,
            keep_ids=request.return_token_ids,
        )
        try:
            return Follower(
                scheduler,
                self.service.mailbox,
                job,
                transcript,
                keep_alive_s=self.limits.keep_alive_s,
                limit_s=self.limits.request_s,
                began=began,
            )
        except RunError as error:
            raise Refusal.of(error) from error


def usage(follower: Follower) -> dict[str, Any]:
    """Token counts of an answer, named as in OpenAI's API."""
    prompt, transcript = len(follower.job.prompt_ids), follower.transcript
    return {
        "prompt_tokens": prompt,
        "completion_tokens": transcript.tokens,
        "total_tokens": prompt + transcript.tokens,
        "prompt_tokens_details": {"cached_tokens": follower.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": transcript.reasoning_tokens},
    }
