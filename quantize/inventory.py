"""Checks that an artifact is a whole DeepSeek-V4 model, from its header, metadata and index.

Every command that takes an artifact judges it by these checks, so that a fault has one verdict;
``artifact/FORMAT.md`` lists the rulings. No payload is read.
"""

from __future__ import annotations

from ds4q.artifact.check import check_structure, own_metadata
from ds4q.artifact.hfq import ARCH_DEEPSEEK4, Reader
from ds4q.artifact.report import Check, Failure
from ds4q.artifact.types import RAW, TIDI32, TYPES
from ds4q.quantize.config import check_config, check_generation
from ds4q.quantize.deepseek4 import Inventory, Storage, find_draft
from ds4q.quantize.errors import SourceError

# What the metadata holds beside the config; each may be absent or null.
METADATA_KINDS = {
    "tokenizer": (str, "the text of tokenizer.json"),
    "tokenizer_config": (dict, "an object"),
    "generation_config": (dict, "an object"),
}


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the draft model."""
    return name.startswith("mtp.")


def check_inventory(reader: Reader, check: Check) -> None:
    """The tensors are those that the artifact's own config implies, in the shapes it implies.

    A file marked as partial may lack tensors; none may be strange to the model.
    """
    if reader.arch_id != ARCH_DEEPSEEK4:
        check.fail(
            Failure(
                "not a DeepSeek-V4 artifact: wrong arch_id",
                expected=str(ARCH_DEEPSEEK4),
                found=str(reader.arch_id),
            )
        )
    _check_metadata(reader, check)
    ours = own_metadata(reader) or {}
    partial = bool(ours.get("partial"))
    config = reader.metadata.get("config")
    if not isinstance(config, dict):
        check.fail(Failure("metadata holds no config object"))
        return
    if partial and not config:
        config = {"model_type": "deepseek_v4"}
    try:
        dims = check_config(config, reader.path, allow_partial=partial)
        generation = reader.metadata.get("generation_config")
        if isinstance(generation, dict):
            check_generation(generation, config, reader.path, "generation_config.")
        draft, stages = find_draft(reader.tensors, config)
        inventory = Inventory(dims, draft, stages)
    except SourceError as error:
        check.fail_with(error)
        return
    weights = [entry for entry in reader.tensors.values() if entry.type_id != RAW.id]
    for entry in weights:
        try:
            expected = inventory.expected(entry.name, reader.path)
        except SourceError as error:
            check.fail_with(error)
            continue
        shape = expected.shape
        holds_ids = expected.storage is Storage.INTEGER
        if holds_ids != (entry.type_id == TIDI32.id):
            what = "numbers where ids belong" if holds_ids else "ids where numbers belong"
            found = TYPES[entry.type_id].name if entry.type_id in TYPES else str(entry.type_id)
            check.fail(Failure(what, tensor=entry.name, found=found))
        agree = len(shape) == len(entry.shape) and all(
            want in (None, found) for want, found in zip(shape, entry.shape, strict=True)
        )
        if not agree:
            check.fail(
                Failure(
                    "shape is not what the config implies",
                    tensor=entry.name,
                    expected=str(list(shape)),
                    found=str(list(entry.shape)),
                )
            )
    parts = {is_draft(name) for name in reader.tensors}
    missing = 0
    for name in inventory.required():
        if is_draft(name) in parts and name not in reader.tensors:
            missing += 1
            if not partial:
                check.fail(Failure("tensor is missing", tensor=name))
    check.figures |= {"tensors": len(reader.tensors), "missing": missing, "partial": partial}


def ids_below(reader: Reader) -> dict[str, int]:
    """By the name of each hash routing table the number of experts: its ids must be below that."""
    config = reader.metadata.get("config")
    experts = config.get("n_routed_experts") if isinstance(config, dict) else None
    if type(experts) is not int:
        return {}
    tables = (entry for entry in reader.tensors.values() if entry.type_id == TIDI32.id)
    return {entry.name: experts for entry in tables}


def _check_metadata(reader: Reader, check: Check) -> None:
    for key, (kind, expected) in METADATA_KINDS.items():
        value = reader.metadata.get(key)
        if value is not None and not isinstance(value, kind):
            what = f"metadata key '{key}' is of the wrong kind"
            check.fail(Failure(what, expected=expected, found=type(value).__name__))


def first_fault(reader: Reader) -> str | None:
    """The first fault of structure or inventory of an open artifact, in a line; None if sound."""
    for name, look in (("structure", check_structure), ("inventory", check_inventory)):
        check = Check(name, path=str(reader.path))
        look(reader, check)
        if not check.ok:
            return fault_line(check)
    return None


def fault_line(check: Check) -> str:
    """The first failure of a failed check, and how many follow."""
    more = f", and {check.count - 1:,} more" if check.count > 1 else ""
    return f"{check.failures[0].line()}{more}"
