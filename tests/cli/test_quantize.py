"""ds4q quantize: words, exit statuses, streams, and that the same input gives the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main
from ds4q.quantize.outputs import MARK
from ds4q.quantize.recipe import RECIPES
from tests.quantize import models
from tests.quantize.builders import RANDOM, TINY

DS4Q = [sys.executable, "-m", "ds4q"]
COMMON = ("fp4", "fp4-q8", "rocmfp23", "mix")
IN_PIECES = ("fp4-q8", "mix")  # dense rows that are rounded; books of experts that share them


def every_recipe(*quick: str) -> pytest.MarkDecorator:
    """A test for each recipe, slow for those that are not ``quick``."""
    marked = [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in RECIPES]
    return pytest.mark.parametrize("recipe", marked)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty output folder."""
    (tmp_path / "o").mkdir()
    return tmp_path / "o"


def quantize(*words: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, words)], env=env)


def refused(*words: object) -> str:
    """The one line of an error with exit status 1; stdout stays empty."""
    result = quantize(*words)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    lines = [line for line in result.stderr.splitlines() if "warning" not in line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("ds4q: error: ")
    return lines[0].removeprefix("ds4q: error: ")


# ---------------------------------------------------------------- results


def test_json_is_the_promised_document(source: Path, folder: Path) -> None:
    result = quantize(source, "-o", folder / "x.hfq", "--allow-partial", "--json", "-q")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    promised = {"output", "bytes", "tensors", "sha256", "seconds", "source_bytes", "types"}
    assert promised | {"bpw_experts"} <= document.keys()
    assert document["types"]["HFP4G32"].keys() == {"tensors", "bytes"}
    assert document["bytes"] == (folder / "x.hfq").stat().st_size
    assert document["sidecars"][0]["output"] == str(folder / "x-dspark.hfq")


def test_a_budget_can_be_planned_by_projection(source: Path, folder: Path) -> None:
    words = (source, "-o", folder / "x.hfq", "--allow-partial", "--dry-run", "--json")
    budget = ("--recipe", "budget", "--target-bpw", "4")
    for extra in ((), ("--per-projection",)):
        result = quantize(*words, *budget, *extra)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["budget"]["per_projection"] == bool(extra)


def test_json_of_a_dry_run_lacks_only_the_hash(source: Path, folder: Path) -> None:
    words = (source, "-o", folder / "x.hfq", "--allow-partial", "--json")
    promised = json.loads(quantize(*words, "--dry-run").stdout)
    assert list(folder.iterdir()) == []
    done = json.loads(quantize(*words).stdout)
    assert done.keys() - promised.keys() == {"sha256"}
    assert promised["bytes"] == done["bytes"] == (folder / "x.hfq").stat().st_size


def test_people_read_names_sizes_types_and_hashes(source: Path, folder: Path) -> None:
    result = quantize(source, "-o", folder / "x.hfq", "--allow-partial", "-q")
    digests = models.digests(folder)
    for name in ("x.hfq", "x-dspark.hfq"):  # the summary names the draft's file
        size = (folder / name).stat().st_size
        assert f"wrote {folder / name}: {size:,} bytes" in result.stdout
        assert digests[name] in result.stdout
    assert "HFP4G32" in result.stdout
    assert "bits per weight" in result.stdout
    assert "rounded" not in result.stdout


def test_people_read_what_a_dry_run_would_write(source: Path, folder: Path) -> None:
    result = quantize(source, "-o", folder / "x.hfq", "--allow-partial", "--dry-run")
    assert f"would write {folder / 'x.hfq'}: " in result.stdout
    assert "sha256" not in result.stdout
    assert list(folder.iterdir()) == []


def test_rounding_is_told(source: Path, folder: Path) -> None:
    result = quantize(source, "-o", folder / "x.hfq", "--allow-partial", "--recipe", "fp4-q8", "-q")
    assert "rounded 8" in result.stdout
    assert "dense values, largest error 0." in result.stdout


def test_what_is_left_out_is_counted_and_listed_on_request(source: Path, folder: Path) -> None:
    words = (source, "--allow-partial", "--exclude-prefix", "layers.0.attn.", "--dspark", "drop")
    brief = quantize(*words, "-o", folder / "x.hfq")
    assert "7 source tensors left out (listed in the receipt)" in brief.stdout
    assert "draft dropped" not in brief.stdout
    long = quantize(*words, "-o", folder / "y.hfq", "-v")
    assert "  mtp.0.main_norm.weight: draft dropped" in long.stdout
    assert "  layers.0.attn.wq_a.scale: excluded by prefix layers.0.attn." in long.stdout


def test_warnings_go_to_stderr_and_quiet_keeps_them(source: Path, folder: Path) -> None:
    result = quantize(source, "-o", folder / "x.hfq", "--allow-partial", "-q")
    assert "ds4q: warning: tokenizer.json is absent" in result.stderr
    assert "no multiple of 256" in result.stderr
    assert "ds4q: " not in result.stdout


@pytest.mark.parametrize("more", [("--dry-run",), (), ("--resume",)], ids=["dry", "run", "resumed"])
def test_the_document_holds_every_warning_and_what_is_not_applied(
    source: Path, folder: Path, more: tuple[str, ...]
) -> None:
    model = Path(shutil.copytree(source, folder / "model"))
    (model / "generation_config.json").write_text('{"top_k": 50, "do_sample": true}')
    words = (model, "-o", folder / "x.hfq", "--allow-partial", "-q", "--json")
    if more == ("--resume",):
        quantize(*words)
    result = quantize(*words, *more)
    document = json.loads(result.stdout)
    assert document["sampling"] == {"not_applied": ["top_k 50"]}
    assert "generation_config settings are not applied: top_k 50" in document["warnings"]
    assert [f"ds4q: warning: {text}" for text in document["warnings"]] == result.stderr.splitlines()


def test_a_finished_job_says_so(source: Path, folder: Path) -> None:
    words = (source, "-o", folder / "x.hfq", "--allow-partial")
    quantize(*words)
    again = quantize(*words, "--resume")
    assert again.exit_code == 0
    assert f"already there: {folder / 'x.hfq'}" in again.stdout


@every_recipe(*COMMON)
def test_whole_models_verify_under_every_recipe(recipe: str, folder: Path) -> None:
    """The trained model, and the random one with its sidecar."""
    for model in (TINY, RANDOM):
        out = folder / f"{model.name}.hfq"
        made = quantize(model, "-o", out, "--recipe", recipe, "-q", "--json")
        assert made.exit_code == 0, made.stderr
        assert json.loads(made.stdout)["partial"] is False
    assert sorted(p.name for p in folder.glob("*.hfq")) == [
        "ds4-random-dspark.hfq",
        "ds4-random.hfq",
        "ds4-tiny.hfq",
    ]
    for path in folder.glob("*.hfq"):
        model = TINY if path.stem == "ds4-tiny" else RANDOM
        done = CliRunner().invoke(main, ["verify", str(path), "--source", str(model), "-q"])
        assert done.exit_code == 0, done.output


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["SRC"],
        ["SRC", "-o", "x.hfq", "--recipe", "fp5"],
        ["SRC", "-o", "x.hfq", "--dspark", "both"],
        ["SRC", "-o", "x.hfq", "--threads", "0"],
        ["SRC", "-o", "x.hfq", "--resume", "--force"],
        ["SRC", "-o", "x.hfq", "--per-projection"],
        ["SRC", "-o", "x.hfq", "more"],
    ],
)
def test_wrong_usage_is_2(words: list[str], source: Path, folder: Path) -> None:
    places = {"SRC": str(source), "x.hfq": str(folder / "x.hfq")}
    result = quantize(*[places.get(word, word) for word in words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert list(folder.iterdir()) == []


def test_each_refusal_is_one_line_with_its_place_and_a_remedy(source: Path, folder: Path) -> None:
    out = folder / "x.hfq"
    part = (source, "--allow-partial", "-o")
    assert refused(source / "no", "-o", out).startswith(f"{source / 'no'}: not found")
    assert refused(*part, "/dev/full").startswith(
        "/dev/full: output is a folder, a device or a link"
    )
    assert refused(*part, folder).startswith(f"{folder}: output is a folder")
    assert "output folder does not exist" in refused(*part, folder / "no" / "x.hfq")
    assert "inside the source folder" in refused(*part, source / "x.hfq")
    assert "'lay.'; prefixes are literal" in refused(*part, out, "--include-prefix", "lay.")
    assert refused(source, "-o", out).startswith(f"{source / 'config.json'}: required key")
    out.write_text("precious")
    assert refused(*part, out) == (
        f"{out}: output exists; choose another name, or replace it with --force"
    )
    assert out.read_text() == "precious"
    assert [p.name for p in folder.iterdir()] == ["x.hfq"]


def test_an_unfinished_job_is_refused_with_both_ways_out(source: Path, folder: Path) -> None:
    (folder / "x.hfq.partial").write_bytes(MARK)
    line = refused(source, "--allow-partial", "-o", folder / "x.hfq")
    assert "an unfinished job lies here: found 0 of" in line
    assert line.endswith("continue it with --resume, or start over with --force")


def test_a_bad_value_names_shard_and_tensor(cases_dir: Path, folder: Path) -> None:
    source = cases_dir / "c09_scale_nan.safetensors"
    line = refused(source, "--allow-partial", "-o", folder / "x.hfq")
    assert line.startswith(f"{source}: layers.0.ffn.experts.0.w1.weight: NaN scale byte")
    assert list(folder.iterdir()) == []


def test_the_shells_file_size_limit(cases_dir: Path, folder: Path) -> None:
    """As scripts would see it: a real process under ulimit."""
    words = f"{sys.executable} -m ds4q quantize {cases_dir / 'good'} -o {folder / 'o.hfq'}"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 16; {words} --allow-partial -q"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert "File too large; the job needs 73,296 bytes" in last
    assert list(folder.iterdir()) == []


def test_options_come_from_the_environment_too(source: Path, folder: Path) -> None:
    env = {"DS4Q_QUANTIZE_RECIPE": "fp4-f16", "DS4Q_QUANTIZE_ALLOW_PARTIAL": "1"}
    result = quantize(source, "-o", folder / "x.hfq", "--json", env=env)
    assert json.loads(result.stdout)["recipe"] == "fp4-f16"


# ---------------------------------------------------------------- the same bytes


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("expected")
    models.run(source, folder / "x.hfq")
    return models.digests(folder)


@pytest.mark.parametrize(
    ("threads", "environment"),
    [
        (1, {"PYTHONHASHSEED": "0", "TZ": "Asia/Kathmandu", "LC_ALL": "C"}),
        (2, {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8", "PYTHONOPTIMIZE": "1"}),
        (8, {"PYTHONHASHSEED": "2", "TZ": "America/St_Johns", "LC_ALL": "tr_TR.UTF-8"}),
        (2, {"PYTHONHASHSEED": "3", "DS4Q_REFERENCE": "1", "LANG": "de_DE.UTF-8"}),
    ],
    ids=["one", "two", "eight", "reference"],
)
def test_bytes_do_not_depend_on_process_or_place(
    threads: int,
    environment: dict[str, str],
    source: Path,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    """Artifact, sidecar and both receipts; another folder, another working directory."""
    folder = tmp_path / f"other {threads}"
    folder.mkdir()
    words = ["quantize", os.path.relpath(source, folder), "-o", "x.hfq", "--allow-partial", "-q"]
    done = subprocess.run(
        [*DS4Q, *words, "--threads", str(threads)],
        cwd=folder,
        env=os.environ | environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert models.digests(folder) == expected


def reshuffled(folder: Path, seed: int) -> Path:
    """The same tensors in another order, over another number of shards."""
    rng = random.Random(seed)
    tensors = models.mini_tensors()
    names = rng.sample(sorted(tensors), len(tensors))
    shards = {name: f"{rng.randrange(4)}" for name in names}
    return models.save(folder, {n: tensors[n] for n in names}, shard_of=shards.__getitem__)


@pytest.mark.parametrize("change", ["touched", "copied", "resharded", "one shard", "prefixed"])
def test_bytes_do_not_depend_on_how_the_source_is_laid_out(
    change: str, source: Path, expected: dict[str, str], tmp_path: Path, folder: Path
) -> None:
    other = tmp_path / "s"
    if change == "touched":
        shutil.copytree(source, other)
        for path in other.iterdir():
            os.utime(path, (1_000_000_000, 1_000_000_000))
    elif change == "copied":  # directory order is the order of creation on some file systems
        other.mkdir()
        for path in sorted(source.iterdir(), reverse=True):
            shutil.copy(path, other / path.name)
    elif change == "resharded":
        reshuffled(other, seed=4)
    elif change == "one shard":
        models.save(other, models.mini_tensors(), shard_of=lambda name: "all")
    else:
        models.save(other, models.mini_tensors(), prefix="model.")
    models.run(other, folder / "x.hfq")
    assert models.digests(folder) == expected


@every_recipe(*IN_PIECES)
@pytest.mark.parametrize(
    "model", [pytest.param(TINY, marks=pytest.mark.slow), RANDOM], ids=lambda path: path.name
)
def test_whole_models_are_the_same_for_any_threads(
    model: Path, recipe: str, tmp_path: Path
) -> None:
    found = []
    for threads in (1, 2, 8):
        folder = tmp_path / str(threads)
        folder.mkdir()
        options: dict[str, Any] = {"recipe": recipe, "threads": threads, "allow_partial": False}
        models.run(model, folder / "x.hfq", **options)
        found.append(models.digests(folder))
    assert found[0] == found[1] == found[2]


def test_files_of_a_job_hold_no_clock_and_no_path(source: Path, folder: Path) -> None:
    import zstandard

    models.run(source, folder / "x.hfq")
    for path in folder.iterdir():
        raw = path.read_bytes()
        if path.suffix == ".receipt":
            raw = zstandard.ZstdDecompressor().decompress(raw)
        for word in (str(folder), str(source), folder.parent.name, "x.hfq"):
            assert word.encode() not in raw, (path.name, word)
