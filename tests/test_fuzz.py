"""Mutated files of every kind that ds4q reads: each is read or refused by name, soon, in bounds.

A reader may raise ``Ds4qError`` or ``OSError`` and nothing else. What reads a server's answer may
also ask for another try, what reads a client's request may refuse it. Digests are put right again
behind a mutation where a format has its own, so that mutations reach what lies behind the digest.
"""

from __future__ import annotations

import copy
import json
import random
import re
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
import zstandard
from click.testing import CliRunner

from ds4q import api
from ds4q.artifact.check import check_structure
from ds4q.artifact.errors import Ds4qError
from ds4q.artifact.files import claim
from ds4q.artifact.hfq import Reader
from ds4q.artifact.receipt import read_receipt, receipt_path
from ds4q.artifact.report import Check
from ds4q.cli import main
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.config import check_generation
from ds4q.quantize.grid import ExpertDims
from ds4q.quantize.imatrix import read_imatrix
from ds4q.quantize.inventory import check_inventory
from ds4q.quantize.journal import read_journal
from ds4q.quantize.outputs import is_plan
from ds4q.quantize.rules import load_recipe
from ds4q.registry import hub
from ds4q.registry.document import read_whole
from ds4q.registry.entries import read_document
from ds4q.registry.remote import TryAgain
from ds4q.runtime.config import parse_config
from ds4q.runtime.experts.adapter import read_adapter
from ds4q.runtime.experts.profile import read_profile
from ds4q.runtime.experts.trace import read_trace
from ds4q.runtime.gates import baseline as baselines
from ds4q.runtime.gates import prompts
from ds4q.runtime.gates.quotient import Series
from ds4q.runtime.serve.refusal import Refusal
from ds4q.runtime.text.tokenizer import Tokenizer
from tests.artifact.build import File, Tensor
from tests.quantize.imatrix import files as imatrices
from tests.runtime.serve.served import MODEL
from tests.wired import App, Wired, wired_app

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
TINY = DATA / "ds4-tiny"
SEED = 20261201
EXECUTIONS = 1100  # of each kind
LONGEST_S = 10.0
MOST_GROWTH_KIB = 400 << 10

ODD = [
    b"0", b"-1", b"1e400", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"1.5",
    b"18446744073709551616", b"2147483647", b'"\\ud800"', b"[" * 400,
    b"1" + b"0" * 400, b"-1" + b"0" * 400, b"1" * 5000, b"0x" + b"f" * 5000,
]  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 2**31, 2**63, 10**400, "", "\ud83d", "\0", "x" * 5000, [], {},
    [[]], {"a": {}}, ["a"] * 50, "user", "tool", "function", "auto",
]  # fmt: skip
_VALUE = re.compile(rb'-?\d+(?:\.\d+)?|"[^"\\]{0,40}"|true|false|null')


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, lengths, repeated or lost pieces, odd values for values."""
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(7)
        at = rng.randrange(len(raw) + 1)
        size = rng.choice((1, 2, 4, 8, 64, 4096))
        if kind == 0 and raw:
            at = min(at, len(raw) - 1)
            raw = raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
        elif kind == 1:
            raw = raw[:at]
        elif kind == 2:
            raw = raw[:at] + raw[at + size :]
        elif kind == 3:
            raw = raw[:at] + raw[at : at + size] + raw[at:]
        elif kind == 4:
            raw = raw[:at] + rng.choice((b"\xff", b"\0", b"\x7f")) * size + raw[at + size :]
        elif kind == 5:
            raw = raw[:at] + rng.randbytes(size) + raw[at:]
        else:
            window = raw[at : at + 2000]
            found = list(_VALUE.finditer(window))
            if found:
                one = rng.choice(found)
                raw = raw[: at + one.start()] + rng.choice(ODD) + raw[at + one.end() :]
    return raw


def mutate_json(raw: bytes, rng: random.Random) -> bytes:
    """As ``mutate``, or one to four values lost, doubled or replaced, and the rest legal JSON."""
    if rng.random() < 0.3:
        return mutate(raw, rng)
    whole = [json.loads(raw)]  # in a list, so that the document itself has a place, too
    for _ in range(rng.randint(1, 4)):
        held, key = rng.choice(list(_places(whole)))
        kind = rng.randrange(6)
        if kind == 0 and held is not whole:
            del held[key]
        elif kind == 1 and isinstance(held, list):
            held.insert(0, copy.deepcopy(held[key]))
        elif kind == 2 and isinstance(held, dict):
            held[rng.choice(("x", "n", "name", "type", "content", "prompt"))] = held.pop(key)
        else:
            held[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return json.dumps(whole[0]).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a document with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


@dataclass(frozen=True)
class Kind:
    """A kind of file: its legal bytes, how it is read, how digests are put right, in its folder."""

    seed: bytes
    read: Callable[[Path], object]
    name: str = "x"
    seal: Callable[[bytes], bytes] = bytes
    mutate: Callable[[bytes, random.Random], bytes] = mutate


def _invoke(*words: str | Path) -> None:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0, result.output


def _journal(folder: Path) -> bytes:
    """The journal of a job that was stopped."""
    count = 0

    @contextmanager
    def stopping(label: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(amount: int) -> None:
            nonlocal count
            count += 1
            if count > 40:
                raise KeyboardInterrupt

        yield advance

    with pytest.raises(KeyboardInterrupt):
        api.quantize(TINY, folder / "stopped.hfq", recipe="mix", progress=stopping)
    return (folder / "stopped.hfq.journal").read_bytes()


def _seal_journal(raw: bytes) -> bytes:
    lines = (line.partition(b" ")[2] for line in raw.split(b"\n") if line)
    return b"".join(xxhash.xxh3_64_hexdigest(t).encode() + b" " + t + b"\n" for t in lines)


def _foreign(path: Path) -> bytes:
    """The front of an artifact without digests of its own, and payloads of zeros."""
    with Reader(path) as reader:
        tensors = [
            Tensor(e.name, e.type_id, e.shape, e.group_size, bytes(e.nbytes))
            for e in reader.tensors.values()
            if e.nbytes < 1 << 14
        ]
        kept = {k: v for k, v in reader.metadata.items() if k not in ("ds4q", "tokenizer")}
    kept.pop("hipfire_quant_recipe", None)
    return File(tensors=tensors, metadata=json.dumps(kept).encode()).data()


def _artifact(path: Path) -> None:
    with Reader(path) as reader:
        for look in (check_structure, check_inventory):
            look(reader, Check("fuzz"))


def _in_model(path: Path) -> None:
    """Open the model whose folder holds the mutated file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Checkpoint.open(path.parent, allow_partial=True).close()


def _object(judge: Callable[[dict[str, Any], Path], object]) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return  # what is not JSON never reaches a judge
        if isinstance(document, dict):
            judge(document, path)

    return read


def _plan_report(path: Path) -> None:
    """Nothing reads a report of a budget but what asks whether it may be replaced."""
    claim(path, is_plan)


RANGE = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 206 Partial Content\r\nServer: x/1.0\r\nDate: Tue, 01 Dec 2026 08:00:00 GMT\r\n"
    b'Content-Type: application/octet-stream\r\nETag: "5f-a"\r\nContent-Encoding: identity\r\n'
    b"Last-Modified: Tue, 01 Dec 2026 08:00:00 GMT\r\nContent-Range: bytes 0-63/1000\r\n"
    b"Content-Length: 64\r\nConnection: keep-alive\r\n\r\n" + bytes(range(64))
)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
    b"5\r\nhello\r\n1a;name=value\r\nabcdefghijklmnopqrstuvwxyz\r\n0\r\nX-Sum: 12\r\n\r\n"
)
REDIRECT = (
    b"HTTP/1.1 302 Found\r\nLocation: http://localhost:80/b.fp4?x=1#y\r\nContent-Length: 0\r\n\r\n"
)
FAULTS = (
    b"HTTP/1.1 503 Busy\r\nRetry-After: 120\r\nX-Error-Message: busy\r\nContent-Length: 0\r\n\r\n"
)
HUB = {
    "sha": "a" * 40,
    "siblings": [
        {"rfilename": "a.fp4", "size": 10, "lfs": {"sha256": "b" * 64, "size": 10}},
        {"rfilename": "README.md", "size": 3, "blobId": "c"},
    ],
}


def _sent(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


def _lane(*more: bytes) -> Callable[[Path], None]:
    """Have a lane read the bytes as a server's answer, and ``more`` as those that follow."""

    def read(path: Path) -> None:
        lane = Wired(path.read_bytes(), *more).lane()
        try:
            answer = lane.open(0, 64, "")
            while answer.read(1 << 16):
                pass
        finally:
            lane.reset()

    return read


def _hub(path: Path) -> None:
    wired = Wired(path.read_bytes())
    with mock.patch.object(hub, "Remote", return_value=wired):
        hub.look_up("owner/name", None)


def _remote_document(path: Path) -> None:
    raw = read_whole(Wired(path.read_bytes()), most_bytes=1 << 20, within_s=LONGEST_S)
    read_document(raw, "a registry")


CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Wie spät ist es?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ],
    "tool_choice": "auto",
    "thinking": {"type": "disabled"},
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "text"},
}  # fmt: skip
COMPLETION = {
    "model": MODEL,
    "prompt": [1, 5, 9],
    "max_tokens": 8,
    "temperature": 0,
    "seed": 1,
    "stop": "x",
    "stream": False,
    "echo": False,
    "logprobs": 2,
}  # fmt: skip
REQUEST = (
    b"GET /v1/models/scripted?x=%41 HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\n"
    b"Authorization: Bearer abc\r\nOrigin: http://localhost:8000\r\nSec-Fetch-Site: same-origin\r\n"
    b"Sec-Fetch-Mode: cors\r\nContent-Length: 0\r\nUser-Agent: x\r\nCookie: a=b\r\n\r\n"
)


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with wired_app() as app:
        yield app


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, app: App) -> dict[str, Kind]:
    folder = tmp_path_factory.mktemp("seeds")
    mix = folder / "mix.hfq"
    api.quantize(TINY, mix, recipe="mix")
    api.quantize(TINY, folder / "budget.hfq", recipe="budget", target_bpw=3.0)
    trace, states = folder / "a.trace", folder / "b.trace"
    for path, more in ((trace, ()), (states, ("--trace-states",))):
        words = ("run", mix, "--prompt-ids", "1,5,9,13", "--max-tokens", "24", "--temp", "0", "-q")
        _invoke(*words, "--expert-cache", "2MiB", "--trace", path, *more)
    _invoke("cache", "profile", trace, "-o", folder / "profile")
    _invoke("adapter", "train", states, "-o", folder / "adapter", "-q")
    journal = _journal(folder)
    receipt = receipt_path(mix).read_bytes()
    text = zstandard.ZstdDecompressor().decompress(receipt)
    packer = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True)
    shard = min(TINY.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    legacy = [(name, 4, vector) for name, vector in imatrices.legacy_vectors().items()]
    series = Series(*([0.5 + number / 100 for number in range(14)] for _ in Series._fields))
    kept = dict.fromkeys(baselines.ARMS, baselines.Kept(series, 10, 1 << 20))
    ids = {prompt: [1, 2, 3] for prompt in baselines.PROMPTS}
    baselines.write(folder / "baseline", {"threads": 1}, kept, ids)
    lines = b'{"text": "Hello"}\n{"ids": [1, 2, 3]}\n'
    dims = ExpertDims(4, 16, 256, 128)

    encoder = Tokenizer((TINY / "tokenizer.json").read_text(encoding="utf-8"))

    def read_prompts(path: Path) -> None:
        prompts.read(path, tokenizer=encoder, vocab_size=512, positions=128)

    def recipe(path: Path) -> None:
        load_recipe(path, dims)

    def imatrix(path: Path) -> None:
        read_imatrix(path, dims=None, fingerprint=None)

    identity = read_trace(trace).header.model

    def profile(path: Path) -> None:
        read_profile(path, identity, 4, 16)

    def document(path: Path) -> None:
        read_document(path.read_bytes(), str(path))

    def tokenizer(path: Path) -> None:
        try:
            held = path.read_bytes().decode()
        except UnicodeDecodeError:
            return
        Tokenizer(held, path=path)

    def posted(endpoint: str) -> Callable[[Path], None]:
        return lambda path: app.post(endpoint, path.read_bytes())

    def requested(path: Path) -> None:
        app.request(path.read_bytes())

    config = _object(lambda found, path: parse_config(found, path=path))
    generation = _object(lambda found, path: check_generation(found, {"vocab_size": 512}, path))
    registry = (DATA.parents[1] / "registry" / "registry.json").read_bytes()
    return {
        "hfq": Kind(mix.read_bytes()[: 1 << 17], _artifact),
        "hfq-foreign": Kind(_foreign(mix), _artifact),
        "receipt": Kind(receipt, read_receipt),
        "receipt-text": Kind(text, read_receipt, seal=packer.compress),
        "journal": Kind(journal, read_journal),
        "journal-text": Kind(journal, read_journal, seal=_seal_journal),
        "safetensors": Kind(shard.read_bytes()[: 1 << 16], _in_model, name=shard.name),
        "index": Kind(
            (TINY / "model.safetensors.index.json").read_bytes(),
            _in_model,
            name="model.safetensors.index.json",
            mutate=mutate_json,
        ),
        "config": Kind(
            (TINY / "config.json").read_bytes(), _in_model, name="config.json", mutate=mutate_json
        ),
        "config-parsed": Kind((TINY / "config.json").read_bytes(), config, mutate=mutate_json),
        "generation": Kind(
            (TINY / "generation_config.json").read_bytes(), generation, mutate=mutate_json
        ),
        "tokenizer": Kind((TINY / "tokenizer.json").read_bytes(), tokenizer, mutate=mutate_json),
        "recipe": Kind((folder / "budget.hfq.plan.toml").read_bytes(), recipe),
        "imatrix-own": Kind(imatrices.own(imatrices.tensors()), imatrix),
        "imatrix-gguf": Kind(imatrices.gguf(imatrices.gguf_tensors()), imatrix),
        "imatrix-legacy": Kind(imatrices.legacy(legacy), imatrix),
        "trace": Kind(trace.read_bytes(), read_trace),
        "profile": Kind((folder / "profile").read_bytes(), profile),
        "adapter": Kind((folder / "adapter").read_bytes(), read_adapter),
        "baseline": Kind(
            (folder / "baseline").read_bytes(), baselines.Baseline.read, mutate=mutate_json
        ),
        "prompts": Kind(lines, read_prompts),
        "registry": Kind(registry, document, mutate=mutate_json),
        "plan-report": Kind((folder / "budget.hfq.plan.json").read_bytes()[:100], _plan_report),
        "answer-range": Kind(RANGE, _lane()),
        "answer-chunked": Kind(CHUNKED, _lane()),
        "answer-redirect": Kind(REDIRECT, _lane(RANGE)),
        "answer-busy": Kind(FAULTS, _lane()),
        "answer-hub": Kind(json.dumps(HUB).encode(), _hub, seal=_sent, mutate=mutate_json),
        "answer-registry": Kind(registry, _remote_document, seal=_sent, mutate=mutate_json),
        "request-head": Kind(REQUEST, requested),
        "request-chat": Kind(
            json.dumps(CHAT).encode(), posted("/v1/chat/completions"), mutate=mutate_json
        ),
        "request-completion": Kind(
            json.dumps(COMPLETION).encode(), posted("/v1/completions"), mutate=mutate_json
        ),
    }


NAMES = [
    "hfq", "hfq-foreign", "receipt", "receipt-text", "journal", "journal-text", "safetensors",
    "index", "config", "config-parsed", "generation", "tokenizer", "recipe", "imatrix-own",
    "imatrix-gguf", "imatrix-legacy", "trace", "profile", "adapter", "baseline", "prompts",
    "registry", "plan-report", "answer-range", "answer-chunked", "answer-redirect", "answer-busy",
    "answer-hub", "answer-registry", "request-head", "request-chat", "request-completion",
]  # fmt: skip
NAMED = (Ds4qError, OSError, TryAgain, Refusal)


def _place(kind: Kind, folder: Path) -> Path:
    """Where mutations of this kind go: a file alone, or one of a model's."""
    if kind.name == "x":
        return folder / "x"
    model = folder / "model"
    shutil.copytree(TINY, model)
    return model / kind.name


@pytest.mark.parametrize("name", NAMES)
def test_every_mutation_is_read_or_refused_by_name(
    kinds: dict[str, Kind], tmp_path: Path, name: str
) -> None:
    assert kinds.keys() == set(NAMES)
    assert len(NAMES) * EXECUTIONS >= 20_000
    kind, rng = kinds[name], random.Random(f"{SEED} {name}")
    path = _place(kind, tmp_path)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(EXECUTIONS):
        raw = kind.seal(kind.mutate(kind.seed, rng))
        path.unlink(missing_ok=True)
        path.write_bytes(raw)
        begin = time.monotonic()
        try:
            kind.read(path)
        except NAMED:
            refused += 1
        except Exception as error:
            error.add_note(f"{name}, mutation {number}: {raw[:200]!r}")
            raise
        assert time.monotonic() - begin < LONGEST_S, number
    assert refused > EXECUTIONS // 20
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < MOST_GROWTH_KIB


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"hfq", "safetensors", "answer-busy"}))
def test_an_unmutated_file_is_read(kinds: dict[str, Kind], tmp_path: Path, name: str) -> None:
    kind = kinds[name]
    path = _place(kind, tmp_path)
    raw = kind.seal(kind.seed)
    path.write_bytes(raw)
    kind.read(path)  # two of the others are cut short
    assert path.read_bytes() == raw
