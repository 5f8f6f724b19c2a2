"""The pairing of compiled kernels with their references, and that no pair goes untested."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from ds4q.artifact import fastpath, formats
from ds4q.artifact.fastpath import PAIRS, FastPath, jit, reference_wanted, steady
from tests.checks import Array, check_parity, same_bits


def of_this_room() -> dict[str, FastPath]:
    """``module.name`` -> pair, for every module of ``formats/``, where the pair is made."""
    out = {}
    for info in pkgutil.iter_modules(formats.__path__):
        module = importlib.import_module(f"{formats.__name__}.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, FastPath) and value.reference.__module__ == module.__name__:
                out[f"{info.name}.{name}"] = value
    return out


def test_every_pair_of_this_room_has_a_parity_test() -> None:
    pairs = of_this_room()
    registered = [p for p in PAIRS if p.reference.__module__.startswith("ds4q.artifact.")]
    assert len(pairs) >= 5
    assert set(pairs.values()) == set(registered), "a pair outside formats/ needs a place here"
    for name in pairs:
        stem, _, pair = name.partition(".")
        path = Path(__file__).parent / "formats" / f"test_{stem.lstrip('_')}.py"
        text = re.sub(r"\(\s+", "(", path.read_text(encoding="utf-8"))
        call = rf"check_parity\(({re.escape(stem)}\.)?{pair}, "
        assert re.search(call, text), f"{path.name} runs no parity check of {name}"


def test_both_sides_have_one_signature() -> None:
    for pair in of_this_room().values():
        one, two = (inspect.signature(side) for side in (pair.reference, pair.fast))
        assert list(one.parameters) == list(two.parameters), pair.__name__


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> FastPath[[int], str]:
    monkeypatch.setattr(fastpath, "PAIRS", [])

    def slow(x: int, y: int = 0) -> str:
        """What it does."""
        return f"reference {x} {y}"

    return FastPath(slow, lambda x, y=0: f"fast {x} {y}")


@pytest.mark.parametrize(
    ("value", "side"),
    [(None, "fast"), ("1", "reference"), ("0", "fast"), ("", "fast"), ("true", "fast")],
)
def test_the_switch_is_read_at_each_call(
    value: str | None, side: str, pair: FastPath[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        if value is None:
            monkeypatch.delenv("DS4Q_REFERENCE", raising=False)
        else:
            monkeypatch.setenv("DS4Q_REFERENCE", value)
        assert pair(1, y=2) == f"{side} 1 2"
        assert reference_wanted() is (side == "reference")
        monkeypatch.setenv("DS4Q_REFERENCE", "1")
        assert pair(3) == "reference 3 0"


def test_a_step_holds_what_was_read(
    pair: FastPath[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own thread, for its own time, and through an error."""
    monkeypatch.setenv("DS4Q_REFERENCE", "1")
    with steady():
        monkeypatch.setenv("DS4Q_REFERENCE", "0")
        assert pair(1) == "reference 1 0"
        with pytest.raises(ZeroDivisionError), steady():
            raise ZeroDivisionError
        assert pair(1) == "reference 1 0"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(pair, 1).result() == "fast 1 0"
    assert pair(1) == "fast 1 0"


def test_a_pair_looks_like_its_reference(pair: FastPath[..., str]) -> None:
    assert (pair.__name__, pair.__doc__) == ("slow", "What it does.")
    assert [pair] == fastpath.PAIRS


def test_jit_keeps_ieee_arithmetic() -> None:
    """No fused multiply-add, no reordering, division by zero as in numpy."""

    @jit
    def compute(a: Array, out: Array) -> None:
        for i in range(a.shape[0]):
            out[i, 0] = a[i] * a[i] - np.float32(1)
            out[i, 1] = np.float32(1) / (a[i] - np.float32(1))

    a = np.linspace(1, 2, 1001, dtype=np.float32) ** np.float32(0.5)
    with np.errstate(divide="ignore"):
        expected = np.stack([a * a - np.float32(1), np.float32(1) / (a - np.float32(1))], axis=1)
    fused = np.square(a.astype(np.float64)) - 1
    assert (fused.astype(np.float32) != expected[:, 0]).any()
    out = np.zeros_like(expected)
    compute(a, out)
    same_bits(out, expected)
    assert np.isinf(out[0, 1])


def test_parity_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastpath, "PAIRS", [])

    def right(out: Array) -> int:
        out[:] = 7
        return 1

    def wrong_bytes(out: Array) -> int:
        out[:] = 7
        out[40:45] = (1, 7, 2, 3, 4)
        out[100] = 0
        return 1

    def wrong_result(out: Array) -> int:
        out[:] = 7
        return 2

    args = [np.zeros(170, dtype=np.uint8)]
    with pytest.raises(pytest.fail.Exception) as caught:
        check_parity(FastPath(right, wrong_bytes), args, block_bytes=17)
    assert str(caught.value) == (
        "right, argument 0: 2 of 10 blocks differ, worst is block 2 (4 bytes); from byte 40: "
        "expected 07070707070707070707070707070707, found 01070203040707070707070707070707"
    )
    with pytest.raises(AssertionError, match="result 2, not 1"):
        check_parity(FastPath(right, wrong_result), args)
    check_parity(FastPath(right, right), args)
    assert not args[0].any()


def test_a_helper_inlined_from_another_file_leaves_no_old_machine_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpath, "_ROOT", tmp_path)
    for room, name in (("artifact", "fastpath.py"), ("runtime", "kernel.py"), ("runtime", "a.py")):
        (tmp_path / room).mkdir(exist_ok=True)
        (tmp_path / room / name).write_text("import numba\n")
    (tmp_path / "runtime" / "plain.py").write_text("pass\n")
    stamp = fastpath._stamp.__wrapped__
    before = stamp("runtime"), stamp("artifact")
    (tmp_path / "runtime" / "plain.py").write_text("pass  # compiles nothing\n")
    assert (stamp("runtime"), stamp("artifact")) == before
    (tmp_path / "runtime" / "a.py").write_text("import numba  # another instruction\n")
    assert stamp("runtime") != before[0]
    assert stamp("artifact") == before[1]


def test_compiled_code_lies_in_the_folder_of_its_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = numba.config
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))

    def seven() -> int:
        return 7

    seven.__module__ = "ds4q.artifact.nothing"
    assert jit(seven)() == 7
    assert str(tmp_path) == config.CACHE_DIR, "the caller's setting is kept"
    assert [path.name for path in tmp_path.iterdir()] == [fastpath._stamp("artifact")]


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, cache: bool = False, **options: object) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", refuse)

    def seven() -> int:
        return 7

    seven.__module__ = "ds4q.artifact.nothing"
    assert jit(seven)() == 7
