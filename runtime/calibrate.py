"""Calibration: texts through a model, an imatrix out. ``layerwise.py`` runs the model.

A text is cut into windows of BOS and as much of it as fits (``text/corpus.py``). Each window goes
through the model by itself, and each of its positions counts, BOS too: a model in use sees it too.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ds4q.artifact.check import own_metadata
from ds4q.artifact.hfq import Reader
from ds4q.quantize.imatrix import claim_place, write_imatrix
from ds4q.quantize.imatrix.writing import ImatrixPlaceError
from ds4q.runtime.config import check_sound, checked_config
from ds4q.runtime.digests import Digests
from ds4q.runtime.errors import RunError
from ds4q.runtime.experts.options import Budget
from ds4q.runtime.layerwise import observe_layers, plan_layers
from ds4q.runtime.text.corpus import WINDOW_TOKENS, bos_id, read_windows
from ds4q.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ds4q.runtime.backend.hip import HipBackend

Advance = Callable[[int], None]
Progress = Callable[..., AbstractContextManager[Advance]]
"""Called with a label, a total and ``unit=``; yields a function that hears of progress."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A finished calibration.

    Attributes
    ----------
    output, sha256 : the imatrix and its digest (hex)
    source_fingerprint : of the checkpoint that the artifact was made from
    texts : for each text its file and digest (hex)
    tokens, windows : positions that went through the model, in so many sequences of at most
        ``window_tokens``
    layers, experts : of the model; ``unseen`` pairs of them had no token
    """

    output: str
    sha256: str
    source_fingerprint: str
    texts: list[dict[str, str]]
    tokens: int
    windows: int
    window_tokens: int
    layers: int
    experts: int
    unseen: int
    seconds: float


def calibrate(
    path: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    limit_tokens: int | None,
    window_tokens: int | None,
    threads: int,
    force: bool,
    expert_cache: Budget | None,
    device: Literal["cpu", "hip"],
    progress: Progress,
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> Calibration:
    """Run an artifact over texts and write what its experts saw; ``ds4q.api.calibrate`` says more.

    ``limit_tokens`` is of text in all, BOS not counted; ``window_tokens`` None takes 512, or what
    the model has positions for.
    """
    begin = time.perf_counter()
    path, out = Path(path), Path(out)
    claim_place(out, force=force)
    _refuse_inputs(out, [path, *map(Path, texts)])
    with Reader(path) as reader:
        config = checked_config(reader)
        fingerprint = _fingerprint(reader)
        tokenizer = Tokenizer.from_metadata(reader.metadata, path=path)
        bos = bos_id(reader.metadata, tokenizer)
    length = _window(window_tokens, config.max_position_embeddings, path)
    windows = read_windows(
        texts,
        tokenizer=tokenizer,
        bos=bos,
        vocab_size=config.vocab_size,
        window_tokens=length,
        limit_tokens=limit_tokens,
    )
    digests = [_digest(text) for text in texts]
    total = sum(map(len, windows))
    with Reader(path) as reader, ExitStack() as stack:
        check_sound(reader)
        backend = stack.enter_context(_opened(device))
        plan = plan_layers(reader, config, total, expert_cache, device=backend is not None)
        receipt = Digests.of(reader, plan.notes)
        stack.callback(receipt.wait)
        tell(
            f"calibrate: {total:,} tokens, layer by layer; their hidden states take "
            f"{plan.disk_bytes:,} bytes in {tempfile.gettempdir()} meanwhile"
        )
        steps = total * config.num_hidden_layers
        with progress("calibrating", steps, unit="tokens x layers") as advance:
            layers = observe_layers(
                reader,
                config,
                windows,
                expert_bytes=plan.expert_bytes,
                threads=threads,
                backend=backend,
                digests=receipt,
                advance=advance,
            )
        for note in plan.notes:
            warn(note)
    sha256 = write_imatrix(
        out,
        layers,
        fingerprint=fingerprint,
        total_tokens=total,
        window_tokens=length,
        texts=digests,
        force=force,
    )
    return Calibration(
        output=str(out),
        sha256=sha256,
        source_fingerprint=fingerprint,
        texts=[
            {"file": str(text), "sha256": digest}
            for text, digest in zip(texts, digests, strict=True)
        ],
        tokens=total,
        windows=len(windows),
        window_tokens=length,
        layers=config.num_hidden_layers,
        experts=config.n_routed_experts,
        unseen=sum(int((layer.tokens == 0).sum()) for layer in layers),
        seconds=time.perf_counter() - begin,
    )


def _window(asked: int | None, limit: int, path: Path) -> int:
    """Positions of a whole window of a model that has ``limit``."""
    length = min(WINDOW_TOKENS, limit) if asked is None else asked
    if length > limit:
        raise RunError("window too long", path=path, expected=f"at most {limit}", found=length)
    return length


def _opened(device: Literal["cpu", "hip"]) -> AbstractContextManager[HipBackend | None]:
    """The device; None for the CPU."""
    if device == "cpu":
        return nullcontext()
    from ds4q.runtime.backend.hip import HipBackend  # for this alone

    return HipBackend.open()


def _fingerprint(reader: Reader) -> str:
    """Which checkpoint the artifact was made from; without it the imatrix would fit any."""
    found = (own_metadata(reader) or {}).get("source_fingerprint")
    if not isinstance(found, str):
        raise RunError(
            "the artifact does not say which checkpoint it was made from",
            path=reader.path,
            expected="ds4q.source_fingerprint in the metadata",
            remedy="calibrate on an artifact that ds4q quantized",
        )
    return found


def _refuse_inputs(out: Path, inputs: Iterable[Path]) -> None:
    if not out.exists():
        return
    for path in inputs:
        if path.exists() and path.samefile(out):
            raise ImatrixPlaceError(
                "output is one of the inputs", path=out, remedy="choose another name"
            )


def _digest(text: str | os.PathLike[str]) -> str:
    with open(text, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
