"""ds4q run: options, output and exit statuses, against an engine that answers by a script."""

# ruff: noqa: RUF001 (the fullwidth bars of the control tokens are meant)

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ds4q.artifact.stops import Terminated
from ds4q.cli import main
from ds4q.cli.run import DEFAULT_MAX_TOKENS
from ds4q.runtime.engine import checked_config

DS4Q = [sys.executable, "-m", "ds4q"]
TINY = Path(__file__).parents[1] / "data" / "ds4-tiny"
EOS = 257
VOCAB = 512
CHAT_HI = [256, 258, *b"hi", 259, 261]
THINK_HI = [256, 258, *b"hi", 259, 260]


def write_artifact(path: Path, metadata: dict[str, Any]) -> Path:
    """An HFQ file without tensors: enough for whatever looks at the metadata only."""
    body = json.dumps(metadata).encode() + struct.pack("<I", 0)
    data_offset = -(-(32 + len(body)) // 4096) * 4096
    header = struct.pack("<4sIIIQQ", b"HFQM", 1, 9, 0, 32, data_offset)
    path.write_bytes((header + body).ljust(data_offset, b"\0"))
    return path


@pytest.fixture
def metadata() -> dict[str, Any]:
    return {
        "config": json.loads((TINY / "config.json").read_text(encoding="utf-8")),
        "tokenizer": (TINY / "tokenizer.json").read_text(encoding="utf-8"),
        "generation_config": {"eos_token_id": EOS, "temperature": 0.7},
    }


@pytest.fixture
def artifact(tmp_path: Path, metadata: dict[str, Any]) -> str:
    return str(write_artifact(tmp_path / "model.hfq", metadata))


@pytest.fixture
def bare_artifact(tmp_path: Path, metadata: dict[str, Any]) -> str:
    return str(write_artifact(tmp_path / "bare.hfq", metadata | {"tokenizer": "{}"}))


class Engine:
    """Answers with a script, and remembers how it was loaded and what it was fed."""

    def __init__(self, answers: Sequence[int | BaseException]) -> None:
        self.vocab_size = VOCAB
        self.max_context = 1000
        self.answers: Iterator[int | BaseException] = iter(answers)
        self.fed: list[list[int]] = []
        self.threads = 0
        self.options: dict[str, Any] = {}
        self.notes: list[str] = []
        self.load_s = {"open": 0.25}

    def load(
        self,
        path: Path,
        *,
        threads: int,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Engine:
        self.threads, self.options = threads, options
        return self

    def cache_counters(self) -> None:
        return None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def new_state(self) -> None:
        return None

    def forward(self, state: None, ids: Sequence[int], logits: str = "last") -> Any:
        self.fed.append(list(ids))
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        out = np.zeros((1, VOCAB), dtype=np.float32)
        out[0, answer] = 100 if answer >= 0 else np.nan
        return out


Answer = Callable[..., Engine]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Makes ``ds4q run`` load an engine that answers with the given tokens."""

    def install(*answers: int | BaseException) -> Engine:
        engine = Engine(answers)
        module = types.ModuleType("ds4q.runtime.engine")
        module.Engine = engine  # type: ignore[attr-defined]
        module.checked_config = checked_config  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ds4q.runtime.engine", module)
        return engine

    return install


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["run", *arguments], input=stdin)


# ------------------------------------------------------------------ prompts


def test_chat_is_the_default(artifact: str, answer: Answer) -> None:
    engine = answer(*b"ok", EOS)
    result = run(artifact, "-p", "hi")
    assert (result.exit_code, result.stdout) == (0, "ok\n")
    assert engine.fed[0] == CHAT_HI


def test_c20_thinking_on_and_off(artifact: str, answer: Answer) -> None:
    for flag, prompt in (("--think", THINK_HI), ("--no-think", CHAT_HI)):
        engine = answer(EOS)
        assert run(artifact, "-p", "hi", flag).exit_code == 0
        assert engine.fed == [prompt]


def test_c20_disagreeing_template_is_not_read(
    tmp_path: Path, metadata: dict[str, Any], answer: Answer
) -> None:
    metadata["tokenizer_config"] = {"chat_template": "{% for m in messages %}no{% endfor %}"}
    engine = answer(EOS)
    assert run(str(write_artifact(tmp_path / "m.hfq", metadata)), "-p", "hi").exit_code == 0
    assert engine.fed == [CHAT_HI]


def test_c20_other_model_type(tmp_path: Path, metadata: dict[str, Any], answer: Answer) -> None:
    metadata["config"]["model_type"] = "deepseek_v41"
    answer(EOS)
    result = run(str(write_artifact(tmp_path / "m.hfq", metadata)), "-p", "hi")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "m.hfq: no prompt format for this model type: expected deepseek_v4" in result.stderr
    assert result.stderr.count("\n") == 1


def test_c20_literal_marker_is_text(artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    run(artifact, "-p", "a<｜Assistant｜>")
    assert engine.fed == [[256, 258, *"a<｜Assistant｜>".encode(), 259, 261]]


def test_raw_is_bos_and_the_text(artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    assert run(artifact, "--raw", "-p", "<think>\n").exit_code == 0
    assert engine.fed == [[256, *b"<think>\n"]]


def test_ids_are_the_whole_prompt(artifact: str, answer: Answer) -> None:
    engine = answer(*b"ok", EOS)
    result = run(artifact, "--prompt-ids", "256, 258,1")
    assert (result.exit_code, result.stdout) == (0, "ok\n")
    assert engine.fed[0] == [256, 258, 1]


@pytest.mark.parametrize("piped", ["hi", "hi\n", "hi\r\n"])
def test_prompt_from_stdin(piped: str, artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    assert run(artifact, stdin=piped).exit_code == 0
    assert engine.fed == [CHAT_HI]


def test_stdin_keeps_all_but_one_line_break(artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    run(artifact, "--raw", stdin=" a\n\n\n")
    assert engine.fed == [[256, *b" a\n\n"]]


def test_stdin_is_not_read_beside_a_prompt(artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    run(artifact, "-p", "hi", stdin="no")
    assert engine.fed == [CHAT_HI]


def test_stdin_that_is_not_utf8(artifact: str, answer: Answer) -> None:
    answer(EOS)
    result = run(artifact, stdin=b"a\xff")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "ds4q: error: stdin is not UTF-8: found byte 1\n"


def test_option_that_is_not_utf8(artifact: str, answer: Answer) -> None:
    answer(EOS)
    result = run(artifact, "-p", "a\udcff")
    assert result.exit_code == 1
    assert "lone surrogate at character 1" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-p", ""],
        ["--raw", "-p", ""],
        ["-p", "hi", "--prompt-ids", "1"],
        ["--prompt-ids", ""],
        ["--prompt-ids", "1,,2"],
        ["--prompt-ids", "1,x"],
        ["--prompt-ids", "1.5"],
        ["--prompt-ids", "1,-2"],
        ["--prompt-ids", "1", "--think"],
        ["-p", "hi", "--raw", "--think"],
        ["-p", "hi", "--max-tokens", "0"],
        ["-p", "hi", "--max-tokens", "-1"],
        ["-p", "hi", "--temp", "-1"],
        ["-p", "hi", "--temp", "nan"],
        ["-p", "hi", "--temp", "inf"],
        ["-p", "hi", "--top-p", "0"],
        ["-p", "hi", "--top-p", "1.5"],
        ["-p", "hi", "--top-p", "nan"],
        ["-p", "hi", "--seed", "-1"],
        ["-p", "hi", "--device", "gpu"],
        ["-p", "hi", "--threads", "0"],
        ["-p", "hi", "--stats", "no/such/folder/s.json"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str], artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    result = run(artifact, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert engine.fed == []


def test_no_prompt_says_what_to_give(artifact: str) -> None:
    result = run(artifact, stdin="\n")
    assert result.exit_code == 2
    assert "no prompt: give -p TEXT or --prompt-ids, or pipe text into stdin" in result.stderr


def test_terminal_without_a_prompt_is_not_waited_for(artifact: str) -> None:
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(
            [*DS4Q, "run", artifact], stdin=theirs, capture_output=True, text=True, timeout=300
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no prompt: give -p TEXT" in done.stderr


def test_id_outside_the_vocabulary(artifact: str, answer: Answer) -> None:
    answer(EOS)
    result = run(artifact, "-q", "--prompt-ids", "1,512")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "token 1 of the prompt is not in the vocabulary" in result.stderr


def test_missing_file_and_other_files(tmp_path: Path) -> None:
    other = tmp_path / "other.hfq"
    other.write_bytes(b"GGUF" + bytes(100))
    for file in (tmp_path / "no.hfq", other, tmp_path):
        result = run(str(file), "-p", "hi")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"ds4q: error: {file}: ")
        assert result.stderr.count("\n") == 1


# ------------------------------------------------------------------ without a tokenizer


def test_ids_without_a_tokenizer_are_printed(bare_artifact: str, answer: Answer) -> None:
    answer(5, 300, EOS)
    result = run(bare_artifact, "--prompt-ids", "1,2", "--temp", "0")
    assert (result.exit_code, result.stdout) == (0, f"5,300,{EOS}\n")


def test_text_without_a_tokenizer_is_refused(bare_artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    for arguments in (["-p", "hi"], ["--raw", "-p", "hi"], ["--think", "-p", "hi"]):
        result = run(bare_artifact, *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.count("\n") == 1
        assert "has no tokenizer" in result.stderr
        assert "--prompt-ids" in result.stderr
    assert engine.threads == 0  # refused before the weights were read


def test_json_without_a_tokenizer(bare_artifact: str, answer: Answer) -> None:
    answer(5, EOS)
    document = json.loads(run(bare_artifact, "--prompt-ids", "1", "--json").stdout)
    assert (document["text"], document["ids"]) == (None, [5, EOS])


# ------------------------------------------------------------------ generation


def test_max_tokens(artifact: str, answer: Answer) -> None:
    answer(*b"abcdef")
    document = json.loads(run(artifact, "-p", "hi", "--max-tokens", "3", "--json").stdout)
    assert (document["text"], document["finish_reason"]) == ("abc", "length")


def test_max_tokens_default_is_documented(artifact: str, answer: Answer) -> None:
    answer(*[97] * 2000)
    document = json.loads(run(artifact, "--prompt-ids", "1", "--ignore-eos", "--json").stdout)
    assert document["usage"]["completion_tokens"] == min(DEFAULT_MAX_TOKENS, 999)
    assert f"[default: {DEFAULT_MAX_TOKENS};" in run("--help").stdout


def test_prompt_that_fills_the_context(artifact: str, answer: Answer) -> None:
    answer(EOS)
    result = run(artifact, "-p", "x" * 1000)
    assert result.exit_code == 1
    assert "the prompt fills the context" in result.stderr


def test_prompt_that_fills_the_model_s_context_is_refused_before_weights_are_read(
    small: str, answer: Answer
) -> None:
    engine = answer(EOS)
    result = run(small, "--raw", "-p", "x" * 19)
    assert result.exit_code == 1
    assert "the prompt fills the context: expected fewer than 20 tokens, found 20" in result.stderr
    assert engine.threads == 0


@pytest.fixture
def small(tmp_path: Path, metadata: dict[str, Any]) -> str:
    """A model of 20 positions, each token of which is a byte."""
    metadata["config"]["max_position_embeddings"] = 20
    return str(write_artifact(tmp_path / "small.hfq", metadata))


def test_no_more_of_stdin_is_read_than_can_be_a_prompt(small: str, answer: Answer) -> None:
    engine = answer(EOS)
    piped = io.BytesIO(b"x" * 1000)
    result = CliRunner().invoke(main, ["run", small, "--raw"], input=piped)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        "ds4q: error: stdin holds more than a context of 20 tokens can: "
        "expected at most 20 bytes; shorten the prompt\n"
    )
    assert piped.tell() == 21
    assert engine.threads == 0


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_longest_prompt_of_stdin_is_taken(small: str, answer: Answer, end: str) -> None:
    engine = answer(97, EOS)
    result = run(small, "--raw", stdin="x" * 18 + end)
    assert (result.exit_code, result.stdout) == (0, "a\n")
    assert len(engine.fed[0]) == 19


def test_stdin_has_no_end_where_tokens_have_none(
    tmp_path: Path, metadata: dict[str, Any], answer: Answer
) -> None:
    parsed = json.loads(metadata["tokenizer"])
    shrinking = {"type": "Replace", "pattern": {"String": "x"}, "content": ""}
    metadata["tokenizer"] = json.dumps(parsed | {"normalizer": shrinking})
    metadata["config"]["max_position_embeddings"] = 20
    engine = answer(EOS)
    file = str(write_artifact(tmp_path / "m.hfq", metadata))
    assert run(file, "--raw", stdin="x" * 1000 + "a").exit_code == 0
    assert engine.fed == [[256, *b"a"]]


def test_ignore_eos(artifact: str, answer: Answer) -> None:
    answer(97, EOS, 98)
    result = run(artifact, "-p", "hi", "--ignore-eos", "--max-tokens", "3")
    assert result.stdout == "ab\n"


def test_sampling_options_win_over_the_file(artifact: str, answer: Answer) -> None:
    answer(EOS)
    document = json.loads(run(artifact, "-p", "hi", "--json").stdout)
    assert document["sampling"]["temperature"] == 0.7
    assert document["sampling"]["top_p"] == 1.0
    answer(EOS)
    options = ["--temp", "0", "--top-p", "0.5", "--seed", "9"]
    document = json.loads(run(artifact, "-p", "hi", *options, "--json").stdout)
    assert document["sampling"] == {
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 9,
        "not_applied": [],
    }


def test_settings_of_the_file_that_are_not_applied_are_named(
    tmp_path: Path, metadata: dict[str, Any], answer: Answer
) -> None:
    metadata["generation_config"] |= {"top_k": 20, "repetition_penalty": 1.05, "min_p": 0}
    file = str(write_artifact(tmp_path / "m.hfq", metadata))
    answer(EOS)
    result = run(file, "-p", "hi", "--json")
    expected = ["repetition_penalty 1.05", "top_k 20"]
    assert json.loads(result.stdout)["sampling"]["not_applied"] == expected
    assert result.stderr.count(f"settings are not applied: {', '.join(expected)}") == 1


def test_an_option_wins_over_a_setting_that_cannot_be(
    tmp_path: Path, metadata: dict[str, Any], answer: Answer
) -> None:
    metadata["generation_config"] |= {"temperature": "x", "top_p": 10**400}
    file = str(write_artifact(tmp_path / "m.hfq", metadata))
    for options in ([], ["--temp", "0"], ["--top-p", "1"]):
        result = run(file, "-p", "hi", *options)
        assert result.exit_code == 1
        assert f"ds4q: error: {file}: generation_config." in result.stderr
        assert "--temp, --top-p" in result.stderr
    answer(EOS)
    assert run(file, "-p", "hi", "--temp", "0", "--top-p", "1").exit_code == 0
    metadata["generation_config"]["eos_token_id"] = 10**400
    write_artifact(Path(file), metadata)
    says = f"ds4q: error: {file}: generation_config key eos_token_id: expected a token id below"
    assert says in run(file, "-p", "hi", "--temp", "0", "--top-p", "1").stderr


def test_each_run_draws_its_own_seed(artifact: str, answer: Answer) -> None:
    seeds = set()
    for _ in range(3):
        answer(EOS)
        seeds.add(json.loads(run(artifact, "-p", "hi", "--json").stdout)["sampling"]["seed"])
    assert len(seeds) == 3


def test_threads_reach_the_engine(artifact: str, answer: Answer) -> None:
    engine = answer(EOS)
    run(artifact, "-p", "hi", "--threads", "3")
    assert engine.threads == 3


def test_nan_logits_are_one_line_and_what_was_said_stays(artifact: str, answer: Answer) -> None:
    answer(97, -1)
    result = run(artifact, "-p", "hi", "-q")
    assert (result.exit_code, result.stdout) == (1, "a\n")
    assert result.stderr.startswith("ds4q: error: the model's logits are not finite")
    assert result.stderr.count("\n") == 1


# ------------------------------------------------------------------ output


def test_thinking_stands_between_its_tags(artifact: str, answer: Answer) -> None:
    answer(*b"why", 261, *b"so", EOS)
    assert run(artifact, "-p", "hi", "--think").stdout == "<think>why</think>\nso\n"
    answer(*b"why", 261, *b"so", EOS)
    document = json.loads(run(artifact, "-p", "hi", "--think", "--json").stdout)
    assert (document["reasoning"], document["text"]) == ("why", "so")


def test_thinking_that_does_not_end(artifact: str, answer: Answer) -> None:
    answer(*b"why</th")
    result = run(artifact, "-p", "hi", "--think", "--max-tokens", "7")
    assert result.stdout == "<think>why</th\n"
    answer(*b"why", 261, EOS)
    assert run(artifact, "-p", "hi", "--think").stdout == "<think>why</think>\n"


def test_text_that_ends_its_line_gets_no_second_one(artifact: str, answer: Answer) -> None:
    answer(*b"a\n", EOS)
    assert run(artifact, "-p", "hi").stdout == "a\n"


def test_c21_emoji_over_four_tokens(artifact: str, answer: Answer) -> None:
    answer(*"😀".encode(), 0xFF, 0xE4, EOS)
    assert run(artifact, "-p", "hi").stdout == "😀��\n"


def test_text_is_utf8_in_any_locale(artifact: str, answer: Answer) -> None:
    answer(*"é😀".encode(), EOS)
    result = CliRunner(charset="ascii").invoke(main, ["run", artifact, "-p", "hi"])
    assert (result.exit_code, result.stdout_bytes) == (0, "é😀\n".encode())


def test_json_is_one_document(artifact: str, answer: Answer) -> None:
    answer(*"é".encode(), EOS)
    result = run(artifact, "-p", "hi", "--json")
    document = json.loads(result.stdout)
    assert document["text"] == "é"
    assert document["reasoning"] is None
    assert document["ids"] == [*"é".encode(), EOS]
    assert document["finish_reason"] == "stop"
    assert document["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
    assert document["cache"] is None
    assert document["device"] == {"kind": "cpu"}
    assert set(document["timings"]) == {
        "load_s",
        "prefill_s",
        "first_token_s",
        "decode_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
    }


def test_statistics_go_to_stderr_unless_quiet(artifact: str, answer: Answer) -> None:
    answer(*b"ok", EOS)
    result = run(artifact, "-p", "hi")
    assert "prompt: 6 tokens in " in result.stderr
    assert "generated: 3 tokens, " in result.stderr
    assert "ended by: stop" in result.stderr
    assert "seed" not in result.stderr
    answer(EOS)
    assert "seed 5\n" in run(artifact, "-p", "hi", "-v", "--seed", "5").stderr
    answer(*b"ok", EOS)
    assert run(artifact, "-p", "hi", "-q").stderr == ""


def test_stats_file(artifact: str, answer: Answer, tmp_path: Path) -> None:
    answer(*b"ok", EOS)
    stats = tmp_path / "stats.json"
    result = run(artifact, "-p", "hi", "--stats", str(stats), "--json")
    written = json.loads(stats.read_text(encoding="utf-8"))
    document = json.loads(result.stdout)
    assert written == {
        key: value for key, value in document.items() if key not in ("text", "reasoning", "ids")
    }


# ------------------------------------------------------------------ stops


@pytest.mark.parametrize(
    ("stop", "status", "word"),
    [(KeyboardInterrupt(), 130, "interrupted"), (Terminated(), 143, "terminated")],
)
def test_stop_finishes_the_line_and_reports(
    stop: BaseException, status: int, word: str, artifact: str, answer: Answer, tmp_path: Path
) -> None:
    answer(*b"ab", 0xE4, stop)
    stats = tmp_path / "stats.json"
    result = run(artifact, "-p", "hi", "--stats", str(stats))
    assert (result.exit_code, result.stdout) == (status, "ab�\n")
    assert "generated: 3 tokens" in result.stderr
    assert "ended by: interrupt" in result.stderr
    assert result.stderr.endswith(f"ds4q: {word}\n")
    assert json.loads(stats.read_text(encoding="utf-8"))["finish_reason"] is None


def test_stop_before_the_first_token_reports_no_speed(artifact: str, answer: Answer) -> None:
    answer(KeyboardInterrupt())
    result = run(artifact, "-p", "hi")
    assert result.exit_code == 130
    assert "ended by: interrupt before the first token" in result.stderr
    assert "tokens/s" not in result.stderr


def test_bytes_behind_the_last_payload_are_spoken_of(artifact: str, answer: Answer) -> None:
    with open(artifact, "ab") as file:
        file.write(b"12345")
    answer(*b"ab")
    result = run(artifact, "-p", "hi", "--max-tokens", "2")
    assert result.exit_code == 0
    assert f"warning: {artifact}: 5 bytes follow the last payload" in result.stderr


def test_stop_with_json_is_still_one_document(artifact: str, answer: Answer) -> None:
    answer(*b"ab", 0xE4, KeyboardInterrupt())
    result = run(artifact, "-p", "hi", "--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert (document["text"], document["finish_reason"]) == ("ab�", None)


def test_stop_in_a_possible_tag_shows_what_was_held(artifact: str, answer: Answer) -> None:
    answer(*b"why</", KeyboardInterrupt())
    assert run(artifact, "-p", "hi", "--think").stdout == "<think>why</\n"


def test_nothing_heavy_is_imported_for_help() -> None:
    program = (
        "import sys\n"
        "from ds4q.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('\\n' + ' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "ds4q.cli.run" in loaded
    assert not loaded & {"numpy", "numba", "rich", "tokenizers", "zstandard", "xxhash"}
