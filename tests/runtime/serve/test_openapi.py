"""The OpenAPI document: it tells all there is, and nothing that it allows breaks the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.runtime.serve.served import Served, serving

EXAMPLES = 200


def document(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/openapi.json").json()
    return found


def references(node: Any) -> Iterator[str]:
    """Every ``$ref`` below ``node``."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for each in node.values():
            yield from references(each)
    elif isinstance(node, list):
        for each in node:
            yield from references(each)


def test_it_tells_paths_methods_and_errors(served: Served) -> None:
    found = document(served)
    assert set(found["paths"]) == {
        "/health",
        "/live",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/chat/completions",
        "/v1/completions",
    }
    post = found["paths"]["/v1/chat/completions"]["post"]
    assert set(post["responses"]) >= {"200", "400", "401", "404", "413", "500", "503"}
    assert set(post["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert post["requestBody"]["required"] is True
    assert all("summary" in each for path in found["paths"].values() for each in path.values())


def test_every_reference_leads_somewhere(served: Served) -> None:
    found = document(served)
    used = set(references(found))
    assert "#/components/schemas/ChatRequest" in used
    for reference in used:
        node = found
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_requests_are_closed_and_ranges_are_told(served: Served) -> None:
    schemas = document(served)["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "UserMessage", "Function"):
        assert schemas[name]["additionalProperties"] is False
    told = schemas["ChatRequest"]["properties"]["max_tokens"]["anyOf"]
    assert {"type": "integer", "minimum": 1} in told


def test_the_page_about_it_is_there(served: Served) -> None:
    assert "/openapi.json" in served.http.get("/docs").text


@pytest.mark.slow
@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.filterwarnings("default")  # schemathesis's own
def test_nothing_that_it_allows_or_forbids_gives_a_500(tools: bool) -> None:
    """Whatever is answered has a status, a kind of content and a shape that the document tells."""
    import schemathesis  # seconds, which the fast tests of this module need not wait for
    from schemathesis import GenerationMode
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi import checks

    conforms = (
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    )
    seen: Counter[tuple[str, int]] = Counter()
    with serving(tools=tools) as served:
        served.engine.default = lambda ids: ids[2:9]
        schema = schemathesis.openapi.from_url(f"{served.base}/openapi.json")
        found = list(schema.get_all_operations())
        operations = [each.ok() for each in found if isinstance(each, Ok)]
        assert len(operations) == len(found) == 7
        for operation in operations:
            for mode in GenerationMode:
                if mode is GenerationMode.NEGATIVE and operation.method != "post":
                    continue  # a GET without parameters has nothing to be wrong in

                @settings(
                    max_examples=EXAMPLES if operation.method == "post" else 5,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(mode))
                def ask(case: Any) -> None:
                    response = case.call(base_url=served.base)
                    seen[case.operation.label, response.status_code] += 1
                    case.validate_response(response, checks=conforms)

                ask()
        assert served.chat().status_code == 200
    assert not [label for label, status in seen if status >= 500], seen
    for label in ("POST /v1/chat/completions", "POST /v1/completions"):
        assert seen[label, 200] > EXAMPLES / 20, seen
        assert seen[label, 400] > EXAMPLES / 4, seen
