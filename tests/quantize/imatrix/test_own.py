"""Our imatrix files: what is read back, and every rule that a file can break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ds4q.artifact.errors import Ds4qError
from ds4q.quantize.errors import (
    ImatrixError,
    ImatrixMissingError,
    ImatrixModelError,
    ImatrixValueError,
)
from ds4q.quantize.imatrix import read_imatrix
from tests.checks import check_refused, same_bits
from tests.quantize.imatrix import files
from tests.quantize.imatrix.files import FINGERPRINT, METADATA, dims, own, put, tensors

LAYER = "layers.1.ffn.experts"


def read(path: Path, fingerprint: str | None = FINGERPRINT) -> Any:
    return read_imatrix(path, dims=dims(), fingerprint=fingerprint)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    imatrix = read(put(tmp_path, own(tensors())))
    assert imatrix.fingerprint == FINGERPRINT
    assert imatrix.warnings == []
    arrays = tensors()
    for layer in range(files.LAYERS):
        prefix = f"layers.{layer}.ffn.experts"
        assert imatrix.tokens(layer).tolist() == list(files.COUNTS[layer])
        same_bits(imatrix.gain(layer), arrays[f"{prefix}.gain"])
        for expert in np.flatnonzero(imatrix.tokens(layer)):
            for projection, part in (("w1", "gate_up"), ("w3", "gate_up"), ("w2", "down")):
                row = imatrix.importance(layer, int(expert), projection)
                same_bits(row, arrays[f"{prefix}.{part}"][expert])


def test_sizes_may_be_unknown(tmp_path: Path) -> None:
    path = put(tmp_path, own(tensors()))
    assert read_imatrix(path, dims=None, fingerprint=None).sizes.hidden == files.HIDDEN
    silent = dims(layers=None, experts=None, d=None, I=None, K=None)
    assert read_imatrix(path, dims=silent, fingerprint=None).unseen == 1


def test_another_models_fingerprint(tmp_path: Path) -> None:
    path = put(tmp_path, own(tensors()))
    other = "0" * 64
    check_refused(
        ImatrixModelError,
        lambda: read(path, other),
        path=path,
        says=["another model", FINGERPRINT, other, "ds4q calibrate"],
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layers": 3}, "number of layers"),
        ({"experts": 5}, "number of experts"),
        ({"d": 16}, "hidden size"),
        ({"I": 8}, "expert width"),
    ],
)
def test_another_models_sizes(tmp_path: Path, changed: dict[str, int], words: str) -> None:
    path = put(tmp_path, own(tensors()))
    check_refused(
        ImatrixModelError,
        lambda: read_imatrix(path, dims=dims(**changed), fingerprint=FINGERPRINT),
        path=path,
        says=[words],
    )


def test_another_number_of_experts_for_each_token(tmp_path: Path) -> None:
    path = put(tmp_path, own(tensors()))
    check_refused(
        ImatrixValueError,
        lambda: read_imatrix(path, dims=dims(K=3), fingerprint=FINGERPRINT),
        says=["do not add up", "30 tokens x 3 experts", "60"],
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e-9])
@pytest.mark.parametrize("part", ["gain", "gate_up", "down"])
def test_illegal_numbers(tmp_path: Path, part: str, value: float) -> None:
    arrays = tensors()
    arrays[f"{LAYER}.{part}"].flat[-1] = value
    path = put(tmp_path, own(arrays))
    check_refused(ImatrixValueError, lambda: read(path), path=path, tensor=f"{LAYER}.{part}")


@pytest.mark.parametrize("counts", [(31, 9, 19, 1), (-1, 30, 30, 1), (30, 10, 19, 2), (0, 0, 0, 0)])
def test_impossible_counts(tmp_path: Path, counts: tuple[int, ...]) -> None:
    arrays = tensors() | {f"{LAYER}.tokens": np.array(counts, "<i8")}
    path = put(tmp_path, own(arrays))
    check_refused(ImatrixValueError, lambda: read(path), path=path, tensor=f"{LAYER}.tokens")


@pytest.mark.parametrize("counts", [(30, 10, 18, 1), (0, 0, 0, 0)])
def test_counts_add_up_where_the_model_is_unknown(tmp_path: Path, counts: tuple[int, ...]) -> None:
    arrays = tensors() | {f"{LAYER}.tokens": np.array(counts, "<i8")}
    path = put(tmp_path, own(arrays))
    check_refused(
        ImatrixValueError,
        lambda: read_imatrix(path, dims=None, fingerprint=None),
        tensor=f"{LAYER}.tokens",
        says=["30 tokens x a number of experts"],
    )


@pytest.mark.parametrize("part", ["gain", "gate_up", "down"])
def test_statistics_of_an_idle_expert(tmp_path: Path, part: str) -> None:
    arrays = tensors()
    name = f"layers.0.ffn.experts.{part}"
    arrays[name][3] = 1.0
    path = put(tmp_path, own(arrays))
    check_refused(ImatrixValueError, lambda: read(path), tensor=name, says=["expert 3"])


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        (f"{LAYER}.gain", None, ImatrixMissingError),
        ("layers.0.ffn.experts.down", None, ImatrixMissingError),
        (f"{LAYER}.extra", np.ones(4, "<f4"), ImatrixError),
        ("layers.01.ffn.experts.gain", np.ones(4, "<f4"), ImatrixError),
        (f"{LAYER}.gain", np.ones(4, "<f8"), ImatrixModelError),
        (f"{LAYER}.tokens", np.ones(4, "<f4"), ImatrixModelError),
        (f"{LAYER}.gain", np.ones(5, "<f4"), ImatrixModelError),
        (f"{LAYER}.down", np.ones((4, 5), "<f4"), ImatrixModelError),
    ],
)
def test_tensors_that_do_not_belong(
    tmp_path: Path, name: str, values: Any, kind: type[ImatrixError]
) -> None:
    arrays = tensors() | {name: values}
    path = put(tmp_path, own({k: v for k, v in arrays.items() if v is not None}))
    check_refused(kind, lambda: read(path), path=path, tensor=name)


def test_no_layers_and_no_matrices(tmp_path: Path) -> None:
    path = put(tmp_path, own({}))
    check_refused(ImatrixMissingError, lambda: read(path), path=path, says=["no layer"])
    path = put(tmp_path, own(tensors() | {"layers.0.ffn.experts.down": np.ones(16, "<f4")}))
    check_refused(ImatrixModelError, lambda: read(path), path=path, says=["impossible shapes"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"format": "ds4q.imatrix.v2"}, "ds4q.imatrix.v2"),
        ({"tokens": "0"}, "metadata key tokens"),
        ({"tokens": "٣"}, "metadata key tokens"),
        ({"window_tokens": "-1"}, "metadata key window_tokens"),
        ({"source_fingerprint": FINGERPRINT.upper()}, "metadata key source_fingerprint"),
        ({"texts": "[]"}, "metadata key texts"),
        ({"texts": '["abc"]'}, "metadata key texts"),
        ({"texts": "["}, "JSON"),
        ({"more": "x"}, "metadata keys differ"),
    ],
)
def test_metadata(tmp_path: Path, changed: dict[str, str], words: str) -> None:
    path = put(tmp_path, own(tensors(), METADATA | changed))
    check_refused(ImatrixError, lambda: read(path), path=path, says=[words])


@pytest.mark.parametrize("key", [*sorted(METADATA.keys() - {"format"}), "tensors_xxh3"])
def test_metadata_that_is_absent(tmp_path: Path, key: str) -> None:
    path = put(tmp_path, own(tensors(), METADATA | {key: None}))
    check_refused(ImatrixError, lambda: read(path), says=["metadata keys differ"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:-1], "short by 1 bytes"),
        (lambda raw: raw + b"\0", "after the last tensor"),
        (lambda raw: raw[:40], "header length"),
        (lambda raw: raw[:8], "header length"),
        (lambda raw: (1 << 31).to_bytes(8, "little") + raw[8:], "longer than that of an imatrix"),
        (lambda raw: raw.replace(b'"layers.0', b'"layers.1'), "duplicate key"),
        (lambda raw: raw[:8] + b"[" + raw[9:], "must begin with"),
    ],
)
def test_damaged_files(tmp_path: Path, change: Callable[[bytes], bytes], words: str) -> None:
    path = put(tmp_path, change(own(tensors())))
    check_refused(ImatrixError, lambda: read(path), path=path, says=[words])


def check_digest_refused(path: Path) -> None:
    check_refused(
        ImatrixError,
        lambda: read(path),
        path=path,
        says=["imatrix differs from its digest", "calibrate again, or copy the file again"],
    )


@pytest.mark.parametrize("name", list(tensors()))
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_bit_of_any_tensor_is_refused(tmp_path: Path, name: str, place: float) -> None:
    arrays = tensors()
    digest = xxhash.xxh3_128_hexdigest(b"".join(v.tobytes() for v in arrays.values()))
    data = arrays[name].view(np.uint8).reshape(-1)
    data[round(place * (data.size - 1))] ^= 1
    check_digest_refused(put(tmp_path, own(arrays, METADATA | {"tensors_xxh3": digest})))


@pytest.mark.parametrize("value", [1.2345, 3e38])
def test_a_legal_number_that_was_not_measured_is_refused(tmp_path: Path, value: float) -> None:
    raw = bytearray(own(tensors()))
    raw[-4:] = np.array(value, "<f4").tobytes()
    check_digest_refused(put(tmp_path, bytes(raw)))


@pytest.mark.parametrize("at", [0, 15, 31])
def test_a_flipped_bit_of_the_digest_is_refused(tmp_path: Path, at: int) -> None:
    raw = bytearray(own(tensors()))
    raw[raw.index(b'"tensors_xxh3": "') + 17 + at] ^= 1
    check_digest_refused(put(tmp_path, bytes(raw)))


@given(at=st.integers(0, len(own(tensors())) - 1), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_no_number(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    """What is left are spaces of the header, digests of texts and the length of a window."""
    raw = bytearray(own(tensors()))
    raw[at] = value
    path = put(tmp_path_factory.mktemp("changed"), bytes(raw))
    try:
        imatrix = read(path)
    except Ds4qError:
        return
    arrays = tensors()
    for layer in range(files.LAYERS):
        prefix = f"layers.{layer}.ffn.experts"
        same_bits(imatrix.tokens(layer), arrays[f"{prefix}.tokens"])
        same_bits(imatrix.gain(layer), arrays[f"{prefix}.gain"])
        same_bits(imatrix.importance(layer, 0, "w1"), arrays[f"{prefix}.gate_up"][0])
        same_bits(imatrix.importance(layer, 0, "w2"), arrays[f"{prefix}.down"][0])
