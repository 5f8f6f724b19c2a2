"""Owns the HTTP application: which paths there are, and what each answers. Opens no socket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ds4q.artifact.errors import Ds4qError, one_line
from ds4q.quantize.encoding import Encoding
from ds4q.runtime.serve import chat_api, completions, documents, openapi, page
from ds4q.runtime.serve.beside import Beside
from ds4q.runtime.serve.follow import ClientLeftError, too_late, while_connected
from ds4q.runtime.serve.guard import Guard
from ds4q.runtime.serve.limits import Limits
from ds4q.runtime.serve.live import live
from ds4q.runtime.serve.metrics import CLIENT_CLOSED_REQUEST, MEDIA_TYPE, outcome_of
from ds4q.runtime.serve.refusal import Refusal, cut
from ds4q.runtime.serve.respond import Form, JsonResponse, Object, refused, respond
from ds4q.runtime.serve.schema import ChatRequest, CompletionRequest, Generation
from ds4q.runtime.serve.service import Service
from ds4q.runtime.serve.serving import LOADING_RETRY_S, Plan, Serving
from ds4q.runtime.text.tokenizer import Tokenizer

DESCRIPTION = (
    "An artifact of ds4q behind OpenAI's API. Fields that are not listed are refused by name; a "
    "field whose value is null counts as absent."
)
VERSION = "1"  # of the paths and their JSON
READ_AT_ONCE = 2  # short requests; of long ones it is one, so that short ones wait for none
LONG_BODY_BYTES = 256 << 10

log = logging.getLogger("ds4q.serve")

M = TypeVar("M", bound=BaseModel)
Asked = tuple[Generation, Plan, Form]


def make_app(
    service: Service,
    *,
    model_name: str,
    tokenizer: Tokenizer,
    metadata: Mapping[str, Any],
    limits: Limits | None = None,
    api_key: str | None = None,
    encoding: Encoding | None = None,
    about: Mapping[str, str] | None = None,
) -> FastAPI:
    """The application.

    Parameters
    ----------
    service : loads the model and holds its scheduler; started and ended by others
    model_name : what clients call the model
    tokenizer, metadata : the artifact's
    api_key : what clients must show; None: nothing
    encoding : texts of the release's prompt format
    about : ``device`` and ``kv_type`` in words, for the page; read anew for each answer

    Raises
    ------
    ConfigError, SamplingError : the metadata cannot be used
    """
    limits = limits or Limits()
    serving = Serving(
        service,
        model_name=model_name,
        tokenizer=tokenizer,
        metadata=metadata,
        limits=limits,
        encoding=encoding,
    )
    app = FastAPI(title="ds4q", version=VERSION, redoc_url=None, redirect_slashes=False)
    paths = {"/health", "/live", "/metrics", "/v1/models"}
    paths |= {chat_api.ENDPOINT, completions.ENDPOINT}

    def count(path: str, status: int) -> None:
        serving.metrics.count(path if path in paths else "other", outcome_of(status))

    _answer_errors(app, count)
    _add_page(app)
    _add_state(app, serving, about or {})
    _add_models(app, serving)
    _add_generation(app, serving)
    app.add_middleware(Guard, limits=limits, api_key=api_key, count=count)
    app.openapi = lambda: openapi.document(app, DESCRIPTION)  # type: ignore[method-assign]
    return app


def _answer_errors(app: FastAPI, count: Any) -> None:
    """Have every error answered with OpenAI's object."""

    def answer(request: Request, refusal: Refusal) -> Response:
        count(request.scope["path"], refusal.status)
        return refused(refusal)

    @app.exception_handler(Refusal)
    async def of_refusal(request: Request, error: Refusal) -> Response:
        return answer(request, error)

    @app.exception_handler(Ds4qError)
    async def of_rule(request: Request, error: Ds4qError) -> Response:
        return answer(request, Refusal.of(error))

    @app.exception_handler(HTTPException)
    async def of_router(request: Request, error: HTTPException) -> Response:
        allowed = (error.headers or {}).get("Allow", "another method")
        what = {404: "there is no such path", 405: f"this path takes {allowed}"}
        words = what.get(error.status_code, str(error.detail))
        message = f"{words}: {cut(request.method)} {cut(request.scope['path'])}"
        return answer(request, Refusal(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)
    async def of_bug(request: Request, error: Exception) -> Response:
        log.error("internal error at %s", one_line(request.scope["path"]), exc_info=error)
        return answer(request, Refusal(500, "internal error; the server's log has more"))


def _add_page(app: FastAPI) -> None:
    def of_file(name: str) -> Response:
        try:
            content = page.read(name)
        except KeyError:
            raise Refusal(404, f"the page has no part {cut(name)!r}") from None
        return Response(content, media_type=page.FILES[name], headers=dict(page.HEADERS))

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return of_file("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    def part(name: str) -> Response:
        return of_file(name)


def _add_state(app: FastAPI, serving: Serving, about: Mapping[str, str]) -> None:
    began = time.monotonic()
    service = serving.service

    @app.head("/health", include_in_schema=False)
    @app.get(
        "/health",
        summary="Whether requests are answered",
        responses={
            200: {"model": documents.Health},
            503: {
                "model": documents.Health,
                "description": "Loading, failed (error says why) or shutting down.",
            },
        },
    )
    def health() -> Response:  # in a thread: it may wait for the file system
        done, total = service.progress
        state, error = service.condition()
        told: Object = {
            "status": state,
            "progress": {"done": done, "total": total},
            "error": None if error is None else Refusal.of(error).message,
        }
        if state == "ready":
            return JsonResponse(told)
        return JsonResponse(told, 503, headers={"Retry-After": f"{LOADING_RETRY_S:.0f}"})

    @app.get(
        "/live",
        summary="What the page shows",
        responses={200: {"model": documents.Live}, **openapi.errors(401, 403)},
    )
    def live_view(request: Request) -> Response:  # in a thread: it may wait for the model's locks
        with_map = request.query_params.get("experts") != "0"
        return JsonResponse(live(serving, about, began, with_map=with_map))

    @app.get(
        "/metrics",
        summary="Counts and times for Prometheus",
        responses={
            200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}},
            **openapi.errors(401, 403),
        },
        response_class=Response,
    )
    def metrics() -> Response:  # in a thread, too
        return Response(serving.metrics.text(), media_type=MEDIA_TYPE)


def _add_models(app: FastAPI, serving: Serving) -> None:
    def model() -> Object:
        return {
            "id": serving.model_name,
            "object": "model",
            "created": serving.created,
            "owned_by": "ds4q",
            "context_length": serving.max_context,
        }

    @app.get(
        "/v1/models",
        summary="The model",
        responses={200: {"model": documents.ModelList}, **openapi.errors(401, 403)},
    )
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model()]})

    @app.get(
        "/v1/models/{name:path}",
        summary="The model by its name",
        responses={200: {"model": documents.Model}, **openapi.errors(401, 403, 404)},
    )
    async def one(name: str) -> Response:
        serving.check_model(name)
        return JsonResponse(model())


def _add_generation(app: FastAPI, serving: Serving) -> None:
    short, long = Beside(READ_AT_ONCE), Beside(1)
    statuses = (400, 401, 403, 404, 408, 413, 500, 503, 504)

    @app.post(
        chat_api.ENDPOINT,
        summary="Answer a conversation",
        openapi_extra=openapi.reads(ChatRequest),
        responses={
            200: {
                "model": documents.ChatCompletion,
                "content": openapi.streams(documents.ChatChunk),
            },
            **openapi.errors(*statuses),
        },
    )
    async def chat(request: Request) -> Response:
        def read(raw: bytes) -> Asked:
            body = _json(raw)
            asked = _request(ChatRequest, body)
            plan = chat_api.plan_chat(serving, asked, body)
            return asked, plan, chat_api.ChatForm(asked, serving.model_name, serving.tokenizer)

        return await answer(request, chat_api.ENDPOINT, read)

    @app.post(
        completions.ENDPOINT,
        summary="Go on with a text",
        openapi_extra=openapi.reads(CompletionRequest),
        responses={
            200: {
                "model": documents.Completion,
                "content": openapi.streams(documents.Completion),
            },
            **openapi.errors(*statuses),
        },
    )
    async def complete(request: Request) -> Response:
        def read(raw: bytes) -> Asked:
            asked = _request(CompletionRequest, _json(raw))
            plan = completions.plan_completion(serving, asked)
            form = completions.CompletionForm(asked, serving.model_name, serving.tokenizer)
            return asked, plan, form

        return await answer(request, completions.ENDPOINT, read)

    async def answer(request: Request, endpoint: str, read: Callable[[bytes], Asked]) -> Response:
        began, limit_s = time.monotonic(), serving.limits.request_s
        try:
            raw = await request.body()
            async with asyncio.timeout(limit_s):
                beside = long if len(raw) > LONG_BODY_BYTES else short
                reading = beside.run(lambda: read(raw))
                asked, plan, form = await while_connected(request.receive, reading)
        except TimeoutError:
            if limit_s is None:
                raise
            raise too_late(limit_s) from None
        except (ClientDisconnect, ClientLeftError):
            serving.metrics.count(endpoint, "cancelled")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        follower = serving.follow(asked, plan, began)
        return await respond(request, follower, form, serving.metrics, stream=asked.stream)


def _json(raw: bytes) -> Any:
    """The JSON of a request; strict UTF-8, no NaN, and bounded depth."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        words = str(error)
        if "hex escape" in words:
            words += "; a \\u escape is cut short, or is half of a surrogate pair"
        raise Refusal(
            400, f"the body cannot be read as JSON: {words}", code="invalid_json"
        ) from None


def _request(model: type[M], body: Any) -> M:
    if not isinstance(body, dict):
        raise Refusal(400, "the body is not a JSON object", code="invalid_json")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise Refusal.of_request(error) from None
