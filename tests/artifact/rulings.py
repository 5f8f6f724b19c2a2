"""Owns the reader's rulings as files: each attack, the class that refuses it, and its legal twin.

The names are those of ``artifact/FORMAT.md``; ``test_format.py`` holds the two lists equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4q.artifact.errors import (
    ArtifactError,
    DuplicateTensorError,
    HeaderError,
    IndexFieldError,
    MagicError,
    MetadataError,
    PayloadBoundsError,
    PayloadSizeError,
    TensorTypeError,
    TruncatedError,
    VersionError,
)
from tests.artifact.build import TWO, File, Tensor

NAN_IN_METADATA = b'{"x":NaN}'
DEEP = 256
LAST = TWO[-1]


def nested(levels: int) -> bytes:
    return b'{"x":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@dataclass(frozen=True)
class Ruling:
    """``attack`` must raise ``error`` (at open, or where ``late`` when it is used).

    ``twin`` differs in as little as possible and must open, with ``warns`` as its only warnings.
    """

    name: str
    attack: File | bytes
    error: type[ArtifactError]
    twin: File | bytes
    says: tuple[str, ...] = ()
    tensor: str | None = None
    late: bool = False
    warns: tuple[str, ...] = ()
    variants: tuple[File | bytes, ...] = ()  # further forms of the attack


LEGAL = File()
WHOLE = LEGAL.data()
EMPTY = File(tensors=[])

RULINGS = [
    Ruling(
        "short-file",
        EMPTY.data()[:31],
        TruncatedError,
        EMPTY,
        ("at least 32 bytes", "31"),
        variants=(b"", b"HFQM"),
    ),
    Ruling("wrong-magic", LEGAL.but(magic=b"HFQN"), MagicError, LEGAL, ("HFQN",)),
    Ruling(
        "unfinished-magic",
        LEGAL.but(magic=b"HFQ!", version=2),
        MagicError,
        LEGAL.but(version=2),
        ("unfinished version-2 file",),
    ),
    Ruling(
        "unknown-version",
        LEGAL.but(version=3),
        VersionError,
        LEGAL.but(version=2),
        ("expected 1 or 2, found 3",),
        variants=(LEGAL.but(version=0), LEGAL.but(version=2**32 - 1)),
    ),
    Ruling(
        "metadata-offset-in-header",
        LEGAL.but(metadata_offset=31),
        HeaderError,
        LEGAL.but(metadata_offset=40, gap=bytes(8)),
        ("metadata_offset", "31"),
        warns=("metadata_offset is 40, not 32",),
        variants=(LEGAL.but(metadata_offset=0),),
    ),
    Ruling(
        "metadata-offset-behind-data-offset",
        LEGAL.but(metadata_offset=4096),
        HeaderError,
        LEGAL,
        ("metadata_offset", "4096"),
        variants=(LEGAL.but(metadata_offset=2**64 - 1),),
    ),
    Ruling(
        "data-offset-behind-file",
        EMPTY.but(data_offset=4097, padding=bytes(4047)),
        TruncatedError,
        EMPTY.but(data_offset=4096, padding=bytes(4047)),
        ("4097",),
        variants=(LEGAL.but(data_offset=2**64 - 1, padding=b""),),
    ),
    Ruling(
        "metadata-begins-elsewhere",
        LEGAL.but(metadata=b' {"config":{}}'),
        MetadataError,
        LEGAL.but(metadata=b'{ "config":{}}'),
        ("must begin with '{'",),
        variants=(
            LEGAL.but(metadata=b'\xef\xbb\xbf{"config":{}}'),
            LEGAL.but(metadata=b'[{"config":{}}]'),
            LEGAL.but(metadata=b""),
        ),
    ),
    Ruling(
        "metadata-never-closes",
        LEGAL.but(metadata=b'{"config":{}'),
        MetadataError,
        LEGAL.but(metadata=b'{"config":"}\\"}"}'),
        ("never closes",),
        variants=(LEGAL.but(metadata=b'{"config":"}'),),
    ),
    Ruling(
        "metadata-not-json",
        LEGAL.but(metadata=b"{'config':{}}"),
        MetadataError,
        LEGAL,
        ("not JSON",),
        variants=(LEGAL.but(metadata=b"{[}]}"),),
    ),
    Ruling(
        "duplicate-metadata-key",
        LEGAL.but(metadata=b'{"config":{},"config":{}}'),
        MetadataError,
        LEGAL.but(metadata=b'{"config":{},"Config":{"config":{}}}'),
        ("'config'",),
    ),
    Ruling(
        "metadata-nan",
        LEGAL.but(metadata=NAN_IN_METADATA),
        MetadataError,
        LEGAL.but(metadata=b'{"x":"NaN"}'),
        ("NaN",),
        variants=(LEGAL.but(metadata=b'{"x":-Infinity}'), LEGAL.but(metadata=b'{"x":1e999}')),
    ),
    Ruling(
        "metadata-lone-surrogate",
        LEGAL.but(metadata=b'{"x":"\\ud83d"}'),
        MetadataError,
        LEGAL.but(metadata=b'{"x":"\\ud83d\\ude00"}'),
        ("surrogate",),
    ),
    Ruling(
        "metadata-nested-deeply",
        LEGAL.but(metadata=nested(DEEP + 1)),
        MetadataError,
        LEGAL.but(metadata=nested(DEEP)),
        ("more than 256 levels",),
        variants=(LEGAL.but(metadata=nested(100_000)),),
    ),
    Ruling(
        "metadata-not-utf8",
        LEGAL.but(metadata=b'{"x":"\xc3"}'),
        MetadataError,
        LEGAL.but(metadata=b'{"x":"\xc3\xbc"}'),
        ("not UTF-8", "byte 6"),
    ),
    Ruling(
        "name-not-utf8",
        File([Tensor(b"a\xff")]),
        IndexFieldError,
        File([Tensor(b"a\xc3\xbf")]),
        ("index entry 0 is not UTF-8",),
        variants=(File([Tensor(b"\xed\xa0\x80")]),),
    ),
    Ruling(
        "index-count-differs",
        LEGAL.but(index_count=1),
        IndexFieldError,
        LEGAL,
        ("expected 2, found 1",),
        variants=(LEGAL.but(count=3), LEGAL.but(index_count=2**32 - 1)),
    ),
    Ruling(
        "count-without-room",
        LEGAL.but(count=10**6, index_count=10**6),
        IndexFieldError,
        LEGAL,
        ("more tensors than the index has room for", "1000000"),
        variants=(LEGAL.but(version=2, count=10**6, index_count=10**6),),
    ),
    Ruling(
        "index-runs-into-payload",
        LEGAL.but(data_offset=100, padding=b""),
        IndexFieldError,
        LEGAL.but(data_offset=32 + 13 + 4 + 28 + 32, padding=b""),
        ("entry 1 runs past data_offset",),
        variants=(
            LEGAL.but(data_offset=32 + 13 + 4 + 28 + 31, padding=b""),
            LEGAL.but(data_offset=32 + 13 + 2, padding=b""),
            File([Tensor(name_length=65535)]),
            LEGAL.but(version=2, data_offset=32 + 13 + 4 + 28 + 32, padding=b""),
        ),
    ),
    Ruling(
        "payload-past-end",
        WHOLE[:-1],
        TruncatedError,
        WHOLE,
        ("past the end of the file", f"{len(WHOLE)} bytes", f"{len(WHOLE) - 1}"),
        tensor=str(LAST.name),
        variants=(File([Tensor("b.weight", nbytes=2**64 - 1)]),),
    ),
    Ruling(
        "v2-offset-before-payload",
        File([Tensor(offset=127)], version=2),
        PayloadBoundsError,
        File([Tensor(offset=128)], version=2),
        ("offset of at least 4096", "4064"),
        tensor="a.weight",
        variants=(File([Tensor(offset=0)], version=2),),
    ),
    Ruling(
        "v2-offset-past-end",
        File([Tensor(offset=129)], version=2),
        TruncatedError,
        File([Tensor(offset=129)], version=2, tail=bytes(32)),
        ("past the end",),
        tensor="a.weight",
        variants=(File([Tensor(offset=2**64 - 1)], version=2),),
    ),
    Ruling(
        "v2-overlap",
        File([Tensor("a"), Tensor("b", payload=bytes(8), offset=128)], version=2),
        PayloadBoundsError,
        File([Tensor("a", offset=129), Tensor("b", payload=bytes(8), offset=128)], version=2),
        ("overlaps that of a",),
        tensor="b",
    ),
    Ruling(
        "duplicate-tensor",
        File([Tensor("a"), Tensor("b"), Tensor("a", 2, (2,))]),
        DuplicateTensorError,
        File([Tensor("a"), Tensor("b"), Tensor("A", 2, (2,))]),
        ("entries 0 and 2",),
        tensor="a",
    ),
    Ruling(
        "empty-name",
        File([Tensor("")]),
        IndexFieldError,
        File([Tensor(" ")]),
        ("entry 0 is empty",),
    ),
    Ruling(
        "control-characters-in-name",
        File([Tensor("a\0b")]),
        IndexFieldError,
        File([Tensor("a\u00a0ü b")]),
        ("control characters",),
        variants=(File([Tensor("a\n")]), File([Tensor("\x7f")]), File([Tensor("\x9b")])),
    ),
    Ruling(
        "zero-dim",
        File([Tensor(shape=(4, 0), payload=b"")]),
        IndexFieldError,
        File([Tensor(shape=(4, 1))]),
        ("a dim is 0", "[4, 0]"),
        tensor="a.weight",
    ),
    Ruling(
        "length-differs-from-formula",
        File([Tensor(nbytes=6, payload=bytes(6))]),
        PayloadSizeError,
        File([Tensor()]),
        ("expected 8 bytes, found 6 bytes",),
        tensor="a.weight",
        late=True,
        variants=(
            File([Tensor("a.weight", 21, (2, 64), 32, bytes(99))]),
            File([Tensor("a.weight", 21, (2, 48), 32, bytes(99))]),
        ),
    ),
    Ruling(
        "group-size-differs",
        File([Tensor("a.weight", 21, (2, 64), 256, bytes(100))]),
        IndexFieldError,
        File([Tensor("a.weight", 21, (2, 64), 32, bytes(100))]),
        ("wrong group size for HFP4G32", "expected 32, found 256"),
        tensor="a.weight",
        late=True,
    ),
    Ruling(
        "unknown-type",
        File([Tensor(type_id=99)]),
        TensorTypeError,
        File([Tensor(type_id=16)]),
        ("unknown tensor type 99",),
        tensor="a.weight",
        late=True,
        variants=(File([Tensor(type_id=13, shape=(256,), group_size=256, payload=bytes(136))]),),
    ),
    Ruling(
        "reserved-type",
        File([Tensor(type_id=23)]),
        TensorTypeError,
        File([Tensor(type_id=22, shape=(2,))]),
        ("reserved tensor type 23",),
        tensor="a.weight",
        variants=tuple(File([Tensor(type_id=n)]) for n in (25, 26, 27, 43)),
    ),
    Ruling(
        "lost-own-digests",
        LEGAL.but(metadata=b'{"hipfire_quant_recipe":"ds4q-fp4"}'),
        MetadataError,
        LEGAL.but(metadata=b'{"hipfire_quant_recipe":"mq2lloyd"}'),
        ("lost its 'ds4q' object",),
        variants=(LEGAL.but(metadata=b'{"ds4q":{}}'), LEGAL.but(metadata=b'{"ds4q":1}')),
    ),
]
