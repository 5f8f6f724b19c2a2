"""The texts of a release's encoder: taken out of its source without running it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4q import api
from ds4q.artifact.hfq import Reader
from ds4q.quantize import encoding as module
from ds4q.quantize.encoding import encoding_from_metadata, find_encoding, parse_encoding
from ds4q.quantize.errors import EncodingError, SourceError
from ds4q.quantize.outputs import OutputExistsError
from tests.quantize import models
from tests.quantize.damage import rebuild

HEADING = '## Format:\n\nAnswer in "this":\n'
PREVIEW = """
import os
os.environ["DS4Q_WAS_RUN"] = "yes"
raise RuntimeError("the file is not to be run")
REASONING_EFFORT_MAX = (
    "Think of all.\\n"
    "Then of the rest.\\n\\n"
)
response_format_template: str = "## Format:\\n\\nAnswer in \\"this\\":\\n{schema}"
"""
LATER = """
_HARD = "Think.\\n\\n"
REASONING_EFFORT_MAX = "of old"
REASONING_EFFORT_PROMPTS: dict[str, str] = {
    "low": None,
    "high": _HARD,
    "ma" "x": "Really: " + _HARD,
    "none": object(),
}
response_format_template = "## Format:\\n\\nAnswer in \\"this\\":\\n" + "{schema}"
"""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(folder: Path, source: str | bytes) -> Path:
    """A release's folder: ``folder`` with ``encoding/encoding_dsv4.py``."""
    place = folder / "encoding"
    place.mkdir(parents=True, exist_ok=True)
    raw = source.encode() if isinstance(source, str) else source
    (place / "encoding_dsv4.py").write_bytes(raw)
    return folder


def test_preview_has_one_text_for_the_highest_effort(tmp_path: Path) -> None:
    found = parse_encoding(write(tmp_path, PREVIEW))
    assert found.release == "preview"
    assert found.efforts == {"low": "", "high": "", "max": "Think of all.\nThen of the rest.\n\n"}
    assert found.response_format == HEADING
    assert found.sha256 == {
        "REASONING_EFFORT_MAX": sha(found.efforts["max"]),
        "response_format_template": sha(HEADING),
    }


def test_later_release_has_a_text_for_each_effort(tmp_path: Path) -> None:
    found = parse_encoding(write(tmp_path, LATER))
    assert found.release == "0731"
    assert found.efforts == {"low": "", "high": "Think.\n\n", "max": "Really: Think.\n\n"}
    assert found.response_format == HEADING
    assert list(found.sha256) == [
        *(f"REASONING_EFFORT_PROMPTS.{effort}" for effort in ("low", "high", "max")),
        "response_format_template",
    ]


def test_the_file_the_folder_and_the_checkpoint_can_be_named(tmp_path: Path) -> None:
    write(tmp_path, LATER)
    folder = tmp_path / "encoding"
    assert parse_encoding(tmp_path) == parse_encoding(folder)
    assert parse_encoding(folder / "encoding_dsv4.py") == parse_encoding(folder)


def test_heading_alone_and_efforts_alone_are_taken(tmp_path: Path) -> None:
    alone = parse_encoding(write(tmp_path, 'response_format_template = "Form:\\n"'))
    assert (alone.release, alone.efforts, alone.response_format) == (None, {"low": ""}, "Form:\n")
    efforts = parse_encoding(write(tmp_path, 'REASONING_EFFORT_PROMPTS = {"max": "More."}'))
    assert (efforts.efforts, efforts.response_format) == ({"low": "", "max": "More."}, None)


def test_the_published_texts_are_known_by_their_hashes() -> None:
    """Lengths and hashes are of the releases; the texts are not part of this program."""
    known = dict(module.KNOWN)
    assert known["REASONING_EFFORT_MAX"] == known["REASONING_EFFORT_PROMPTS.high"]
    assert known["REASONING_EFFORT_PROMPTS.high"].startswith("f7a24f3b3050d4a8")
    assert known["REASONING_EFFORT_PROMPTS.max"].startswith("53fb31b8392ec5b4")
    assert known["REASONING_EFFORT_PROMPTS.low"] == sha("")
    assert known["response_format_template"].startswith("5200f58413f49f39")


def test_another_text_is_reported_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parse_encoding(write(tmp_path, PREVIEW))
    place = tmp_path / "encoding" / "encoding_dsv4.py"
    told = [note.removeprefix(f"{place}: ").split()[0] for note in found.notes]
    assert told == list(found.sha256)
    digests = found.sha256.values()
    assert all(digest in note for digest, note in zip(digests, found.notes, strict=True))
    monkeypatch.setattr(module, "KNOWN", found.sha256)
    again = parse_encoding(tmp_path)
    assert (again.notes, again.efforts) == ((), found.efforts)


# ------------------------------------------------------------------ bad files

BAD: dict[str, tuple[str | bytes, str]] = {
    "syntax": ("def", "not Python: found"),
    "null": (b"x = '\0'", "not Python"),
    "latin": (b"x = '\xe9'", "not UTF-8: found byte 5"),
    "deep": ("x = " + "(" * 5000 + ")" * 5000, "not Python"),
    "empty": ("", "none of the format's constants"),
    "other": ('REASONING = "x"', "none of the format's constants"),
    "call": ("REASONING_EFFORT_MAX = str(1)", "line 1 is not plain text: found Call"),
    "f-string": ('x = "a"\nREASONING_EFFORT_MAX = f"{x}"', "line 2 is not plain text"),
    "number": ("REASONING_EFFORT_MAX = 3", "not plain text: found Constant"),
    "product": ('REASONING_EFFORT_MAX = "a" * 10**9', "not plain text: found BinOp"),
    "itself": ("REASONING_EFFORT_MAX = REASONING_EFFORT_MAX", "defined by itself"),
    "circle": ("a = b\nb = a\nREASONING_EFFORT_MAX = a", "a is defined by itself"),
    "unknown": ("REASONING_EFFORT_MAX = a", "a is not one plain assignment: found 0"),
    "twice": ('REASONING_EFFORT_MAX = "a"\nREASONING_EFFORT_MAX = "b"', "found 2 assignments"),
    "grown": ('REASONING_EFFORT_MAX = "a"\nREASONING_EFFORT_MAX += "b"', "found 2 assignments"),
    "branch": ('if 1:\n    REASONING_EFFORT_MAX = "a"', "not one plain assignment"),
    "list": ("REASONING_EFFORT_PROMPTS = []", "not a dictionary: found List"),
    "key": ('REASONING_EFFORT_PROMPTS = {1: "a"}', "not plain text"),
    "merged": ("REASONING_EFFORT_PROMPTS = {**x}", "not a dictionary of texts"),
    "value": ('REASONING_EFFORT_PROMPTS = {"max": 1}', "not plain text"),
    "long": (f'REASONING_EFFORT_MAX = "{"a" * 70000}"', "a constant is too long"),
    "doubled": (
        'a0 = "a"\n' + "".join(f"a{n + 1} = a{n} + a{n}\n" for n in range(60))
        + "REASONING_EFFORT_MAX = a60",
        "a constant is too long",
    ),
    "surrogate": (r'REASONING_EFFORT_MAX = "\ud800"', "lone surrogate"),
    "behind": ('response_format_template = "a{schema}b"', "response_format_template is not"),
    "two": ('response_format_template = "a{schema}{schema}"', "response_format_template is not"),
    "field": ('response_format_template = "a{other}"', "response_format_template is not"),
    "huge": ("#" * (1 << 20) + "\n", "the file is too long"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "said"), BAD.values(), ids=BAD.keys())
def test_bad_file_is_one_line_that_names_it(source: str | bytes, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, source) / "encoding" / "encoding_dsv4.py"
    with pytest.raises(SourceError) as caught:
        parse_encoding(tmp_path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_doubling_of_nothing_ends(tmp_path: Path) -> None:
    names = "".join(f"a{n + 1} = a{n} + a{n}\n" for n in range(90))
    write(tmp_path, f'a0 = ""\n{names}REASONING_EFFORT_MAX = a90')
    assert parse_encoding(tmp_path).efforts["max"] == ""


def test_what_python_thinks_of_the_style_is_not_heard(tmp_path: Path) -> None:
    write(tmp_path, 'x = "\\d" is "d"\nREASONING_EFFORT_MAX = "a"')
    assert parse_encoding(tmp_path).efforts["max"] == "a"


def test_no_file_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no", tmp_path / "no.py"):
        with pytest.raises(EncodingError, match=r"no encoding_dsv4\.py") as caught:
            parse_encoding(place)
        assert str(caught.value).startswith(str(place))


def test_a_note_names_the_file_that_was_given(tmp_path: Path) -> None:
    place = tmp_path / "mine.py"
    place.write_text('REASONING_EFFORT_MAX = "x"')
    (note,) = parse_encoding(place).notes
    assert note.startswith(f"{place}: REASONING_EFFORT_MAX has another text")
    assert "encoding_dsv4.py" not in note
    metadata = {"ds4q": {"encoding": parse_encoding(place).document()}}
    kept = encoding_from_metadata(metadata, path="a.hfq")
    assert kept is not None
    assert kept.notes[0].startswith("a.hfq: metadata ds4q.encoding: REASONING_EFFORT_MAX has")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_told_with_what_to_name(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "encoding_dsv4.py"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place = Path(os.devnull)
    with pytest.raises(EncodingError) as caught:
        parse_encoding(tmp_path if kind == "folder" else place)
    said = str(caught.value)
    assert said.startswith(f"{place}: not a regular file; ")
    assert "encoding_dsv4.py of a DeepSeek-V4 release, or the folder encoding/" in said


# ------------------------------------------------------------------ in artifacts


def test_metadata_gives_the_texts_back(tmp_path: Path) -> None:
    for source in (PREVIEW, LATER, 'REASONING_EFFORT_PROMPTS = {"max": "More."}'):
        found = parse_encoding(write(tmp_path, source))
        document = json.loads(json.dumps(found.document(), sort_keys=True))
        again = encoding_from_metadata({"ds4q": {"encoding": document}})
        assert again is not None
        assert replace(again, notes=()) == replace(found, notes=())
        place = f"{tmp_path / 'encoding' / 'encoding_dsv4.py'}: "
        told = sorted(note.removeprefix(place) for note in found.notes)
        assert [n.removeprefix("metadata ds4q.encoding: ") for n in again.notes] == told


@pytest.mark.parametrize(
    "metadata", [{}, {"ds4q": None}, {"ds4q": {}}, {"ds4q": {"encoding": None}}]
)
def test_no_texts_in_the_metadata(metadata: dict[str, Any]) -> None:
    assert encoding_from_metadata(metadata) is None


@pytest.mark.parametrize(
    "document",
    [
        "x",
        {},
        {"texts": []},
        {"texts": {"other": "x"}, "sha256": {"other": sha("x")}},
        {"texts": {"REASONING_EFFORT_MAX": 1}, "sha256": {}},
        {"texts": {"REASONING_EFFORT_MAX": "a"}},
        {"texts": {"REASONING_EFFORT_MAX": "a"}, "sha256": {"REASONING_EFFORT_MAX": sha("b")}},
        {"texts": {"REASONING_EFFORT_MAX": "a"}, "sha256": {}},
    ],
    ids=repr,
)
def test_texts_that_were_changed_are_refused(document: Any) -> None:
    with pytest.raises(EncodingError, match=r"^x\.hfq: metadata ds4q\.encoding"):
        encoding_from_metadata({"ds4q": {"encoding": document}}, path="x.hfq")


def test_the_artifact_s_texts_come_before_those_beside_it(tmp_path: Path) -> None:
    artifact = tmp_path / "x.hfq"
    assert find_encoding(artifact, {}) is None
    (tmp_path / "encoding").write_text("a file of that name is none of ours")
    assert find_encoding(artifact, {}) is None
    (tmp_path / "encoding").unlink()
    beside = parse_encoding(write(tmp_path, PREVIEW))
    assert find_encoding(artifact, {}) == beside
    own = parse_encoding(write(tmp_path / "other", LATER))
    found = find_encoding(artifact, {"ds4q": {"encoding": own.document()}})
    assert found is not None
    assert found.release == "0731"


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint with an encoder beside it."""
    return write(models.mini(tmp_path_factory.mktemp("released")), LATER)


@pytest.fixture(scope="module")
def packed(released: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "x.hfq"
    models.run(released, out)
    return out


def source_check(artifact: Path, source: Path) -> Any:
    report = api.verify(artifact, source=source)
    return next(check for check in report.checks if check.name == "source")


def test_quantize_copies_the_texts_of_its_source(packed: Path, released: Path) -> None:
    sidecar = packed.with_name("x-dspark.hfq")
    for path in (packed, sidecar):
        with Reader(path) as reader:
            ours = reader.metadata["ds4q"]["encoding"]
        assert ours == parse_encoding(released).document()
        assert ours["texts"]["REASONING_EFFORT_PROMPTS.max"] == "Really: Think.\n\n"
        assert ours["sha256"]["response_format_template"] == sha(HEADING)
    assert source_check(packed, released).ok


def test_a_source_without_encoder_leaves_no_trace(source: Path, tmp_path: Path) -> None:
    models.run(source, tmp_path / "x.hfq")
    with Reader(tmp_path / "x.hfq") as reader:
        assert "encoding" not in reader.metadata["ds4q"]


def test_quantize_warns_of_texts_it_does_not_know(released: Path, tmp_path: Path) -> None:
    warnings = models.run(released, tmp_path / "x.hfq").plan.warnings
    assert sum("has another text than the releases known here" in each for each in warnings) == 3


def test_quantize_refuses_an_encoder_that_cannot_be_read(tmp_path: Path) -> None:
    source = write(models.mini(tmp_path / "source"), "def")
    with pytest.raises(EncodingError, match=r"encoding_dsv4\.py: not Python"):
        models.run(source, tmp_path / "x.hfq")
    assert not list(tmp_path.glob("x*"))


def other_text(metadata: dict[str, Any]) -> dict[str, Any]:
    """Texts and hashes that agree with each other, and are not the source's."""
    document = {
        "texts": {"REASONING_EFFORT_MAX": "x"},
        "sha256": {"REASONING_EFFORT_MAX": sha("x")},
    }
    return metadata | {"ds4q": metadata["ds4q"] | {"encoding": document}}


def without_texts(metadata: dict[str, Any]) -> dict[str, Any]:
    ours = {key: value for key, value in metadata["ds4q"].items() if key != "encoding"}
    return metadata | {"ds4q": ours}


def test_verify_compares_the_texts(packed: Path, released: Path, tmp_path: Path) -> None:
    changed = rebuild(packed, tmp_path / "y.hfq", metadata=other_text)
    (failure,) = source_check(changed, released).failures
    assert failure.message == "metadata key 'ds4q.encoding' differs from the source"


def test_verify_finds_texts_that_the_source_does_not_have(packed: Path, source: Path) -> None:
    (failure,) = source_check(packed, source).failures
    assert failure.message == "metadata key 'ds4q.encoding' differs from the source"


def test_an_artifact_of_before_is_still_sound(packed: Path, released: Path, tmp_path: Path) -> None:
    earlier = rebuild(packed, tmp_path / "y.hfq", metadata=without_texts)
    check = source_check(earlier, released)
    assert check.ok
    assert "the texts of the source's encoding/ are not in the artifact" in check.notes


def test_resume_does_not_take_other_texts_for_its_own(tmp_path: Path) -> None:
    """Of the same length: only the texts themselves tell the files apart."""
    source = write(models.mini(tmp_path / "source"), LATER)
    models.run(source, tmp_path / "x.hfq")
    assert models.run(source, tmp_path / "x.hfq", resume=True).already_done
    write(source, LATER.replace("Think.", "Thank."))
    with pytest.raises(OutputExistsError):
        models.run(source, tmp_path / "x.hfq", resume=True)
