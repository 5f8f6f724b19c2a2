"""Owns the figure of the frontier: bits per expert weight against KL, from the recorded results.

``python -m benchmarks.frontier`` reads ``results/quality.csv`` and writes ``docs/frontier.svg``.
The same results give the same file.
"""

from __future__ import annotations

import csv
from typing import Any

from benchmarks.harness import RESULTS, ROOT

OUT = ROOT / "docs" / "frontier.svg"
FIXED, BUDGET, PLAIN, WEIGHED = "#8a5a00", "#1f4e9e", "white", None
LABELLED = {
    "rocmfp2-dual": (6, 4),
    "rocmfp2-affine": (6, -3),
    "rocmfp23": (6, 4),
    "mix": (6, 4),
    "mix2": (-28, 4),
    "rocmfp3": (6, 4),
    "rocmfp4-fast": (6, 6),
    "rocmfp4": (6, -4),
}


def rows() -> list[dict[str, Any]]:
    with (RESULTS / "quality.csv").open(newline="", encoding="utf-8") as file:
        found = [r for r in csv.DictReader(file) if not r["recipe"].startswith(("fp4", "rocmfp6"))]
    return [r for r in found if r["recipe"] != "rocmfp8"]


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "ds4q", "font.size": 9, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for weighed in ("no", "yes"):
        for budget, colour in ((False, FIXED), (True, BUDGET)):
            part = [
                r
                for r in rows()
                if r["imatrix"] == weighed and r["recipe"].startswith("budget") == budget
            ]
            part.sort(key=lambda r: float(r["bpw"]))
            axes.errorbar(
                [float(r["bpw"]) for r in part],
                [float(r["kl"]) for r in part],
                [float(r["kl_se"]) for r in part],
                fmt=("-" if budget else "") + ("s" if budget else "o"),
                color=colour,
                markerfacecolor=PLAIN if weighed == "no" else colour,
                markersize=5,
                linewidth=1.2,
                elinewidth=0.8,
                label=f"{'budget' if budget else 'fixed recipe'}"
                f"{', with imatrix' if weighed == 'yes' else ''}",
            )
            for r in part:
                if weighed == "no" and r["recipe"] in LABELLED:
                    axes.annotate(
                        r["recipe"],
                        (float(r["bpw"]), float(r["kl"])),
                        LABELLED[r["recipe"]],
                        textcoords="offset points",
                        fontsize=7.5,
                        color=FIXED,
                    )
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight of the routed experts, row headers in, tables out")
    axes.set_ylabel("KL from the lossless artifact, nats per token")
    axes.grid(True, which="both", linewidth=0.3, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title("ds4-tiny, teacher-forced; bars: standard error over windows", fontsize=9)
    figure.tight_layout()
    figure.savefig(OUT, metadata={"Date": None, "Creator": None})
    print(f"wrote {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    draw()
