"""The engine: what it refuses to load or run; pieces, threads and batches never show."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4q.artifact.errors import CodingError, TruncatedError
from ds4q.artifact.fastpath import reference_wanted
from ds4q.artifact.formats import codec_for
from ds4q.artifact.hfq import Reader
from ds4q.artifact.types import (
    BF16,
    F16,
    F32,
    HFP4G32,
    Q8F16,
    ROCMFP6,
    ROCMFP8,
    TIDI32,
    TYPES,
    TensorType,
)
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import (
    BackendTypeError,
    ConfigError,
    ContextError,
    ModelTensorError,
    RunError,
    TokenError,
)
from tests.checks import check_refused, same_bits
from tests.runtime import mixed
from tests.runtime.artifacts import DATA, Packed, config_of, pack, write

RANDOM = DATA / "ds4-random"
PROMPT = np.load(RANDOM / "prompt.npy")
TOKENS = 150  # past the window, several ratio-4 windows over topk, one ratio-128 window
F32Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def whole(random_engine: Engine) -> F32Array:
    """Logits of the first tokens of the prompt in one call."""
    return random_engine.forward(random_engine.new_state(), PROMPT[:TOKENS], "all")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Packed]:
    return pack(RANDOM)


# ---------------------------------------------------------------- pieces, threads, batches


def check_same(found: F32Array, expected: F32Array) -> None:
    """Bit for bit, where the compiled kernels run; numpy's products depend on the batch's shape."""
    assert found.shape == expected.shape
    tolerance = 1e-4 if reference_wanted() else 0.0
    assert np.abs(found - expected).max() <= tolerance


def run_pieces(engine: Engine, cuts: list[int]) -> F32Array:
    state = engine.new_state()
    parts = [
        engine.forward(state, PROMPT[low:high], "all") for low, high in itertools.pairwise(cuts)
    ]
    assert state.position == cuts[-1]
    return np.concatenate(parts)


def test_one_by_one_equals_prefill(random_engine: Engine, whole: F32Array) -> None:
    check_same(run_pieces(random_engine, list(range(TOKENS + 1))), whole)


@settings(max_examples=12)
@given(cuts=st.sets(st.integers(1, TOKENS - 1), max_size=8))
def test_random_pieces_equal_prefill(
    random_engine: Engine, whole: F32Array, cuts: set[int]
) -> None:
    check_same(run_pieces(random_engine, [0, *sorted(cuts), TOKENS]), whole)


@pytest.mark.parametrize(("threads", "batch", "context"), [(1, 256, 150), (3, 7, None), (2, 1, 1)])
def test_threads_batches_and_context_never_show(
    random_path: Path, whole: F32Array, threads: int, batch: int, context: int | None
) -> None:
    engine = Engine.load(random_path, threads=threads, batch_tokens=batch, max_context=context)
    tokens = min(TOKENS, engine.max_context)
    logits = engine.forward(engine.new_state(), PROMPT[:tokens], "all")
    check_same(logits, whole[:tokens])


def test_last_logits_are_the_last_row(random_engine: Engine, whole: F32Array) -> None:
    last = random_engine.forward(random_engine.new_state(), PROMPT[:TOKENS].tolist())
    assert last.shape == (1, random_engine.vocab_size)
    check_same(last, whole[-1:])


def test_sequences_do_not_mix(random_engine: Engine, whole: F32Array) -> None:
    mine, other = random_engine.new_state(), random_engine.new_state()
    rows = []
    for token in PROMPT[:40]:
        rows.append(random_engine.forward(mine, [token]))
        random_engine.forward(other, [511 - token, 5])
    check_same(np.concatenate(rows), whole[:40])


@pytest.mark.parametrize("stop", ["l0.attn_out", "l3.ffn_out", "final_norm"])
def test_interrupted_step_changes_nothing(
    random_engine: Engine, whole: F32Array, stop: str
) -> None:
    def interrupt(name: str, values: Any) -> None:
        if name == stop:
            raise KeyboardInterrupt

    state = random_engine.new_state()
    random_engine.forward(state, PROMPT[:50])
    with pytest.raises(KeyboardInterrupt):
        # Tokens that differ from the prompt's: rows they left behind must not be read.
        random_engine.forward(state, 511 - PROMPT[50:290], trace=interrupt)
    assert state.position == 50
    rest = random_engine.forward(state, PROMPT[50:TOKENS], "all")
    check_same(rest, whole[50:])


def test_interrupted_prompt_keeps_its_whole_batches(random_path: Path, whole: F32Array) -> None:
    seen = []

    def interrupt(name: str, values: Any) -> None:
        seen.append(name)
        if seen.count("l0.attn_in") == 3:
            raise KeyboardInterrupt

    engine = Engine.load(random_path, threads=1, batch_tokens=20)
    state = engine.new_state()
    with pytest.raises(KeyboardInterrupt):
        engine.forward(state, PROMPT[:TOKENS], trace=interrupt)
    assert state.position == 40
    check_same(engine.forward(state, PROMPT[40:TOKENS], "all"), whole[40:])


# ---------------------------------------------------------------- token ids and context


@pytest.mark.parametrize(
    "ids",
    [[], [[1, 2]], [0.5], ["a"], [True], [512], [3, -1], np.array([600]), [2**70]],
    ids=repr,
)
def test_bad_ids_are_refused(random_engine: Engine, ids: Any) -> None:
    state = random_engine.new_state()
    check_refused(TokenError, lambda: random_engine.forward(state, ids))
    assert state.position == 0


def test_context_is_a_limit(random_path: Path) -> None:
    engine = Engine.load(random_path, threads=1, max_context=10)
    state = engine.new_state()
    engine.forward(state, PROMPT[:8])
    check_refused(ContextError, lambda: engine.forward(state, [1, 2, 3]), says=["10", "11"])
    engine.forward(state, [1, 2])
    assert state.position == 10


@pytest.mark.parametrize("context", [0, -1, 1048577])
def test_impossible_context_is_refused(random_path: Path, context: int) -> None:
    check_refused(ContextError, lambda: Engine.load(random_path, threads=1, max_context=context))


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 1, "batch_tokens": 0}])
def test_impossible_options_are_refused(random_path: Path, options: Any) -> None:
    check_refused(RunError, lambda: Engine.load(random_path, **options))


# ---------------------------------------------------------------- loading


def test_progress_ends_with_everything(random_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = Engine.load(
        random_path, threads=1, progress=lambda done, total: seen.append((done, total))
    )
    assert engine.vocab_size == 512
    assert engine.max_context == 1048576
    assert engine.metadata["config"]["model_type"] == "deepseek_v4"
    total = seen[-1][1]
    assert seen[-1] == (total, total)
    assert 0.9 < total / random_path.stat().st_size < 1  # all but the small tensors


Change = Callable[[dict[str, Any], dict[str, Packed]], dict[str, Any]]


def without(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Packed]) -> dict[str, Any]:
        del tensors[name]
        return {}

    return change


def reshaped(name: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Packed]) -> dict[str, Any]:
        kind, shape, payload = tensors[name]
        tensors[name] = (kind, (1, *shape), payload)
        return {}

    return change


def retyped(name: str, kind: TensorType) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, Packed]) -> dict[str, Any]:
        shape = tensors[name][1]
        tensors[name] = (kind, shape, np.zeros(kind.payload_bytes(shape), dtype=np.uint8))
        return {}

    return change


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "head.weight",
        "norm.weight",
        "hc_head_fn",
        "hc_head_base",
        "hc_head_scale",
        "layers.0.attn_norm.weight",
        "layers.0.hc_ffn_scale",
        "layers.0.attn.attn_sink",
        "layers.0.ffn.gate.tid2eid",
        "layers.1.attn.indexer.wq_b.weight",
        "layers.1.attn.indexer.compressor.ape",
        "layers.2.attn.compressor.norm.weight",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.experts.15.w2.weight",
        "layers.5.ffn.shared_experts.w3.weight",
    ],
)
@pytest.mark.parametrize("change", [without, reshaped])
def test_missing_or_misshapen_tensor_is_refused(
    tmp_path: Path, tensors: dict[str, Packed], name: str, change: Callable[[str], Change]
) -> None:
    check_load(tmp_path, tensors, change(name), ModelTensorError, tensor=name)


@pytest.mark.parametrize(
    ("change", "kind", "tensor", "says"),
    [
        (
            retyped("layers.3.ffn.experts.5.w3.weight", F32),
            ModelTensorError,
            "layers.3.ffn.experts.5.w3.weight",
            ["HFP4G32", "F32"],
        ),
        (
            retyped("layers.1.ffn.gate.tid2eid", F32),
            ModelTensorError,
            "layers.1.ffn.gate.tid2eid",
            ["TidI32"],
        ),
        (lambda c, t: c.update(n_routed_experts=4), ModelTensorError, None, ["layers.0"]),
        (lambda c, t: c.update(model_type="qwen3"), ConfigError, None, ["model_type", "qwen3"]),
        (lambda c, t: {"config": "none"}, ConfigError, None, ["no config"]),
    ],
)
def test_wrong_artifact_is_refused(
    tmp_path: Path,
    tensors: dict[str, Packed],
    change: Any,
    kind: Any,
    tensor: str | None,
    says: list[str],
) -> None:
    check_load(tmp_path, tensors, change, kind, tensor=tensor, says=says)


def check_load(
    folder: Path,
    tensors: dict[str, Packed],
    change: Any,
    kind: Any,
    *,
    tensor: str | None = None,
    says: list[str] | None = None,
) -> None:
    config, mine = config_of(RANDOM), dict(tensors)
    extra = change(config, mine) or {}
    path = write(folder / "m.hfq", extra.pop("config", config), mine, **extra)
    error = check_refused(
        kind, lambda: Engine.load(path, threads=1), path=path, tensor=tensor, says=says or []
    )
    assert tensor is None or error.tensor == tensor


def test_another_architecture_is_refused(tmp_path: Path, random_path: Path) -> None:
    raw = bytearray(random_path.read_bytes())
    raw[8] = 5
    path = tmp_path / "m.hfq"
    path.write_bytes(raw)
    check_refused(
        RunError, lambda: Engine.load(path, threads=1), path=path, says=["arch id 9", "found 5"]
    )


def test_truncated_file_is_refused(tmp_path: Path, random_path: Path) -> None:
    path = tmp_path / "m.hfq"
    path.write_bytes(random_path.read_bytes()[:-1])
    check_refused(TruncatedError, lambda: Engine.load(path, threads=1), path=path)


@pytest.mark.parametrize("partial", [{"tensors": ["a"]}, ["a"], True])
def test_part_of_a_model_is_refused(
    tmp_path: Path, tensors: dict[str, Packed], monkeypatch: pytest.MonkeyPatch, partial: Any
) -> None:
    # Sealing the metadata is the writer's business; what the engine makes of it is the subject.
    monkeypatch.setattr(Reader, "_check_front_digests", lambda self, parsed: None)
    path = write(tmp_path / "m.hfq", config_of(RANDOM), tensors, ds4q={"partial": partial})
    check_refused(RunError, lambda: Engine.load(path, threads=1), path=path, says=["part"])
    whole = write(tmp_path / "whole.hfq", config_of(RANDOM), tensors)
    assert Engine.load(whole, threads=1).vocab_size == 512


def as_floats(packed: Packed) -> Packed:
    """The values of ``packed`` as F32; experts and ids stay as they are."""
    kind, shape, payload = packed
    if kind in (HFP4G32, TIDI32):
        return packed
    values = codec_for(kind.id).decode(payload, shape)
    return F32, shape, codec_for(F32.id).encode(values)


@pytest.mark.parametrize("dense", [F16, Q8F16])
def test_dense_types_of_other_recipes_run(
    tmp_path: Path, whole: F32Array, dense: TensorType
) -> None:
    """The same rounded weights give the same logits, whatever type carries them."""
    rounded = pack(RANDOM, dense)
    plain = {name: as_floats(packed) for name, packed in rounded.items()}
    logits = []
    for name, tensors in (("rounded", rounded), ("plain", plain)):
        path = write(tmp_path / f"{name}.hfq", config_of(RANDOM), tensors)
        engine = Engine.load(path, threads=2)
        logits.append(engine.forward(engine.new_state(), PROMPT[:40], "all"))
    assert np.abs(logits[0] - logits[1]).max() < 2e-4
    assert np.abs(logits[0] - whole[:40]).max() > 1e-3  # the rounding is really in there


@pytest.mark.parametrize(("kind", "coding"), [(ROCMFP8, None), (ROCMFP6, "neg32")])
def test_dense_matrices_of_rocmfpx_types_run(
    tmp_path: Path,
    tensors: dict[str, Packed],
    whole: F32Array,
    kind: TensorType,
    coding: str | None,
) -> None:
    made, plain, codec = dict(tensors), dict(tensors), codec_for(kind.id, coding)
    for name, (source, shape, payload) in tensors.items():
        if name.endswith(".weight") and len(shape) == 2 and source in (BF16, F32):
            made[name] = kind, shape, codec.encode(codec_for(source.id).decode(payload, shape))
            values = codec.decode(made[name][2], shape)
            plain[name] = F32, shape, codec_for(F32.id).encode(values)
    assert made["embed.weight"][0] is made["layers.0.attn.wo_a.weight"][0] is kind
    metadata = {"spec": 1, "calibration": "absmax"} | ({"fp6_code32": coding} if coding else {})
    path = write(tmp_path / "m.hfq", config_of(RANDOM), made, rocmfpx=metadata)
    logits = []
    for file in (path, write(tmp_path / "plain.hfq", config_of(RANDOM), plain)):
        engine = Engine.load(file, threads=2)
        logits.append(engine.forward(engine.new_state(), PROMPT[:40], "all"))
    assert np.abs(logits[0] - logits[1]).max() < 2e-4
    assert np.abs(logits[0] - whole[:40]).max() > 1e-3


def test_expert_type_without_a_kernel_is_refused(
    tmp_path: Path, tensors: dict[str, Packed]
) -> None:
    name = "layers.4.ffn.experts.0.w1.weight"
    check_load(tmp_path, tensors, retyped(name, TYPES[24]), BackendTypeError, tensor=name)


@pytest.mark.parametrize(("variant", "code32"), [("affine", "neg32"), ("sign", "zero")])
def test_experts_of_all_types_run_in_one_layer(
    tmp_path: Path, tensors: dict[str, Packed], whole: F32Array, variant: str, code32: str
) -> None:
    """As their decoded values do; and neither threads nor pieces show."""
    made, plain, metadata = mixed.encode(tensors, variant, code32)
    path = write(tmp_path / "mixed.hfq", config_of(RANDOM), made, rocmfpx=metadata)
    other = write(tmp_path / "plain.hfq", config_of(RANDOM), plain)
    engine = Engine.load(path, threads=2)
    logits = engine.forward(engine.new_state(), PROMPT[:40], "all")
    expected = Engine.load(other, threads=2)
    same_values = expected.forward(expected.new_state(), PROMPT[:40], "all")
    assert np.abs(logits - same_values).max() < 2e-4
    assert np.abs(logits - whole[:40]).max() > 1e-3  # the rounding is really in there
    if not reference_wanted():
        same_bits(run_pieces(engine, list(range(41))), logits)
        alone = Engine.load(path, threads=1)
        same_bits(alone.forward(alone.new_state(), PROMPT[:40], "all"), logits)


@pytest.fixture(scope="module")
def remade(tensors: dict[str, Packed]) -> tuple[dict[str, Packed], dict[str, Any]]:
    made, _, metadata = mixed.encode(tensors, "dual", "zero")
    return made, metadata


def lost_table(name: str) -> Callable[[dict[str, Packed], dict[str, Any]], None]:
    def change(made: dict[str, Packed], metadata: dict[str, Any]) -> None:
        del made[name]

    return change


def other_books(made: dict[str, Packed], metadata: dict[str, Any]) -> None:
    name = "layers.2.ffn.experts.w2.mix_table"
    kind, shape, payload = made[name]
    other = payload.copy()
    other[-1] ^= 1
    made[name] = (kind, shape, other)


def lost_variant(made: dict[str, Packed], metadata: dict[str, Any]) -> None:
    del metadata["variant_107"]


def lost_index(made: dict[str, Packed], metadata: dict[str, Any]) -> None:
    del metadata["mix_tables"], metadata["mix_index_sha256"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lost_table("layers.3.ffn.experts.w1.mix_table"), "mix-table-missing"),
        (other_books, "mix-table-digest"),
        (lost_variant, "variant-missing"),
        (lost_index, "mix-index"),
    ],
)
def test_experts_without_their_tables_are_refused(
    tmp_path: Path, remade: tuple[dict[str, Packed], dict[str, Any]], change: Any, says: str
) -> None:
    """Before anything else is read; no fixed levels take the place of missing ones."""
    made, metadata = dict(remade[0]), dict(remade[1])
    change(made, metadata)
    path = write(tmp_path / "m.hfq", config_of(RANDOM), made, rocmfpx=metadata)
    check_refused(CodingError, lambda: Engine.load(path, threads=1), path=path, says=[says])
