"""Owns the public functions that join the rooms: what a command does, for programs.

The command line parses words, calls these and prints what they return.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ds4q import __version__
from ds4q.artifact.check import check_structure, own_metadata
from ds4q.artifact.codings import Codings
from ds4q.artifact.errors import ArtifactError, Ds4qError
from ds4q.artifact.hfq import Reader
from ds4q.artifact.hfq2 import check_quantization_hash, declares_hash
from ds4q.artifact.places import reason
from ds4q.artifact.receipt import Receipt, find_receipt, receipt_path
from ds4q.artifact.report import Check, Failure, Report
from ds4q.artifact.walk import LegalBytes, ReceiptDigests, Visitor, walk
from ds4q.quantize.audit import Audit, audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.choose import Wish, choose
from ds4q.quantize.compare import Demands, SourceComparison
from ds4q.quantize.errors import SourceError
from ds4q.quantize.export import export as export  # one of the functions of this module
from ds4q.quantize.imatrix import Imatrix, read_imatrix
from ds4q.quantize.inventory import check_inventory, ids_below
from ds4q.quantize.job import Job, SpaceError, Summary, left_over
from ds4q.quantize.measure import ErrorSums
from ds4q.quantize.outputs import OutputPlaceError
from ds4q.quantize.plan import DraftChoice, Options, Plan, make_plan
from ds4q.quantize.recipe import Recipe, find_recipe

if TYPE_CHECKING:
    from ds4q.runtime.calibrate import Calibration
    from ds4q.runtime.device.decode_check import DeviceDecoding
    from ds4q.runtime.gates import Gate, Measurement, Surroundings

Advance = Callable[[int], None]
Progress = Callable[..., AbstractContextManager[Advance]]
"""Called with a label, a total and ``unit="tokens"`` or the like where that is not bytes; yields a
function that hears of so many more done."""

Where = Literal["cpu", "hip"]
"""What computes: this machine's processor, or the device that HIP finds."""

NO_RECEIPT = "no receipt: digests not checked"
NOTHING_READ = "no tensor was read and no gate ran: mend this first"


@contextmanager
def silent(label: str, total: int, *, unit: str = "bytes") -> Iterator[Advance]:
    """The progress of a program that shows none."""
    yield lambda amount: None


def quantize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: str = "fp4",
    variant_107: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    target_bytes: int | None = None,
    target_bpw: float | None = None,
    per_projection: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    draft: DraftChoice = "split",
    allow_partial: bool = False,
    allow_saturation: bool = False,
    dry_run: bool = False,
    resume: bool = False,
    force: bool = False,
    threads: int = 1,
    progress: Progress = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> Summary:
    """Turn a checkpoint into an artifact and its receipt, the draft into files beside them.

    Parameters
    ----------
    source : checkpoint folder, or one ``.safetensors`` file
    out : path of the artifact; nothing stands there before it is complete
    recipe : a name (``fp4`` is lossless), the path of a ``.toml`` file of rules, or ``budget``
    variant_107 : how type 107 is to be read, where the recipe leaves it open
    imatrix : importance matrix (``ds4q calibrate``) that weighs the errors of lossy types
    target_bytes, target_bpw : for ``budget``: length of the trunk file, or bits per weight of its
        routed experts; the plan is also written beside ``out``, as a recipe and as a report
    per_projection : have a budget give all experts of a layer one type for each part
    include, exclude : literal name prefixes; include first, then exclude
    draft : ``mtp.*`` tensors go to a file of their own (``split``), into ``out``, or nowhere
    allow_saturation : write tensors too whose blocks lie outside the range of their type
    dry_run : plan only; the sizes are those that would be written
    resume : go on with an unfinished job; a finished one is recognised
    force : replace existing output
    warn : hears what is legal but unusual, before any work

    Raises
    ------
    SourceError : the checkpoint is not sound; nothing was written
    JobError, WriteError : the output cannot be placed or written
    """
    _check_name(os.fspath(out))
    begin = time.perf_counter()
    wish = Wish(os.fspath(recipe), variant_107, target_bytes, target_bpw, per_projection)
    wish.check()
    with Checkpoint.open(source, allow_partial=allow_partial) as checkpoint:
        audited = audit(checkpoint, allow_partial=allow_partial)
        weights = _imatrix(imatrix, checkpoint, audited)
        names = tuple(include), tuple(exclude)
        options = Options(
            find_recipe("fp4"), *names, draft, allow_partial, weights, allow_saturation
        )

        def plan_for(chosen: Recipe) -> Plan:
            wanted = replace(options, recipe=chosen)
            return make_plan(checkpoint, audited, Path(out), wanted, __version__)

        choice = choose(
            wish,
            checkpoint,
            audited,
            weights,
            units=lambda: [t.unit for t in plan_for(options.recipe).trunk.tensors],
            file_bytes=lambda chosen: plan_for(chosen).trunk.layout.file_bytes,
            threads=threads,
            progress=progress,
        )
        plan = plan_for(choice.recipe)
        odd = [] if weights is None else weights.warnings
        given = [*audited.warnings, *odd, *plan.warnings, *left_over(plan)]
        for warning in given:
            warn(warning)
        inputs = imatrix, recipe if wish.is_file else None
        read = tuple(Path(each) for each in inputs if each is not None)
        job = Job(checkpoint, audited, plan, choice.budget, read, resume=resume, force=force)
        summary = job.finished_earlier(progress, tidy=not dry_run)
        if summary is None:
            given += _preflight(job, warn if dry_run else None)
            if dry_run:
                summary = Summary(plan, choice.budget, seconds=time.perf_counter() - begin)
            else:
                with progress("quantize", plan.payload_bytes) as advance:
                    summary = job.run(threads, advance)
        return replace(summary, warnings=tuple(given))


def _preflight(job: Job, warn: Callable[[str], None] | None) -> list[str]:
    """Check the output before work; with ``warn``, too little space is only a warning."""
    try:
        job.preflight()
    except SpaceError as error:
        if warn is None:
            raise
        warn(str(error))
        return [str(error)]
    return []


def _check_name(out: str) -> None:
    """A path that ends in a folder would name no file."""
    if not os.path.basename(out) or Path(out).name in ("", "..", "."):
        raise OutputPlaceError("output is not a file name", found=repr(out), remedy="name a file")


def _imatrix(
    path: str | os.PathLike[str] | None, checkpoint: Checkpoint, audited: Audit
) -> Imatrix | None:
    """The imatrix at ``path``, which must be of this checkpoint."""
    if path is None:
        return None
    return read_imatrix(path, dims=audited.dims, fingerprint=checkpoint.fingerprint())


@dataclass(slots=True)
class Verification(Report):
    """A report, and what a page shows beside it.

    Attributes
    ----------
    reader : the artifact as it was opened, closed by now; None where it could not be
    errors : what each re-encoded tensor lost, by name, where a source was compared to its end
    sha256 : of the whole file (hex), where a receipt or ``want_sha256`` asked for it
    """

    reader: Reader | None = None
    errors: dict[str, ErrorSums] = field(default_factory=dict)
    sha256: str | None = None


def verify(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    receipt: str | os.PathLike[str] | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    errors_only: bool = False,
    require_receipt: bool = False,
    want_sha256: bool = False,
    device: Where = "cpu",
    gates: Sequence[Gate] = (),
    threads: int = 1,
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Check an artifact: structure, inventory, legal bytes, receipt, device, source, gates.

    Parameters
    ----------
    source : checkpoint folder; every code, scale byte and dense value is compared with it
    receipt : receipt file; else the one that belongs to the artifact by name or by content
    imatrix : the importance matrix that the artifact was made with
    errors_only : of lossy types measure the errors alone: no second encoding, no fit of books
    require_receipt : an artifact without a receipt fails
    want_sha256 : compute the file's SHA-256 in the same pass, also where there is no receipt
    device : "hip" has the device decode every weight, too, and compares bits with the CPU codecs
    gates : ``Divergence(...)``, ``Fidelity(...)``, ``Neutrality(...)``, ``LoadTime(...)`` of
        ``ds4q.runtime.gates``; they run the model, the last two on ``device``, and only where the
        structure is sound. Where one of them cannot run, that is all that is told: no tensor is
        read
    tell : called with lines for people, such as how much disk a gate is about to take

    A check whose ground is missing (no receipt, no source) is not in the report. What is wrong
    with the artifact, the receipt or the source is a failure of a check, not an exception; an
    ``OSError`` of the file itself is raised.
    """
    report = Verification({"path": os.fspath(path), "name": Path(path).name})
    measurements: list[tuple[str, Measurement]] = []
    with report.check("structure") as structure:
        reader = report.reader = Reader(path)
    if not structure.ok:
        return report
    with reader:
        report.artifact |= {
            "bytes": reader.file_bytes,
            "version": reader.version,
            "tensors": len(reader.tensors),
            "recipe": (own_metadata(reader) or {}).get("recipe"),
        }
        check_structure(reader, structure)
        with report.check("inventory") as inventory:
            check_inventory(reader, inventory)
        if structure.ok and gates:
            from ds4q.runtime.gates import Surroundings  # the model and its kernels, for this alone

            where = Surroundings(threads, progress, tell, device)
            measurements = _prepare_gates(report, path, gates, where)
            if not measurements:
                return report
        if structure.ok:
            ground = _Ground(
                source, receipt, imatrix, errors_only, require_receipt, want_sha256, device
            )
            _verify_payload(report, reader, ground, threads, progress)
            if declares_hash(reader):
                with report.check("quantization-hash") as check:
                    check_quantization_hash(reader, check)
    for name, measure in measurements:
        with report.check(name) as check, _lacking(check):
            measure(check)
    return report


def _prepare_gates(
    report: Report, path: str | os.PathLike[str], gates: Sequence[Gate], where: Surroundings
) -> list[tuple[str, Measurement]]:
    """What measures for each gate; none, and failed checks, where one of them cannot run."""
    found = []
    prepared = Report(report.artifact)
    for gate in gates:
        with prepared.check(gate.name) as check, _lacking(check):
            found.append((gate.name, gate.prepare(path, where)))
    if prepared.ok:
        return found
    for check in prepared.checks:
        if not check.ok:
            check.notes.append(NOTHING_READ)
            report.checks.append(check)
    return []


@contextmanager
def _lacking(check: Check) -> Iterator[None]:
    """A file that a gate lacks is a failure like any other."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        check.fail(Failure(f"{error.filename}: {reason(error)}"))


@dataclass(frozen=True, slots=True)
class _Ground:
    """What an artifact is compared with."""

    source: str | os.PathLike[str] | None
    receipt: str | os.PathLike[str] | None
    imatrix: str | os.PathLike[str] | None
    errors_only: bool
    require_receipt: bool
    want_sha256: bool
    device: Where


def _verify_payload(
    report: Verification,
    reader: Reader,
    ground: _Ground,
    threads: int,
    progress: Progress,
) -> None:
    """The checks that need the tensors' bytes: all in one pass over the file."""
    codings = Codings.of(reader)
    with report.check("payload") as payload:
        visitors: list[Visitor] = [LegalBytes(payload, codings, ids_below(reader))]
    digests = _receipt_digests(report, reader, ground.receipt)
    if digests is not None:
        visitors.append(digests)
    elif report.checks[-1] is payload:
        payload.notes.append(NO_RECEIPT)
        if ground.require_receipt:
            with report.check("receipt") as check:
                check.fail(Failure(f"no receipt; ds4q quantize writes {receipt_path(reader.path)}"))
    decoding = _device_decoding(report, codings) if ground.device == "hip" else None
    if decoding is not None:
        visitors.append(decoding)
    checkpoint: Checkpoint | None = None
    comparison: SourceComparison | None = None
    begin = time.perf_counter()
    try:
        if ground.source is not None:
            with report.check("source") as check:
                partial = bool((own_metadata(reader) or {}).get("partial"))
                checkpoint = Checkpoint.open(ground.source, allow_partial=partial)
                told = None if digests is None else digests.receipt
                comparison = _comparison(check, checkpoint, reader, codings, told, ground)
                comparison.compare_whole()
                if comparison.check_imatrix():
                    visitors.append(comparison)
        payload_bytes = sum(entry.nbytes for entry in reader.tensors.values())
        with progress("verify", payload_bytes) as advance:
            wanted = digests is not None or ground.want_sha256
            report.sha256 = walk(reader, visitors, threads=threads, sha256=wanted, advance=advance)
        if checkpoint is not None:
            checkpoint.check_unchanged()
    except Ds4qError as error:  # cut short or replaced while it was read
        blamed = payload
        if comparison is not None and isinstance(error, SourceError):
            blamed = comparison.check
        blamed.fail_with(error)
        return
    finally:
        if decoding is not None:
            decoding.close()
        for visitor in visitors:
            visitor.check.seconds += time.perf_counter() - begin
        if checkpoint is not None:
            checkpoint.close()
    payload.figures["bytes"] = payload_bytes
    if comparison is not None:
        comparison.report_errors()
        report.errors = comparison.errors
    if digests is not None and report.sha256 is not None:
        digests.compare_sha256(report.sha256)


def _device_decoding(report: Report, codings: Codings) -> DeviceDecoding | None:
    """The device's check, or None where no device can be opened, which fails it."""
    from ds4q.hipkern.driver import Device  # the way to the device, for this alone
    from ds4q.hipkern.kernels import Kernels
    from ds4q.runtime.device.decode_check import DeviceDecoding

    with report.check("device") as check:
        device = Device.open()
        return DeviceDecoding(check, codings, device, Kernels(device))
    return None


def _comparison(
    check: Check,
    checkpoint: Checkpoint,
    reader: Reader,
    codings: Codings,
    receipt: Receipt | None,
    ground: _Ground,
) -> SourceComparison:
    """The comparison with the source, by the imatrix that is given."""
    audited = audit(checkpoint, allow_partial=bool((own_metadata(reader) or {}).get("partial")))
    imatrix = _imatrix(ground.imatrix, checkpoint, audited)
    demands = Demands(imatrix, ground.errors_only)
    return SourceComparison(check, checkpoint, audited, reader, codings, receipt, demands)


def _receipt_digests(
    report: Report, reader: Reader, receipt: str | os.PathLike[str] | None
) -> ReceiptDigests | None:
    """The receipt's check, or None where there is no receipt or it cannot be read."""
    try:
        found = find_receipt(reader, None if receipt is None else Path(receipt))
    except ArtifactError as error:
        with report.check("receipt") as check:
            check.fail_with(error)
        return None
    if found is None:
        return None
    with report.check("receipt") as check:
        check.figures["file"] = found[0].name
        digests = ReceiptDigests(check, found[1])
        digests.compare_front(reader)
    return digests


def calibrate(
    path: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    limit_tokens: int | None = None,
    window_tokens: int | None = None,
    threads: int = 1,
    force: bool = False,
    expert_cache: int | Literal["auto"] | None = None,
    device: Where = "cpu",
    progress: Progress = silent,
    tell: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = warnings.warn,
) -> Calibration:
    """Run an artifact over texts and write what its experts saw as an imatrix.

    The model runs layer by layer, so memory holds one layer and temporary files hold the hidden
    states of all tokens. The same texts give the same bytes, whatever the number of threads and the
    memory. Everything that can be refused is refused before the weights are read.

    Parameters
    ----------
    texts : UTF-8, or decimal token ids in files named ``.ids``
    out : the imatrix; an earlier one of ds4q is replaced, another file only with ``force``
    limit_tokens : read no more than so many tokens of text in all, BOS not counted
    window_tokens : positions of a whole window; None takes 512, or what the model has
    expert_cache : bytes of routed experts that are in memory at a time; None or "auto": what fits
    device : where layers run, a whole one at a time on "hip"; its sums differ from the CPU's in the
        last bits
    tell : hears how much disk the hidden states take
    warn : hears that memory could not be checked

    Raises
    ------
    RunError : not a complete model of a known checkpoint, or texts that it cannot read
    JobError, WriteError : the imatrix cannot be placed or written
    """
    from ds4q.runtime import calibrate as calibration  # the model and its kernels, for this alone

    return calibration.calibrate(
        path,
        texts,
        out,
        limit_tokens=limit_tokens,
        window_tokens=window_tokens,
        threads=threads,
        force=force,
        expert_cache=expert_cache,
        device=device,
        progress=progress,
        tell=tell,
        warn=warn,
    )


def check_adapter(path: str | os.PathLike[str], trunk: str | os.PathLike[str]) -> None:
    """Raise ``AdapterError`` for a predictor that is damaged, or of another model than ``trunk``.

    ``trunk`` is an artifact.
    """
    from ds4q.runtime.config import parse_config  # the model's kernels come with it
    from ds4q.runtime.errors import AdapterError
    from ds4q.runtime.experts.adapter import read_adapter
    from ds4q.runtime.experts.trace import identity_of

    adapter = read_adapter(path)
    with Reader(trunk) as reader:
        config = reader.metadata.get("config")
        known = config if isinstance(config, dict) else {}
        doubts = adapter.check_model(parse_config(known, path=reader.path), identity_of(reader))
    if doubts and adapter.about is not None:
        raise AdapterError("expert predictor of another artifact", path=path)
