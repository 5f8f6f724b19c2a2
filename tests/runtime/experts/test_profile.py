"""The warm-start profile: what was used most, and for whom."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ds4q.artifact.metadata import canonical
from ds4q.runtime.errors import ProfileError, TraceError
from ds4q.runtime.experts.header import Identity
from ds4q.runtime.experts.profile import NAMELESS_FORMAT, Profile, is_profile, read_profile
from ds4q.runtime.experts.trace import read_trace
from tests.runtime.experts import streams

LAYERS, EXPERTS, K = 2, 16, 3
IDENTITY = streams.header().model


@pytest.fixture
def made(tmp_path: Path) -> Profile:
    ids = streams.skewed(1, LAYERS, 40, EXPERTS, K)
    path = streams.record(tmp_path / "t", ids, streams.header(), prompt=12)
    return Profile.of(read_trace(path))


def sealed(document: dict[str, Any]) -> bytes:
    """A file of ``document`` with its digest, spaced unlike ours."""
    digest = xxhash.xxh3_128(canonical(document)).hexdigest()
    return json.dumps(document | {"xxh3": digest}, indent=1).encode()


def test_experts_stand_in_the_order_of_their_use(made: Profile) -> None:
    ids = streams.skewed(1, LAYERS, 40, EXPERTS, K)
    for layer in range(LAYERS):
        counts = Counter(ids[layer].ravel().tolist())  # a prompt's bands count each choice once
        assert dict(zip(made.experts[layer], made.uses[layer], strict=True)) == counts
        order = sorted(counts, key=lambda e: (-counts[e], e))
        assert list(made.experts[layer]) == order


def test_a_profile_comes_back_as_it_was_written(made: Profile, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(made.encode())
    found = read_profile(tmp_path / "p", IDENTITY, LAYERS, EXPERTS)
    assert found == made
    assert found.digest == made.digest
    assert is_profile((tmp_path / "p").read_bytes())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["p", "t"]


def test_another_artifacts_profile_is_refused(made: Profile, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(made.encode())
    other = Identity("f" * 32, "s" * 64)
    says = f"another artifact: expected artifact {other.artifact}, found {IDENTITY.artifact}"
    with pytest.raises(ProfileError, match=says):
        read_profile(tmp_path / "p", other, LAYERS, EXPERTS)


def test_a_profile_fits_every_artifact_of_its_checkpoint(made: Profile, tmp_path: Path) -> None:
    named = replace(made, source="s" * 64)
    (tmp_path / "p").write_bytes(named.encode())
    found = read_profile(tmp_path / "p", Identity("f" * 32, "s" * 64), LAYERS, EXPERTS)
    assert found == named
    with pytest.raises(
        ProfileError, match=f"another model: expected source {'t' * 64}, found {'s' * 64}"
    ):
        read_profile(tmp_path / "p", Identity(made.artifact, "t" * 64), LAYERS, EXPERTS)


def test_what_was_altered_is_noticed(made: Profile, tmp_path: Path) -> None:
    path = tmp_path / "p"
    first, second, *_ = made.experts[0]
    whole = made.encode()
    assert whole.count(f"[[{first},{second},".encode()) == 1
    path.write_bytes(
        whole.replace(f"[[{first},{second},".encode(), f"[[{second},{first},".encode())
    )
    with pytest.raises(ProfileError, match="the profile is damaged: its digest differs"):
        read_profile(path, IDENTITY, LAYERS, EXPERTS)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ProfileError):
            read_profile(path, IDENTITY, LAYERS, EXPERTS)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "a_format",
            "ds4q.profile.v1",
            "another version: expected ds4q.profile.v3, found ds4q.prof",
        ),
        ("a_format", "ds4q.trace", "not a warm-start profile"),
        ("more", 1, "not a warm-start profile"),
        ("experts", [[1]], "one list of numbers a layer"),
        ("experts", [[1], [True]], "one list of numbers a layer"),
        ("experts", [[1], ["1"]], "one list of numbers a layer"),
        ("experts", [[1], [2, 3]], "layer 1: an expert twice, or without its uses"),
        ("experts", [[1], [EXPERTS]], "layer 1: expert out of range: expected 0 to 15, found 16"),
        ("experts", [[-1], [2]], "layer 0: expert out of range"),
        ("uses", 5, "one list of numbers a layer"),
    ],
)
def test_what_is_no_profile_is_refused(key: str, value: Any, says: str, tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "a_format": NAMELESS_FORMAT,
        "artifact": IDENTITY.artifact,
        "experts": [[1], [2]],
        "uses": [[5], [6]],
    }
    path = tmp_path / "p"
    path.write_bytes(sealed(document))
    assert read_profile(path, IDENTITY, LAYERS, EXPERTS).experts == ((1,), (2,))
    path.write_bytes(sealed(document | {key: value}))
    with pytest.raises(ProfileError, match=says):
        read_profile(path, IDENTITY, LAYERS, EXPERTS)


def test_an_expert_named_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p"
    document = {
        "a_format": NAMELESS_FORMAT,
        "artifact": IDENTITY.artifact,
        "experts": [[1, 1]],
        "uses": [[5, 6]],
    }
    path.write_bytes(sealed(document))
    with pytest.raises(ProfileError, match="layer 0: an expert twice"):
        read_profile(path, IDENTITY, 1, EXPERTS)


@pytest.mark.parametrize("raw", [b"", b"\x00\xff", b"[1]", b'{"a_format":"ds4q.profile.v2"', b"{}"])
def test_other_files_are_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(raw)
    with pytest.raises(ProfileError, match="not a warm-start profile"):
        read_profile(tmp_path / "p", IDENTITY, LAYERS, EXPERTS)


def test_an_empty_trace_has_no_profile(tmp_path: Path) -> None:
    made = streams.record(
        tmp_path / "t", streams.skewed(1, LAYERS, 1, EXPERTS, 3), streams.header()
    )
    with pytest.raises(TraceError, match="records no dispatch"):
        Profile.of(read_trace(streams.altered(made, streams.end(0))))
