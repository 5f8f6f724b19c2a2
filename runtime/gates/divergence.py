"""The divergence gate: how far an artifact's predictions are from a reference's on texts.

Both models read the same tokens (``forced.py``), one after the other, since two may not fit into
memory: the reference's logits wait on disk (``spool.py``), 4 bytes x vocabulary a token. Beside a
model there are two windows of logits in memory, 530 MB at 129,280 token ids. Everything is computed
in float64 from the float32 logits.

Tokens of a window depend on each other, so standard errors count windows, not tokens: that of a
mean m = sum(x) / sum(n) over W windows is sqrt(W / (W - 1) * sum((x_w - m * n_w)^2)) / sum(n), the
usual one of a ratio of sums over clusters (Cochran, Sampling Techniques, 3rd ed., 6.3 and 9A.1).
It needs two windows, so fewer are refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ds4q.artifact.report import NOT_JUDGED, Check, Failure
from ds4q.runtime.errors import GateError
from ds4q.runtime.experts.options import Budget
from ds4q.runtime.gates.forced import (
    F32,
    I64,
    Call,
    forced_calls,
    forced_logits,
    scored_tokens,
)
from ds4q.runtime.gates.pair import Advance, Measurement, Model, Surroundings, read_pair
from ds4q.runtime.gates.spool import Spool
from ds4q.runtime.rows import check_room
from ds4q.runtime.text.corpus import WINDOW_TOKENS, bos_id, read_windows

F64 = npt.NDArray[np.float64]

SUMS = ("kl", "top1", "nats", "nats_ref", "nats_diff")
MIN_TOKENS = 256
"""With fewer, the standard error of ``top1`` can exceed 1 / (2 sqrt(256)) = 3 points even if tokens
were independent: more than what separates most recipes."""
MIN_WINDOWS = 2
_CHUNK_LOGITS = 1 << 20  # bounds the float64 copies
_LOGIT_BYTES = np.dtype(np.float32).itemsize


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models over the same windows.

    Attributes
    ----------
    tokens : i64 [W] scored tokens of each window
    sums : f64 [W, 5] sums over them, in the order of ``SUMS``: KL(reference || model) in nats,
        1 where both think the same token most likely, -log p(next token) of the model, of the
        reference, and the difference of the two
    """

    tokens: I64
    sums: F64

    def figures(self) -> dict[str, Any]:
        """Means per token with their standard errors, which are None for a single window."""
        total = int(self.tokens.sum())
        figures: dict[str, Any] = {}
        for name, sums in zip(SUMS, self.sums.T, strict=True):
            mean = sums.sum() / total
            count = len(sums)
            spread = float(np.square(sums - mean * self.tokens).sum())
            figures[name] = float(mean)
            figures[f"{name}_se"] = (
                None if count < 2 else (count / (count - 1) * spread) ** 0.5 / total
            )
        return figures | {"tokens": total, "windows": len(self.tokens)}


def compare(
    windows: Sequence[I64],
    reference: Iterable[Call],
    candidate: Iterable[Call],
    advance: Advance = lambda tokens: None,
) -> Comparison:
    """Compare two models' recorded calls on ``windows``, window by window.

    Parameters
    ----------
    reference, candidate : from ``forced_calls``, over the same windows
    advance : hears of tokens compared

    Raises
    ------
    GateError : a model was not fed exactly these windows (see ``forced_logits``)
    """
    rows = []
    expected = forced_logits("reference", windows, reference)
    found = forced_logits("model", windows, candidate)
    # Strict: both proofs run to their ends, where records past the last window are refused.
    for window, of_reference, of_model in zip(windows, expected, found, strict=True):
        if of_reference.shape != of_model.shape:
            raise GateError(
                "the models have different vocabularies",
                expected=of_reference.shape[1],
                found=of_model.shape[1],
            )
        rows.append(_score(of_reference, of_model, window[1:]))
        advance(len(window) - 1)
    tokens = np.array([len(window) - 1 for window in windows], np.int64)
    return Comparison(tokens, np.array(rows))


def _score(reference: F32, model: F32, following: I64) -> F64:
    """The five sums over one window; logits [T, vocab], ``following`` [T] the next tokens."""
    sums = np.zeros(len(SUMS))
    step = max(1, _CHUNK_LOGITS // reference.shape[1])
    for start in range(0, len(following), step):
        part = slice(start, start + step)
        log_p, log_q = _log_softmax(reference[part]), _log_softmax(model[part])
        rows = np.arange(len(log_p))
        next_p, next_q = log_p[rows, following[part]], log_q[rows, following[part]]
        agree = reference[part].argmax(axis=1) == model[part].argmax(axis=1)
        sums += [
            (np.exp(log_p) * (log_p - log_q)).sum(),
            agree.sum(),
            -next_q.sum(),
            -next_p.sum(),
            (next_p - next_q).sum(),
        ]
    return sums


def _log_softmax(logits: F32) -> F64:
    """Log-probabilities, f64, of logits [T, vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


@dataclass(frozen=True, slots=True)
class Divergence:
    """The gate ``divergence``: passes if the comparison is valid and within the limits.

    Without a limit that could be missed it measures and judges nothing.

    Attributes
    ----------
    against : the reference artifact, with the same tokenizer
    texts : UTF-8 files, or ``.ids`` files of token ids
    tokens : compare no more than so many; None takes all
    window : tokens of a window, BOS included; None takes 512, or as many as both have positions for
    max_kl : fail above this mean KL, in nats per token
    min_top1 : fail below this share of equal most likely tokens
    expert_cache : bytes of experts in memory, or "auto"; None: all of them. It changes no figure
    """

    name: ClassVar[str] = "divergence"
    against: str | os.PathLike[str]
    texts: Sequence[str | os.PathLike[str]]
    tokens: int | None = None
    window: int | None = None
    max_kl: float | None = None
    min_top1: float | None = None
    expert_cache: Budget | None = None

    def prepare(self, path: str | os.PathLike[str], where: Surroundings) -> Measurement:
        """What compares the artifact ``path`` with the reference; see ``Gate``."""
        model, reference = read_pair(path, self.against)
        positions = min(m.config.max_position_embeddings for m in (model, reference))
        windows = read_windows(
            self.texts,
            tokenizer=reference.tokenizer,
            bos=bos_id(reference.metadata, reference.tokenizer),
            vocab_size=reference.config.vocab_size,
            window_tokens=self.window or min(WINDOW_TOKENS, positions),
            limit_tokens=self.tokens,
        )
        longest = max(map(len, windows))
        if longest > positions:
            raise GateError(
                "a window is longer than the context",
                path=model.path,
                expected=f"at most {positions} tokens",
                found=longest,
                remedy="give a smaller --window, or leave it out",
            )
        _require_enough(windows, self.texts)
        nbytes = scored_tokens(windows) * reference.config.vocab_size * _LOGIT_BYTES
        check_room(nbytes)
        where = where.paged(self.expert_cache)
        return partial(self._run, model, reference, windows, nbytes, where)

    def _run(
        self,
        model: Model,
        reference: Model,
        windows: Sequence[I64],
        nbytes: int,
        where: Surroundings,
        check: Check,
    ) -> None:
        count = scored_tokens(windows)
        with Spool(nbytes) as spool:
            where.tell(
                f"divergence: {count:,} tokens; the reference's logits take {nbytes:,} bytes in "
                f"{spool.folder} meanwhile"
            )
            _fill(spool, reference, windows, where)
            with (
                model.load(where) as engine,
                where.progress("divergence", count, unit="tokens") as advance,
            ):
                calls = forced_calls(engine, windows)
                comparison = compare(windows, spool.calls(), calls, advance)
        check.figures |= comparison.figures() | {"against": reference.path.name}
        if os.path.samefile(model.path, reference.path):
            check.notes.append("compared with itself: this says nothing of another artifact")
        self._judge(check)

    def _judge(self, check: Check) -> None:
        if self.max_kl in (None, math.inf) and not self.min_top1:
            check.unjudged = NOT_JUDGED
        kl, top1 = check.figures["kl"], check.figures["top1"]
        if self.max_kl is not None and not kl <= self.max_kl:
            check.fail(Failure("kl is too large", expected=f"at most {self.max_kl}", found=str(kl)))
        if self.min_top1 is not None and not top1 >= self.min_top1:
            least = f"at least {self.min_top1}"
            check.fail(Failure("top1 is too low", expected=least, found=str(top1)))


def _require_enough(windows: Sequence[I64], texts: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse texts whose figures would have no standard error, or a uselessly large one."""
    path, tokens = ", ".join(str(text) for text in texts), scored_tokens(windows)
    if tokens < MIN_TOKENS:
        raise GateError(
            "too few tokens for a measurement",
            path=path,
            expected=f"at least {MIN_TOKENS}",
            found=tokens,
            remedy="give a longer --text, or a larger --tokens",
        )
    if len(windows) < MIN_WINDOWS:
        raise GateError(
            "one window has no standard error",
            path=path,
            expected=f"at least {MIN_WINDOWS} windows",
            found=f"1, of {tokens} tokens",
            remedy="give a longer --text, a larger --tokens or a smaller --window",
        )


def _fill(spool: Spool, reference: Model, windows: Sequence[I64], where: Surroundings) -> None:
    """Run the reference; its weights are let go on return."""
    count = scored_tokens(windows)
    with (
        reference.load(where) as engine,
        where.progress("reference", count, unit="tokens") as advance,
    ):
        for call in forced_calls(engine, windows):
            spool.write(call)
            advance(len(call.fed))
