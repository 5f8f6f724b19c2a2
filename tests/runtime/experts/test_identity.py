"""The identity of an artifact: equal for copies, another for another model of the same shape."""

from __future__ import annotations

from pathlib import Path

from ds4q.artifact.hfq import Reader
from ds4q.runtime.experts.identity import identity
from tests.runtime.artifacts import DATA, config_of, pack, write


def of(path: Path) -> str:
    with Reader(path) as reader:
        return identity(reader)


def test_an_identity_is_that_of_the_model(tmp_path: Path) -> None:
    tensors = {"head.weight": pack(DATA / "ds4-tiny")["head.weight"]}
    config = config_of(DATA / "ds4-tiny")
    one = of(write(tmp_path / "one.hfq", config, tensors, source="a"))
    assert of(write(tmp_path / "copy.hfq", config, tensors, source="a")) == one
    # as long as the first: header and index are the same
    assert of(write(tmp_path / "other.hfq", config, tensors, source="b")) != one
    assert of(write(tmp_path / "less.hfq", config, {}, source="a")) != one
