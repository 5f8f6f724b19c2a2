"""Documents become entries, and a name resolves to the one that is called exactly so."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.registry.entries import (
    Registry,
    Sidecar,
    check_document,
    document_text,
    load_registry,
    local_registry_path,
    read_document,
)
from ds4q.registry.errors import (
    AmbiguousNameError,
    DocumentError,
    SourceError,
    UnknownTagError,
)
from ds4q.registry.sources import URL_VARIABLE
from tests.checks import check_refused
from tests.registry.documents import SHA_A, SHA_B, TIME, document, entry, raw

FLASH = "deepseek-v4-flash"


def read(changed: dict[str, Any]) -> Registry:
    return read_document(raw(changed), "r.json")


def test_an_entry_holds_what_the_document_says() -> None:
    item = entry(
        revision="main",
        quant_recipe="fp4",
        size_bytes=1e9,  # JSON may write a whole number so
        dspark={"file": "d.fp4", "sha256": SHA_B, "size_bytes": 5},
        mtp={"file": "m.fp4", "unverified": True},
        receipt={"file": "flash.fp4.receipt", "sha256": SHA_B, "size_bytes": 6},
    )
    registry = read(document({f"{FLASH}-preview": item}, _comment="hand-made"))
    found = registry.entries[f"{FLASH}-preview"]
    assert (found.tag, found.repo, found.file) == (f"{FLASH}-preview", "owner/name", "flash.fp4")
    assert (found.size_gb, found.min_vram_gb, found.desc) == (1, 2, "a model")
    assert (found.sha256, found.size_bytes, found.unverified) == (SHA_A, 10**9, False)
    assert type(found.size_bytes) is int
    assert (found.arch_id, found.quant, found.quant_recipe) == (9, "fp4", "fp4")
    assert found.revision == "main"
    assert found.raw == json.loads(json.dumps(item))
    assert found.sidecars == (
        Sidecar("receipt", "flash.fp4.receipt", SHA_B, 6),
        Sidecar("dspark", "d.fp4", SHA_B, 5),
        Sidecar("mtp", "m.fp4", None, None, unverified=True),
    )
    assert (registry.generated_at, registry.origin) == (TIME, "r.json")
    assert (registry.warnings, registry.local) == ((), frozenset())


def test_text_and_registry_are_the_same_thing() -> None:
    changed = document({FLASH: entry(), "b": entry(file="b")}, {"ds4": FLASH}, _comment="ü")
    text = document_text(read(changed))
    assert json.loads(text) == changed
    assert document_text(read_document(text.encode(), "x")) == text


# --- names ------------------------------------------------------------------------------------

FILES = {FLASH: "a.fp4", f"{FLASH}-0731": "b.fp4", f"{FLASH}-0731:mtp": "c.fp4"}


def family(*, without: str = "") -> Registry:
    models = {
        tag: entry(file=file, repo="", sha256=None, size_bytes=None)
        for tag, file in FILES.items()
        if tag != without
    }
    return read(document(models, {"ds4": f"{FLASH}-0731"} if without else {"ds4": FLASH}))


def test_a_name_is_a_tag_an_alias_or_a_file() -> None:
    registry = family()
    for tag, file in FILES.items():
        assert registry.resolve(tag).tag == tag
        assert registry.resolve(file).tag == tag
    assert registry.resolve("ds4").tag == FLASH


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-v4-fl",
        "DeepSeek-V4-Flash",
        "deepseek-v4-flash-",
        "deepseek-v4-flash-07",
        "deepseek-v4-flash ",
        "deepseek-v4-flash:fp4",
        "A.fp4",
        "a.hf4",
        "a",
        "DS4",
        "ds",
    ],
)
def test_a_name_that_is_only_alike_is_not_found(name: str) -> None:
    error = check_refused(UnknownTagError, lambda: family().resolve(name), path="r.json")
    assert error.found == repr(name)


def test_an_entry_that_was_removed_is_not_answered_by_its_neighbour() -> None:
    registry = family(without=FLASH)
    check_refused(
        UnknownTagError,
        lambda: registry.resolve(FLASH),
        says=[f"unknown tag: found '{FLASH}'; did you mean {FLASH}-0731"],
    )
    assert registry.resolve("ds4").tag == f"{FLASH}-0731"


def test_a_miss_far_from_all_says_where_tags_are() -> None:
    check_refused(
        UnknownTagError, lambda: family().resolve("zzz"), says=["'ds4q registry list' shows all"]
    )


def test_what_names_nothing_to_pull_is_not_offered_to_pull() -> None:
    models = {
        "flash:fp4": entry(repo="", file="a.fp4", receipt=None),
        "flash:mq2r": entry(repo="owner/name", file="b.fp4"),
        "other": entry(repo="", file="same.fp4"),
    }
    for item in models.values():
        item.pop("receipt", None)
    registry = read(document(models, {"flash:mine": "flash:fp4"}))
    for to_pull, offered in ((True, "flash:mq2r?"), (False, "flash:fp4, ")):
        ask = partial(registry.resolve, "flash:f", to_pull=to_pull)
        error = check_refused(UnknownTagError, ask)
        assert offered in error.remedy
        assert ("flash:fp4" in error.remedy) != to_pull
        assert ("flash:mine" in error.remedy) != to_pull


def test_a_file_of_several_tags_is_refused_with_all() -> None:
    shared = {FLASH: entry(), "b": entry(), "a": entry()}
    check_refused(
        AmbiguousNameError,
        lambda: read(document(shared)).resolve("flash.fp4"),
        says=["found 'flash.fp4'; give one of the tags a, b, deepseek-v4-flash"],
    )


@given(st.text(max_size=40))
def test_only_what_is_written_there_resolves(name: str) -> None:
    registry = family()
    names = {**{tag: tag for tag in FILES}, **{file: tag for tag, file in FILES.items()}}
    names["ds4"] = FLASH
    if name in names:
        assert registry.resolve(name).tag == names[name]
    else:
        with pytest.raises(UnknownTagError):
            registry.resolve(name)


# --- documents that others wrote ----------------------------------------------------------------


def test_what_a_newer_registry_adds_is_a_warning_for_readers_and_a_problem_for_checks() -> None:
    grown = document({FLASH: entry(vision={"file": "x"}, quant="fp5")}, {"old": "gone"}, more=1)
    registry = read(grown)
    assert registry.entries[FLASH].quant == "fp5"
    assert "old" not in registry.aliases
    assert sorted(registry.warnings) == [
        "r.json: aliases: old: alias of a tag that does not exist: found 'gone'",
        'r.json: deepseek-v4-flash: quant: unknown quant: found "fp5"',
        "r.json: deepseek-v4-flash: vision: unknown key",
        "r.json: more: unknown key",
    ]
    assert len(check_document(raw(grown), "r.json")) == 4


def test_a_digest_in_upper_case_is_read_with_a_warning_and_refused_by_checks() -> None:
    upper = document({FLASH: entry(sha256="A" * 64)})
    registry = read(upper)
    assert registry.entries[FLASH].sha256 == SHA_A
    assert registry.warnings == ("r.json: models: deepseek-v4-flash: sha256: in upper case",)
    (problem,) = check_document(raw(upper), "r.json")
    assert problem.where == ("models", FLASH, "sha256")
    assert problem.fatal


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file": "../../x.hfq"}, "file: bad value: expected a plain file name"),
        ({"dspark": {"file": "/abs"}}, "dspark: file: bad value: expected a plain file name"),
        ({"sha256": f"sha256:{SHA_A}"}, "sha256: bad value: expected 64 lower-case hex digits"),
        ({"sha256": "a" * 63}, "sha256: bad value"),
        ({"size_bytes": "1000"}, "size_bytes: bad value: expected a whole number of bytes"),
        ({"mtp": {"file": "m"}}, "mtp: an MTP draft does not pair with the 0731 trunk"),
        ({"receipt": {"file": "m"}}, "receipt: file: not the trunk's receipt"),
        ({"file": "a\u202eb"}, "file: unsafe name"),
        ({"file": "a" * 241}, "file: bad value: expected a plain file name of 240 bytes or less"),
        ({"dspark": {"file": "é" * 121}}, "dspark: file: unsafe name: dspark file is longer than"),
    ],
)
def test_one_bad_entry_rejects_the_document(change: dict[str, Any], says: str) -> None:
    broken = document({FLASH: entry(**change), "fine": entry(file="fine.fp4")})
    check_refused(
        DocumentError, lambda: read(broken), path="r.json", says=[f"r.json: {FLASH}: {says}"]
    )


def test_many_problems_are_told_in_one_line_that_ends() -> None:
    broken = document({f"tag{n}": entry(file="../x") for n in range(50)})
    error = check_refused(DocumentError, lambda: read(broken), says=["and 47 more"])
    assert len(str(error)) < 600
    assert len(check_document(raw(broken), "r.json")) == 50


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_document_is_refused_or_means_what_it_says(data: st.DataObject) -> None:
    text = bytearray(raw(document(aliases={"ds4": FLASH})))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        registry = read_document(bytes(text), "r.json")
    except DocumentError as error:
        said = str(error)
    else:
        said = "".join(registry.warnings)
        assert all(registry.resolve(tag) is found for tag, found in registry.entries.items())
        assert json.loads(document_text(registry))["models"].keys() == registry.entries.keys()
    assert said.isprintable()


ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1.5,
        10**300,
        "",
        "x",
        "../x",
        "\u202e",
        [],
        {},
        {"x": 1},
        [1],
        FLASH,
        SHA_A,
    ]
)
FULL = document(
    {
        f"{FLASH}-preview": entry(
            dspark={"file": "d", "unverified": True},
            mtp={"file": "m", "sha256": SHA_B, "size_bytes": 5},
            recommended_settings={"top_k": 5},
            sampling_profiles={"coding": {"temperature": 1}},
        ),
        "b": entry(file="b"),
    },
    {"ds4": f"{FLASH}-preview"},
)


def places(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = value.items() if isinstance(value, dict) else ()
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


@settings(max_examples=80)
@given(st.lists(st.tuples(st.sampled_from(places(FULL)), st.booleans(), ODD), max_size=3))
def test_a_document_of_odd_values_is_refused_or_usable(
    changes: list[tuple[tuple[str, ...], bool, Any]],
) -> None:
    odd = json.loads(json.dumps(FULL))
    for place, new_key, value in changes:
        into: Any = odd
        for key in place if new_key else place[:-1]:
            into = into.get(key) if isinstance(into, dict) else None
        if isinstance(into, dict) and (place or new_key):
            into["new" if new_key else place[-1]] = copy.deepcopy(value)
    problems = check_document(raw(odd), "r.json")
    if any(problem.fatal for problem in problems):
        with pytest.raises(DocumentError):
            read(odd)
    else:
        registry = read(odd)
        assert len(registry.warnings) == len(problems)
        names = [item.file for found in registry.entries.values() for item in found.sidecars]
        names += [found.file for found in registry.entries.values()]
        assert not any("/" in name or name.startswith(".") for name in names)
        assert all(registry.resolve(alias).tag == tag for alias, tag in registry.aliases.items())


# --- which document ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.delenv("DS4Q_NO_REGISTRY_FETCH", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_bundled_registry_is_the_default_and_sound() -> None:
    registry = load_registry()
    assert registry.origin == "bundled registry"
    assert registry.warnings == ()
    assert FLASH in registry.entries


def test_a_path_is_that_document_and_no_other(tmp_path: Path, home: Path) -> None:
    (home / "registry.json").write_bytes(raw(document({"mine": entry()})))
    for origin in (str(tmp_path / "r.json"), (tmp_path / "r.json").as_uri()):
        (tmp_path / "r.json").write_bytes(raw(document()))
        registry = load_registry(origin)
        assert list(registry.entries) == [FLASH]
        assert registry.origin == origin
    with pytest.raises(FileNotFoundError):
        load_registry(str(tmp_path / "gone.json"))
    for origin in ("ftp://x/y", "file://host/x", "file:///tmp/x%00y"):
        error = check_refused(SourceError, partial(load_registry, origin))
        assert error.path == origin
    check_refused(
        SourceError,
        lambda: load_registry(str(home)),
        path=home,
        says=["not a regular file", "a folder"],
    )


def test_the_environment_may_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, str(tmp_path / "r.json"))
    with pytest.raises(FileNotFoundError):
        load_registry()
    (tmp_path / "r.json").write_bytes(raw(document({"own": entry()})))
    assert list(load_registry(offline=True).entries) == ["own"]
    monkeypatch.setenv("DS4Q_NO_REGISTRY_FETCH", "1")
    assert load_registry().origin == "bundled registry"


def test_the_users_own_document_lies_over_the_bundled_one(home: Path) -> None:
    assert local_registry_path() == home / "registry.json"
    mine = document(
        {
            f"{FLASH}:fp4": entry(file="mine.fp4"),
            f"{FLASH}-0731": entry(file="four.fp4", quant="fp4p"),
        },
        {"my": f"{FLASH}:mq2r", "lost": "nowhere", f"{FLASH}:fp4p": f"{FLASH}-0731"},
    )
    local_registry_path().write_bytes(raw(mine))
    registry = load_registry()
    assert registry.resolve(f"{FLASH}:fp4").file == "mine.fp4"
    assert registry.resolve("my").tag == f"{FLASH}:mq2r"
    assert registry.resolve(f"{FLASH}-0731:fp4").file == "mine.fp4"
    assert registry.local == {f"{FLASH}:fp4", f"{FLASH}-0731"}
    assert str(home) in registry.origin
    assert "bundled registry" in registry.origin
    # A tag means its entry, whatever an alias says elsewhere; and that is told.
    assert registry.resolve(f"{FLASH}-0731").file == "four.fp4"
    assert registry.resolve(f"{FLASH}:fp4p").file == "deepseek-v4-flash-0731.fp4p"
    told = "\n".join(registry.warnings)
    assert f"'{FLASH}-0731' is a tag, so it is no alias of '{FLASH}'" in told
    assert f"'{FLASH}:fp4p' is a tag, so it is no alias of '{FLASH}-0731'" in told
    assert "lost: alias of a tag that does not exist" in told
    assert len(registry.warnings) == 3


def test_a_broken_document_of_the_users_own_is_never_passed_over(home: Path) -> None:
    local_registry_path().write_bytes(b"{")
    path = home / "registry.json"
    check_refused(DocumentError, load_registry, path=path, says=["not JSON", "move it away"])
    path.write_bytes(raw(document({"my:fp4": None})))
    said = ["my:fp4: bad value: expected a JSON object, found null", "move it away"]
    check_refused(DocumentError, load_registry, path=path, says=said)
    path.unlink()
    path.mkdir()
    check_refused(SourceError, load_registry, path=path, says=["not a regular", "move it away"])


def test_names_that_download_and_document_need_are_refused() -> None:
    for name in (" ", "x.partial", "x.partial.blocks", "*.hfq", "C:x.hfq", "registry.json"):
        bad = raw(document({"m": entry(file=name)}))
        check_refused(
            DocumentError, partial(read_document, bad, "r.json"), says=["m: file: unsafe"]
        )
