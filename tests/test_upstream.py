"""hipfire's own kind of artifact, end to end: inspected, verified, run and paged; others refused.

ds4-tiny in the types of its published trunk, and the same weights as float32 beside it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.artifact.errors import PayloadValueError
from ds4q.artifact.formats import codec_for
from ds4q.artifact.tables import expert_name
from ds4q.artifact.types import BF16, BY_NAME, HFP4G32, MQ2_LLOYD, TYPES
from ds4q.cli import main
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.engine import Engine
from ds4q.runtime.experts.options import CacheOptions
from tests.artifact import mq2
from tests.checks import same_bits
from tests.runtime import upstream
from tests.runtime.artifacts import Packed

F32Array = npt.NDArray[np.float32]
Tensors = dict[str, Packed]
PROMPT = [256, 258, 104, 105, 259, 261]
ASK = ["--prompt-ids", ",".join(map(str, PROMPT)), "--temp", "0", "--max-tokens", "8"]
DEVICE_TOLERANCE = 1e-3  # logits reach 25; sums run in another order
LAYERS = range(2)  # run where many types are mixed: one routes by hash, one has an indexer
THRASH = CacheOptions(slots=4)  # what one token needs
FIRST = expert_name(0, 0, "w1")


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return upstream.packed()


@pytest.fixture(scope="module")
def trunk(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upstream.write_trunk(tmp_path_factory.mktemp("trunk") / "tiny.mq2lloyd", tensors)


@pytest.fixture(scope="module")
def logits(trunk: Path) -> F32Array:
    with Engine.load(trunk, threads=1) as engine:
        return walk(engine)


def walk(engine: Any) -> F32Array:
    """Logits of a prompt, and of three steps fed by what is likeliest."""
    state = engine.new_state()
    found = [engine.forward(state, PROMPT, "all")]
    for _ in range(3):
        found.append(engine.forward(state, [int(found[-1][-1].argmax())]))
    return np.concatenate(found)


def ds4q(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def refused(*words: object) -> str:
    """The line of an error with status 1, behind any warnings."""
    result = ds4q(*words)
    assert result.exit_code == 1, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("ds4q: error: ")
    return line


# ------------------------------------------------------------------ on the CPU


def test_logits_are_those_of_the_same_weights_as_float32(
    tensors: Tensors, logits: F32Array, tmp_path: Path
) -> None:
    twin = upstream.write_trunk(tmp_path / "twin.hfq", upstream.unpacked(tensors))
    with Engine.load(twin, threads=1) as engine:
        wanted = walk(engine)
    assert np.abs(logits - wanted).max() < 1e-4
    other = dict(tensors)
    for number in range(16):
        name = expert_name(3, number, "w2")
        kind, shape, payload = tensors[name]
        values = codec_for(kind.id).decode(payload, shape)[:, ::-1]
        other[name] = kind, shape, mq2.encode(np.ascontiguousarray(values), upstream.LLOYD_STEPS)
    with Engine.load(upstream.write_trunk(tmp_path / "other.hfq", other), threads=1) as engine:
        assert np.abs(walk(engine) - wanted).max() > 1e-2, "one layer's downs are seen"


def test_both_paths_of_the_cpu_agree(
    trunk: Path, logits: F32Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4Q_REFERENCE", "1")
    with Engine.load(trunk, threads=1) as engine:
        assert np.abs(engine.forward(engine.new_state(), PROMPT, "all") - logits[:6]).max() < 1e-3


def test_paging_changes_no_bit(trunk: Path, logits: F32Array) -> None:
    with Engine.load(trunk, threads=2, cache=THRASH) as engine:
        same_bits(walk(engine), logits)
        counts = engine.cache_counters()
    assert counts is not None
    assert counts["decode"]["evictions"] > 0
    assert counts["reads"]["reads_checked"] == 0  # there is no receipt


def test_the_command_line_inspects_verifies_runs_and_pages(trunk: Path) -> None:
    shown = json.loads(ds4q("inspect", trunk, "--json").stdout)
    assert shown["types"]["MQ2G256Lloyd"] == {"tensors": 192, "bytes": 192 * 256 * 72}
    assert shown["types"].keys() == {"F16", "MQ2G256Lloyd", "Q8F16", "TidI32"}
    assert shown["metadata"]["hipfire_quant_recipe"] == "mq2lloyd"
    assert shown["ok"] or shown["problems"] == []
    report = ds4q("verify", trunk, "--json")
    assert report.exit_code == 0, report.output
    checks = {check["name"]: check for check in json.loads(report.stdout)["checks"]}
    assert {"structure", "inventory", "payload"} <= checks.keys()
    assert "no receipt: digests not checked" in report.stdout
    whole = json.loads(ds4q("run", trunk, *ASK, "--ignore-eos", "--json").stdout)
    budget = 4 * 4 * 3 * 256 * 72 + 4 * 4096  # four slots in each of four layers, and alignment
    paged = ds4q("run", trunk, *ASK, "--ignore-eos", "--json", "--expert-cache", budget)
    assert paged.exit_code == 0, paged.output
    assert json.loads(paged.stdout)["ids"] == whole["ids"]
    assert json.loads(paged.stdout)["cache"]["slots"] == 4


def test_bytes_behind_the_last_payload_are_told(trunk: Path, tmp_path: Path) -> None:
    """The format allows them, and a file of upstream's says nowhere where it ends."""
    longer = tmp_path / "longer.mq2lloyd"
    longer.write_bytes(trunk.read_bytes() + b"junk" * 250)
    report = ds4q("verify", longer)
    assert report.exit_code == 0
    assert "structure: 1000 bytes follow the last payload" in report.stdout
    assert "follow the last payload" not in ds4q("verify", trunk).stdout


# ------------------------------------------------------------------ on a device


def test_a_device_agrees_with_the_cpu_and_with_itself_paged(
    sim: Control, trunk: Path, logits: F32Array
) -> None:
    with HipEngine.load(trunk, max_context=32, batch_tokens=8) as engine:
        found = walk(engine)
    assert np.abs(found - logits).max() < DEVICE_TOLERANCE
    assert (found[-4:].argmax(axis=1) == logits[-4:].argmax(axis=1)).all()
    with HipEngine.load(trunk, max_context=32, batch_tokens=8, cache=THRASH) as engine:
        same_bits(walk(engine), found)
        counts = engine.cache_counters()
    assert counts is not None
    assert counts["decode"]["evictions"] > 0


def test_rotated_matrices_stand_beside_others_anywhere(
    sim: Control, tensors: Tensors, tmp_path: Path
) -> None:
    """Dense matrices in the type, experts of two types in a layer, a gate's and its down's too."""
    mixed, source = dict(tensors), upstream.pack(upstream.TINY)
    for name, (_, shape, payload) in source.items():
        kind = source[name][0]
        expert = re.search(r"experts\.(\d+)\.w(\d)", name)
        if expert and int(expert[1]) % 2 == int(expert[2] == "2"):
            mixed[name] = source[name]  # HFP4G32
        elif "shared_experts" in name:
            mixed[name] = source[name]
        elif kind is BF16 and len(shape) == 2 and shape[1] % 256 == 0:
            values = codec_for(kind.id).decode(payload, shape)
            mixed[name] = MQ2_LLOYD, shape, mq2.encode(values)
    types = {name: packed[0] for name, packed in mixed.items()}
    dense = {re.sub(r"^layers\.\d+\.", "", n) for n, kind in types.items() if kind is MQ2_LLOYD}
    assert {"attn.wq_a.weight", "attn.wo_a.weight", "attn.wo_b.weight"} <= dense
    assert {"embed.weight", "head.weight", "ffn.gate.weight"} <= dense
    assert types[expert_name(0, 0, "w1")] is HFP4G32
    assert types[expert_name(0, 0, "w2")] is types[expert_name(0, 1, "w1")] is MQ2_LLOYD
    path = upstream.write_trunk(tmp_path / "mixed.hfq", mixed)
    with Engine.load(path, threads=1, layers=LAYERS) as cpu:
        wanted = walk(cpu)
    with HipEngine.load(path, max_context=32, batch_tokens=8, layers=LAYERS) as engine:
        assert np.abs(walk(engine) - wanted).max() < DEVICE_TOLERANCE
    twin = upstream.write_trunk(tmp_path / "twin.hfq", upstream.unpacked(mixed))
    with Engine.load(twin, threads=1, layers=LAYERS) as cpu:
        assert np.abs(walk(cpu) - wanted).max() < 1e-3


# ------------------------------------------------------------------ what is refused


def damaged(tensors: Tensors, name: str, at: int, *values: int) -> Tensors:
    """``tensors`` with other bytes from byte ``at`` of one of them on."""
    kind, shape, payload = tensors[name]
    payload = payload.copy()
    payload[at : at + len(values)] = values
    return tensors | {name: (kind, shape, payload)}


def check_everywhere(path: Path, tensor: str, *says: str) -> None:
    """verify fails with the tensor's name; running and paging refuse with it."""
    report = api.verify(path)
    (failure,) = [f for check in report.checks for f in check.failures]
    assert failure.tensor == tensor
    for words in says:
        assert words in failure.line()
    for cache in (None, THRASH):
        with pytest.raises(PayloadValueError) as caught:
            use_every_expert(path, cache)
        assert caught.value.tensor == tensor
        for words in says:
            assert words in str(caught.value)


def use_every_expert(path: Path, cache: CacheOptions | None) -> None:
    with Engine.load(path, threads=1, cache=cache) as engine:
        engine.forward(engine.new_state(), range(100, 200))


@pytest.mark.parametrize("levels", [(0x7E00, 0, 0, 0), (0x3C00, 0, 0, 0)], ids=["nan", "order"])
def test_levels_that_are_no_levels(
    tensors: Tensors, levels: tuple[int, ...], tmp_path: Path
) -> None:
    raw = np.array(levels, "<u2").view(np.uint8)
    path = upstream.write_trunk(tmp_path / "x.hfq", damaged(tensors, FIRST, 72 * 9, *raw))
    check_everywhere(path, FIRST, "bad levels of MQ2G256Lloyd in group 9")


def test_a_device_pages_no_levels_that_are_none(
    sim: Control, tensors: Tensors, tmp_path: Path
) -> None:
    kind, shape, payload = tensors["layers.0.ffn.gate.tid2eid"]
    chosen = codec_for(kind.id).decode(payload, shape)
    token = int(np.flatnonzero((chosen == 0).any(axis=1))[0])  # a token that expert 0 serves
    raw = np.array([0x7C00], "<u2").view(np.uint8)
    path = upstream.write_trunk(tmp_path / "x.hfq", damaged(tensors, FIRST, 6, *raw))
    with (
        HipEngine.load(path, max_context=32, batch_tokens=8, cache=THRASH) as engine,
        pytest.raises(PayloadValueError, match="bad levels of MQ2G256Lloyd in group 0"),
    ):
        engine.forward(engine.new_state(), [token])


HEADERS = {
    "rotated": (6, 0x01),
    "second scale used": (6, 0x02),
    "offline FWHT": (6, 0x05),
    "reserved flag": (6, 0x80),
    "row_scale_b": (2, 0x01),
    "row_scale_b, high byte": (3, 0x3C),
    "first reserved byte": (7, 0x01),
    "last reserved byte": (15, 0x01),
    "block count": (4, 0x07),
}


@pytest.mark.parametrize("what", HEADERS)
def test_rows_of_hfp4g32_with_more_in_their_header(what: str, tmp_path: Path) -> None:
    tensors = upstream.pack(upstream.TINY)
    at, value = HEADERS[what]
    path = upstream.write_trunk(tmp_path / "x.hfq", damaged(tensors, FIRST, 152 * 7 + at, value))
    check_everywhere(path, FIRST, "bad HFP4G32 row header in row 7")


def test_a_row_scale_is_honoured(sim: Control, tmp_path: Path) -> None:
    """Half the row scale under one more in each exponent: the same weights, the same bits."""
    tensors = upstream.pack(upstream.TINY)
    scaled = dict(tensors)
    for name, (kind, shape, payload) in tensors.items():
        if kind is HFP4G32:
            rows = payload.copy().reshape(shape[0], -1)
            rows[:, :2] = np.array([0.5], "<f2").view(np.uint8)
            rows[:, 16::17] += 1
            scaled[name] = kind, shape, rows.reshape(-1)
    plain = upstream.write_trunk(tmp_path / "plain.hfq", tensors)
    path = upstream.write_trunk(tmp_path / "scaled.hfq", scaled)
    assert api.verify(path).ok
    for cache in (None, THRASH):
        with Engine.load(plain, threads=1) as one, Engine.load(path, threads=1, cache=cache) as two:
            same_bits(walk(two), walk(one))
    with HipEngine.load(plain, max_context=32, batch_tokens=8) as device:
        wanted = device.forward(device.new_state(), PROMPT)
    with HipEngine.load(path, max_context=32, batch_tokens=8) as device:
        same_bits(device.forward(device.new_state(), PROMPT), wanted)


OTHERS = ("MQ4G256", "MQ3G256Lloyd", "MQ4G256Lloyd", "MFP4G32", "MFP4G32E8SOA", "MQ2G256LloydU")


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_are_listed_and_refused_by_name(
    tensors: Tensors, name: str, tmp_path: Path
) -> None:
    kind = BY_NAME[name]
    shape = tensors[FIRST][1]
    payload = np.zeros(kind.payload_bytes(shape), np.uint8)
    path = upstream.write_trunk(tmp_path / "x.hfq", tensors | {FIRST: (kind, shape, payload)})
    shown = json.loads(ds4q("inspect", path, "--json").stdout)
    assert shown["types"][name] == {"tensors": 1, "bytes": payload.nbytes}
    (failure,) = api.verify(path).checks[0].failures
    assert (failure.tensor, failure.message) == (
        FIRST,
        f"qtype-unknown: ds4q has no codec for tensor type {kind.id} ({name})",
    )
    for options in ([], ["--expert-cache", "1GiB"]):
        line = refused("run", path, *ASK, *options)
        assert FIRST in line
        assert name in line


@pytest.mark.parametrize("name", ["MQ2G256Lloyd", *OTHERS])
def test_lengths_of_types_without_a_codec_are_checked(
    tensors: Tensors, name: str, tmp_path: Path
) -> None:
    kind, shape = BY_NAME[name], tensors[FIRST][1]
    nbytes = kind.payload_bytes(shape)
    path = upstream.write_trunk(
        tmp_path / "x.hfq", tensors | {FIRST: (kind, shape, np.zeros(nbytes, np.uint8))}
    )
    data = bytearray(path.read_bytes())
    field = data.index(nbytes.to_bytes(8, "little"), data.index(FIRST.encode()))
    data[field : field + 8] = (nbytes - 1).to_bytes(8, "little")
    path.write_bytes(data)
    found = [f for f in api.verify(path).checks[0].failures if f.tensor == FIRST]
    assert found[-1].message == "payload length does not fit type and shape"
    assert (found[-1].expected, found[-1].found) == (f"{nbytes} bytes", f"{nbytes - 1} bytes")
    assert len(found) == 1 + (not TYPES[kind.id].codec)
    problems = json.loads(ds4q("inspect", path, "--json").stdout)["problems"]
    assert any(FIRST in line and "payload length" in line for line in problems)
    if TYPES[kind.id].codec:
        assert FIRST in refused("run", path, *ASK)


def test_the_type_is_no_choice_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('default = "MQ2G256Lloyd"\n')
    out = tmp_path / "x.hfq"
    line = refused("quantize", upstream.TINY, "-o", out, "--recipe", tmp_path / "x.toml")
    assert "MQ2G256Lloyd" in line
    assert not out.exists()


def test_a_checkpoint_cannot_vouch_for_a_fit_that_is_not_made_again(trunk: Path) -> None:
    report = api.verify(trunk, source=upstream.TINY)
    (check,) = [check for check in report.checks if check.name == "source"]
    messages = {(failure.message, failure.found) for failure in check.failures if failure.tensor}
    assert messages == {("type cannot come from this source", "MQ2G256Lloyd")}
    assert not report.ok
