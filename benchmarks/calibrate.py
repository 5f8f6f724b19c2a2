"""Measure what a calibration takes: memory and bytes of a layer of true Flash shape.

``python -m benchmarks.calibrate`` writes a random artifact of one layer (about 3.7 GB; its
vocabulary is cut) and calibrates it in processes of their own: with all of it in memory, as an
engine holds it, then layer by layer with all experts of the layer, a tenth of them, and one. All
must give the same statistics. The peak is the process's largest resident size.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import flash_model
from benchmarks.load_gate import SMALL_VOCABULARY
from ds4q.artifact.hfq import Reader
from ds4q.runtime.collect import Collector
from ds4q.runtime.engine import Engine, checked_config
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.layerwise import observe_layers
from ds4q.runtime.source import ArtifactSource

VOCABULARY = SMALL_VOCABULARY["vocab_size"]


def measure(path: Path, expert_bytes: int, tokens: int) -> dict[str, object]:
    """Digest of the statistics, peak and seconds of one calibration; 0 bytes: an engine's."""
    ids = np.random.default_rng(5).integers(0, VOCABULARY, tokens)
    windows = [ids[at : at + 512] for at in range(0, tokens, 512)]
    start = time.perf_counter()
    with Reader(path) as reader:
        config = checked_config(reader)
        if expert_bytes:
            found = observe_layers(reader, config, windows, expert_bytes=expert_bytes, threads=2)
        else:
            engine, collector = Engine.load(path, threads=2), Collector(config, 2)
            for window in windows:
                engine.forward(engine.new_state(), window, observer=collector)
            found = collector.statistics()
    seconds = time.perf_counter() - start
    digest = hashlib.sha256()
    for layer in found:
        for values in (layer.tokens, layer.gain, layer.gate_up, layer.down):
            digest.update(values.tobytes())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"sha256": digest.hexdigest(), "peak_bytes": peak, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "BYTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        path, expert_bytes = options.measure
        print(json.dumps(measure(Path(path), int(expert_bytes), options.tokens)))
        return
    with tempfile.TemporaryDirectory(prefix="ds4q-calibrate-") as place:
        path = Path(place) / "layer.hfq"
        config = (
            flash_model.flash_config((4,))
            | SMALL_VOCABULARY
            | {"n_routed_experts": options.experts}
        )
        flash_model.write(path, "fp4", config)
        with Reader(path) as reader:
            catalogue = Catalogue(checked_config(reader), ArtifactSource(reader), bind=False)
            every, one = catalogue.file_bytes, max(record.nbytes for record in catalogue)
        digests = set()
        for name, nbytes in (
            ("in memory", 0),
            ("a layer", every),
            ("a tenth", every // 10),
            ("one expert", one),
        ):
            words = ["--measure", str(path), str(nbytes), "--tokens", str(options.tokens)]
            command = [sys.executable, "-m", "benchmarks.calibrate", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            digests.add(row["sha256"])
            print(
                f"{name:10} {nbytes:>13,} bytes of experts, peak {row['peak_bytes']:>13,} bytes, "
                f"{row['seconds']:6.1f} s, {row['sha256'][:16]}",
                flush=True,
            )
        print("the same statistics" if len(digests) == 1 else "DIFFERENT STATISTICS")
        sys.exit(len(digests) != 1)


if __name__ == "__main__":
    main()
