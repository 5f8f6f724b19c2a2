"""Owns the question where an imatrix helps: KL of one re-encoded layer and part at a time.

``python -m benchmarks.imatrix`` re-encodes one part of one layer of ds4-tiny and keeps the rest
lossless. It scores that without an imatrix, with one of 65,536 tokens, and with one of twice as
many. Differences are paired token by token; results go to ``results/imatrix.csv``.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path

from benchmarks.harness import RESULTS, commit, machine
from benchmarks.quality import CALIBRATION_TOKENS, SOURCE, TEXTS, THREADS, Score, Scorer, mean_se
from ds4q import api

LAYERS = 4
TOKENS = 16_384
PARTS = {
    "rocmfp2-affine": ("gate-up", "down"),
    "rocmfp2-mix": ("gate-up",),
    "rocmfp3-mix": ("down",),
}
RULE = """default = "fp4"
[dense]
recipe = "fp4"
[[rule]]
type = "{word}"
layers = {layer}
part = "{part}"
"""
COLUMNS = ("commit", "machine", "type", "layer", "part", "calibration", "kl", "less", "less_se")


def score(
    word: str, layer: int, part: str, imatrix: Path | None, folder: Path, by: Scorer
) -> Score:
    """The artifact in which this part of this layer alone was re-encoded."""
    rule, out = folder / "one.toml", folder / "one.hfq"
    rule.write_text(RULE.format(word=word, layer=layer, part=part), encoding="utf-8")
    api.quantize(SOURCE, out, recipe=str(rule), imatrix=imatrix, threads=THREADS, force=True)
    return by.score(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ds4q-imatrix-") as place:
        folder = Path(place)
        lossless = folder / "fp4.hfq"
        api.quantize(SOURCE, lossless, recipe="fp4", threads=THREADS)
        by = Scorer(lossless, TEXTS / "scored.txt", options.tokens)
        files: dict[int, Path | None] = {0: None}
        for times in (1, 2):
            tokens = times * CALIBRATION_TOKENS
            files[tokens] = out = folder / f"{tokens}.imatrix"
            text = TEXTS / "calibration.txt"
            api.calibrate(lossless, [text], out, limit_tokens=tokens, threads=THREADS)
        for word, parts in PARTS.items():
            for layer in range(LAYERS):
                for part in parts:
                    plain: Score | None = None
                    for tokens, imatrix in files.items():
                        found = score(word, layer, part, imatrix, folder, by)
                        plain = plain or found
                        less, se = mean_se(plain.kl - found.kl, found.windows)
                        kl = float(found.kl.mean())
                        print(
                            f"{word:15} layer {layer} {part:8} calibration {tokens:>7,}  "
                            f"KL {kl:.5f}, less by {less:+.5f} +-{se:.5f}",
                            flush=True,
                        )
                        figures = (f"{kl:.6f}", f"{less:.6f}", f"{se:.6f}")
                        place_of = (word, layer, part, tokens)
                        rows.append((commit(), machine(), *place_of, *figures))
    with (RESULTS / "imatrix.csv").open("w", newline="", encoding="utf-8") as out_file:
        writer = csv.writer(out_file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
