"""The self-test of kernels: its inputs, its digests, and that a wrong kernel is told by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ds4q.artifact.formats import codec_for
from ds4q.hipkern import selftest
from ds4q.hipkern.driver import Device
from ds4q.hipkern.kernels import Kernels
from ds4q.hipkern.selftest import Case, __main__, cases, expected_digests
from ds4q.hipkern.selftest.inputs import EDGES, Inputs
from ds4q.hipkern.selftest.packed import FORMATS, Format, decode_inputs
from ds4q.hipkern.sim.control import Control
from ds4q.hipkern.source import FOLDER, load

# Decoders that stand for all in dear tests.
FEW = ("HFP4G32", "ROCmFP3Mix", "BF16", "any", "", "D=64")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4Q_HIP", "sim")
        with Device.open() as device:
            yield Kernels(device)


def few() -> list[Case]:
    return [case for case in cases() if case.decoder in FEW]


# ---------------------------------------------------------------- inputs


def test_inputs_never_change() -> None:
    words = Inputs("a").words(2).tolist()
    assert words == [15829060357068751680, 11424928194170998522]
    values = Inputs("v").values(64)
    assert values[:40:8].view(np.uint32).tolist() == list(EDGES)
    assert values[1:3].tolist() == [0.687935471534729, 0.7732095718383789]


def test_inputs_are_splitmix64() -> None:
    inputs = Inputs("")
    inputs._seed = np.uint64(1234567)
    assert inputs.words(3).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_drawing_twice_is_drawing_more() -> None:
    once, twice = Inputs("x"), Inputs("x")
    assert once.words(7).tolist() == [*twice.words(3).tolist(), *twice.words(4).tolist()]


def decode_case(form: Format, kernel: str) -> Case:
    (case,) = [c for c in cases() if (c.name, c.decoder) == (kernel, form.label)]
    return case


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.label)
def test_digests_of_decoding_are_those_of_the_codecs(form: Format) -> None:
    """No device is asked: what is expected of kernels is what the CPU's codecs give."""
    digests = expected_digests()
    for kernel, kind in (("decode_f32", np.float32), ("decode_f16", np.float16)):
        case = decode_case(form, kernel)
        packed, rows, cols = decode_inputs(case.inputs(), form)
        codec = codec_for(form.kind.id, form.coding)
        codec.validate(packed.reshape(-1), (rows, cols))
        with np.errstate(over="ignore"):
            values = codec.decode(packed.reshape(-1), (rows, cols)).astype(np.float32).astype(kind)
        assert not np.isnan(values).any()
        assert xxhash.xxh3_128_hexdigest(values.data) == digests[case.kernel][form.label]


# ---------------------------------------------------------------- digests


def test_every_kernel_of_every_file_is_covered() -> None:
    declared = {
        f"{path.name} {kernel}"
        for path in FOLDER.glob("*.hip")
        for kernel in load(path.name).kernels
    }
    assert {case.kernel for case in cases()} == declared


def test_digests_belong_to_cases() -> None:
    listed = {(kernel, word) for kernel, found in expected_digests().items() for word in found}
    made = [(case.kernel, case.decoder) for case in cases()]
    assert len(set(made)) == len(made)
    assert set(made) == listed


REMEDY = "where a kernel was redefined on purpose: python -m ds4q.hipkern.selftest --write"


def test_every_kernel_gives_its_digest(kernels: Kernels) -> None:
    """Experts with few decoders: their builds are dear, and all the others are a slow test's."""
    chosen = [case for case in cases() if case.file != "moe.hip" or case.decoder in FEW]
    wrong = [result for result in selftest.run(kernels.device, kernels, chosen) if not result.ok]
    assert wrong == [], REMEDY


@pytest.mark.slow
def test_every_expert_kernel_gives_its_digest(kernels: Kernels) -> None:
    chosen = [case for case in cases() if case.file == "moe.hip"]
    wrong = [result for result in selftest.run(kernels.device, kernels, chosen) if not result.ok]
    assert wrong == [], REMEDY


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"threads": 1}, marks=pytest.mark.slow),
        {"threads": 5},
        pytest.param({"lane_seed": 1}, marks=pytest.mark.slow),
        pytest.param({"lane_seed": 2}, marks=pytest.mark.slow),
        {"lane_seed": 77, "threads": 3},
        {"delay_us": 300, "delay_seed": 5},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_threads_lane_order_or_delays(
    kernels: Kernels, sim: Control, settings: dict[str, int]
) -> None:
    sim.set(**settings)
    wrong = [r[:2] for r in selftest.run(kernels.device, kernels, few()) if not r.ok]
    assert wrong == []


@pytest.mark.slow
def test_bits_do_not_depend_on_the_compiler(tmp_path: Path) -> None:
    """zig's clang in place of g++: for the library and for every kernel."""
    environ = os.environ | {
        "DS4Q_HIP": "sim",
        "DS4Q_HOME": str(tmp_path / "home"),
        "PATH": str(tmp_path),  # no g++ there
        "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(tmp_path / "zig-local"),
    }
    command = [sys.executable, "-m", "ds4q.hipkern.selftest"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(cases())} of {len(cases())} kernels equal" in done.stdout


# ---------------------------------------------------------------- wrong kernels


def altered(folder: Path, file: str, before: str, after: str) -> Path:
    """A copy of the kernels' sources with one change."""
    copy = folder / "kernels"
    shutil.copytree(FOLDER, copy)
    text = (copy / file).read_text("utf-8")
    assert text.count(before) == 1
    (copy / file).write_text(text.replace(before, after), "utf-8")
    return copy


def test_a_wrong_kernel_is_told_by_name(kernels: Kernels, tmp_path: Path) -> None:
    folder = altered(tmp_path, "head.hip", "~(ds4q_u32)best;", "~(ds4q_u32)best ^ 1;")
    chosen = [case for case in cases() if case.file in ("head.hip", "route.hip")]
    results = selftest.run(kernels.device, Kernels(kernels.device, folder), chosen)
    assert [result.kernel for result in results if not result.ok] == ["head.hip argmax"]


def test_the_program_tells_which_kernels_differ(
    capsys: pytest.CaptureFixture[str],
    sim: Control,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    digests = expected_digests()
    digests["head.hip argmax"][""] = "0" * 32
    del digests["route.hip route"]
    changed = tmp_path / "hashes.json"
    changed.write_text(json.dumps(digests))
    chosen = [case for case in cases() if case.file in ("head.hip", "route.hip")]
    monkeypatch.setattr(selftest, "cases", lambda: chosen)
    monkeypatch.setattr(selftest, "HASHES", changed)
    assert __main__.main([]) == 1
    *wrong, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in wrong] == ["route.hip route", "head.hip argmax"]
    assert f"expected {'0' * 32}, found" in wrong[1]
    assert last == "ds4q simulated device (CPU) (sim): 1 of 3 kernels equal"


def test_writing_gives_what_is_then_expected(
    sim: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = [case for case in cases() if case.file == "head.hip"]
    monkeypatch.setattr(selftest, "cases", lambda: chosen)
    for module in (selftest, __main__):
        monkeypatch.setattr(module, "HASHES", tmp_path / "hashes.json")
    (tmp_path / "hashes.json").write_text("{}")
    assert __main__.main([]) == 1
    assert __main__.main(["--write"]) == 0
    assert __main__.main([]) == 0
    names = ["head.hip argmax", "head.hip argmax_parts"]
    assert list(json.loads((tmp_path / "hashes.json").read_text())) == names


def test_no_device_is_one_line(sim: Control, capsys: pytest.CaptureFixture[str]) -> None:
    sim.set(devices=0)
    assert __main__.main([]) == 1
    assert capsys.readouterr().err.startswith("error: ")
