"""Model cards: no figure without a source, nothing borrowed from another artifact's report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import Receipt, TensorRecord
from ds4q.registry.card import (
    BUDGETS_GIB,
    UNKNOWN,
    Header,
    Measured,
    ReportError,
    Sources,
    read_measured,
    render,
)
from ds4q.registry.entries import Entry, load_registry
from tests.artifact import build
from tests.checks import check_refused
from tests.registry.documents import SHA_A, SHA_B, entry
from tests.registry.shelves import registry_of

TAG = "deepseek-v4-flash-0731:fp4"
FIGURE = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w-])")
WIDTH, D, LAYERS, EXPERTS = 2048, 4096, 43, 256  # of Flash


def expert_records(kind: str = "HFP4G32", layers: int = LAYERS) -> Iterator[TensorRecord]:
    """The routed experts of Flash: bytes of HFP4G32 rows, 16 and 17 for each 32 columns."""
    for layer in range(layers):
        for expert in range(EXPERTS):
            for w, rows, k in (("w1", WIDTH, D), ("w2", D, WIDTH), ("w3", WIDTH, D)):
                name = f"layers.{layer}.ffn.experts.{expert}.{w}.weight"
                nbytes = rows * (16 + k // 32 * 17)
                yield TensorRecord(name, kind, (rows, k), nbytes, "0" * 32, ())


def receipt_of(tensors: tuple[TensorRecord, ...], recipe: str = "fp4") -> Receipt:
    return Receipt(
        5, SHA_A, "0" * 32, recipe, "x.y", "0" * 64, "c" * 64, False, (), tensors, "1" * 32
    )


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    events = {"tiny_scales": 31.0}
    dense = (
        TensorRecord("embed.weight", "BF16", (7, 11), 154, "0" * 32, ()),
        TensorRecord("norm.weight", "F32", (13,), 52, "0" * 32, (), events),
    )
    return receipt_of((*dense, *expert_records()))


@pytest.fixture(scope="module")
def known() -> Entry:
    models = {
        TAG: entry(
            min_vram_gb=1.375,
            quant_recipe="fp4",
            desc="a model",
            dspark={"file": "flash-dspark.fp4", "sha256": SHA_B, "size_bytes": 1234567},
            sampling={"temperature": 1.0, "top_p": 0.96875},
            recommended_settings={"top_k": 47, "reasoning_effort": "low"},
            sampling_profiles={"coding": {"min_p": 0.0625}},
        )
    }
    return registry_of(models).entries[TAG]


HEADER = Header(
    {
        "num_hidden_layers": 43,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
    },
    True,
)


def report(*checks: dict[str, Any], nbytes: int = 10**9, sha256: str = SHA_A) -> dict[str, Any]:
    """A document of ``ds4q verify --json``; the check of the receipt tells the digest."""
    first = {"name": "receipt", "ok": True, "figures": {"sha256": sha256}, "failures": []}
    return {"ok": True, "artifact": {"bytes": nbytes}, "checks": [first, *checks]}


def check_document(name: str, figures: dict[str, Any], ok: bool | None = True) -> dict[str, Any]:
    figures = {"failures": 0 if ok else 2} | figures
    return {"name": name, "ok": ok, "figures": figures, "failures": []}


SOURCE = check_document("source", {"tensors": 33026, "source_bytes": 999})
GATE = check_document("divergence", {"kl": 0.0078125, "tokens": 8765, "kl_se": None})


def card(known: Entry, *checks: dict[str, Any], **sources: Any) -> str:
    """A card; ``checks`` make the verify report, measured on a named device."""
    if checks:
        sources["measured"] = Measured(report(*checks), "Device of a name", "2026-08-14")
    return render(Sources(known, **sources))


def section(text: str, title: str) -> str:
    """The part of a card below a heading."""
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def figures(text: str, known: Entry) -> set[str]:
    """Every number of a card that is not part of a word: a name, a digest, a date."""
    text = text.replace(known.tag, "").replace("2026-08-14", "")
    return set(FIGURE.findall(text))


# ---------------------------------------------------------------- no figure without a source


def entry_figures(known: Entry) -> set[str]:
    """What the entry alone says in numbers, as people read it."""
    sizes = [known.size_bytes, *(sidecar.size_bytes for sidecar in known.sidecars)]
    return {f"{size:,}" for size in sizes if size is not None} | {
        str(known.arch_id),
        str(known.min_vram_gb),
        *("1.0", "0.96875", "47", "0.0625"),  # its settings
    }


def test_a_card_of_an_entry_alone_has_the_entrys_figures(known: Entry) -> None:
    text = card(known)
    assert figures(text, known) == entry_figures(known)
    for title in ("Tensors", "Verified", "Measured"):
        assert UNKNOWN in section(text, title)
        assert not FIGURE.search(section(text, title))


def test_a_full_card_has_no_figure_that_its_sources_lack(known: Entry, receipt: Receipt) -> None:
    gate_exact, slot_bytes = 33_024, LAYERS * (2 * 4_489_216 + 4_521_984)
    allowed = entry_figures(known)
    allowed |= {"43", "256", "1", "6"}  # header
    allowed |= {"1", "154", "52", "33,024", "33,026", "31"}  # receipt: tensors, bytes, events
    expert_bytes = EXPERTS * LAYERS * (2 * 4_489_216 + 4_521_984)
    allowed |= {f"{expert_bytes:,}", f"{expert_bytes + 206:,}", f"{gate_exact:,}"}
    allowed |= {f"{slot_bytes:,}", f"{slot_bytes * EXPERTS:,}"}
    slots = {gib: gib * 2**30 // slot_bytes for gib in BUDGETS_GIB}
    allowed |= {str(n) for n in (*slots.keys(), *slots.values())}
    allowed |= {"0.0078125", "8,765"}  # report
    text = card(known, SOURCE, GATE, receipt=receipt, header=HEADER)
    assert figures(text, known) <= allowed
    # And what is there is in its place: each source is used.
    for figure in ("33,024", "31", f"{slot_bytes:,}", "0.0078125", "8,765", "6", "47"):
        assert figure in figures(text, known)


@pytest.mark.parametrize("lacking", ["receipt", "header", "measured"])
def test_a_source_that_is_not_there_leaves_no_figure(
    known: Entry, receipt: Receipt, lacking: str
) -> None:
    measured = Measured(report(SOURCE, GATE), "Device of a name", "2026-08-14")
    every: dict[str, Any] = {"receipt": receipt, "header": HEADER, "measured": measured}
    whole = render(Sources(known, **every))
    del every[lacking]
    less = render(Sources(known, **every))
    assert figures(less, known) < figures(whole, known)
    assert less.count(UNKNOWN) > whole.count(UNKNOWN)


def test_timings_need_device_and_date(known: Entry) -> None:
    document = report(GATE)
    text = render(Sources(known, measured=Measured(document, "a device", "2026-08-14")))
    assert "| divergence | kl | 0.0078125 | a device | 2026-08-14 |" in text
    for where in ((None, None), ("a device", None), (None, "2026-08-14")):
        text = render(Sources(known, measured=Measured(document, *where)))
        assert section(text, "Measured").strip() == UNKNOWN
        assert "0.0078125" not in text


# ---------------------------------------------------------------- sections


def test_slots_are_those_of_the_formula(known: Entry, receipt: Receipt) -> None:
    memory = section(card(known, receipt=receipt), "Memory")
    assert "a slot in every layer takes 580,517,888 bytes" in memory
    rows = dict(re.findall(r"\| (\d+) GiB \| (\d+) \| 256 \|", memory))
    assert rows == {"8": "14", "16": "29", "32": "59", "48": "88", "64": "118", "96": "177"} | {
        "128": "236"
    }
    assert "| 148,612,579,328 bytes | 256 | 256 |" in memory


def test_budgets_end_where_everything_fits(known: Entry) -> None:
    few = receipt_of(tuple(expert_records(layers=2)))
    memory = section(card(known, receipt=few), "Memory")
    assert re.findall(r"\| (\d+) GiB", memory) == []
    assert "| 256 | 256 |" in memory
    none = receipt_of((TensorRecord("norm.weight", "F32", (13,), 52, "0" * 32, ()),))
    assert UNKNOWN in section(card(known, receipt=none), "Memory")


def test_experts_are_byte_exact_only_if_the_source_was_compared(
    known: Entry, receipt: Receipt
) -> None:
    text = section(card(known, SOURCE, receipt=receipt), "Verified")
    assert "all 33,024 expert tensors byte-exact" in text
    assert "byte-exact" not in card(known, GATE, receipt=receipt)
    assert "byte-exact" not in card(known, SOURCE)
    bad = check_document("source", {}, ok=False)
    bad["failures"] = [{"tensor": "layers.0.x|y", "message": "packed block\ndiffers"}]
    text = section(card(known, bad, receipt=receipt), "Verified")
    assert "byte-exact" not in text
    assert "| source | FAILED, 2 |" in text
    assert "- `layers.0.x\\|y`: packed block differs" in text
    unjudged = card(known, check_document("divergence", {"kl": 0.5}, ok=None), receipt=receipt)
    assert "| divergence | measured, not judged |" in section(unjudged, "Verified")


def test_what_was_encoded_again_is_counted(known: Entry) -> None:
    records = tuple(expert_records(layers=1))
    lossy = tuple(replace(r, type="ROCmFP2") if ".w1." in r.name else r for r in records)
    source = check_document("source", {"nrmse": 0.171875})
    text = card(known, source, receipt=receipt_of(lossy, "rocmfp2"))
    assert "512 of 768 expert tensors byte-exact, the others re-encoded" in text
    assert "0.171875" in text
    assert "ds4q only: ROCmFP2 are types of its own" in text


def test_who_opens_it_is_told_as_far_as_it_is_known(known: Entry, receipt: Receipt) -> None:
    assert f"ds4q; other loaders: {UNKNOWN}" in card(known, receipt=receipt, header=HEADER)
    odd = replace(HEADER, k256=False)
    assert "hipfire does not load rows" in card(known, receipt=receipt, header=odd)
    assert f"| what opens it | {UNKNOWN} |" in card(known)


def test_the_census_is_the_receipts(known: Entry, receipt: Receipt) -> None:
    tensors = section(card(known, receipt=receipt), "Tensors")
    assert "| BF16 | 1 | 154 |" in tensors
    assert "| all | 33,026 |" in tensors
    assert "| dense tensors | BF16, F32 | receipt |" in card(known, receipt=receipt)


def test_a_licence_is_claimed_for_deepseeks_weights_only(known: Entry) -> None:
    assert "license: mit\nbase_model: deepseek-ai/DeepSeek-V4-Flash" in card(known)
    mine = registry_of({"mine:fp4": entry()}).entries["mine:fp4"]
    assert "license" not in card(mine)
    assert "base_model" not in card(mine)


def test_sidecars_tell_what_they_are_for(known: Entry) -> None:
    text = section(card(known), "Sidecars")
    assert "pairs with DSpark drafts, not with MTP heads" in text
    assert "- `flash-dspark.fp4`: draft model" in text
    published = load_registry(offline=True).entries
    text = section(card(published["deepseek-v4-flash"]), "Sidecars")
    assert "experimental" in text
    assert "no digest was published" in text
    preview = section(card(published["deepseek-v4-flash-preview"]), "Sidecars")
    assert "pairs with DSpark" not in preview
    alone = registry_of({"mine:fp4": entry()}).entries["mine:fp4"]
    assert section(card(alone), "Sidecars").strip() == "None registered."


def test_text_cannot_break_out_of_the_card(known: Entry) -> None:
    text = card(replace(known, desc="a\n## Files\n<script>|", quant="x|y"))
    assert text.count("## Files\n") == 1
    assert "<script>" not in text
    assert "| quantization | x\\|y | entry |" in text
    for desc in ("# Files", "- item", "---", "  > quote", "`code`"):
        assert f"\n\\{desc.strip().replace('`', chr(39))}\n" in card(replace(known, desc=desc))


def test_every_published_tag_has_a_card() -> None:
    registry = load_registry(offline=True)
    for tag, each in registry.entries.items():
        text = card(each, aliases=["a", "b"])
        assert f"# {tag}\n" in text
        assert "Also known as: a, b." in text
        assert "None" not in text.replace("None registered", "")


# ---------------------------------------------------------------- sources


def test_a_header_gives_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "x.hfq"
    path.write_bytes(build.File(metadata=b'{"config":{"num_hidden_layers":5}}').data())
    with Reader(path) as reader:
        assert Header.of(reader) == Header({"num_hidden_layers": 5}, None)
    path.write_bytes(build.File(metadata=b'{"config":[]}').data())
    with Reader(path) as reader:
        assert Header.of(reader) == Header({}, None)


def test_a_report_of_this_artifact_is_read(known: Entry) -> None:
    raw = json.dumps(report(GATE)).encode()
    measured = read_measured(raw, known, "v.json", device="d", date="2026-08-14")
    assert measured.check("divergence") == GATE
    assert measured.check("fidelity") is None
    assert (measured.device, measured.date) == ("d", "2026-08-14")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (report(sha256=SHA_B), "not of this artifact"),
        (report(nbytes=5), "not of this artifact"),
        ({"artifact": {"bytes": 10**9}, "checks": [GATE]}, "found no digest"),
        ({"artifact": {"bytes": 10**9}, "checks": []}, "found no digest"),
        ([], "not a report"),
        ({}, "not a report"),
        ({"artifact": [], "checks": [GATE]}, "not a report"),
        ({"artifact": {}, "checks": [5]}, "not a report"),
        ({"artifact": {}, "checks": [{"figures": {}, "failures": []}]}, "not a report"),
        (report({"name": "a", "ok": True, "figures": {}, "failures": [5]}), "not a report"),
        (report({"name": "a", "ok": True, "figures": {"sha256": []}, "failures": []}), "report"),
    ],
)
def test_other_reports_are_refused(known: Entry, document: object, says: str) -> None:
    raw = json.dumps(document).encode()
    check_refused(ReportError, lambda: read_measured(raw, known, "v.json"), says=[says])


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_no_json_is_refused(known: Entry, raw: bytes) -> None:
    check_refused(ReportError, lambda: read_measured(raw, known, "v.json"), path="v.json")
