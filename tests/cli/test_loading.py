"""What a model runs on: KV type by option and registry, encoding file, reasoning effort."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner, Result

from ds4q.artifact.receipt import receipt_path
from ds4q.cli import main
from ds4q.cli.chat import PREFIX_CACHE_BYTES
from ds4q.cli.loading import compile_notice
from ds4q.hipkern.sim.control import Control
from ds4q.registry.entries import local_registry_path
from ds4q.runtime.engine import Engine
from tests.quantize.damage import rebuild
from tests.registry.documents import document, entry

ASK = ["-p", "hi", "--temp", "0", "--max-tokens", "3"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4Q_HOME", str(tmp_path / "home"))


def run(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", str(file), *ASK, *arguments])


def kv_type(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["kv_type"]
    assert isinstance(found, str)
    return found


def register(file: Path, *modes: str | None) -> None:
    """Register the file under a tag for each mode."""
    models = {
        f"deepseek-v4-t{number}": entry(
            file=file.name, size_bytes=file.stat().st_size, default_kv_mode=mode
        )
        for number, mode in enumerate(modes)
    }
    local_registry_path().parent.mkdir(parents=True, exist_ok=True)
    local_registry_path().write_text(json.dumps(document(models)))


def test_the_default_is_exact_and_says_nothing(tiny_artifact: Path) -> None:
    result = run(tiny_artifact, "--json")
    assert kv_type(result) == "f32"
    assert "KV" not in result.stderr


@pytest.mark.parametrize("asked", ["f32", "f16", "bf16"])
def test_an_option_wins_over_the_registry(tiny_artifact: Path, asked: str) -> None:
    register(tiny_artifact, "bf16")
    result = run(tiny_artifact, "--json", "--kv-type", asked)
    assert kv_type(result) == asked
    assert "KV" not in result.stderr


def test_a_registered_file_takes_its_entrys_type_and_tells(tiny_artifact: Path) -> None:
    register(tiny_artifact, "f16", None)
    result = run(tiny_artifact, "--json")
    assert kv_type(result) == "f16"
    assert "KV type: f16 (registered as f16 by deepseek-v4-t0)\n" in result.stderr
    assert "KV" not in run(tiny_artifact, "--json", "-q").stderr


def test_auto_is_the_exact_one(tiny_artifact: Path) -> None:
    register(tiny_artifact, "auto")
    result = run(tiny_artifact, "--json")
    assert kv_type(result) == "f32"
    assert "KV type: f32 (registered as auto by deepseek-v4-t0)\n" in result.stderr


@pytest.mark.parametrize("modes", [("q8",), ("f16", "bf16")])
def test_a_type_that_is_none_here_is_warned_of(tiny_artifact: Path, modes: tuple[str, ...]) -> None:
    register(tiny_artifact, *modes)
    result = run(tiny_artifact, "--json", "-q")
    assert kv_type(result) == "f32"
    named = "; ".join(f"{mode} by deepseek-v4-t{number}" for number, mode in enumerate(modes))
    assert f"its registered KV type is not one of f32, f16, bf16 ({named})" in result.stderr
    assert "--kv-type" in result.stderr


def test_a_registry_that_cannot_be_read_is_warned_of(tiny_artifact: Path) -> None:
    register(tiny_artifact, "f16")
    local_registry_path().write_text(f'{{"{tiny_artifact.name}": ')
    result = run(tiny_artifact, "--json", "-q")
    assert kv_type(result) == "f32"
    assert f"ds4q: warning: {local_registry_path()}: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    result = run(tmp_path / "deepseek-v4-flash.mq2lloyd")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_types_reach_the_engine(tiny_artifact: Path, sim: Control, monkeypatch: Any) -> None:
    from ds4q.runtime.device.engine import HipEngine
    from ds4q.runtime.engine import Engine

    class LoadedError(Exception):
        pass

    def load(path: Path, **options: Any) -> None:
        raise LoadedError(options["kv_type"])

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(HipEngine, "load", load)
    for device in (["--device", "cpu"], ["--device", "hip"], ["--expert-cache", "3MB"]):
        result = run(tiny_artifact, "-v", "--kv-type", "bf16", *device)
        assert "LoadedError: bf16" in result.stderr, device


def test_a_chat_leaves_room_for_its_snapshots(tiny_artifact: Path, monkeypatch: Any) -> None:
    from ds4q.runtime.device.engine import HipEngine
    from ds4q.runtime.engine import Engine

    asked: dict[str, Any] = {}

    def load(path: Path, **options: Any) -> None:
        asked.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "load", load)
    monkeypatch.setattr(HipEngine, "load", load)
    monkeypatch.setattr("ds4q.cli.run.on_terminal", lambda: True)
    for device in ("cpu", "hip"):
        asked.clear()
        words = ["-q", "--expert-cache", "auto", "--device", device]
        CliRunner().invoke(main, ["run", str(tiny_artifact), *words])
        wanted = (PREFIX_CACHE_BYTES, 1, None)
        assert (asked["beside_bytes"], asked["sequences"], asked["max_context"]) == wanted


def test_a_chat_computes_before_it_asks(tiny_artifact: Path, monkeypatch: Any) -> None:
    from ds4q.runtime.engine import Engine
    from ds4q.runtime.serve import service

    warmed: list[object] = []
    closed: list[object] = []

    def stop(engine: object) -> None:
        warmed.append(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "warm_up", stop)
    monkeypatch.setattr(Engine, "close", lambda self: closed.append(self))
    monkeypatch.setattr("ds4q.cli.run.on_terminal", lambda: True)
    assert CliRunner().invoke(main, ["run", str(tiny_artifact), "-q"]).exit_code == 130
    assert len(warmed) == 1
    assert closed == warmed


@pytest.mark.parametrize("words", ["", "f64", "F16"])
def test_no_other_type(tiny_artifact: Path, words: str) -> None:
    assert run(tiny_artifact, "--kv-type", words).exit_code == 2


# ------------------------------------------------------------------ kernels

KERNELS = """
import numba

@numba.njit(cache=True)
def inner(x):
    return x + 1

@numba.njit(cache=True)
def outer(x):
    return inner(x) * 2
"""
NOTICE = "compiling kernels: the first start on a machine takes longer\n"


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[[], Any]:
    """Imports a module of kernels anew, as another process would."""
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)

    def fresh() -> Any:
        spec = importlib.util.spec_from_file_location("kernels", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return fresh


def test_kernels_that_are_compiled_are_told_of_once(
    kernels: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with compile_notice(quiet=False):
        assert kernels().outer(1) == 4
    assert capsys.readouterr() == ("", NOTICE)
    with compile_notice(quiet=False):  # they are on disk now
        assert kernels().outer(1) == 4
        assert capsys.readouterr() == ("", "")
        assert kernels().outer(1.5) == 5  # for another type they are not
    assert capsys.readouterr() == ("", NOTICE)
    assert kernels().outer(1j) == 2 + 2j
    assert capsys.readouterr() == ("", "")


def test_kernels_are_not_told_of_where_nothing_is_to_be_said(
    kernels: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with compile_notice(quiet=True):
        assert kernels().outer(1) == 4
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("options", [[], ["-q"]])
def test_run_tells_of_kernels(
    tiny_artifact: Path, kernels: Callable[[], Any], monkeypatch: Any, options: list[str]
) -> None:
    forward = Engine.forward

    def compiling(self: Engine, *given: Any, **more: Any) -> Any:
        kernels().outer(1)
        return forward(self, *given, **more)

    monkeypatch.setattr(Engine, "forward", compiling)
    result = run(tiny_artifact, "--max-tokens", "3", *options)
    assert result.exit_code == 0
    assert result.stderr.count(NOTICE) == (0 if options else 1)


# ------------------------------------------------------------------ encoding

ENCODER = """
REASONING_EFFORT_PROMPTS = {"low": "", "high": "Think hard.\\n\\n", "max": "Think harder.\\n\\n"}
"""


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    path = tmp_path / "encoding" / "encoding_dsv4.py"
    path.parent.mkdir()
    path.write_text(ENCODER)
    return path


def prompt_tokens(result: Result) -> int:
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["usage"]["prompt_tokens"]
    assert isinstance(found, int)
    return found


def test_effort_takes_its_text_from_the_file(tiny_artifact: Path, encoder: Path) -> None:
    plain = prompt_tokens(run(tiny_artifact, "--json", "--think"))
    for given in (encoder, encoder.parent):
        options = ["--think", "--encoding", str(given), "--reasoning-effort"]
        high = run(tiny_artifact, "--json", *options, "high")
        assert prompt_tokens(high) == plain + len("Think hard.\n\n")
        assert "encoding_dsv4" in high.stderr or "REASONING_EFFORT_PROMPTS" in high.stderr
        assert prompt_tokens(run(tiny_artifact, "--json", *options, "low")) == plain


def test_effort_without_its_text_is_refused_before_weights_are_read(tiny_artifact: Path) -> None:
    result = run(tiny_artifact, "--think", "--reasoning-effort", "max")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "max" in result.stderr


def test_effort_belongs_to_thinking(tiny_artifact: Path) -> None:
    result = run(tiny_artifact, "--reasoning-effort", "high")
    assert result.exit_code == 2
    assert "--reasoning-effort belongs to --think" in result.stderr


def test_an_encoding_file_that_is_none_is_refused(tiny_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "encoding_dsv4.py").write_text("REASONING_EFFORT_MAX = 1 +")
    for given in (tmp_path / "encoding_dsv4.py", tmp_path):
        result = run(tiny_artifact, "--encoding", str(given))
        assert (result.exit_code, result.stdout) == (1, "")
        assert "encoding_dsv4.py" in result.stderr
    assert run(tiny_artifact, "--encoding", str(tmp_path / "no-such")).exit_code == 2


# --- what is loaded is what the receipt says


def sealed_again(artifact: Path, out: Path) -> Path:
    """``artifact`` with another ``rms_norm_eps``, sound in itself, beside the receipt as it was."""

    def other(words: dict[str, Any]) -> dict[str, Any]:
        return words | {"config": words["config"] | {"rms_norm_eps": 0.001}}

    rebuild(artifact, out, metadata=other)
    receipt_path(out).write_bytes(receipt_path(artifact).read_bytes())
    return out


@pytest.mark.parametrize(
    "words",
    [
        "run {forged} -p hi --max-tokens 1",
        "run {forged} -p hi --max-tokens 1 --require-receipt",
        "run {forged} -p hi --max-tokens 1 --expert-cache 3MB",
        "calibrate {forged} --text {text} -o {out}",
        "export {forged} --to safetensors -o {out}",
        "verify {forged}",
        "verify {sound} --gate divergence --against {forged} --text {text} --tokens 512 "
        "--window 256",
    ],
)
def test_metadata_that_was_sealed_again_is_seen(
    words: str, tiny_artifact: Path, tmp_path: Path
) -> None:
    forged = sealed_again(tiny_artifact, tmp_path / "m.hfq")
    text = tmp_path / "t.txt"
    text.write_text("Repeat exactly: " * 60)
    places = {"forged": forged, "sound": tiny_artifact, "text": text, "out": tmp_path / "out"}
    result = CliRunner().invoke(main, [word.format(**places) for word in words.split()])
    assert result.exit_code == 1, result.stdout
    assert "metadata differs from the receipt" in result.stderr
    assert not (tmp_path / "out").exists()


def earlier_version(artifact: Path) -> None:
    """Have the receipt of an artifact be of version 1, which does not cover the metadata."""
    path = receipt_path(artifact)
    document = json.loads(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    del document["metadata_xxh3"], document["imatrix_sha256"]
    text = json.dumps(document | {"format": "ds4q.receipt.v1"}).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(text))


def test_a_receipt_of_an_earlier_version_is_used_and_named(
    tiny_artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.hfq"
    path.write_bytes(tiny_artifact.read_bytes())
    receipt_path(path).write_bytes(receipt_path(tiny_artifact).read_bytes())
    earlier_version(path)
    note = "the receipt is of an earlier version, which does not cover the metadata"
    result = run(path)
    assert result.exit_code == 0
    assert note in result.stderr
    result = run(path, "--require-receipt")
    assert result.exit_code == 1
    assert note in result.stderr
    result = CliRunner().invoke(main, ["verify", str(path)])
    assert result.exit_code == 0
    assert note in result.stdout
