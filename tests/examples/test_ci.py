"""What users put into their CI: green on a good folder, red on every way to break one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from ds4q import __version__, api
from ds4q.registry.add import Wish, add
from ds4q.registry.entries import Registry
from ds4q.registry.names import ARTIFACT_SUFFIXES
from ds4q.targets import Targets
from examples.ci.damage import WAYS, Copy, NotGoodError, damage
from tests.examples.actions import ROOT, Ran, commands, load, run_action, uses_of_the_action
from tests.quantize.builders import TINY
from tests.registry.folders import good_folder
from tests.test_packaging import BUILD_LEFTOVERS, ROOMS

DS4Q = str(Path(sys.executable).with_name("ds4q"))
WITHOUT_A_TENSOR = {
    "metadata-byte",
    "magic",
    "empty",
    "appended",
    "lfs-pointer",
    "wrong-variant",
    "cut-receipt",
    "no-receipt",
    "stale-size",
    "stale-hash",
    "wrong-arch",
    "upper-case-digest",
    "unknown-key",
    "unsafe-name",
    "dangling-alias",
    "no-json",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "models")


@pytest.fixture
def workspace(good: Path, tmp_path: Path) -> Path:
    """A checkout of a user's repository."""
    shutil.copytree(good, tmp_path / "work" / "models")
    return tmp_path / "work"


def use(workspace: Path, **inputs: str) -> Ran:
    """Run the example workflow's step, with some inputs changed and ds4q installed already."""
    (step,) = uses_of_the_action()
    temp = workspace.with_name("temp")
    temp.mkdir(exist_ok=True)
    return run_action(step["with"] | {"ds4q": DS4Q} | inputs, workspace, temp)


# ---------------------------------------------------------------- green


def test_the_example_workflow_is_green_on_a_good_folder(workspace: Path) -> None:
    ran = use(workspace)
    assert ran.status == 0, ran.log
    assert ran.outputs["ok"] == "true"
    assert "::error" not in ran.log
    document = json.loads((workspace / ran.outputs["json"]).read_text())
    assert document["ok"] is True
    root = ElementTree.parse(workspace / ran.outputs["junit"]).getroot()
    assert [suite.get("failures") for suite in root] == ["0", "0"]
    assert len(list(root.iter("testcase"))) == 6


def test_what_the_workflow_uploads_is_what_the_action_writes() -> None:
    steps = [
        step
        for job in load(ROOT / "examples/ci/validate.yml")["jobs"].values()
        for step in job["steps"]
    ]
    (upload,) = [step for step in steps if "upload-artifact" in step.get("uses", "")]
    outputs = re.findall(r"steps\.ds4q\.outputs\.(\w+)", upload["with"]["path"])
    assert set(outputs) == {"junit", "json"} <= load(ROOT / "action.yml")["outputs"].keys()
    assert upload["if"] == "${{ always() }}", "a red run is the one whose report is wanted"
    (step,) = uses_of_the_action()
    assert step["id"] == "ds4q"
    assert step["uses"] == f"OWNER/ds4q@v{__version__}"


# ---------------------------------------------------------------- red


class Broken(NamedTuple):
    """All ways at once: one run of the action over one folder each."""

    faults: dict[str, tuple[str, str | None]]
    ran: Ran
    document: dict[str, Any]
    suites: dict[str, ElementTree.Element]


@pytest.fixture(scope="module")
def broken(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    workspace = tmp_path_factory.mktemp("broken") / "work"
    workspace.mkdir()
    faults = damage(good, workspace)
    ran = use(workspace, path="\n".join(faults))
    root = ElementTree.parse(workspace / "ds4q-verify.xml").getroot()
    document = json.loads((workspace / "ds4q-verify.json").read_text())
    suites = {str(s.get("name")).removeprefix("ds4q verify "): s for s in root}
    return Broken(faults, ran, document, suites)


def test_the_good_folder_gives_ground_for_every_way(broken: Broken) -> None:
    assert broken.faults.keys() == WAYS.keys()
    assert len(WAYS) >= 12
    nowhere = {way for way, (_, tensor) in broken.faults.items() if tensor is None}
    assert nowhere == WITHOUT_A_TENSOR


def test_broken_folders_turn_the_run_red(broken: Broken) -> None:
    assert broken.ran.status == 1
    assert broken.ran.outputs["ok"] == "false"
    assert broken.document["ok"] is False


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_break_is_red_where_it_was_broken(way: str, broken: Broken) -> None:
    name, tensor = broken.faults[way]
    suites = [suite for path, suite in broken.suites.items() if path.startswith(f"{way}/")]
    assert len(suites) == 2, "an artifact and a registry"
    cases = {case.get("name"): case for suite in suites for case in suite}
    lines = "\n".join(failure.text or "" for failure in cases[name].iter("failure")).splitlines()
    assert lines, f"check {name!r} is green"
    if tensor is not None:
        assert any(line.startswith(tensor) for line in lines), lines
    log = [line for line in broken.ran.log.splitlines() if line.startswith("::error ")]
    assert any(f"::{way}/" in line and name in line and (tensor or "") in line for line in log)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_way_alone_fails_the_job(way: str, good: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "work"
    workspace.mkdir()
    WAYS[way](Copy(good, workspace / "models"))
    ran = use(workspace)
    assert ran.status == 1
    assert ran.outputs["ok"] == "false"


@pytest.mark.slow
def test_a_mixed_artifact_is_red_in_every_way_it_gives_ground_for(tmp_path: Path) -> None:
    """An artifact of recipe ``mix``: all its experts are of types 105 and 106."""
    good = tmp_path / "good"
    good.mkdir()
    api.quantize(TINY, good / "mix.hfq", recipe="mix", warn=lambda text: None)
    tag = Wish("deepseek-v4-flash:mix")
    add(Registry({}, {}, "", "a test"), good / "registry.json", good / "mix.hfq", tag)
    workspace = tmp_path / "work"
    workspace.mkdir()
    faults = damage(good, workspace)
    only_fp4_or_107 = {"nibble", "scale-byte", "nan-scale", "row-header"}
    assert WAYS.keys() - faults.keys() == only_fp4_or_107 | {"unknown-variant", "wrong-variant"}
    ran = use(workspace, path="\n".join(faults))
    assert ran.status == 1
    seen = set()
    for target in json.loads((workspace / "ds4q-verify.json").read_text())["targets"]:
        way = target["artifact"]["path"].partition("/")[0]
        name, tensor = faults[way]
        for check in (check for check in target["checks"] if check["name"] == name):
            assert check["ok"] is False, (way, name)
            named = {failure["tensor"] for failure in check["failures"]}
            assert tensor is None or tensor in named, (way, named)
            seen.add(way)
    assert seen == faults.keys(), "no target has the check that must fail"


def test_artifacts_of_unknown_kinds_are_red_and_name_the_tensor(
    cases_dir: Path, workspace: Path
) -> None:
    """Type 22 is a table of integers: legal by itself, but this file is no model's."""
    numbers = (22, 23, 99)
    for number in numbers:
        shutil.copy(cases_dir / f"c10_id{number}.hfq", workspace / "models")
    ran = use(workspace, options="")
    assert ran.status == 1
    root = ElementTree.parse(workspace / "ds4q-verify.xml").getroot()
    red = [suite for suite in root if suite.get("failures") != "0"]
    assert [suite.get("name") for suite in red] == [
        f"ds4q verify models/c10_id{number}.hfq" for number in numbers
    ]
    said = {
        number: [line for each in suite.iter("failure") for line in (each.text or "").splitlines()]
        for number, suite in zip(numbers, red, strict=True)
    }
    assert any("no model_type" in line for line in said[22])
    for number in (23, 99):
        assert any(f"tensor type {number}" in line and ".weight: " in line for line in said[number])


def test_wrong_usage_is_red_and_says_so(workspace: Path) -> None:
    ran = use(workspace, options="--no-such-option")
    assert ran.status == 2
    assert "No such option" in ran.log
    assert ran.outputs["ok"] == "false"


def test_a_mistyped_path_is_red_in_every_form(workspace: Path) -> None:
    assert use(workspace).status == 0
    ran = use(workspace, path="models/flash.hpq")
    assert (ran.status, ran.outputs["ok"]) == (1, "false")
    assert "::error title=ds4q verify::models/flash.hpq: structure: " in ran.log
    document = json.loads((workspace / ran.outputs["json"]).read_text())
    assert document["artifact"]["path"] == "models/flash.hpq"
    (suite,) = ElementTree.parse(workspace / ran.outputs["junit"]).getroot()
    assert suite.get("failures") == "1"


def test_an_input_never_becomes_a_command(workspace: Path) -> None:
    marker = workspace / "pwned"
    hostile = f"$(touch {marker})\n`touch {marker}`\n; touch {marker}\n--help"
    ran = use(workspace, path=hostile)
    assert ran.status == 1
    assert not marker.exists()
    document = json.loads((workspace / "ds4q-verify.json").read_text())
    paths = [target["artifact"]["path"] for target in document["targets"]]
    assert paths == hostile.split("\n"), "what looks like an option is a path, too"


def test_a_file_name_never_becomes_a_workflow_command(workspace: Path) -> None:
    names = ["a\n::set-output name=ok::true\n%0A\udcff", "::add-mask::a", "x##[error]b"]
    for name in names:
        (workspace / f"{name}.hfq").write_bytes(b"x")
        shutil.copy(workspace / "models" / "flash.hfq", workspace / f"{name}.fp4")  # sound
    ran = use(workspace, path=".", options="")
    assert ran.status == 1
    said = commands(ran.log)
    assert len(said) == 3
    assert all(line.startswith("::error title=ds4q verify::") for line in said), said
    assert "##[error]b.fp4: ok" in ran.log, "for people it is there"
    ran = use(workspace, path="models", options="::add-mask::a")  # a path too many, and no report
    assert ran.status == 1
    assert all(line.startswith("::error title=ds4q verify::") for line in commands(ran.log))


@pytest.mark.parametrize("name", ["junit", "json"])
def test_a_report_takes_the_place_of_no_other_file(name: str, workspace: Path) -> None:
    victim = workspace / "models" / "flash.hfq"
    before = victim.read_bytes()
    ran = use(workspace, **{name: "models/flash.hfq"})
    assert (ran.status, ran.outputs["ok"]) == (2, "false")
    assert victim.read_bytes() == before
    assert "exists and is no earlier report" in ran.log


def one_error(ran: Ran) -> str:
    """The one line of a run that could not check anything."""
    assert ran.status != 0
    assert ran.outputs["ok"] == "false"
    assert "Traceback" not in ran.log
    lines = [line for line in ran.log.splitlines() if not re.match(r"::(stop-comm|\w{32}::)", line)]
    assert len(lines) == 1, lines
    return lines[0].removeprefix("::error title=ds4q verify::")


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"junit": "r.out", "json": "./r.out"}, "name the same file"),
        ({"options": "--help"}, "--help is no option of a check"),
        ({"options": "--require-receipt\n--"}, "-- is no option of a check"),
        ({"junit": "a.xml\nok=true"}, "not the path of a file"),
        ({"json": "a.json\rok=true"}, "not the path of a file"),
        ({"json": " "}, "not the path of a file"),
        ({"json": "no/such/r.json"}, "No such file"),
        ({"json": "models"}, "models"),
        ({"ds4q": "no-such-command"}, "no-such-command: No such file"),
        ({"ds4q": "true"}, "gave no report and ended with status 0"),
    ],
)
def test_inputs_that_cannot_be_are_one_line(
    inputs: dict[str, str], says: str, workspace: Path
) -> None:
    assert says in one_error(use(workspace, **inputs))


def test_an_earlier_green_report_does_not_outlive_a_run_without_one(workspace: Path) -> None:
    assert [use(workspace).status for _ in range(2)] == [0, 0], "an earlier report is replaced"
    assert use(workspace, ds4q="false").status == 1
    assert (workspace / "ds4q-verify.json").read_bytes() == b""


def test_line_ends_of_windows_are_line_ends(workspace: Path) -> None:
    ran = use(
        workspace,
        path="models\r\nmodels/flash.hfq\r\n\r\n",
        options="--require-receipt\r\n",
        junit="r.xml\r\n",
        json="r.json\r\n",
    )
    assert ran.status == 0, ran.log
    assert (ran.outputs["junit"], ran.outputs["json"]) == ("r.xml", "r.json")
    assert (workspace / "r.xml").exists()
    assert json.loads((workspace / "r.json").read_text())["ok"] is True


def test_a_module_of_the_checkout_is_not_run(workspace: Path) -> None:
    (workspace / "json.py").write_text("raise SystemExit(0)")
    assert use(workspace, path="no.hfq").status == 1


# ---------------------------------------------------------------- the script that breaks


def ruin(case: str, good: Path, out: Path) -> None:
    """Make a folder that is not good, or a place that is taken."""
    if case == "no folder":
        shutil.rmtree(good)
    elif case == "no artifact":
        (good / "flash.hfq").unlink()
    elif case == "two artifacts":
        shutil.copy(good / "flash.hfq", good / "other.hfq")
    elif case == "no artifact's bytes":
        (good / "flash.hfq").write_bytes(b"x")
    elif case == "no receipt":
        (good / "flash.hfq.receipt").unlink()
    elif case == "no registry":
        (good / "registry.json").unlink()
    elif case == "no entry":
        (good / "registry.json").write_text('{"models": {"m": []}}')
    elif case == "a file":
        out.write_text("x")
    else:
        (out / "nibble").mkdir(parents=True)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("no folder", "is not a folder"),
        ("no artifact", "holds 0 artifacts (.hfq), not one"),
        ("two artifacts", "holds 2 artifacts (.hfq), not one"),
        ("no artifact's bytes", "file is too short"),
        ("no receipt", "flash.hfq.receipt: No such file"),
        ("no registry", "registry.json: No such file"),
        ("no entry", "registry.json holds no entry"),
        ("a file", "out is not a folder"),
        ("made before", "nibble exists; name a new folder"),
    ],
)
def test_a_folder_that_cannot_be_broken_is_refused_before_work(
    case: str, says: str, workspace: Path
) -> None:
    good, out = workspace / "models", workspace / "out"
    ruin(case, good, out)
    before = sorted(workspace.rglob("*"))
    with pytest.raises(NotGoodError, match=re.escape(says)):
        damage(good, out)
    assert sorted(workspace.rglob("*")) == before


def test_what_is_broken_lies_beside_what_is_good(workspace: Path) -> None:
    with pytest.raises(NotGoodError, match="name a folder beside it"):
        damage(workspace / "models", workspace / "models" / "broken")
    assert not (workspace / "models" / "broken").exists()


def test_the_script_says_in_one_line_why_not(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "ci" / "damage.py")
    done = run([sys.executable, script, str(tmp_path / "no"), str(tmp_path / "out")], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"damage.py: {tmp_path / 'no'} is not a folder\n"


# ---------------------------------------------------------------- installing


@pytest.mark.slow
def test_the_action_installs_the_version_that_it_is_part_of(workspace: Path) -> None:
    """Without the network: what ds4q needs is taken from this environment."""
    (step,) = uses_of_the_action()
    temp = workspace.with_name("temp")
    temp.mkdir()
    here = next(path for path in sys.path if path.endswith("site-packages"))
    offline = {
        "PYTHONPATH": here,
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads "no isolation: false" as no isolation
    }
    python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    checkout = workspace.with_name("checkout")  # building writes into it
    for name in ("ds4q", *ROOMS):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=BUILD_LEFTOVERS)
    for name in ("pyproject.toml", "README.md", "LICENSE", "action.yml"):
        shutil.copy(ROOT / name, checkout)
    ran = run_action(step["with"], workspace, temp, checkout=checkout, PATH=python, **offline)
    assert ran.status == 0, ran.log
    assert (temp / "ds4q-venv" / "bin" / "ds4q").exists()


# ---------------------------------------------------------------- pre-commit


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """In a repository of its own, even where the tests themselves run in a hook of git."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env |= {"PRE_COMMIT_HOME": str(cwd.with_name("cache")), "GIT_CONFIG_GLOBAL": os.devnull}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def pre_commit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "pre_commit", *words], cwd)


def git(*words: str, cwd: Path) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    assert run(["git", *identity, *words], cwd).returncode == 0


@pytest.fixture
def repository(workspace: Path) -> Path:
    """A user's repository with the hook; ds4q is installed already, so pre-commit need not."""
    (hook,) = load_hooks()
    config = {"repos": [{"repo": "local", "hooks": [hook | {"language": "system"}]}]}
    (workspace / ".pre-commit-config.yaml").write_text(json.dumps(config))
    git("init", "-q", cwd=workspace)
    git("add", "-A", cwd=workspace)
    return workspace


def load_hooks() -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()))


@pytest.mark.parametrize("suffix", sorted({*ARTIFACT_SUFFIXES, ".mtp"}))
def test_the_hook_sees_what_verify_knows(suffix: str, tmp_path: Path) -> None:
    (hook,) = load_hooks()
    for name in ("flash" + suffix, "flash" + suffix + ".receipt"):
        assert re.search(hook["files"], "models/" + name), name
        assert not re.search(hook["files"], name + ".partial"), name
    (tmp_path / f"flash{suffix}.receipt").write_text("{}")
    found = Targets.of([tmp_path / f"flash{suffix}.receipt"])
    assert [path.name for path in found.receipts] == [f"flash{suffix}.receipt"]


def test_pre_commit_accepts_the_hook(workspace: Path) -> None:
    done = pre_commit("validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"), cwd=workspace)
    assert done.returncode == 0, done.stdout


def test_the_hook_is_green_on_a_good_folder_and_red_on_a_broken_one(repository: Path) -> None:
    done = pre_commit("run", "--all-files", cwd=repository)
    assert done.returncode == 0, done.stdout
    assert "Passed" in done.stdout
    git("commit", "-q", "-m", "x", cwd=repository)
    registry = repository / "models" / "registry.json"
    registry.write_text(registry.read_text().replace('"arch_id": 9', '"arch_id": 10'))
    git("add", "-A", cwd=repository)
    done = pre_commit("run", cwd=repository)
    assert done.returncode == 1, done.stdout
    assert "expected 10, found 9" in done.stdout


def test_the_hook_takes_no_file_name_for_an_option(repository: Path) -> None:
    names = ("--html=x.hfq", "--junit=y.hfq", "-h.hfq", "--.hfq")
    for name in names:
        (repository / name).write_bytes(b"no artifact")
    git("add", "-A", cwd=repository)
    done = pre_commit("run", "--all-files", cwd=repository)
    assert done.returncode == 1, done.stdout
    for name in names:
        assert f"{name}: structure: file is too short" in done.stdout
    assert not (repository / "x.hfq").exists()
    assert not (repository / "y.hfq").exists()


def test_options_in_the_hooks_args_are_not_ignored(repository: Path) -> None:
    """They come behind the entry's ``--``: names, and no such files."""
    path = repository / ".pre-commit-config.yaml"
    config = json.loads(path.read_text())
    config["repos"][0]["hooks"][0]["args"] = ["--require-receipt"]
    path.write_text(json.dumps(config))
    git("add", "-A", cwd=repository)
    done = pre_commit("run", "--all-files", cwd=repository)
    assert done.returncode == 1
    assert "--require-receipt: structure: --require-receipt: No such file" in done.stdout


def test_a_commit_without_such_files_is_not_held_up(repository: Path) -> None:
    git("commit", "-q", "-m", "x", cwd=repository)
    (repository / "README.md").write_text("x")
    git("add", "-A", cwd=repository)
    done = pre_commit("run", cwd=repository)
    assert done.returncode == 0
    assert "no files to check" in done.stdout


# ---------------------------------------------------------------- the page


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "ci.md").read_text("utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert (ROOT / "examples" / "ci" / "validate.yml").read_text("utf-8") in blocks
    assert f"in {len(WAYS)} ways" in page


def test_the_page_lists_the_actions_inputs_and_outputs() -> None:
    page = (ROOT / "docs" / "ci.md").read_text("utf-8")
    table = page.partition("| input |")[2].partition("\n\n")[0]
    action = load(ROOT / "action.yml")
    named = set(re.findall(r"`(\w+)`", table))
    assert {*action["inputs"], *action["outputs"]} <= named


def test_the_pages_hook_is_the_one_that_is_offered() -> None:
    page = (ROOT / "docs" / "ci.md").read_text("utf-8")
    (hook,) = load_hooks()
    assert f"- id: {hook['id']}\n" in page
    assert hook["entry"].split()[:2] == ["ds4q", "verify"]
    own = re.search(r"entry: (.*)", page)
    assert own is not None
    assert own[1].replace(" --require-receipt", "") == hook["entry"]
