"""exp, log1p and sigmoid of the device header: stated errors, on a sample of their range."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from ds4q.hipkern.source import FOLDER
from tests.hipkern.dense import F32, F64, Rig, open_rig

PROBE = """
#include "ds4q_dev.h"
DS4Q_KERNEL(probe, 256, (const float* x, float* out, int n, int which)) {
  ds4q_u32 i = ds4q_block_x() * 256 + ds4q_thread();
  if (i >= (ds4q_u32)n) return;
  out[i] = which == 0 ? ds4q_exp(x[i]) : which == 1 ? ds4q_log1p(x[i]) : ds4q_sigmoid(x[i]);
}
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("math")
    (folder / "math.hip").write_text(PROBE)
    shutil.copy(FOLDER / "ds4q_dev.h", folder)
    with open_rig(folder) as rig:
        yield rig


def _of(rig: Rig, x: F32, which: int) -> F32:
    out = rig.room(len(x))
    rig.run("math.hip", "probe", (-(-len(x) // 256), 1, 1), rig.put(x), out, len(x), which)
    return rig.get(out, len(x))


def _floats(low: float, high: float, stride: int) -> F32:
    """Every ``stride``-th float of one sign from ``low`` to ``high``, both included."""
    ends = np.array([low, high], np.float32).view(np.uint32)
    bits = np.append(
        np.arange(int(ends.min()), int(ends.max()), stride, dtype=np.uint32), ends.max()
    )
    return bits.view(np.float32)


def _ulps(found: F32, want: F64) -> npt.NDArray[np.float64]:
    """Error in units of the last place of a float32 at ``want``, subnormals included."""
    exponent = np.maximum(np.frexp(want)[1], -125)
    return np.abs(found.astype(np.float64) - want) / np.ldexp(1.0, exponent - 24)


@pytest.mark.parametrize(
    ("which", "exact", "low", "high", "ulps"),
    [
        (0, np.exp, 0.0, 88.72283, 0.88),
        (0, np.exp, -0.0, -104.0, 0.88),
        (1, np.log1p, 0.0, 1.0, 0.91),
    ],
)
def test_errors_are_what_the_header_states(
    rig: Rig, which: int, exact: Callable[[F64], F64], low: float, high: float, ulps: float
) -> None:
    x = _floats(low, high, 65_521 if low or which else 32_749)
    assert len(x) > 10_000
    worst = _ulps(_of(rig, x, which), exact(x.astype(np.float64))).max()
    assert 0.5 < worst <= ulps  # a sample that is no worse than rounding would show nothing


def test_the_sample_holds_the_worst_cases_of_the_whole_range(rig: Rig) -> None:
    """Found by a scan over all floats; these errors are what the header rounds up."""
    for which, at, exact, error in (
        (0, "0x1.da21b2p+5", np.exp, 0.8699),
        (0, "-0x1.7905dep+2", np.exp, 0.8736),
        (0, "-0x1.5ec8f6p+6", np.exp, 0.8578),
        (1, "0x1.f61d78p-2", np.log1p, 0.9024),
    ):
        x = np.array([float.fromhex(at)], np.float32)
        found = _ulps(_of(rig, x, which), exact(x.astype(np.float64)))
        assert found[0] == pytest.approx(error, abs=1e-4)


def test_ends_of_the_range(rig: Rig) -> None:
    x = np.array([np.inf, 88.73, -104.01, -np.inf, -0.0, np.nan, 3e38, -3e38], np.float32)
    np.testing.assert_array_equal(_of(rig, x, 0), [np.inf, np.inf, 0, 0, 1, np.nan, np.inf, 0])
    x = np.array([0.0, 1e-45, np.nan], np.float32)
    np.testing.assert_array_equal(_of(rig, x, 1), np.array([0.0, 1e-45, np.nan], np.float32))
    x = np.array([np.inf, 200.0, 0.0, -200.0, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(_of(rig, x, 2), [1, 1, 0.5, 0, 0, np.nan])
