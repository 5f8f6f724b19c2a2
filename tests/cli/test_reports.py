"""Files that a user names for a report, a trace or a profile: only ds4q's own are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ds4q.cli import main
from ds4q.runtime.gates.baseline import is_baseline, write

RUN = "run {model} --prompt-ids 256,258,104 --max-tokens 2 --ignore-eos -q"
WORDS = {
    "verify --junit": "verify {model} --junit {out}",
    "verify --html": "verify {model} --html {out}",
    "inspect --html": "inspect {model} --html {out}",
    "run --stats": RUN + " --stats {out}",
    "run --trace": RUN + " --trace {out}",
    "cache profile": "cache profile {trace} -o {out}",
    "adapter train": "adapter train {trace} -o {out}",
    "verify --write-baseline": "verify {model} --gate load-time --write-baseline {out}",
}
MADE_BY_ITSELF = [name for name in WORDS if "baseline" not in name]


def ds4q(words: str, **places: Path) -> Result:
    return CliRunner().invoke(main, [word.format(**places) for word in words.split()])


@pytest.fixture(scope="module")
def places(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An artifact and a trace with router states."""
    trace = tmp_path_factory.mktemp("traces") / "run.trace"
    made = ds4q(RUN + " --trace {trace} --trace-states", model=tiny_artifact, trace=trace)
    assert made.exit_code == 0, made.stderr
    return {"model": tiny_artifact, "trace": trace}


@pytest.mark.parametrize("name", MADE_BY_ITSELF)
def test_an_earlier_one_is_replaced_and_a_file_about_it_is_not(
    name: str, places: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        result = ds4q(WORDS[name], out=out, **places)
        assert result.exit_code == 0, result.stderr
    _refused(name, out, places)


def test_a_baseline_is_recognized_by_its_beginning(places: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, {}, {}, {})
    assert is_baseline(out.read_bytes())
    _refused("verify --write-baseline", out, places)


def _refused(name: str, out: Path, places: dict[str, Path]) -> None:
    """A file of the user's that quotes one of ours is kept, and nothing is left beside it."""
    quoted = b"# kept for the report of May:\n" + out.read_bytes()
    out.write_bytes(quoted)
    result = ds4q(WORDS[name], out=out, **places)
    assert result.exit_code == 2
    assert "exists and is no earlier report" in result.stderr
    assert out.read_bytes() == quoted
    assert list(out.parent.iterdir()) == [out]
