"""Every command that writes, with each of its writing system calls failing in turn.

A final name keeps its old file or gets the whole new one; the message names a file and is true;
the same command then works.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ds4q.artifact.errors import Ds4qError
from ds4q.cli import main
from ds4q.runtime.experts.trace import read_trace
from tests.faults import SHORT, Faults, ways
from tests.quantize import models

TEXT = Path(__file__).parents[1] / "data" / "text" / "calibration.txt"
SAMPLE = 6  # faults of a command in the normal suite
CHANGING = rb'"(?:generated_at|\w*_s|\w*seconds|\w*bytes_per_s|rss\w*)": *[^,}\n]*'


@dataclass(frozen=True)
class Case:
    """A command line: ``{S}`` is the folder of what it reads, ``{F}`` of all that it writes.

    ``before`` is what was run there first. ``slow``: in the slow suite only.
    """

    words: str
    before: tuple[str, ...] = ()
    slow: bool = False


QUANTIZE = "quantize {S}/mini -o {F}/x.hfq --allow-partial -q --threads 1"
EXPERTS = "quantize {S}/experts -o {F}/x.hfq --allow-partial -q --threads 1 --recipe"
PULL = "registry pull t:a --registry {S}/r.json --models-dir {F}/m -q"
EXPORT = "export {S}/experts.hfq --to safetensors --only experts -q -o {F}/x"
CALIBRATE = f"calibrate {{S}}/tiny.hfq --text {TEXT} --tokens 9 -o {{F}}/i -q"
IDS = ",".join(map(str, range(200)))
RUN = "run {S}/tiny.hfq --prompt-ids 1,2,3 --max-tokens 2 --threads 1 --seed 1 -q"
VERIFY = "verify {S}/mini.hfq -q --threads 1"
CASES = {
    "quantize": Case(QUANTIZE),
    "quantize-force": Case(QUANTIZE + " --force", (QUANTIZE + " --dspark keep",)),
    "quantize-resume": Case(QUANTIZE + " --resume", ("STOP " + QUANTIZE,)),
    "quantize-mix": Case(EXPERTS + " mix", slow=True),
    "quantize-budget": Case(EXPERTS + " budget --target-bpw 3.5", slow=True),
    "export": Case(
        "export {S}/experts.hfq --to safetensors --only experts -o {F}/x.safetensors -q"
    ),
    "export-folder": Case("export {S}/experts.hfq --to safetensors --only experts -o {F}/x -q"),
    "calibrate": Case(
        f"calibrate {{S}}/tiny.hfq --text {TEXT} --tokens 9 -o {{F}}/i -q", slow=True
    ),
    "add": Case("registry add {S}/mini.hfq --tag t:a --registry {F}/r.json -q"),
    "add-more": Case(
        "registry add {S}/mini.hfq --tag t:b --registry {F}/r.json -q --force",
        ("registry add {S}/mini.hfq --tag t:a --registry {F}/r.json -q",),
    ),
    "pull": Case(PULL),
    "rm": Case("registry rm t:a --registry {S}/r.json --models-dir {F}/m --yes -q", (PULL,)),
    "trace": Case(RUN + " --trace {F}/t --trace-states --stats {F}/s", slow=True),
    "verify-reports": Case(VERIFY + " --junit {F}/j.xml --html {F}/h.html"),
    "profile": Case("cache profile {S}/run.trace -o {F}/p -q"),
    "adapter": Case("adapter train {S}/run.trace -o {F}/a --rank full -q"),
    "sign": Case("sign {S}/mini.hfq --key {S}/key.pem -o {F}/x.sig"),
}


def run(words: str, sources: Path, folder: Path) -> Result:
    line = [word.replace("{F}", str(folder)).replace("{S}", str(sources)) for word in words.split()]
    return CliRunner().invoke(main, line, env={"DS4Q_HOME": str(folder / "home")})


@pytest.fixture(scope="module")
def sources(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("sources")
    models.mini(folder / "mini")
    models.save(folder / "experts", models.expert_tensors(), config=models.EXPERT_CONFIG)
    for path in (tiny_artifact, tiny_artifact.with_name(tiny_artifact.name + ".receipt")):
        os.link(path, folder / path.name.replace(tiny_artifact.name, "tiny.hfq"))
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(pem)
    for words in (
        "quantize {S}/mini -o {S}/mini.hfq --allow-partial -q",
        "quantize {S}/experts -o {S}/experts.hfq --allow-partial -q",
        "registry add {S}/mini.hfq --tag t:a --registry {S}/r.json -q",
        RUN.replace("1,2,3", ",".join(map(str, range(200))))
        + " --trace {S}/run.trace --trace-states",
    ):
        done = run(words, folder, folder)
        assert done.exit_code == 0, done.stderr
    document = folder / "r.json"
    document.write_text(document.read_text().replace('"repo": ""', f'"repo": "file://{folder}"'))
    return folder


def stop_at_seal(words: str, sources: Path, folder: Path) -> None:
    """An unfinished job."""

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4q.quantize.job.seal", stop)
        assert run(words, sources, folder).exit_code == 130


def digests(folder: Path) -> dict[str, str]:
    """Of all files below, by relative name; times that are measured do not count."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data = path.read_bytes()
        name = str(path.relative_to(folder))
        if "/.verified/" in f"/{name}":  # only remembers what was hashed, and when
            continue
        if path.suffix == ".sig" or path.suffix in (".xml", ".html"):
            data = b"signed or timed" if data.rstrip().endswith((b"}", b">")) else data
        if path.name == "t":  # a trace notes how long reads took
            with suppress(Ds4qError):
                data = repr([type(record) for record in read_trace(path)]).encode()
        found[name] = hashlib.sha256(re.sub(CHANGING, b"", data)).hexdigest()
    return found


class Trial:
    """One command line, run with faults in copies of its folder."""

    def __init__(self, case: Case, sources: Path, folder: Path) -> None:
        self.case, self.sources, self._folder = case, sources, folder
        self._count = 0
        self._template = folder / "template"
        self._template.mkdir()
        for words in case.before:
            if words.startswith("STOP "):
                stop_at_seal(words.removeprefix("STOP "), sources, self._template)
            else:
                assert run(words, sources, self._template).exit_code == 0
        self.before = digests(self._template)
        with pytest.MonkeyPatch.context() as patch:
            place = self._place()
            counted = Faults(patch, place)
            done = run(case.words, sources, place)
        assert done.exit_code == 0, done.stderr
        self.expected = digests(place)
        self.faults = [
            (call, n, way)
            for call, count in sorted(counted.counts.items())
            for n in range(1, count + 1)
            for way in ways(call)
        ]

    def _place(self) -> Path:
        """A fresh copy, at one place: the output's name is part of some outputs."""
        place = self._folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self._template, place)
        return place

    def check(self, call: str, n: int, way: int) -> None:
        """Run with one fault, look at what is left, and run again without."""
        about = f"{call} {n}: {'short' if way == SHORT else os.strerror(way)}"
        place = self._place()
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, place, call, n, way)
            done = run(self.case.words, self.sources, place)
        found = digests(place)
        if done.exit_code == 0:
            assert found == self.expected, about
            return
        assert done.exit_code == 1, about
        said = done.stderr.strip().splitlines()[-1]
        about += f": {said}"
        assert way != SHORT, about
        assert said.startswith("ds4q: error: "), about
        assert os.strerror(way) in said, about
        assert str(place) in said, about
        for name in {*self.before, *self.expected}:
            if "home/" not in name and not name.endswith((".partial", ".journal")):
                old_or_new = self.before.get(name), self.expected.get(name)
                assert found.get(name) in old_or_new, f"{about}: {name}"
        rest = [name for name in found if name not in self.before and name not in self.expected]
        rest = [name for name in rest if not name.startswith("home/")]
        if "may not be on the disk" in said:
            assert found == self.expected, about
            return
        goes_on = "--resume" in said or self.case.words.startswith("registry pull")
        assert not rest or goes_on, f"{about}: {rest}"
        if "nothing was left behind" in said and "--resume" not in self.case.words:
            assert found == self.before, about
        words = self.case.words
        if "--resume" in said:
            words = words.replace(" --force", "").removesuffix(" --resume") + " --resume"
        again = run(words, self.sources, place)
        assert again.exit_code == 0, f"{about}; then: {again.stderr}"
        found = digests(place)
        if call == "unlink":  # what could not be removed then may still be there
            spare = (".partial", ".blocks", ".journal")
            found = {name: digest for name, digest in found.items() if not name.endswith(spare)}
        assert found == self.expected, about


@pytest.fixture
def trial(request: pytest.FixtureRequest, sources: Path, tmp_path: Path) -> Trial:
    return Trial(CASES[request.param], sources, tmp_path)


@pytest.mark.parametrize(
    "trial", [name for name, case in CASES.items() if not case.slow], indirect=True
)
def test_some_failing_calls_leave_what_the_message_says(trial: Trial) -> None:
    for fault in random.Random(16).sample(trial.faults, min(SAMPLE, len(trial.faults))):
        trial.check(*fault)


@pytest.mark.slow
@pytest.mark.parametrize("trial", CASES, indirect=True)
def test_each_failing_call_leaves_what_the_message_says(trial: Trial) -> None:
    wrong = []
    for fault in trial.faults:
        try:
            trial.check(*fault)
        except AssertionError as error:
            wrong.append(str(error).splitlines()[0])
    assert not wrong, "\n".join([f"{len(wrong)} of {len(trial.faults)}", *wrong])
