"""The group: fast help, exit statuses, one line for every error, streams that close early."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ds4q
from ds4q.artifact import stops
from ds4q.artifact.errors import ArtifactError
from ds4q.cli import COMMANDS, Ds4q, common, main
from tests.cli.test_run import write_artifact
from tools import cli_reference

DS4Q = [sys.executable, "-m", "ds4q"]


def test_help_and_version() -> None:
    help_ = CliRunner().invoke(main, ["--help"])
    assert help_.exit_code == 0
    for name, line in COMMANDS.items():
        assert f"  {name}" in help_.output
        assert line in help_.output
    version = CliRunner().invoke(main, ["--version"], env={"DS4Q_VERSION": "1"})
    assert (version.exit_code, version.output) == (0, f"ds4q {ds4q.__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from ds4q.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "ds4q.cli.common" in loaded
    assert not loaded & {"numpy", "numba", "rich", "tokenizers", "zstandard", "xxhash", "ctypes"}


def test_wrong_usage_is_2_with_nothing_on_stdout() -> None:
    for arguments in ([], ["nosuch"], ["--nosuch"], ["doctor", "--nosuch"], ["doctor", "extra"]):
        result = CliRunner().invoke(main, arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert "Error: " in result.stderr or not arguments  # no command: the help


def test_every_option_that_takes_a_path_expands_a_tilde_and_refuses_nothing_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").write_bytes(b"")
    seen = 0
    for words, command in cli_reference.commands().items():
        for param in command.params:
            named = param.metavar or ""
            if isinstance(param.type, click.Path) or re.search("FILE|PATH|DIR|FOLDER", named):
                assert str(param.type.convert("~/a", param, None)) == f"{tmp_path}/a", words
                with pytest.raises(click.BadParameter, match="it is empty"):
                    param.type.convert("", param, None)
                seen += 1
    assert seen > 40


def test_no_folder_named_tilde_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    env = {"HOME": str(tmp_path), "DS4Q_HOME": "~/home", "DS4Q_REGISTRY_LIST_MODELS_DIR": "~/m"}
    found = json.loads(CliRunner().invoke(main, ["registry", "list", "--json"], env=env).stdout)
    assert found["models_dir"] == str(tmp_path / "m")
    env = {"HOME": str(tmp_path), "DS4Q_REGISTRY_URL": "~/none.json"}
    said = CliRunner().invoke(main, ["registry", "list"], env=env)
    assert f"{tmp_path}/none.json: No such file" in said.stderr
    said = CliRunner().invoke(main, ["registry", "list", "--registry=~/none.json"], env=env)
    assert f"{tmp_path}/none.json: No such file" in said.stderr
    assert list((tmp_path / "here").iterdir()) == []


def ending_with(error: BaseException) -> Ds4q:
    """A group whose one command prints, then raises ``error``."""

    @click.command()
    @common.talk_options
    def broken(quiet: bool, verbose: bool) -> None:
        click.echo("so far")
        raise error

    group = Ds4q("ds4q")
    group.get_command = lambda ctx, cmd_name: broken  # type: ignore[method-assign]
    return group


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ArtifactError("bad row", path="a.hfq", tensor="t", expected=1, found=2, remedy="stop"),
            "a.hfq: t: bad row: expected 1, found 2; stop",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/o.hfq"),
            "out/o.hfq: No space left on device",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", b"a\xff"),
            r"a\xff: Permission denied",
        ),
        (OSError(errno.EXDEV, "Cross-device link", "a", None, "b"), "a -> b: Cross-device link"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("odd"), "odd"),
        (OSError(errno.EBADF, "Bad file descriptor", 7), "7: Bad file descriptor"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a\nb"), r"a\x0ab: No such file"),
        (MemoryError(), "out of memory"),
        (MemoryError("Unable to allocate 9 TiB"), "out of memory: Unable to allocate 9 TiB"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_is_one_line_and_1(error: Exception, line: str) -> None:
    result = CliRunner().invoke(ending_with(error), ["broken"])
    assert result.exit_code == 1
    assert result.stdout == "so far\n"
    assert result.stderr == f"ds4q: error: {line}\n"


def test_a_bug_is_one_line_and_a_traceback_only_with_v() -> None:
    group = ending_with(ZeroDivisionError("odd\nthing"))
    result = CliRunner().invoke(group, ["broken"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert r"internal error: ZeroDivisionError: odd\x0athing; this is a bug" in result.stderr
    loud = CliRunner().invoke(group, ["broken", "-v"])
    assert loud.exit_code == 1
    assert "Traceback (most recent call last)" in loud.stderr
    assert loud.stderr.splitlines()[-1].startswith("ds4q: error: internal error")


def test_a_stop_ends_with_its_last_words() -> None:
    for error, status, word in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (stops.Terminated(), 143, "terminated"),
    ):
        error.add_note("go on with: ds4q quantize --resume")
        result = CliRunner().invoke(ending_with(error), ["broken"])
        assert result.exit_code == status
        assert result.stderr == f"ds4q: {word}\ngo on with: ds4q quantize --resume\n"


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, (130, "interrupted")), (signal.SIGTERM, (143, "terminated"))],
)
def test_a_stop_while_the_command_line_is_read_is_the_same(
    monkeypatch: pytest.MonkeyPatch, number: int, said: tuple[int, str]
) -> None:
    def parse_args(self: Ds4q, ctx: click.Context, args: list[str]) -> list[str]:
        os.kill(os.getpid(), number)
        return args

    monkeypatch.setattr(Ds4q, "parse_args", parse_args)
    result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stderr.strip()) == (said[0], f"ds4q: {said[1]}")


def test_a_command_picks_its_own_status() -> None:
    result = CliRunner().invoke(ending_with(click.exceptions.Exit(3)), ["broken"])
    assert (result.exit_code, result.stderr) == (3, "")


def test_sigterm_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    CliRunner().invoke(main, ["--version"])
    assert signal.getsignal(signal.SIGTERM) is before


WAITING = """
import signal, sys, time
import click
from ds4q.cli import Ds4q, common

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests were started by

@click.command()
def wait():
    with common.last_words(lambda: "go on with: --resume"):
        print("ready", flush=True)
        time.sleep(60)

group = Ds4q("ds4q")
group.get_command = lambda ctx, name: wait
group(["wait"])
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_signals_to_a_real_process(number: signal.Signals, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=300)
    assert child.returncode == status
    assert out == ""
    assert err.splitlines()[-1] == "go on with: --resume"
    assert "Traceback" not in err


IMPORTING = """
import os, signal, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop())
sys.argv = ["ds4q", "inspect", "--help"]
from ds4q.__main__ import entry
entry()
"""


@pytest.mark.parametrize("module", ["click", "ds4q.cli.common", "ds4q.cli.inspect"])
def test_a_stop_while_it_is_imported_is_a_stop_like_any_other(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING.format(module=module)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ds4q: interrupted\n")


STUBBORN = WAITING.replace(
    'group(["wait"])', 'with stops.caught(to_the_end=True): group(["wait"])'
).replace(
    "import Ds4q, common",
    """import Ds4q, common
from ds4q.artifact import stops
import threading
threading.Thread(target=time.sleep, args=(1.0,)).start()  # the process ends when this has""",
)


def test_a_second_ctrl_c_tears_no_traceback_out_of_the_clean_up() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        said = [child.stderr.readline() for _ in range(2)]
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
        child.wait(300)
    assert said == ["ds4q: interrupted\n", "go on with: --resume\n"]
    assert (child.returncode, rest) == (130, "")


def test_a_stopped_command_leaves_the_handlers_of_a_program_that_called_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    group = Ds4q("ds4q")
    monkeypatch.setattr(group, "get_command", lambda ctx, name: stop)
    with pytest.raises(SystemExit) as caught:
        group(["stop"])
    assert caught.value.code == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@click.command()
def stop() -> None:
    raise KeyboardInterrupt


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for arguments in (["doctor"], ["--help"]):
            done = subprocess.run(
                [*DS4Q, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True
            )
            assert (done.returncode, done.stderr) == (1, ""), arguments
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])  # of containers, say
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["inspect", "--help"],
        ["doctor"],
        ["doctor", "--json"],
        ["inspect", "FILE"],
        ["inspect", "FILE", "--json"],
        ["verify", "FILE"],
        ["registry", "list"],
    ],
    ids=" ".join,
)
def test_a_full_disk_under_stdout_is_an_error(
    tmp_path: Path, arguments: list[str], unbuffered: str
) -> None:
    file = str(write_artifact(tmp_path / "a.hfq", {}))
    words = [file if word == "FILE" else word for word in arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*DS4Q, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    said = "standard output cannot be written: No space left on device"
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, [f"ds4q: error: {said}"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stderr_keeps_the_status() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*DS4Q, "nosuch"], stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("closed", [0, 2])
def test_a_closed_stdin_or_stderr_does_not_matter(closed: int) -> None:
    command = f"exec {closed}>&-; exec {sys.executable} -m ds4q doctor --json"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize("arguments", ["doctor --json", "doctor", "--help", "run --help"])
def test_results_for_a_closed_stdout_are_an_error(arguments: str) -> None:
    command = f"exec {sys.executable} -m ds4q {arguments} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "ds4q: error: standard output cannot be written: Bad file descriptor\n"


def test_a_closed_stdout_does_not_matter_without_results() -> None:
    command = f"exec {sys.executable} -m ds4q nosuch >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such command" in done.stderr


def test_an_opened_file_never_becomes_a_standard_stream(tmp_path: Path) -> None:
    program = """
import os, sys
import click
from ds4q.cli import Ds4q

@click.command()
def write():
    with open(sys.argv[1], "w") as file:
        file.write(str(file.fileno()))
        os.write(2, b"noise of a library")

group = Ds4q("ds4q")
group.get_command = lambda ctx, name: write
group(["write"])
"""
    out = tmp_path / "number"
    command = f"exec 2>&-; exec {sys.executable} -c '{program}' {out}"
    assert subprocess.run(["bash", "-c", command]).returncode == 0
    assert int(out.read_text()) > 2


def test_options_come_from_the_environment() -> None:
    result = CliRunner().invoke(main, ["doctor"], env={"DS4Q_DOCTOR_JSON": "1"})
    assert json.loads(result.stdout)["ds4q"] == ds4q.__version__
    refused = CliRunner().invoke(main, ["run", "x.hfq"], env={"DS4Q_RUN_MAX_TOKENS": "0"})
    assert refused.exit_code == 2
    assert "--max-tokens" in refused.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_environment_names_options_as_the_command_line_does(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for option in command.params:
        if isinstance(option, click.Option):
            flag = str(option.envvar).removeprefix(f"DS4Q_{name.upper()}_").lower()
            assert "--" + flag.replace("_", "-") in option.opts


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_answers_help(name: str) -> None:
    for flag in ("-h", "--help"):
        result = CliRunner().invoke(main, [name, flag])
        assert result.exit_code == 0, result.output
        assert result.output.startswith(f"Usage: ds4q {name} ")
        # The line of the list and the page that it leads to speak of the same thing.
        assert f"\n\n  {COMMANDS[name].split()[0]} " in result.output
