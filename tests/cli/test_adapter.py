"""ds4q adapter: train and eval end to end on ds4-tiny; words, JSON and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q import api
from ds4q.cli import main
from ds4q.runtime.engine import Engine
from ds4q.runtime.errors import AdapterError
from ds4q.runtime.experts.adapter import read_adapter
from ds4q.runtime.experts.options import CacheOptions

TEXTS = Path(__file__).parents[1] / "data" / "text"


def run(*arguments: object, **rest: Any) -> Result:
    return CliRunner().invoke(main, ["adapter", *map(str, arguments)], **rest)


def states(artifact: Path, trace: Path, text: str, tokens: int) -> Path:
    options = CacheOptions(trace=trace, trace_states=True)
    with Engine.load(artifact, threads=2, cache=options) as engine:
        ids = [256, *(TEXTS / text).read_bytes()[: tokens - 1]]
        engine.forward(engine.new_state(), ids)
    return trace


@pytest.fixture(scope="module")
def trained(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two traces of different texts, and a predictor from the first."""
    folder = tmp_path_factory.mktemp("adapter")
    states(tiny_artifact, folder / "one.trace", "calibration.txt", 1500)
    states(tiny_artifact, folder / "two.trace", "scored.txt", 500)
    result = run("train", folder / "one.trace", "-o", folder / "m.adapter", "--rank", "full", "-q")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith(
        f"{folder / 'm.adapter'}: 3 layers of 16 experts, rank 16, 1,500 tokens"
    )
    return folder


def test_what_was_fitted_beats_what_needs_no_fit(trained: Path) -> None:
    result = run("eval", trained / "m.adapter", trained / "two.trace", "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert (found["held_out"], found["tokens"], found["layers"], found["top_k"]) == (
        True,
        500,
        3,
        4,
    )
    recall = {
        (each["name"], each["rank"]): {top["m"]: top["recall"] for top in each["top"]}
        for each in found["predictors"]
    }
    assert list(recall) == [
        ("adapter", 8),
        ("adapter", 16),
        ("last token", None),
        ("token profile", None),
        ("gate(L+1) on h(L)", None),
    ]
    fitted = recall["adapter", 16]
    assert list(fitted) == [3, 4, 6, 8]
    assert 0.5 < fitted[4] < fitted[6] < fitted[8] < 1
    for name in ("last token", "token profile", "gate(L+1) on h(L)"):
        assert recall[name, None][4] < fitted[4]
    assert recall["adapter", 8][4] < fitted[4]
    keys = {"m", "recall", "covers", "wasted", "late", "fetches"}
    assert set(found["predictors"][0]["top"][0]) == keys


def test_the_table_says_the_same(trained: Path) -> None:
    result = run("eval", trained / "m.adapter", trained / "two.trace", "--rank", "4")
    lines = result.stdout.splitlines()
    assert lines[0] == "500 tokens, 3 layers, 4 experts chosen in each"
    head = ["predictor", "rank", "M", "recall", "covers", "wasted", "late", "fetches"]
    assert lines[1].split() == head
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["adapter", "4", "3"],
        ["adapter", "4", "4"],
    ]
    assert len(lines) == 2 + 4 * 4


def test_a_text_of_the_fit_is_warned_of(trained: Path) -> None:
    command = ["eval", trained / "m.adapter", trained / "one.trace", "--rank", "full"]
    result = run(*command)
    assert result.exit_code == 0
    assert "was in the fit" in result.stderr
    assert run(*command, "-q").stderr == ""


def test_training_in_json(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.adapter"
    traces = [trained / "one.trace", trained / "two.trace"]
    result = run("train", *traces, "-o", out, "--rank", "3", "--ridge", "0.5", "--json")
    document = json.loads(result.stdout)
    about = read_adapter(out).about
    assert about is not None
    assert document.pop("seconds") > 0
    assert document == {
        "schema_version": 1,
        "output": str(out),
        "bytes": out.stat().st_size,
        "source_layers": [0, 1, 2],
        "rank": 3,
        "experts": 16,
        "artifact": about.artifact,
        "state": "router-input",
        "target": "score-before-bias",
        "normalisation": "centred over tokens and experts",
        "ridge": 0.5,
        "tokens": 2000,
        "texts": list(about.texts),
        "source": about.source,
    }


def test_options_from_the_environment(trained: Path, tmp_path: Path) -> None:
    command = ["train", trained / "one.trace", "-o", tmp_path / "a"]
    assert run(*command, env={"DS4Q_ADAPTER_TRAIN_RANK": "2"}).exit_code == 0
    assert read_adapter(tmp_path / "a").rank == 2


@pytest.mark.parametrize("rank", ["0", "-1", "1.5", "all", "1" * 10])
def test_a_bad_rank_is_wrong_usage(trained: Path, tmp_path: Path, rank: str) -> None:
    result = run("train", trained / "one.trace", "-o", tmp_path / "a", f"--rank={rank}")
    assert result.exit_code == 2
    assert "is not a rank" in result.stderr


@pytest.mark.parametrize("ridge", ["-1", "0", "nan", "inf", "1e7"])
def test_a_bad_ridge_is_wrong_usage(trained: Path, tmp_path: Path, ridge: str) -> None:
    result = run("train", trained / "one.trace", "-o", tmp_path / "a", f"--ridge={ridge}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--ridge" in result.stderr
    assert "is not from 1e-09 to 1e+06" in result.stderr


def test_an_output_that_cannot_be_is_wrong_usage(
    trained: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    one, before = trained / "one.trace", (trained / "one.trace").read_bytes()
    for out in (one, tiny_artifact, tmp_path, tmp_path / "no" / "a"):
        result = run("train", one, "-o", out)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--output" in result.stderr
    assert one.read_bytes() == before


def test_a_file_that_is_in_the_way_stays(trained: Path, tmp_path: Path) -> None:
    mine = tmp_path / "a.partial"
    mine.write_text("mine")
    refused(run("train", trained / "one.trace", "-o", tmp_path / "a"), mine, "move it away")
    assert mine.read_text() == "mine"
    assert not (tmp_path / "a").exists()


def refused(result: Result, *says: object) -> None:
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("ds4q: error: ")
    for words in says:
        assert str(words) in result.stderr


def test_what_cannot_be_done_is_one_line(
    trained: Path, tiny_artifact: Path, random_artifact: Path, tmp_path: Path
) -> None:
    one, fitted = trained / "one.trace", trained / "m.adapter"
    refused(
        run("train", tmp_path / "none", "-o", tmp_path / "a"), tmp_path / "none", "No such file"
    )
    refused(run("train", tiny_artifact, "-o", tmp_path / "a"), tiny_artifact, "not a trace")
    refused(run("eval", tiny_artifact, one), tiny_artifact, "not an expert predictor")
    refused(run("eval", fitted, one, "--rank", "17"), fitted, "1 to 16")
    cut = tmp_path / "cut"
    cut.write_bytes(fitted.read_bytes()[:-1])
    refused(run("eval", cut, one), cut, "cut short")
    cut.write_bytes(one.read_bytes()[:-1])
    refused(run("eval", fitted, cut, "-q"), cut, "cut short")
    other = states(random_artifact, tmp_path / "other.trace", "scored.txt", 20)
    refused(run("eval", fitted, other), fitted, "another model, of the same hidden size")
    refused(run("train", one, other, "-o", tmp_path / "a"), other, "different models")
    assert not (tmp_path / "a").exists()


def test_a_run_refuses_the_predictor_of_another_model(trained: Path, random_artifact: Path) -> None:
    options = CacheOptions(slots=6, adapter=trained / "m.adapter")
    with pytest.raises(AdapterError, match="another model"):
        Engine.load(random_artifact, threads=1, cache=options)


def test_from_a_run_to_a_run(tiny_artifact: Path, tmp_path: Path) -> None:
    trace, fitted = tmp_path / "t.trace", tmp_path / "t.adapter"
    text = (TEXTS / "calibration.txt").read_text()[:600]
    base = ["run", str(tiny_artifact), "--raw", "--temp", "0", "--ignore-eos", "-q", "--json"]

    def answer(*options: object, prompt: str = "def main(", tokens: int = 24) -> Any:
        command = [*base, "-p", prompt, "--max-tokens", str(tokens), *map(str, options)]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    answer("--trace", trace, "--trace-states", prompt=text, tokens=1)
    assert run("train", trace, "-o", fitted, "-q").exit_code == 0
    resident = answer()
    small = ["--expert-cache", "4MB"]
    for prefetch in ([], ["--prefetch", fitted], ["--prefetch", fitted, "--prefetch-top", "4"]):
        paged = answer(*small, *prefetch)
        assert paged["ids"] == resident["ids"]
        assert bool(prefetch) is (paged["cache"]["speculative"]["issued"] > 0)


def test_a_requantized_model_takes_its_predictor_and_profile(trained: Path, tmp_path: Path) -> None:
    """Both belong to the checkpoint, not to how it is packed."""
    other = tmp_path / "other.hfq"
    api.quantize(TEXTS.parent / "ds4-tiny", other, recipe="fp4-q8")
    profile = tmp_path / "p"
    words = ["cache", "profile", str(trained / "one.trace"), "-o", str(profile)]
    assert CliRunner().invoke(main, words).exit_code == 0
    options = CacheOptions(slots=6, adapter=trained / "m.adapter", profile=profile)
    with Engine.load(other, threads=1, cache=options) as engine:
        assert engine.notes == []
    api.check_adapter(trained / "m.adapter", other)
