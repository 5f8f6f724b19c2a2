"""Owns the model card of a tag: what entry, receipt, header and verify report say, as Markdown.

Every figure comes from one of them and the card says from which; what none of them says is "not
measured by this project". Nothing is typed here, and nothing is measured here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4q.artifact.check import own_metadata
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import Receipt, TensorRecord
from ds4q.artifact.report import NOT_JUDGED
from ds4q.artifact.tables import expert_of
from ds4q.artifact.types import BY_NAME, HFP4G32, PRIVATE, RAW
from ds4q.registry.arch import ARCH_NAMES, CURRENT_RELEASE, release
from ds4q.registry.entries import Entry
from ds4q.registry.errors import DocumentError, RegistryError
from ds4q.registry.schema import parse

UNKNOWN = "not measured by this project"
SLOT_ALIGN_BYTES = 256  # of a matrix in a slot of the expert cache
BUDGETS_GIB = (8, 16, 32, 48, 64, 96, 128)
GATES = ("divergence", "fidelity", "neutrality", "load-time", "device")  # checks that measure

_WHAT_SIDECARS_ARE = {
    "receipt": "digests of every tensor; `ds4q verify` compares with it",
    "dspark_receipt": "digests of every tensor of the dspark draft",
    "dspark": "draft model for speculative decoding with this trunk",
    "mtp_receipt": "digests of every tensor of the mtp draft",
    "mtp": "draft model (MTP head) for this trunk",
    "adapter": "experimental: guesses which experts come next; off unless asked for",
    "triattn": "attention data of other runtimes",
}


class ReportError(RegistryError):
    """A verify report that cannot stand on this card."""

    rule = "verify report cannot be used"


@dataclass(frozen=True, slots=True)
class Header:
    """What a card takes from an artifact's header.

    Attributes
    ----------
    config : the checkpoint's config.json, as far as the artifact holds it
    k256 : whether rows are as long as hipfire's kernels want them; None where nobody says
    """

    config: Mapping[str, Any]
    k256: bool | None

    @classmethod
    def of(cls, reader: Reader) -> Header:
        """Of an open artifact."""
        config = reader.metadata.get("config")
        k256 = (own_metadata(reader) or {}).get("k256")
        known = config if isinstance(config, dict) else {}
        return cls(known, k256 if isinstance(k256, bool) else None)


@dataclass(frozen=True, slots=True)
class Measured:
    """A report of ``ds4q verify --json``; its timings count only where device and date are told."""

    document: Mapping[str, Any]
    device: str | None = None
    date: str | None = None

    def check(self, name: str) -> Mapping[str, Any] | None:
        """The check of that name."""
        found = (c for c in self.document["checks"] if c["name"] == name)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Sources:
    """All that a card may say."""

    entry: Entry
    aliases: Sequence[str] = ()
    receipt: Receipt | None = None
    header: Header | None = None
    measured: Measured | None = None


def read_measured(
    raw: bytes, entry: Entry, origin: str, *, device: str | None = None, date: str | None = None
) -> Measured:
    """A verify report, which must be one of this very artifact.

    Raises
    ------
    ReportError : not such a report, or of another file, or it does not say of which
    """
    try:
        document = parse(raw, origin)
        checks = document["checks"]
        found = {c["figures"].get("sha256") for c in checks} - {None}
        shaped = all({"name", "ok"} <= c.keys() and _are_objects(c["failures"]) for c in checks)
        nbytes = document["artifact"].get("bytes")
    except (DocumentError, KeyError, TypeError, AttributeError):
        shaped = False
    if not shaped:
        raise ReportError("not a report of 'ds4q verify --json'", path=origin)
    if not found or found != {entry.sha256} or nbytes != entry.size_bytes:
        said = ", ".join(sorted(map(str, found))) or "no digest"
        raise ReportError(
            "the report is not of this artifact",
            path=origin,
            expected=f"SHA-256 {entry.sha256}, {entry.size_bytes} bytes",
            found=f"{said}, {nbytes} bytes",
            remedy="write one with 'ds4q verify FILE --registry TAG --json'",
        )
    return Measured(document, device, date)


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def render(sources: Sources) -> str:
    """The card as Markdown."""
    entry = sources.entry
    parts = [
        *_front(entry),
        f"# {entry.tag}\n",
        f"{_paragraph(entry.desc)}\n",
        f"Also known as: {', '.join(sources.aliases) or 'no other name'}.\n",
        "## Files\n",
        *_table(("file", "what", "bytes", "SHA-256"), _files(entry)),
        "## Model\n",
        *_table(("", "", "source"), _model(sources)),
        "## Tensors\n",
        *_census(sources.receipt),
        "## Verified\n",
        *_verified(sources),
        "## Memory\n",
        *_memory(sources),
        "## Sampling\n",
        *_sampling(entry),
        "## Sidecars\n",
        *_sidecars(entry),
        "## Measured\n",
        *_figures(sources.measured),
    ]
    return "\n".join(parts).rstrip() + "\n"


# ---------------------------------------------------------------- sections


def _front(entry: Entry) -> Iterator[str]:
    """The front matter that a model hub reads; a licence only where the weights are DeepSeek's."""
    yield "---"
    if release(entry.tag, entry.file) is not None:
        yield "license: mit"
        yield "base_model: deepseek-ai/DeepSeek-V4-Flash"
    yield "tags:"
    yield from (f"- {word}" for word in ("hipfire", "deepseek", "moe", "quantized"))
    yield "---\n"


def _files(entry: Entry) -> Iterator[tuple[object, ...]]:
    yield entry.file, "trunk", _bytes(entry.size_bytes), entry.sha256 or UNKNOWN
    for sidecar in entry.sidecars:
        yield sidecar.file, sidecar.kind, _bytes(sidecar.size_bytes), sidecar.sha256 or UNKNOWN


def _model(sources: Sources) -> Iterator[tuple[object, ...]]:
    entry, receipt, header = sources.entry, sources.receipt, sources.header
    arch = ARCH_NAMES.get(entry.arch_id, "a family without a name here")
    yield "arch_id", f"{entry.arch_id}, {arch}", "entry"
    yield "quantization", entry.quant, "entry"
    yield _row("recipe", entry.quant_recipe, "entry")
    config = {} if header is None else header.config
    for label, key in (
        ("layers", "num_hidden_layers"),
        ("routed experts a layer", "n_routed_experts"),
        ("shared experts a layer", "n_shared_experts"),
        ("experts of a token", "num_experts_per_tok"),
    ):
        yield _row(label, config.get(key), "header")
    yield _row("dense tensors", receipt and _dense(receipt), "receipt")
    yield _row("what opens it", receipt and _loaders(receipt, header), "receipt and header")
    yield _row("made by ds4q", receipt and receipt.tool_version, "receipt")
    yield _row("source digest", receipt and receipt.source_digest, "receipt")
    if receipt is not None and receipt.imatrix_sha256:
        yield "imatrix", receipt.imatrix_sha256, "receipt"


def _dense(receipt: Receipt) -> str:
    kinds = {t.type for t in receipt.tensors if not _is_expert(t) and t.type != RAW.name}
    return ", ".join(sorted(kinds))


def _loaders(receipt: Receipt, header: Header | None) -> str:
    private = sorted({t.type for t in receipt.tensors if BY_NAME[t.type].id >= PRIVATE})
    if private:
        return f"ds4q only: {', '.join(private)} are types of its own"
    if header is not None and header.k256 is False:
        return "ds4q; hipfire does not load rows of these lengths"
    return f"ds4q; other loaders: {UNKNOWN}"


def _census(receipt: Receipt | None) -> Iterator[str]:
    if receipt is None:
        yield f"{UNKNOWN}\n"
        return
    count = Counter(t.type for t in receipt.tensors)
    nbytes: Counter[str] = Counter()
    for tensor in receipt.tensors:
        nbytes[tensor.type] += tensor.nbytes
    rows = [(kind, f"{count[kind]:,}", _bytes(nbytes[kind])) for kind in sorted(count)]
    rows.append(("all", f"{count.total():,}", _bytes(nbytes.total())))
    yield from _table(("type", "tensors", "bytes"), rows)
    yield "From the receipt.\n"


def _verified(sources: Sources) -> Iterator[str]:
    measured, receipt = sources.measured, sources.receipt
    source = None if measured is None else measured.check("source")
    if measured is None:
        yield f"Checks of `ds4q verify`: {UNKNOWN}\n"
    else:
        rows = [(c["name"], _result(c)) for c in measured.document["checks"]]
        yield from _table(("check", "result"), rows)
        yield "From the verify report.\n"
        for check in measured.document["checks"]:
            for failure in check["failures"]:
                where = failure.get("tensor") or check["name"]
                yield f"- `{_cell(where)}`: {_cell(failure.get('message'))}"
    yield f"Compared with the source checkpoint: {_fidelity(source, receipt)}\n"
    tiny = UNKNOWN
    if receipt is not None:
        tiny = f"{sum(int(t.events.get('tiny_scales', 0)) for t in receipt.tensors):,} (receipt)"
    yield f"FP4 blocks with a subnormal scale (kept as they are): {tiny}\n"


def _result(check: Mapping[str, Any]) -> str:
    if check["ok"] is None:
        return NOT_JUDGED
    return "ok" if check["ok"] else f"FAILED, {check['figures'].get('failures')}"


def _fidelity(source: Mapping[str, Any] | None, receipt: Receipt | None) -> str:
    """The word on the expert tensors: byte-exact, or which are not."""
    if source is None or receipt is None:
        return UNKNOWN
    experts = [t for t in receipt.tensors if _is_expert(t)]
    exact = sum(t.type == HFP4G32.name for t in experts)
    if source["ok"] is False:
        return f"FAILED, {source['figures'].get('failures')} differences (verify report)"
    if exact == len(experts):
        return f"all {exact:,} expert tensors byte-exact (verify report, receipt)"
    text = f"{exact:,} of {len(experts):,} expert tensors byte-exact, the others re-encoded"
    nrmse = source["figures"].get("nrmse")
    return text + (f", error (nrmse) {nrmse}" if nrmse is not None else "") + " (verify report)"


def _memory(sources: Sources) -> Iterator[str]:
    entry, receipt = sources.entry, sources.receipt
    yield f"All of it in memory: {entry.min_vram_gb} GB or more (entry).\n"
    slot_bytes = None if receipt is None else _slot_bytes(receipt)
    if receipt is None or slot_bytes is None:
        yield f"Experts in a bounded cache: {UNKNOWN}\n"
        return
    places = filter(None, (expert_of(tensor.name) for tensor in receipt.tensors))
    experts = 1 + max(expert for _, expert, _ in places)
    yield (
        f"Experts in a bounded cache (`--expert-cache`): a slot in every layer takes "
        f"{_bytes(slot_bytes)} bytes, whatever the device.\n"
    )
    slots = {budget: (budget << 30) // slot_bytes for budget in BUDGETS_GIB}
    small = [budget for budget in BUDGETS_GIB if slots[budget] < experts]
    rows = [(f"{budget} GiB", slots[budget], experts) for budget in small]
    rows.append((f"{_bytes(slot_bytes * experts)} bytes", experts, experts))
    yield from _table(("cache", "experts of a layer in it", "experts of a layer"), rows)
    yield "Computed from the receipt.\n"


def _slot_bytes(receipt: Receipt) -> int | None:
    """Bytes of one slot in every layer: as long as the longest expert, gate and up apart from down.

    None where the artifact has no routed experts.
    """
    longest: Counter[tuple[int, str]] = Counter()
    for tensor in receipt.tensors:
        place = expert_of(tensor.name)
        if place is not None:
            layer, _, projection = place
            role = "down" if projection == "w2" else "gate-up"
            longest[layer, role] = max(longest[layer, role], tensor.nbytes)
    aligned = {at: -(-n // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES for at, n in longest.items()}
    return sum(n if role == "down" else 2 * n for (_, role), n in aligned.items()) or None


def _sampling(entry: Entry) -> Iterator[str]:
    said: dict[str, Mapping[str, Any]] = {}
    for key in ("sampling", "recommended_settings"):
        if key in entry.raw:
            said[key] = entry.raw[key]
    for name, settings in sorted(entry.raw.get("sampling_profiles", {}).items()):
        said[f"profile {name}"] = settings
    if not said:
        yield f"{UNKNOWN}\n"
        return
    rows = [(name, key, value) for name, held in said.items() for key, value in held.items()]
    yield from _table(("", "setting", "value"), rows)
    yield "From the entry.\n"


def _sidecars(entry: Entry) -> Iterator[str]:
    if not entry.sidecars:
        yield "None registered.\n"
        return
    if release(entry.tag, entry.file) == CURRENT_RELEASE:
        yield "This trunk pairs with DSpark drafts, not with MTP heads.\n"
    for sidecar in entry.sidecars:
        trust = "" if sidecar.sha256 else " (no digest was published)"
        yield f"- `{_cell(sidecar.file)}`: {_WHAT_SIDECARS_ARE[sidecar.kind]}{trust}"
    yield ""


def _figures(measured: Measured | None) -> Iterator[str]:
    """Figures of gates, each with device and date; without both, none is shown."""
    rows: list[tuple[object, ...]] = []
    if measured is not None and measured.device and measured.date:
        where = measured.device, measured.date
        for gate in GATES:
            figures = (measured.check(gate) or {"figures": {}})["figures"]
            rows += [
                (gate, key, f"{value:,}" if type(value) is int else value, *where)
                for key, value in figures.items()
                if type(value) in (int, float) and key != "failures"
            ]
    if not rows:
        yield f"{UNKNOWN}\n"
        return
    yield from _table(("gate", "figure", "value", "device", "date"), rows)
    yield "From the verify report.\n"


# ---------------------------------------------------------------- words


def _is_expert(tensor: TensorRecord) -> bool:
    return expert_of(tensor.name) is not None


def _bytes(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def _row(label: str, value: object, source: str) -> tuple[object, ...]:
    return (label, UNKNOWN, "") if value is None else (label, value, source)


def _cell(value: object) -> str:
    """Text that cannot break out of a table, a line or a piece of code."""
    text = "".join(c if c.isprintable() else " " for c in str(value))
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def _paragraph(text: str) -> str:
    """Text that is no heading, list or rule, whatever it begins with."""
    cell = _cell(text).strip()
    return cell if not cell or cell[0].isalnum() else f"\\{cell}"


def _table(head: Sequence[str], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""
