"""Tensors on their way to the device: what is refused before anything is read, and what arrives."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4q.artifact.errors import PayloadSizeError, PayloadValueError
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import BF16, F32, HFP4G32, ROCMFP2_MIX, TIDI32
from ds4q.hipkern.driver import Device
from ds4q.hipkern.errors import DeviceMemoryError
from ds4q.hipkern.sim.control import Control
from ds4q.runtime.backend.hip import HipBackend
from ds4q.runtime.config import checked_config
from ds4q.runtime.device import weights as weights_module
from ds4q.runtime.device.engine import HipEngine
from ds4q.runtime.device.layout import Layout
from ds4q.runtime.device.model import plan_weights
from ds4q.runtime.device.weights import DeviceSource, Matrix
from ds4q.runtime.errors import BackendTypeError, DeviceModelError, ModelTensorError, RunError
from tests.checks import check_refused
from tests.runtime.artifacts import Packed, write
from tests.runtime.device.micro import CONFIG, tensors, write_micro

EXPERT = "layers.1.ffn.experts.2"
SHARED = "layers.1.ffn.shared_experts"


def downloaded(backend: HipBackend, matrix: Matrix) -> bytes:
    raw = np.empty(matrix.place.nbytes, np.uint8)
    backend.stream.download(raw, matrix.place.address)
    return raw.tobytes()


@pytest.mark.parametrize("piece_bytes", [8 << 20, 1500])
def test_bytes_arrive_packed_and_in_the_layout_of_experts(
    sim: Control, micro_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """One buffer for gate and up, expert by expert, one for down, both in order; checked on the
    way, whole or in pieces that cut matrices and join them."""
    monkeypatch.setattr(weights_module, "PIECE_BYTES", piece_bytes)
    expected = tensors()
    seen: list[tuple[int, int]] = []
    with HipBackend.open() as backend, Reader(micro_path) as reader:
        source = DeviceSource(reader)
        model = plan_weights(checked_config(reader), source, micro_path)
        for layout in source.layouts:
            layout.allocate(backend.device)
        done = source.fill(backend.device, backend.copies, lambda *both: seen.append(both))
        backend.copies.synchronize()
        done.free()
        for layer, own in enumerate(model.layers):
            flat = [part for gate, up, _ in own.experts for part in (gate, up)]
            for parts in (flat, [down for _, _, down in own.experts]):
                addresses = [part.place.address for part in parts]
                gaps = {b - a - parts[0].place.nbytes for a, b in pairwise(addresses)}
                assert gaps == {0}
                assert all(address % 16 == 0 for address in addresses)
            for number, expert in enumerate(own.experts):
                for word, part in zip(("w1", "w3", "w2"), expert, strict=True):
                    name = f"layers.{layer}.ffn.experts.{number}.{word}.weight"
                    assert downloaded(backend, part) == expected[name][2].tobytes()
            joined = b"".join(downloaded(backend, part) for part in own.out_low)
            assert joined == expected[f"layers.{layer}.attn.wo_a.weight"][2].tobytes()
            norm = np.empty(CONFIG["hidden_size"], np.float32)
            backend.stream.download(norm, own.around_experts.norm.address)
            kind, shape, payload = expected[f"layers.{layer}.ffn_norm.weight"]
            assert np.array_equal(norm, codec_for(kind.id).decode(payload, shape))
    assert seen[-1][0] == seen[-1][1]
    assert len(seen) == (5 if piece_bytes > 1500 else len(seen)) > 4


BAD: list[tuple[dict[str, Packed | None], type[RunError], str, str]] = [
    ({f"{EXPERT}.w2.weight": None}, ModelTensorError, f"{EXPERT}.w2.weight", "missing"),
    ({"norm.weight": None}, ModelTensorError, "norm.weight", "missing"),
    (
        {"layers.1.ffn.gate.bias": (F32, (5,), np.zeros(20, np.uint8))},
        ModelTensorError,
        "layers.1.ffn.gate.bias",
        "[4]",
    ),
    (
        {"layers.0.ffn.gate.tid2eid": (F32, (96, 2), np.zeros(768, np.uint8))},
        ModelTensorError,
        "layers.0.ffn.gate.tid2eid",
        "TidI32",
    ),
    (
        {"head.weight": (TIDI32, (96, 64), np.zeros(96 * 64 * 4, np.uint8))},
        BackendTypeError,
        "head.weight",
        "TidI32",
    ),
    (
        {f"{EXPERT}.w3.weight": (BF16, (32, 64), np.zeros(32 * 64 * 2, np.uint8))},
        ModelTensorError,
        f"{EXPERT}.w3.weight",
        "differ in type",
    ),
    (
        {f"{SHARED}.w3.weight": (F32, (32, 64), np.zeros(32 * 64 * 4, np.uint8))},
        ModelTensorError,
        f"{SHARED}.w3.weight",
        "differ in type",
    ),
]


@pytest.mark.parametrize(
    ("changed", "kind", "tensor", "says"), BAD, ids=lambda value: str(value)[:40]
)
def test_what_the_index_tells_is_refused_before_anything_is_read(
    changed: dict[str, Packed | None],
    kind: type[RunError],
    tensor: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, Any] = tensors() | changed
    path = write(tmp_path / "m.hfq", CONFIG, {k: v for k, v in made.items() if v is not None})
    with Reader(path) as reader:
        monkeypatch.setattr(Reader, "pread_into", refuse_to_read)
        plan: Callable[[], object] = lambda: plan_weights(  # noqa: E731
            checked_config(reader), DeviceSource(reader), path
        )
        check_refused(kind, plan, path=path, tensor=tensor, says=[says])


def refuse_to_read(*_: object) -> None:
    raise AssertionError("something was read")


def test_memory_is_asked_for_before_anything_is_read(
    sim: Control, micro_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim.set(memory_bytes=1 << 20)
    monkeypatch.setattr("ds4q.runtime.device.room.available_bytes", lambda: 0)
    with Device.open() as device:
        free = device.free_bytes()  # other tests of this process may hold some
    monkeypatch.setattr("ds4q.runtime.device.weights.read_jobs", refuse_to_read)
    monkeypatch.setattr(Layout, "allocate", refuse_to_read)
    error = check_refused(
        DeviceMemoryError,
        lambda: HipEngine.load(micro_path, max_context=4096),
        says=["weights and caches", str(micro_path), "expected ", f"{free:,} bytes free"],
    )
    needed = int(str(error.expected).split()[0].replace(",", ""))
    sim.set(memory_bytes=needed + (2 << 20) - free)
    monkeypatch.undo()
    monkeypatch.setenv("DS4Q_HIP", "sim")
    with HipEngine.load(micro_path, max_context=4096) as engine:
        engine.new_state().close()
    with HipEngine.load(micro_path, max_context=8) as engine:
        small = engine.new_state().nbytes
        assert engine.backend.device.free_bytes() > small


def test_a_bad_byte_is_refused_and_nothing_is_left(sim: Control, tmp_path: Path) -> None:
    kind, shape, payload = tensors()[f"{EXPERT}.w1.weight"]
    payload = payload.copy()
    payload[HFP4G32.row_bytes(64) * 3 + 16] = 255  # a NaN scale in row 3
    path = write_micro(tmp_path / "m.hfq", **{f"{EXPERT}.w1.weight": (kind, shape, payload)})
    check_refused(
        PayloadValueError,
        lambda: HipEngine.load(path),
        path=path,
        tensor=f"{EXPERT}.w1.weight",
        says=["row 3"],
    )


def test_an_interrupt_while_loading_frees_everything(sim: Control, micro_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = sim.live()
    with pytest.raises(KeyboardInterrupt):
        HipEngine.load(micro_path, progress=interrupt)
    assert sim.live() == before


def test_rows_that_kernels_cannot_multiply_are_refused(tmp_path: Path) -> None:
    """K is a multiple of 32, of 128 for types 106 and 107."""
    values = np.zeros((4, 48), np.float32)
    short: dict[str, Packed] = {"a": (BF16, values.shape, codec_for(BF16.id).encode(values))}
    path = write(tmp_path / "a.hfq", CONFIG, short)
    with Reader(path) as reader:
        source = DeviceSource(reader)
        says = ["multiple of 32", "found 48"]
        check_refused(
            DeviceModelError, lambda: source.matrix("a", 4, 48), path=path, tensor="a", says=says
        )
    assert ROCMFP2_MIX.row_multiple == 128
    check_refused(PayloadSizeError, lambda: ROCMFP2_MIX.row_bytes(96), says=["multiple of 128"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hc_mult", 6),
        ("hidden_size", 8224),
        ("hidden_size", 72),
        ("head_dim", 516),
        ("num_experts_per_tok", 32),
        ("index_head_dim", 132),
        ("index_n_heads", 65),
        ("n_routed_experts", 1025),
    ],
)
def test_models_larger_than_the_kernels_are_refused(
    key: str, value: int, micro_path: Path, tmp_path: Path
) -> None:
    sizes = CONFIG | {"n_routed_experts": 64, key: value}
    path = write(tmp_path / "m.hfq", sizes, tensors())
    with Reader(path) as reader:
        config = checked_config(reader)
        plan: Callable[[], object] = lambda: plan_weights(  # noqa: E731
            config, DeviceSource(reader), path
        )
        check_refused(DeviceModelError, plan, path=path, says=[key, str(value)])


def test_a_layout_gives_addresses_once_there_is_memory(sim: Control) -> None:
    layout = Layout()
    place = layout.floats(3, 5)
    check_refused(RunError, lambda: place.address, says=["bug"])
    with HipBackend.open() as backend:
        layout.allocate(backend.device)
        assert place.nbytes == 60
        assert place.address == layout.address
        check_refused(RunError, lambda: layout.reserve(4), says=["bug"])
        layout.free()
        layout.free()
