"""One verdict for a fault: verify, run, export and inspect --strict agree on every odd artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4q import api
from ds4q.artifact.check import check_structure
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.report import Check
from ds4q.artifact.types import F32, HFP4G32, TIDI32, TensorType
from ds4q.quantize.export import export
from ds4q.quantize.inventory import check_inventory
from ds4q.runtime.engine import Engine
from tests.artifact.build import File, Tensor

TINY = Path(__file__).parent / "data" / "ds4-tiny"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("own") / "tiny.hfq"
    api.quantize(TINY, out)
    return out


@pytest.fixture(scope="module")
def foreign(own: Path) -> File:
    """The same model as another tool would write it: no digests of its own."""
    raw = own.read_bytes()
    with Reader(own) as reader:
        tensors = [
            Tensor(e.name, e.type_id, e.shape, e.group_size, raw[e.offset : e.offset + e.nbytes])
            for e in reader.tensors.values()
        ]
        metadata = {
            key: value
            for key, value in reader.metadata.items()
            if key not in ("ds4q", "hipfire_quant_recipe")
        }
    return File(tensors=tensors, metadata=_json(metadata))


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


def metadata(**changes: Any) -> Callable[[File], File]:
    return lambda file: file.but(metadata=_json(json.loads(file.metadata) | changes))


def expert(**changes: Any) -> Callable[[File], File]:
    """Change the first expert's entry."""
    return entry(HFP4G32, **changes)


def entry(kind: TensorType, **changes: Any) -> Callable[[File], File]:
    """Change the first entry of a type."""

    def change(file: File) -> File:
        tensors = list(file.tensors)
        at = next(i for i, t in enumerate(tensors) if t.type_id == kind.id)
        if "drop" in changes:
            del tensors[at]
        elif "payload" in changes:
            payload = bytearray(tensors[at].payload)
            place, byte = changes["payload"]
            payload[place] = byte
            tensors[at] = replace(tensors[at], payload=bytes(payload))
        else:
            tensors[at] = replace(tensors[at], **changes)
        return file.but(tensors=tensors)

    return change


def added(tensor: Tensor) -> Callable[[File], File]:
    return lambda file: file.but(tensors=[*file.tensors, tensor])


LEGAL: dict[str, Callable[[File], File]] = {
    "plain": lambda file: file,
    "version-2": lambda file: file.but(version=2),
    "bytes-after-payload": lambda file: file.but(tail=b"hello"),
    "metadata-offset-not-32": lambda file: file.but(gap=bytes(8), metadata_offset=40),
    "unsorted": lambda file: file.but(tensors=file.tensors[::-1]),
    "other-architecture-word": metadata(architecture="qwen3_5"),
    "no-tokenizer": metadata(tokenizer=None),
    "no-generation-config": metadata(generation_config=None),
}

FAULTS: dict[str, Callable[[File], File]] = {
    "other-arch-id": lambda file: file.but(arch_id=5),
    "no-arch-id": lambda file: file.but(arch_id=0),
    "strange-tensor": added(Tensor("zzz.weight")),
    "strange-tensor-of-unknown-type": added(Tensor("zzz.weight", 77)),
    "missing-tensor": expert(drop=True),
    "group-size-differs": expert(group_size=256),
    "row-header": expert(payload=(9, 1)),
    "nan-scale": expert(payload=(16, 255)),
    "route-beyond-the-experts": entry(TIDI32, payload=(0, 16)),
    "route-far-beyond-the-experts": entry(TIDI32, payload=(3, 128)),
    "routes-of-another-type": entry(TIDI32, type_id=F32.id),
    "norm-of-ids": lambda file: file.but(
        tensors=[
            replace(t, type_id=TIDI32.id, payload=bytes(4 * t.shape[0]))
            if t.name == "norm.weight"
            else t
            for t in file.tensors
        ]
    ),
    "no-config": metadata(config=None),
    "other-model": metadata(config={"model_type": "llama"}),
    "tokenizer-not-text": metadata(tokenizer={"model": {}}),
    "generation-config-not-an-object": metadata(generation_config=[1]),
    "tokenizer-config-not-an-object": metadata(tokenizer_config="x"),
}
IN_PAYLOADS = (
    "row-header",
    "nan-scale",
    "route-beyond-the-experts",
    "route-far-beyond-the-experts",
)  # which inspect does not read


def _verdicts(path: Path, out: Path) -> dict[str, bool]:
    """Whether each command takes the artifact."""

    def run() -> None:
        Engine.load(path, threads=1).close()

    def write() -> None:
        export(path, out / "experts", to="safetensors")

    def accepted(work: Callable[[], object]) -> bool:
        try:
            work()
        except Ds4qError:
            return False
        return True

    with Reader(path) as reader:
        check = Check("inspect")
        check_structure(reader, check)
        check_inventory(reader, check)
    return {
        "verify": api.verify(path).ok,
        "run": accepted(run),
        "export": accepted(write),
        "inspect": check.ok,
    }


@pytest.mark.parametrize("name", LEGAL)
def test_every_command_takes_a_legal_oddity(foreign: File, tmp_path: Path, name: str) -> None:
    found = _verdicts(LEGAL[name](foreign).write(tmp_path), tmp_path)
    assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("name", FAULTS)
def test_every_command_refuses_a_fault(foreign: File, tmp_path: Path, name: str) -> None:
    found = _verdicts(FAULTS[name](foreign).write(tmp_path), tmp_path)
    inspected = found.pop("inspect")
    assert found == dict.fromkeys(found, False)
    assert inspected == (name in IN_PAYLOADS)


def test_every_command_refuses_a_file_of_ours_with_bytes_behind_it(
    own: Path, tmp_path: Path
) -> None:
    longer = tmp_path / "longer.hfq"
    longer.write_bytes(own.read_bytes() + b"12345")
    found = _verdicts(longer, tmp_path)
    assert found == dict.fromkeys(found, False)
