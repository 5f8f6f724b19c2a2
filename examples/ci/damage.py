"""Breaks a folder of artifacts in one way after another: a check that stays green proves nothing.

    python examples/ci/damage.py GOOD OUT

GOOD holds one artifact (.hfq), its receipt and a registry.json with an entry for it. For every
way to break it, OUT/WAY becomes a copy of GOOD with that one fault, which `ds4q verify OUT/WAY`
must refuse. Standard output is one JSON object: WAY -> the check that has to fail, and the tensor
that it has to name, or null where the fault lies in no tensor. Ways that GOOD gives no ground for,
such as decode tables that it does not have, are named on standard error and left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.hfq import HEADER_BYTES, NAME_LENGTH, Reader, TensorEntry
from ds4q.artifact.metadata import BLANK_DIGEST, canonical, front_digest, seal
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.artifact.tables import KINDS, TableHead, expert_of, mix_index_sha256
from ds4q.artifact.types import HFP4G32, RAW, ROCMFP2, ROCMFP2_MIX, ROCMFP3_MIX
from ds4q.artifact.writer import TensorSpec, layout
from ds4q.registry.schema import parse

Fault = tuple[str, str | None]
"""The check that fails, and the tensor that it names."""

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize {}\n"


class NoGroundError(Exception):
    """The artifact has nothing that could be broken this way."""


class NotGoodError(Exception):
    """The folder is not one that can be broken, or there is no place for what would be broken."""


class Copy:
    """A copy of the good folder, to be broken."""

    def __init__(self, good: Path, folder: Path) -> None:
        shutil.copytree(good, folder)
        (self.artifact,) = sorted(folder.glob("*.hfq"))
        self.receipt = receipt_path(self.artifact)
        self.registry = folder / "registry.json"

    def experts(self, type_id: int | None = None) -> list[TensorEntry]:
        """Matrices of routed experts of one type, at least two; None takes the most used type."""
        with Reader(self.artifact) as reader:
            entries = [e for e in reader.tensors.values() if expert_of(e.name)]
        if type_id is None:
            used = Counter(e.type_id for e in entries)
            type_id = max(used, key=lambda each: used[each], default=None)
        entries = [e for e in entries if e.type_id == type_id]
        if len(entries) < 2:
            raise NoGroundError(f"no two experts of type {type_id}")
        return entries

    def write(self, at: int, data: bytes) -> None:
        """Put ``data`` at byte ``at`` of the artifact."""
        with self.artifact.open("r+b") as file:
            file.seek(at)
            file.write(data)

    def read(self, at: int, count: int) -> bytes:
        """``count`` bytes at ``at``."""
        with self.artifact.open("rb") as file:
            file.seek(at)
            return file.read(count)

    def flip(self, at: int, mask: int = 1) -> None:
        """Change one byte of the artifact."""
        self.write(at, bytes([self.read(at, 1)[0] ^ mask]))

    def rebuild(
        self,
        drop: Iterable[str] = (),
        change: Callable[[dict[str, Any]], None] = lambda _: None,
        payload_of: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write the artifact anew, digests and all.

        Without some tensors, with other metadata, or with other bytes of some tensors.
        """
        with Reader(self.artifact) as reader:
            metadata = reader.metadata
            arch_id = reader.arch_id
            kept = [e for e in reader.tensors.values() if e.name not in drop]
            held = {e.name: reader.read(e.name).tobytes() for e in kept}
        payloads = list((held | dict(payload_of or {})).values())
        change(metadata)
        census = metadata["hipfire_recipe_census"]
        if dropped := len(reader.tensors) - len(kept):
            census[RAW.name] -= dropped
            if not census[RAW.name]:
                del census[RAW.name]
        specs = [TensorSpec(e.name, e.type_id, e.shape) for e in kept]
        metadata["ds4q"] |= {"index_xxh3": BLANK_DIGEST, "metadata_xxh3": BLANK_DIGEST}
        planned = layout(specs, len(canonical(metadata)), arch_id=arch_id)
        metadata["ds4q"]["index_xxh3"] = front_digest(planned.header, planned.index)
        self.artifact.write_bytes(planned.front(seal(metadata)) + b"".join(payloads))

    def edit_table(self, type_id: int, change: Callable[[bytearray, int], None]) -> str:
        """Change a decode table for tensors of ``type_id`` and every digest in the artifact.

        ``change`` gets the table's bytes and the place of its first mode. Returns its name.
        """
        self.experts(type_id)
        with Reader(self.artifact) as reader:
            index = reader.metadata["rocmfpx"]["mix_tables"]
            name = next(item["table"] for item in index if item["qtype"] == type_id)
            raw = bytearray(reader.read(name).tobytes())
        change(raw, KINDS[type_id].header.size)

        def agree(metadata: dict[str, Any]) -> None:
            coded = metadata["rocmfpx"]
            (item,) = (item for item in coded["mix_tables"] if item["table"] == name)
            item["sha256"] = hashlib.sha256(raw).hexdigest()
            coded["mix_index_sha256"] = mix_index_sha256(coded["mix_tables"])

        self.rebuild(change=agree, payload_of={name: bytes(raw)})
        return str(name)

    def edit_registry(self, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
        """Change the registry: ``change`` gets the document and its first entry."""
        document = json.loads(self.registry.read_text("utf-8"))
        change(document, next(iter(document["models"].values())))
        self.registry.write_text(json.dumps(document, indent=1), "utf-8")

    def entry_check(self) -> str:
        """The check that holds the registry's first entry to its file."""
        document = json.loads(self.registry.read_text("utf-8"))
        return f"entry {next(iter(document['models']))}"


# ------------------------------------------------------------------ payload


def nibble(copy: Copy) -> Fault:
    """One FP4 code of an expert."""
    entry = copy.experts(HFP4G32.id)[0]
    copy.flip(entry.offset + HFP4G32.row_header_bytes + 1, 0x01)
    return "receipt", entry.name


def scale_byte(copy: Copy) -> Fault:
    """One block's exponent."""
    entry = copy.experts(HFP4G32.id)[0]
    copy.flip(entry.offset + HFP4G32.row_header_bytes)
    return "receipt", entry.name


def nan_scale(copy: Copy) -> Fault:
    """An exponent of 0xFF, which stands for NaN."""
    entry = copy.experts(HFP4G32.id)[0]
    copy.write(entry.offset + HFP4G32.row_header_bytes, b"\xff")
    return "payload", entry.name


def row_header(copy: Copy) -> Fault:
    """A reserved flag in the header of a row."""
    entry = copy.experts(HFP4G32.id)[0]
    copy.flip(entry.offset + 6, 0x80)
    return "payload", entry.name


def swapped_experts(copy: Copy) -> Fault:
    """Two experts' matrices in each other's place: every byte is one of the file's own."""
    first, *others = copy.experts()
    projection = first.name.rpartition(".experts.")[2].partition(".")[2]
    other = next(e for e in others if e.name.endswith(f".{projection}") and e.shape == first.shape)
    payloads = [copy.read(e.offset, e.nbytes) for e in (first, other)]
    copy.write(first.offset, payloads[1])
    copy.write(other.offset, payloads[0])
    return "receipt", first.name


# ------------------------------------------------------------------ mixed types and their books


def _mixed_byte(copy: Copy, type_id: int, byte: int, mask: int) -> str:
    """Flip bits in one byte of the second block of an expert of type 105 or 106."""
    entry = copy.experts(type_id)[0]
    copy.flip(entry.offset + KINDS[type_id].type.block_bytes + byte, mask)
    return entry.name


def code_105(copy: Copy) -> Fault:
    """One 3-bit code of a block of type 105."""
    return "receipt", _mixed_byte(copy, ROCMFP3_MIX.id, 5, 0x02)


def code_106(copy: Copy) -> Fault:
    """One 2-bit code of a block of type 106."""
    return "receipt", _mixed_byte(copy, ROCMFP2_MIX.id, 3, 0x01)


def scale_105(copy: Copy) -> Fault:
    """The scale of a half block of type 105."""
    return "receipt", _mixed_byte(copy, ROCMFP3_MIX.id, 12, 0x01)


def scale_106(copy: Copy) -> Fault:
    """The scale of a half block of type 106."""
    return "receipt", _mixed_byte(copy, ROCMFP2_MIX.id, 9, 0x01)


def select_bit_105(copy: Copy) -> Fault:
    """The bit that chooses the book of a half block of type 105."""
    return "receipt", _mixed_byte(copy, ROCMFP3_MIX.id, 13, 0x80)


def select_bit_106(copy: Copy) -> Fault:
    """The bit that chooses the book of a half block of type 106."""
    return "receipt", _mixed_byte(copy, ROCMFP2_MIX.id, 8, 0x80)


def nan_scale_106(copy: Copy) -> Fault:
    """A scale of 0x7F, which stands for NaN."""
    entry = copy.experts(ROCMFP2_MIX.id)[0]
    copy.write(entry.offset + 8, b"\x7f")
    return "payload", entry.name


def table_byte(copy: Copy) -> Fault:
    """One bit of a book, as a disk would turn it: no digest agrees."""
    copy.experts(ROCMFP3_MIX.id)
    with Reader(copy.artifact) as reader:
        index = reader.metadata["rocmfpx"]["mix_tables"]
        name = next(item["table"] for item in index if item["qtype"] == ROCMFP3_MIX.id)
        entry = reader.entry(name)
    copy.flip(entry.offset + entry.nbytes - 2)
    return "structure", entry.name


def other_book(copy: Copy) -> Fault:
    """One level of a book a little larger, in order still; every digest in the file agrees."""

    def change(raw: bytearray, modes: int) -> None:
        raw[-2] ^= 0x01  # the low bits of the last and largest level

    return "receipt", copy.edit_table(ROCMFP3_MIX.id, change)


def book_order(copy: Copy) -> Fault:
    """Two levels of a book in each other's place; every digest in the file agrees."""

    def change(raw: bytearray, modes: int) -> None:
        raw[-4:] = raw[-2:] + raw[-4:-2]

    return "structure", copy.edit_table(ROCMFP2_MIX.id, change)


def swapped_books(copy: Copy) -> Fault:
    """Two experts' books in each other's place; every digest in the file agrees."""

    def change(raw: bytearray, modes: int) -> None:
        kind = KINDS[ROCMFP2_MIX.id]
        books, n = (
            len(raw) - TableHead.read(bytes(raw), kind).experts * kind.books_bytes,
            kind.books_bytes,
        )
        raw[books : books + 2 * n] = raw[books + n : books + 2 * n] + raw[books : books + n]

    return "receipt", copy.edit_table(ROCMFP2_MIX.id, change)


def other_mode(copy: Copy) -> Fault:
    """An expert that is read by the fixed levels of its type, or by its books, as it should not."""

    def change(raw: bytearray, modes: int) -> None:
        raw[modes] ^= 1

    return "receipt", copy.edit_table(ROCMFP3_MIX.id, change)


# ------------------------------------------------------------------ the file


def index_field(copy: Copy) -> Fault:
    """One dim in the index."""
    entry = copy.experts()[0]
    with Reader(copy.artifact) as reader:
        start = HEADER_BYTES + len(reader.metadata_raw)
        name = entry.name.encode()
        at = reader.index_raw.index(NAME_LENGTH.pack(len(name)) + name)
    copy.flip(start + at + 2 + len(name) + 2)
    return "structure", entry.name


def metadata_byte(copy: Copy) -> Fault:
    """One byte of the metadata."""
    copy.flip(HEADER_BYTES + 3)
    return "structure", None


def magic(copy: Copy) -> Fault:
    """The first byte: no longer an HFQ file, though it is called one."""
    copy.flip(0)
    return "structure", None


def truncated(copy: Copy) -> Fault:
    """The last byte is missing."""
    with Reader(copy.artifact) as reader:
        last = max(reader.tensors.values(), key=lambda e: e.offset).name
        size = reader.file_bytes
    with copy.artifact.open("r+b") as file:
        file.truncate(size - 1)
    return "structure", last


def empty(copy: Copy) -> Fault:
    """A download that never began."""
    copy.artifact.write_bytes(b"")
    return "structure", None


def appended(copy: Copy) -> Fault:
    """A byte too many."""
    with copy.artifact.open("ab") as file:
        file.write(b"\0")
    return "structure", None


def lfs_pointer(copy: Copy) -> Fault:
    """A checkout without git-lfs."""
    size = copy.artifact.stat().st_size
    copy.artifact.write_text(LFS_POINTER.format("0" * 64, size), "ascii")
    return "structure", None


def missing_decode_table(copy: Copy) -> Fault:
    """A mixed artifact without one of its tables, every digest made to agree."""
    with Reader(copy.artifact) as reader:
        tables = [e.name for e in reader.tensors.values() if e.type_id == RAW.id]
    if not tables:
        raise NoGroundError("no decode table")
    copy.rebuild(drop=tables[:1])
    return "structure", tables[0]


def _variant(copy: Copy, word: str) -> str:
    entry = copy.experts(ROCMFP2.id)[0]
    copy.rebuild(change=lambda metadata: metadata["rocmfpx"].update(variant_107=word))
    return entry.name


def unknown_variant(copy: Copy) -> Fault:
    """A reading of type 107 that nobody knows."""
    return "structure", _variant(copy, "duel")


def wrong_variant(copy: Copy) -> Fault:
    """Another of the four readings of type 107: legal, so only a digest of the whole can tell."""
    _variant(copy, "s40")
    return "receipt", None


# ------------------------------------------------------------------ receipt


def wrong_receipt(copy: Copy) -> Fault:
    """The receipt of an earlier build, in which one tensor was another."""
    receipt = read_receipt(copy.receipt)
    first = copy.experts()[0].name
    records = tuple(
        replace(r, xxh3=r.xxh3[::-1]) if r.name == first else r for r in receipt.tensors
    )
    earlier = replace(receipt, tensors=records, sha256=receipt.sha256[::-1])
    copy.receipt.write_bytes(earlier.encode())
    return "receipt", first


def cut_receipt(copy: Copy) -> Fault:
    """A receipt without its end."""
    copy.receipt.write_bytes(copy.receipt.read_bytes()[:-9])
    return "receipt", None


def no_receipt(copy: Copy) -> Fault:
    """No receipt; red with --require-receipt."""
    copy.receipt.unlink()
    return "receipt", None


# ------------------------------------------------------------------ registry


def stale_size(copy: Copy) -> Fault:
    """The entry of a file that has been built anew since: another length."""
    copy.edit_registry(lambda _, entry: entry.update(size_bytes=entry["size_bytes"] + 1))
    return copy.entry_check(), None


def stale_hash(copy: Copy) -> Fault:
    """The same, of the same length."""
    copy.edit_registry(lambda _, entry: entry.update(sha256=entry["sha256"][::-1]))
    return copy.entry_check(), None


def wrong_arch(copy: Copy) -> Fault:
    """An entry of another architecture."""
    copy.edit_registry(lambda _, entry: entry.update(arch_id=entry["arch_id"] + 1))
    return copy.entry_check(), None


def upper_case_digest(copy: Copy) -> Fault:
    """A digest that is no digest to a strict reader."""
    copy.edit_registry(lambda _, entry: entry.update(sha256="sha256:" + entry["sha256"].upper()))
    return "document", None


def unknown_key(copy: Copy) -> Fault:
    """A slip of the pen."""
    copy.edit_registry(lambda _, entry: entry.update(sha265="0" * 64))
    return "document", None


def unsafe_name(copy: Copy) -> Fault:
    """A file name that leads out of the folder."""
    copy.edit_registry(lambda _, entry: entry.update(file="../" + entry["file"]))
    return "document", None


def dangling_alias(copy: Copy) -> Fault:
    """An alias of a tag that is not there."""
    copy.edit_registry(lambda document, _: document["aliases"].update({"latest": "no-such-tag"}))
    return "document", None


def no_json(copy: Copy) -> Fault:
    """What a server says in place of the registry."""
    copy.registry.write_text("<html>404</html>", "utf-8")
    return "document", None


WAYS: dict[str, Callable[[Copy], Fault]] = {
    way.__name__.replace("_", "-"): way
    for way in (
        nibble,
        scale_byte,
        nan_scale,
        row_header,
        swapped_experts,
        code_105,
        code_106,
        scale_105,
        scale_106,
        select_bit_105,
        select_bit_106,
        nan_scale_106,
        table_byte,
        other_book,
        book_order,
        swapped_books,
        other_mode,
        index_field,
        metadata_byte,
        magic,
        truncated,
        empty,
        appended,
        lfs_pointer,
        missing_decode_table,
        unknown_variant,
        wrong_variant,
        wrong_receipt,
        cut_receipt,
        no_receipt,
        stale_size,
        stale_hash,
        wrong_arch,
        upper_case_digest,
        unknown_key,
        unsafe_name,
        dangling_alias,
        no_json,
    )
}


def check_places(good: Path, out: Path) -> None:
    """Raise ``NotGoodError`` where ``damage`` could not do its work; writes nothing."""
    if not good.is_dir():
        raise NotGoodError(f"{good} is not a folder")
    artifacts = sorted(good.glob("*.hfq"))
    if len(artifacts) != 1:
        raise NotGoodError(f"{good} holds {len(artifacts)} artifacts (.hfq), not one")
    try:
        with Reader(artifacts[0]):
            read_receipt(receipt_path(artifacts[0]))
        document = parse((good / "registry.json").read_bytes(), str(good / "registry.json"))
        entry = next(iter(document["models"].values()))
        whole = {
            "file",
            "size_bytes",
            "sha256",
            "arch_id",
        } <= entry.keys() and "aliases" in document
    except Ds4qError as error:
        raise NotGoodError(str(error)) from None
    except OSError as error:
        raise NotGoodError(f"{error.filename}: {error.strerror}") from None
    except (KeyError, AttributeError, StopIteration):
        whole = False
    if not whole:
        raise NotGoodError(
            f"{good / 'registry.json'} holds no entry as 'ds4q registry add' makes it"
        )
    if out.resolve().is_relative_to(good.resolve()):
        raise NotGoodError(f"{out} lies in {good}; name a folder beside it")
    if out.exists() and not out.is_dir():
        raise NotGoodError(f"{out} is not a folder")
    if there := [name for name in WAYS if os.path.lexists(out / name)]:
        raise NotGoodError(f"{out / there[0]} exists; name a new folder")


def damage(good: Path, out: Path) -> dict[str, Fault]:
    """Write a broken copy of ``good`` to ``out``/WAY for each way there is ground for.

    Raises ``NotGoodError`` as ``check_places``.
    """
    check_places(good, out)
    faults = {}
    for name, way in WAYS.items():
        copy = Copy(good, out / name)
        try:
            faults[name] = way(copy)
        except NoGroundError as reason:
            shutil.rmtree(out / name)
            print(f"{name}: left out: {reason}", file=sys.stderr)
    return faults


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/ci/damage.py GOOD OUT")
    try:
        found = damage(Path(sys.argv[1]), Path(sys.argv[2]))
    except NotGoodError as error:
        sys.exit(f"damage.py: {error}")
    except OSError as error:
        sys.exit(f"damage.py: {error.filename}: {error.strerror}")
    told = {way: {"check": check, "tensor": tensor} for way, (check, tensor) in found.items()}
    print(json.dumps(told, indent=1))
