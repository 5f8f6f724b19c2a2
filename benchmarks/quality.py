"""Owns the price of each recipe in quality: bytes against nats, KL and top-1 on ds4-tiny.

``python -m benchmarks.quality`` calibrates on one text, quantizes with every fixed recipe and with
budgets, without and with the imatrix, and scores another text, teacher-forced. All figures of one
run are paired: differences and their standard errors are taken token by token against the lossless
artifact, and between a budget and every fixed recipe of at most its bytes.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.harness import RESULTS, ROOT, commit, machine
from ds4q import api
from ds4q.runtime.engine import Engine
from ds4q.runtime.text.corpus import bos_id, read_windows
from ds4q.runtime.text.tokenizer import Tokenizer

F64 = npt.NDArray[np.float64]

SOURCE = ROOT / "tests" / "data" / "ds4-tiny"
TEXTS = ROOT / "tests" / "data" / "text"
SCORED_TOKENS = 32_768
CALIBRATION_TOKENS = 65_536
THREADS = 2
BUDGETS = (2.5, 2.75, 3.0, 3.5)
FIXED = (
    "rocmfp2-dual",
    "rocmfp2-affine",
    "rocmfp2-s40",
    "rocmfp2-sign",
    "mix2",
    "rocmfp23",
    "mix",
    "rocmfp3",
    "rocmfp4-fast",
    "rocmfp4",
    "rocmfp6-zero",
    "rocmfp6-neg32",
    "rocmfp8",
)
COLUMNS = (
    "commit",
    "machine",
    "recipe",
    "imatrix",
    "bpw",
    "bytes",
    "tokens",
    "nats",
    "nats_se",
    "nats_over",
    "nats_over_se",
    "kl",
    "kl_se",
    "top1",
    "top1_se",
)


@dataclass(frozen=True)
class Score:
    """Per-token figures of one artifact: -log p of each token, KL from and agreement with ours.

    ``windows`` numbers the window of each token: tokens of one window are not independent.
    """

    nats: F64
    kl: F64
    top1: F64
    windows: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """A scored artifact."""

    recipe: str
    imatrix: bool
    bpw: float
    nbytes: int
    score: Score

    @property
    def label(self) -> str:
        return f"{self.recipe}{' +imatrix' if self.imatrix else ''}"


def mean_se(values: F64, windows: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Mean over tokens, and its standard error with windows as the independent units."""
    mean = float(values.mean())
    counts = np.bincount(windows)
    residuals = np.bincount(windows, values - mean)
    n = len(counts)
    return mean, math.sqrt(float((residuals**2).sum()) * n / (n - 1)) / len(values)


class Scorer:
    """Scores artifacts on one text against the log-probabilities of a reference artifact."""

    def __init__(self, reference: Path, text: Path, tokens: int) -> None:
        engine = Engine.load(reference, threads=THREADS)
        tokenizer = Tokenizer.from_metadata(engine.metadata, path=reference)
        self._windows = read_windows(
            [text],
            tokenizer=tokenizer,
            bos=bos_id(engine.metadata, tokenizer),
            vocab_size=engine.vocab_size,
            limit_tokens=tokens,
        )
        self._reference = [self._log_p(engine, window) for window in self._windows]
        self.own = self._score(self._reference)

    @staticmethod
    def _log_p(engine: Engine, window: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        logits = engine.forward(engine.new_state(), window[:-1], "all").astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits.astype(np.float32)

    def score(self, artifact: Path) -> Score:
        engine = Engine.load(artifact, threads=THREADS)
        return self._score([self._log_p(engine, window) for window in self._windows])

    def _score(self, found: list[npt.NDArray[np.float32]]) -> Score:
        nats, kl, top1, windows = [], [], [], []
        for number, (ours, theirs) in enumerate(zip(self._reference, found, strict=True)):
            p, q = ours.astype(np.float64), theirs.astype(np.float64)
            ids = self._windows[number][1:]
            nats.append(-q[np.arange(len(ids)), ids])
            kl.append((np.exp(p) * (p - q)).sum(axis=1))
            top1.append((p.argmax(axis=1) == q.argmax(axis=1)).astype(np.float64))
            windows.append(np.full(len(ids), number))
        return Score(*(np.concatenate(part) for part in (nats, kl, top1, windows)))


def quantized(recipe: str, imatrix: Path | None, folder: Path) -> tuple[Path, float, int]:
    """The artifact of a recipe (``budget-2.75`` is a budget of so many bits), its bpw and bytes."""
    out = folder / f"{recipe}{'-imatrix' if imatrix else ''}.hfq"
    name, _, target = recipe.partition("@")
    summary = api.quantize(
        SOURCE,
        out,
        recipe=name,
        target_bpw=float(target) if target else None,
        imatrix=imatrix,
        threads=THREADS,
        force=True,
    )
    document = summary.document()
    return out, document["bpw_experts"], document["bytes"]


def run(recipes: Iterable[str], tokens: int, calibration: int, folder: Path) -> list[Row]:
    """Score every recipe without and with an imatrix; the lossless one comes first."""
    lossless, bpw, nbytes = quantized("fp4", None, folder)
    imatrix = folder / "imatrix.safetensors"
    api.calibrate(
        lossless, [TEXTS / "calibration.txt"], imatrix, limit_tokens=calibration, threads=THREADS
    )
    scorer = Scorer(lossless, TEXTS / "scored.txt", tokens)
    rows = [Row("fp4", False, bpw, nbytes, scorer.own)]
    show(rows[0], rows[0])
    for recipe in recipes:
        for weights in (None, imatrix) if recipe != "fp4-q8" else (None,):
            path, bpw, nbytes = quantized(recipe, weights, folder)
            rows.append(Row(recipe, weights is not None, bpw, nbytes, scorer.score(path)))
            show(rows[-1], rows[0])
            path.unlink()
    return rows


def figures(row: Row, lossless: Row) -> dict[str, float]:
    s = row.score
    found: dict[str, float] = {}
    for name, values in (
        ("nats", s.nats),
        ("nats_over", s.nats - lossless.score.nats),
        ("kl", s.kl),
        ("top1", s.top1),
    ):
        found[name], found[f"{name}_se"] = mean_se(values, s.windows)
    return found


def show(row: Row, lossless: Row) -> None:
    f = figures(row, lossless)
    print(
        f"{row.label:26} {row.bpw:7.4f} bpw {row.nbytes:>11,}  nats {f['nats']:.4f} "
        f"(+{f['nats_over']:.4f} +-{f['nats_over_se']:.4f})  "
        f"KL {f['kl']:.4f} +-{f['kl_se']:.4f}  top-1 {f['top1']:.4f}",
        flush=True,
    )


METRICS = {"nats": 1, "kl": 1, "top1": -1}  # and whether less or more of it is better


def compare(rows: list[Row]) -> list[dict[str, object]]:
    """Each budget against the fixed recipe of at most its bytes that comes closest, by metric.

    Weighed budgets meet weighed recipes, plain ones plain ones. Differences are paired by token.
    """
    found: list[dict[str, object]] = []
    for row in rows:
        if not row.recipe.startswith("budget"):
            continue
        for metric, sign in METRICS.items():
            ours = getattr(row.score, metric)
            best: tuple[float, float, Row] | None = None
            for rival in rows:
                fixed = not rival.recipe.startswith("budget") and rival.recipe != "fp4"
                if not fixed or rival.imatrix != row.imatrix or rival.bpw > row.bpw + 1e-9:
                    continue
                mean, se = mean_se(sign * (ours - getattr(rival.score, metric)), row.score.windows)
                if best is None or mean > best[0]:
                    best = mean, se, rival
            if best is None:
                continue
            mean, se, rival = best
            verdict = "better" if mean < -se else "worse" if mean > se else "even"
            print(
                f"{row.label:22} {metric:4} against {rival.label:24} "
                f"{sign * mean:+.5f} +-{se:.5f} {verdict}"
            )
            found.append(
                {
                    "budget": row.label,
                    "metric": metric,
                    "closest": rival.label,
                    "difference": f"{sign * mean:.6f}",
                    "se": f"{se:.6f}",
                    "verdict": verdict,
                }
            )
    return found


def write(rows: list[Row], pairs: list[dict[str, object]]) -> None:
    """Replace the results: one run is one table of recipes and one of comparisons."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "quality_pairs.csv").open("w", newline="", encoding="utf-8") as out:
        pair_writer = csv.DictWriter(out, list(pairs[0]), lineterminator="\n")
        pair_writer.writeheader()
        pair_writer.writerows(pairs)
    with (RESULTS / "quality.csv").open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {
                    "commit": commit(),
                    "machine": machine(),
                    "recipe": row.recipe,
                    "imatrix": "yes" if row.imatrix else "no",
                    "bpw": f"{row.bpw:.4f}",
                    "bytes": row.nbytes,
                    "tokens": len(row.score.nats),
                }
                | {name: f"{value:.6f}" for name, value in figures(row, rows[0]).items()}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="*", help="only these, and write no results")
    parser.add_argument("--tokens", type=int, default=SCORED_TOKENS)
    parser.add_argument("--calibration", type=int, default=CALIBRATION_TOKENS)
    options = parser.parse_args()
    every = ["fp4-q8", *FIXED, *(f"budget@{bpw}" for bpw in BUDGETS)]
    with tempfile.TemporaryDirectory(prefix="ds4q-quality-") as folder:
        recipes = options.recipes or every
        rows = run(recipes, options.tokens, options.calibration, Path(folder))
    pairs = compare(rows)
    if not options.recipes:
        write(rows, pairs)


if __name__ == "__main__":
    main()
