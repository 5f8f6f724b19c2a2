"""Owns the server's OpenAPI document: what FastAPI cannot see of requests that are read by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ds4q.runtime.serve.documents import ChatChunk, ErrorDocument
from ds4q.runtime.serve.schema import ChatRequest, CompletionRequest

REFERENCE = "#/components/schemas/{model}"


def reads(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose body is one of ``model``."""
    schema = {"$ref": REFERENCE.format(model=model.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def streams(model: type[BaseModel]) -> dict[str, Any]:
    """A second kind of content of an answer: events whose data is JSON of ``model``, or the end."""
    told = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": REFERENCE.format(model=model.__name__)},
    }
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, told]}},
    }
    return {"text/event-stream": {"itemSchema": event}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that may refuse with these."""
    words = {
        400: "The request is not one that can be served.",
        401: "The API key is missing or wrong.",
        403: "The request names another host, or comes from another site's page.",
        404: "There is no such model.",
        408: "The body has not come in time.",
        413: "The body is too large.",
        500: "The model failed.",
        503: "Not now: loading, too busy or shutting down; Retry-After says when.",
        504: "The answer took longer than the server allows.",
    }
    return {status: {"model": ErrorDocument, "description": words[status]} for status in statuses}


def document(app: FastAPI, description: str) -> dict[str, Any]:
    """The whole document, with the schemas of requests and of the events of streams."""
    found = get_openapi(
        title="ds4q",
        version=app.version,
        description=description,
        routes=app.routes,
    )
    _, own = models_json_schema(
        [(model, "validation") for model in (ChatRequest, CompletionRequest, ChatChunk)],
        ref_template=REFERENCE,
    )
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    schemas |= own["$defs"]
    bearer = {"type": "http", "scheme": "bearer", "description": "Where the server has a key."}
    found["components"]["securitySchemes"] = {"key": bearer}
    found["security"] = [{}, {"key": []}]
    return found
