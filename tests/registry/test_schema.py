"""Documents are strict JSON, and each value is what the shipped schema says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ds4q.registry.errors import DocumentError
from ds4q.registry.rules import SIDECAR_KINDS
from ds4q.registry.schema import MAX_DOCUMENT_BYTES, canonical, parse, schema_problems, shown
from tests.checks import check_refused
from tests.registry.documents import SHA_A, document, entry, raw

SCHEMA = json.loads((Path(__file__).parents[2] / "registry" / "schema.json").read_text("utf-8"))


def said(changed: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in schema_problems(changed, "document")]


def test_the_schema_is_one_and_knows_every_sidecar() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert set(SIDECAR_KINDS) <= SCHEMA["$defs"]["fields"]["properties"].keys()


def test_a_full_entry_has_no_problem() -> None:
    sidecars = {kind: {"file": f"{kind}.bin", "sha256": SHA_A} for kind in SIDECAR_KINDS}
    settings = {
        "temperature": 2,
        "top_p": 1,
        "top_k": 100000,
        "min_p": 0.0,
        "presence_penalty": 0,
        "repeat_penalty": 0.5,
        "system_prompt": "",
        "reasoning_effort": "xhigh",
        "thinking_budget": "uncapped",
    }
    full = entry(
        revision="refs/pr/3",
        quant_recipe="deepseek4-mq2r-e8-p3-v1",
        default_kv_mode="legacy-asym3",
        default_tool_format="qwen_xml",
        sampling={"temperature": 1.0, "top_p": 1.0},
        recommended_settings=settings,
        sampling_profiles={"general": settings, "coding": {}, "instruct": {}},
        **sidecars,
    )
    assert said(document({"deepseek-v4-flash": full}, {"ds4": "deepseek-v4-flash"})) == []


BAD_VALUES: dict[str, list[Any]] = {
    "repo": [
        None,
        "name",
        "a/b/c",
        "../b",
        "a/../b",
        "ftp://x/y",
        "https://u:p@host/x",
        "a/b ",
        "https://host/x?token=1",
        "a/b\n",
        "file://host/x",
        ".a/b",
    ],
    "file": ["", "../../x.hfq", "/abs", "a\\b", "a/b", "a\0b", ".x", "a..b", 5, "a" * 256],
    "revision": ["", "../x", "-x", "a b", "a//b", "x\n", "/x"],
    "desc": [None, 5],
    "size_gb": [-1, "1", None, True, 10**400],
    "min_vram_gb": [-0.1],
    "sha256": ["A" * 64, f"sha256:{SHA_A}", "a" * 63, "a" * 65, "", 5, "g" * 64, SHA_A[:63] + "\n"],
    "size_bytes": ["5", -1, 1.5, True, 2**53, 10**400],
    "arch_id": [None, "9", -1, 2**32],
    "quant": [None, ""],
    "default_kv_mode": ["f64"],
    "default_tool_format": ["xml"],
    "dspark": [{}, {"file": "../x"}, "x", {"file": "x", "sha256": "A" * 64}],
    "sampling": [{"temperature": 2.1}, {"top_p": -0.1}],
    "recommended_settings": [
        {"top_k": 0},
        {"top_k": 1.5},
        {"repeat_penalty": 0.4},
        {"reasoning_effort": "most"},
        {"thinking_budget": "medium"},
        {"min_p": 1.1},
    ],
    "sampling_profiles": [{"coding": {"presence_penalty": 3}}],
    "unverified": ["yes"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD_VALUES.items() for value in values]
)
def test_a_bad_value_is_told_by_tag_and_key(key: str, value: Any) -> None:
    broken = entry()
    if value is None and key not in ("sha256", "size_bytes"):
        del broken[key]
    else:
        broken[key] = value
    problems = list(schema_problems(document({"deepseek-v4-flash": broken}), "document"))
    assert problems
    for problem in problems:
        assert problem.fatal
        assert problem.where[:2] == ("models", "deepseek-v4-flash")
        assert key in str(problem), problem
        assert str(problem).startswith("deepseek-v4-flash: ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(schema_version=2), "schema_version: bad value"),
        (lambda d: d.update(schema_version="1"), "schema_version: bad value"),
        (lambda d: d.pop("generated_at"), "'generated_at' is a required property"),
        (lambda d: d.update(generated_at="today"), "generated_at: bad value: expected a UTC time"),
        (lambda d: d.update(models={}), "models: bad value: expected at least one tag, found {}"),
        (lambda d: d.update(models=[]), "models: bad value"),
        (lambda d: d["models"].update({"a b": entry()}), "expected a tag of letters"),
        (lambda d: d["models"].update({"x:": entry()}), 'found "x:"'),
        (lambda d: d["models"].update({"../x": entry()}), 'found "../x"'),
        (lambda d: d["models"].update(x=5), "x: bad value"),
        (lambda d: d["models"].update(x=None), "x: bad value: expected a JSON object, found null"),
        (lambda d: d.update(_comment=[]), "_comment: bad value: expected text, found []"),
        (lambda d: d["aliases"].update({"": "x"}), "aliases: bad value"),
        (lambda d: d["aliases"].update(ds4=5), "aliases: ds4: bad value: expected a tag"),
    ],
)
def test_a_document_of_another_shape_is_told(
    change: Callable[[dict[str, Any]], Any], says: str
) -> None:
    broken = document()
    change(broken)
    problems = list(schema_problems(broken, "document"))
    assert any(says in str(problem) and problem.fatal for problem in problems), problems


def test_problems_are_told_in_the_order_of_the_document() -> None:
    tags = [f"{letter}:x" for letter in "fbdaec"]
    faults: list[dict[str, Any]] = [{"file": "../x"}, {"repo": 5}, {"odd": 1}]
    models = {tag: entry(**faults[number % 3]) for number, tag in enumerate(tags)}
    problems = schema_problems(document(models), "document")
    assert [problem.where[1] for problem in problems] == tags
    odd = [f"odd{letter}" for letter in "fbdaec"]
    problems = schema_problems(document() | dict.fromkeys(odd, 1), "document")
    assert [problem.where for problem in problems] == [(key,) for key in odd]


def test_a_secret_in_a_url_is_not_shown() -> None:
    url = "http://user:hun/t@er2@host/x?token=SECRET"
    assert shown({"a": [url, "file:///x#f"]}) == '{"a": ["http://host/x", "file:///x"]}'
    (odd,) = schema_problems(document() | {url: SHA_A}, "document")
    assert str(odd) == "http://host/x: unknown key"
    with pytest.raises(DocumentError, match='http://host/x":') as refused:
        parse(f'{{"{url}":'.encode(), "r.json")
    assert "er2" not in str(refused.value)
    for wrong in ("http:/u:er2@h/x?token=er2", "https:u:er2@h/x#er2", "HTTP://h:1;t=er2/x"):
        assert "er2" not in shown({"repo": wrong}), wrong
    assert shown('say "http://host/x" twice?') == r'"say \"http://host/x\" twice?"'


def test_every_part_of_the_schema_has_words_of_its_own() -> None:
    def parts(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield from [value] if isinstance(value.get("type"), str | list) else []
            value = list(value.values())
        for inner in value if isinstance(value, list) else []:
            yield from parts(inner)

    known = [part for part in parts(SCHEMA) if "description" not in part]
    assert {part["type"] for part in known} == {"object", "string"}


def test_unknown_keys_are_told_apart_wherever_they_are() -> None:
    grown = document(
        {"deepseek-v4-flash": entry(vision={}, dspark={"file": "d", "new": 1})}, more=1
    )
    problems = list(schema_problems(grown, "document"))
    assert {problem.where for problem in problems} == {
        ("more",),
        ("models", "deepseek-v4-flash", "vision"),
        ("models", "deepseek-v4-flash", "dspark", "new"),
    }
    assert {(problem.what, problem.fatal) for problem in problems} == {("unknown key", False)}


def test_a_curated_entry_needs_neither_id_nor_quant() -> None:
    curated = document({"x": entry(arch_id=None, quant=None)})
    del curated["generated_at"]
    assert list(schema_problems(curated, "curated")) == []
    assert [p.what for p in schema_problems(curated | {"generated_at": ""}, "curated")] == [
        "unknown key"
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"<html>not here</html>", ["not JSON", "<html>"]),
        (b"", ["not JSON"]),
        (b"[]", ["not a JSON object", "[]"]),
        (b'{"a": NaN}', ["not JSON", "NaN"]),
        (b'{"a": 1e999}', ["not JSON"]),
        (b'{"a": "\\ud800"}', ["not JSON"]),
        (b'{"a": "\xff"}', ["not JSON", "utf-8"]),
        (b'{"a": ' + b"1" * 5000 + b"}", ["not JSON"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"a":' * 33 + b"1" + b"}" * 33, ["nested more than 32 levels deep"]),
        (b'{"a":' * 900 + b"1" + b"}" * 900, ["nested more than 32 levels deep"]),
        (b'{"x": 1, "x": 2}', ["key 'x' stands twice", "1 and 2"]),
        (b" " * (MAX_DOCUMENT_BYTES + 1), [f"longer than {MAX_DOCUMENT_BYTES} bytes"]),
    ],
)
def test_what_is_no_strict_json_object_is_refused_in_one_line(text: bytes, says: list[str]) -> None:
    check_refused(
        DocumentError, lambda: parse(text, "http://x/r.json"), path="http://x/r.json", says=says
    )


def test_a_document_may_be_as_deep_as_the_limit() -> None:
    assert parse(b'{"a":' * 32 + b"1" + b"}" * 32, "x")


def test_an_alias_of_two_entries_is_refused_naming_both() -> None:
    text = raw(document())[:-2] + b'"ds4": "deepseek-v4-flash", "ds4": "deepseek-v4-flash:mq2r"}}'
    check_refused(
        DocumentError,
        lambda: parse(text, "r.json"),
        path="r.json",
        says=["'ds4' stands twice", '"deepseek-v4-flash" and "deepseek-v4-flash:mq2r"'],
    )


def test_text_has_one_layout() -> None:
    assert canonical({"b": 1, "a": {"ü": [1.0]}}) == (
        '{\n  "a": {\n    "ü": [\n      1.0\n    ]\n  },\n  "b": 1\n}\n'
    )
    assert parse(canonical(document()).encode(), "x") == document()
