"""Owns ``python -m ds4q.hipkern.selftest``: run the self-test, or write the expected digests.

``--write`` takes them from the simulated device, and from no other.
"""

from __future__ import annotations

import argparse
import json
import sys

from ds4q.artifact.errors import Ds4qError, escape_unencodable
from ds4q.hipkern.driver import Device
from ds4q.hipkern.selftest import HASHES, Result, run


def main(words: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ds4q.hipkern.selftest", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {HASHES.name} anew")
    options = parser.parse_args(words)
    escape_unencodable(sys.stdout, sys.stderr)
    try:
        with Device.open() as device:
            if options.write and device.kind != "sim":
                parser.error("--write needs the simulated device: DS4Q_HIP=sim")
            results = run(device)
    except Ds4qError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.write:
        write(results)
        print(f"wrote {len(results)} digests to {HASHES}")
        return 0
    wrong = [result for result in results if not result.ok]
    for kernel, decoder, digest, expected in wrong:
        print(f"{kernel} {decoder}".rstrip() + f": expected {expected}, found {digest}")
    equal = f"{len(results) - len(wrong)} of {len(results)} kernels equal"
    print(f"{device.name} ({device.kind}): {equal}")
    return 1 if wrong else 0


def write(results: list[Result]) -> None:
    """Make ``results`` what is expected from now on."""
    found: dict[str, dict[str, str]] = {}
    for result in results:
        found.setdefault(result.kernel, {})[result.decoder] = result.digest
    HASHES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
