"""Opening and reading a checkpoint: index, links, names, texts, reads, identity."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ds4q.quantize.checkpoint import Checkpoint, ShardInfo
from ds4q.quantize.errors import (
    ChangedSourceError,
    ConfigError,
    DuplicateNameError,
    FileKindError,
    IndexMismatchError,
    JsonFileError,
    LfsPointerError,
    MissingFileError,
    ShardNameError,
    SourceError,
    SourceReadError,
)
from ds4q.quantize.index import INDEX
from tests.quantize.builders import (
    RANDOM,
    TINY,
    listing_of,
    record,
    shard_bytes,
    write_index,
    write_model,
    write_shard,
)

ONE = "model-00001-of-00002.safetensors"
TWO = "model-00002-of-00002.safetensors"
W1 = "layers.0.ffn.experts.0.w1.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


def link_tree(source: Path, folder: Path) -> Path:
    """A copy of a test model whose files are links, so that one can be replaced cheaply."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def good(cases_dir: Path, tmp_path: Path) -> Path:
    """A private copy of the small two-shard folder."""
    return Path(shutil.copytree(cases_dir / "good", tmp_path / "good"))


def open_partial(path: Path) -> Checkpoint:
    return Checkpoint.open(path, allow_partial=True)


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("folder", [TINY, RANDOM], ids=lambda p: p.name)
def test_tensors_are_what_the_headers_say(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        found = {t.raw_name: (t.dtype, t.shape) for t in checkpoint.tensors.values()}
        assert found == listing_of(folder)
        assert list(checkpoint.tensors) == sorted(checkpoint.tensors)
        assert list(checkpoint.shards) == sorted(p.name for p in folder.glob("*.safetensors"))


def test_texts_are_read_where_they_are() -> None:
    with Checkpoint.open(TINY) as tiny, Checkpoint.open(RANDOM) as random:
        assert tiny.texts.tokenizer == (TINY / "tokenizer.json").read_text()
        assert tiny.texts.tokenizer_config is not None
        assert tiny.texts.generation_config is not None
        assert tiny.texts.chat_template is None
        assert tiny.warnings == []
        assert tiny.config["vocab_size"] == 512
        assert tiny.config_raw == (TINY / "config.json").read_bytes()
        assert random.texts.tokenizer is None
        assert random.warnings == ["tokenizer.json is absent: the model will run on token ids only"]


def test_chat_template_file_is_read(good: Path) -> None:
    (good / "chat_template.jinja").write_text("{{ messages }}")
    with open_partial(good) as checkpoint:
        assert checkpoint.texts.chat_template == "{{ messages }}"


def test_bytes_are_those_of_the_file() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        for tensor in list(checkpoint.tensors.values())[::40]:
            raw = (TINY / tensor.shard).read_bytes()
            want = raw[tensor.offset : tensor.offset + tensor.nbytes]
            assert checkpoint.read(tensor).tobytes() == want
            out = np.zeros(tensor.nbytes - 3, np.uint8)
            checkpoint.read_into(tensor, out, 2)
            assert out.tobytes() == want[2:-1]


def test_single_file_opens_with_what_lies_beside_it(cases_dir: Path) -> None:
    with open_partial(cases_dir / "c06_nibble.safetensors") as checkpoint:
        assert list(checkpoint.tensors) == [W1.replace("weight", "scale"), W1]
        assert checkpoint.config == {}
    with Checkpoint.open(TINY / "model-00001-of-00005.safetensors") as checkpoint:
        assert len(checkpoint.tensors) == 6
        assert checkpoint.config["model_type"] == "deepseek_v4"


def test_config_may_be_absent_only_from_a_part(cases_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json.*missing.*--allow-partial"):
        Checkpoint.open(cases_dir / "c06_nibble.safetensors")


def test_equal_bytes_read_equally_as_fp4_and_int8(cases_dir: Path) -> None:
    with (
        open_partial(cases_dir / "c03_f4_ok.safetensors") as packed,
        open_partial(cases_dir / "c03_i8_ok.safetensors") as bytewise,
    ):
        for name in ("w", "s"):
            left, right = packed.tensors[name], bytewise.tensors[name]
            assert packed.read(left).tobytes() == bytewise.read(right).tobytes()


# ---------------------------------------------------------------- what stands in the way


def test_path_must_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no-such"):
        Checkpoint.open(tmp_path / "no-such")
    with pytest.raises(MissingFileError):
        Checkpoint.open(tmp_path / ("x" * 5000))
    with pytest.raises(MissingFileError, match=r"no \.safetensors file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileKindError, match=r"one \.safetensors file"):
        Checkpoint.open(tmp_path / "model.gguf")


def test_pipe_in_place_of_a_shard_does_not_hang(good: Path) -> None:
    (good / ONE).unlink()
    os.mkfifo(good / ONE)
    with pytest.raises(FileKindError, match="not a regular file"):
        open_partial(good)


def test_folder_in_place_of_a_shard_is_refused(good: Path) -> None:
    (good / ONE).unlink()
    (good / ONE).mkdir()
    with pytest.raises(SourceError, match=ONE):
        open_partial(good)


@pytest.mark.parametrize("name", [ONE, "config.json", "tokenizer.json", INDEX])
def test_lfs_pointer_is_named_wherever_it_stands(good: Path, name: str) -> None:
    (good / name).write_bytes(POINTER)
    with pytest.raises(LfsPointerError, match=f"{name}.*git-lfs pointer.*git lfs pull"):
        open_partial(good)


def test_lfs_pointer_comes_before_the_missing_config(cases_dir: Path) -> None:
    with pytest.raises(LfsPointerError):
        Checkpoint.open(cases_dir / "lfs_pointer")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[]", "not a JSON object"),
        (b'{"a":1,"a":2}', "duplicate key in JSON: found 'a'"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":"\xff"}', "UTF-8"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "128 levels"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_files_are_strict(good: Path, name: str, text: bytes, words: str) -> None:
    (good / name).write_bytes(text)
    with pytest.raises(SourceError, match=f"{name}.*{words}"):
        open_partial(good)


def test_failed_open_leaves_no_descriptor(cases_dir: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("c05_map_names_ghost", "c05_missing_shard", "c04_cut.safetensors"):
        with pytest.raises(SourceError):
            open_partial(cases_dir / name)
    assert len(os.listdir("/proc/self/fd")) <= before


# ---------------------------------------------------------------- index


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing_shard", [TWO, "layers.0.attn.wq_a.scale", "not there", "8 tensors"]),
        ("map_to_wrong_shard", [W1, f"expected {TWO}", f"found {ONE}"]),
        ("map_names_ghost", ["layers.0.ffn.experts.9.w1.weight", ONE, "does not hold it"]),
    ],
)
def test_index_faults_name_tensor_and_shard(cases_dir: Path, case: str, words: list[str]) -> None:
    for allow_partial in (False, True):
        with pytest.raises(IndexMismatchError) as caught:
            Checkpoint.open(cases_dir / f"c05_{case}", allow_partial=allow_partial)
        assert [word for word in words if word not in str(caught.value)] == []


def test_sound_index_opens(cases_dir: Path) -> None:
    with Checkpoint.open(cases_dir / "good") as checkpoint:
        assert len(checkpoint.tensors) == 15
        assert not any("total_size" in text for text in checkpoint.warnings)


def test_wrong_total_is_a_warning_with_both_numbers(cases_dir: Path) -> None:
    with Checkpoint.open(cases_dir / "c05_wrong_total") as checkpoint:
        assert f"{INDEX}: total_size is 1, the shards hold 36050 bytes" in (checkpoint.warnings)


def index_of(folder: Path) -> dict[str, Any]:
    weight_map: dict[str, Any] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def test_tensor_that_the_index_does_not_name_is_refused(good: Path) -> None:
    weight_map = index_of(good)
    del weight_map[W1]
    write_index(good, weight_map)
    with pytest.raises(IndexMismatchError, match=f"{W1}.*{ONE} holds a tensor"):
        open_partial(good)


@pytest.mark.parametrize("name", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_a_shard_that_the_index_does_not_name_is_not_used(good: Path, name: str) -> None:
    """Not even opened: a left-over may be cut, or of another revision."""
    (good / name).write_bytes(b"half a download")
    with open_partial(good) as checkpoint:
        assert name not in checkpoint.shards
        assert f"{name} is not named by {INDEX}, and not used" in checkpoint.warnings
        assert len(checkpoint.tensors) == 15


def test_the_index_says_which_copy_counts(good: Path) -> None:
    """A stale copy in another shard, of other bytes and even another shape, is named, not read."""
    with open_partial(good) as checkpoint:
        expected = checkpoint.read(checkpoint.tensors[W1]).tobytes()
    listing = {W1: ("I8", (1, 16)), "norm.weight": ("BF16", (8,))}
    write_shard(good / "a-first.safetensors", listing)
    weight_map = index_of(good)
    write_index(good, weight_map | {"norm.weight": "a-first.safetensors"})
    with open_partial(good) as checkpoint:
        assert checkpoint.tensors[W1].shard == weight_map[W1]
        assert checkpoint.read(checkpoint.tensors[W1]).tobytes() == expected
        assert checkpoint.tensors["norm.weight"].shard == "a-first.safetensors"
        (told,) = [text for text in checkpoint.warnings if "copy of" in text]
        assert told.startswith(f"a-first.safetensors holds a copy of {W1} that is not used")


@pytest.mark.parametrize("written", ["sub/one.safetensors", "./sub/one.safetensors"])
def test_shards_may_lie_in_folders_below(good: Path, written: str) -> None:
    (good / "sub").mkdir()
    (good / ONE).rename(good / "sub" / "one.safetensors")
    (good / "sub" / "not-named.safetensors").write_bytes(b"")
    moved = {name: written if shard == ONE else shard for name, shard in index_of(good).items()}
    write_index(good, moved)
    with open_partial(good) as checkpoint:
        assert sorted(checkpoint.shards) == sorted([TWO, "sub/one.safetensors"])
        checkpoint.read(checkpoint.tensors[W1])
        checkpoint.check_unchanged()


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {"format": "pt", "x": "y" * 100_000}}])
def test_a_shard_without_tensors_is_legal(good: Path, metadata: dict[str, dict[str, str]]) -> None:
    (good / INDEX).unlink()
    (good / "empty.safetensors").write_bytes(shard_bytes(json.dumps(metadata)))
    with open_partial(good) as checkpoint:
        assert len(checkpoint.tensors) == 15


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_refused_with_what_to_do(good: Path, name: str, encoding: str) -> None:
    path = good / name
    text = path.read_text() if path.exists() else "{}"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(SourceError, match=f"{name}: .*byte-order mark.*; save it as UTF-8 without"):
        open_partial(good)


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/hostname",
        "/etc/x.safetensors",
        "sub/../../x.safetensors",
        "sub/../x.safetensors",
        "sub//x.safetensors",
        "././x.safetensors",
        "/".join("abcdefgh") + "/x.safetensors",
        "sub/" + "x" * 300 + ".safetensors",
        "a\0b.safetensors",
        "..\\x.safetensors",
        "a\nb.safetensors",
        "",
        "..",
        "config.json",
        "x" * 300 + ".safetensors",
        7,
        None,
        [ONE],
    ],
)
def test_unsafe_shard_name_is_refused_before_anything_is_opened(
    good: Path, monkeypatch: pytest.MonkeyPatch, shard: Any
) -> None:
    shutil.copy(good / ONE, good.parent / "outside.safetensors")
    weight_map = index_of(good)
    weight_map[W1] = shard
    write_index(good, weight_map)
    opened = record(monkeypatch, "open", lambda path, *args: Path(path).name)
    with pytest.raises(ShardNameError, match=f"{W1}.*unsafe shard name"):
        open_partial(good)
    assert opened == [INDEX]


@pytest.mark.parametrize("text", ['{"weight_map":[]}', '{"weight_map":{}}', "{}", "null"])
def test_index_without_a_map_is_refused(good: Path, text: str) -> None:
    (good / INDEX).write_text(text)
    with pytest.raises(JsonFileError, match=INDEX):
        open_partial(good)


@pytest.mark.parametrize(
    "metadata", ["[]", "null", '{"total_size":null}', '{"total_size":36050.0}']
)
def test_total_size_may_be_absent_or_a_float(good: Path, metadata: str) -> None:
    text = json.dumps({"weight_map": index_of(good)})
    (good / INDEX).write_text(f'{{"metadata":{metadata},{text[1:]}')
    with Checkpoint.open(good) as checkpoint:
        assert not any("total_size" in text for text in checkpoint.warnings)


def test_hub_cache_links_are_followed(good: Path) -> None:
    blobs = good.parent / "blobs"
    blobs.mkdir()
    snapshot = good.parent / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in sorted(good.iterdir()):
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    with Checkpoint.open(snapshot) as checkpoint:
        assert len(checkpoint.tensors) == 15
        assert checkpoint.read(checkpoint.tensors[W1]).nbytes == 512


def test_dangling_link_is_a_missing_shard(good: Path) -> None:
    (good / ONE).unlink()
    (good / ONE).symlink_to("../blobs/gone")
    with pytest.raises(IndexMismatchError, match=f"{ONE}.*not there"):
        open_partial(good)
    (good / INDEX).unlink()
    with pytest.raises(MissingFileError, match=ONE):
        open_partial(good)


# ---------------------------------------------------------------- without an index


def test_without_index_all_shards_are_read(good: Path) -> None:
    (good / INDEX).unlink()
    with Checkpoint.open(good) as checkpoint:
        assert len(checkpoint.tensors) == 15


def test_without_index_the_names_tell_how_many_there_must_be(good: Path) -> None:
    (good / INDEX).unlink()
    (good / ONE).unlink()
    with pytest.raises(MissingFileError, match=f"{ONE}: shard is missing"):
        Checkpoint.open(good)
    with open_partial(good) as checkpoint:
        assert f"shard {ONE} is absent" in checkpoint.warnings
        assert len(checkpoint.tensors) == 8


def test_tensor_in_two_shards_is_refused(good: Path) -> None:
    (good / INDEX).unlink()
    write_shard(good / "model-extra.safetensors", {W1: ("I8", (4, 128))})
    with pytest.raises(DuplicateNameError, match=f"{W1}: tensor name appears twice: found {W1}"):
        open_partial(good)


# ---------------------------------------------------------------- names


def test_prefix_is_stripped(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"model." + W1: ("I8", (1, 16))})
    with open_partial(tmp_path) as checkpoint:
        tensor = checkpoint.tensors[W1]
        assert (tensor.name, tensor.raw_name) == (W1, "model." + W1)


def test_names_that_collide_without_the_prefix_are_refused(tmp_path: Path) -> None:
    listing = {"model." + W1: ("I8", (1, 16)), W1: ("I8", (1, 16))}
    write_shard(tmp_path / "model.safetensors", listing)
    with pytest.raises(DuplicateNameError, match=f"found model.{W1} in model.safetensors"):
        open_partial(tmp_path)


# ---------------------------------------------------------------- reading


def test_range_outside_the_tensor_is_refused(cases_dir: Path) -> None:
    with open_partial(cases_dir / "c06_nibble.safetensors") as checkpoint:
        tensor = checkpoint.tensors[W1]
        for start, length in ((-1, 4), (0, 17), (16, 1), (17, 0)):
            with pytest.raises(SourceReadError, match=f"{W1}: read outside the tensor"):
                checkpoint.read_into(tensor, np.empty(length, np.uint8), start)
        checkpoint.read_into(tensor, np.empty(0, np.uint8), 16)


def test_truncation_during_a_job_is_an_error_and_no_signal(good: Path) -> None:
    with open_partial(good) as checkpoint:
        tensor = checkpoint.tensors[W1]
        os.truncate(good / ONE, 10)
        with pytest.raises(SourceReadError, match=f"{ONE}: {W1}: shard ended during a read"):
            checkpoint.read(tensor)


def test_short_reads_are_continued(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_partial(good) as checkpoint:
        tensor = checkpoint.tensors[W1]
        whole = checkpoint.read(tensor).tobytes()
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:7]], at))
        assert checkpoint.read(tensor).tobytes() == whole


def test_refused_read_names_tensor_and_reason(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with open_partial(good) as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(SourceReadError, match=f"{W1}: read failed: Input/output error"):
            checkpoint.read(checkpoint.tensors[W1])


def test_closed_checkpoint_does_not_read(good: Path) -> None:
    with open_partial(good) as checkpoint:
        pass
    checkpoint.close()
    with pytest.raises(SourceReadError, match="checkpoint is closed"):
        checkpoint.read(checkpoint.tensors[W1])


def test_threads_read_what_one_reader_reads() -> None:
    with Checkpoint.open(TINY) as checkpoint:
        tensors = list(checkpoint.tensors.values())
        want = [checkpoint.read(t).tobytes() for t in tensors]
        wrong: list[str] = []

        def check(offset: int) -> None:
            for i in range(len(tensors)):
                j = (i + offset) % len(tensors)
                if checkpoint.read(tensors[j]).tobytes() != want[j]:
                    wrong.append(tensors[j].name)

        threads = [threading.Thread(target=check, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


# ---------------------------------------------------------------- what it costs


def read_bytes(fd: int, n_bytes: int, at: int) -> int:
    return n_bytes


def test_open_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "big.safetensors", {"pad": ("U8", (4_831_838_208,))})
    sizes = record(monkeypatch, "pread", read_bytes)
    with open_partial(tmp_path / "big.safetensors") as checkpoint:
        assert checkpoint.tensors["pad"].nbytes == 4_831_838_208
    assert sum(sizes) < 1000


def test_reads_grow_with_shards_and_headers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(count: int) -> tuple[int, int]:
        folder = tmp_path / str(count)
        listing = {f"t{i:06d}": ("U8", (1,)) for i in range(count)}
        write_model(folder, listing, None, shards=4)
        with monkeypatch.context() as patch:
            sizes = record(patch, "pread", read_bytes)
            with open_partial(folder) as checkpoint:
                assert len(checkpoint.tensors) == count
        return len(sizes), sum(sizes)

    small, large = cost(1000), cost(10_000)
    assert small[0] == large[0] == 4 * 2 + 1  # length and header of each shard, the index
    assert large[1] < 10.5 * small[1]


# ---------------------------------------------------------------- identity


def test_unchanged_source_passes(good: Path) -> None:
    with open_partial(good) as checkpoint:
        checkpoint.check_unchanged()


def test_changes_are_named(good: Path) -> None:
    with open_partial(good) as checkpoint:
        os.utime(good / ONE, ns=(1, 1))
        with pytest.raises(ChangedSourceError, match=f"{ONE}: source changed.*mtime_ns 1 instead"):
            checkpoint.check_unchanged()
    with open_partial(good) as checkpoint:
        copy = good / "copy"
        shutil.copy2(good / ONE, copy)
        copy.rename(good / ONE)
        with pytest.raises(ChangedSourceError, match="inode"):
            checkpoint.check_unchanged()
    with open_partial(good) as checkpoint:
        (good / TWO).unlink()
        with pytest.raises(ChangedSourceError, match=f"{TWO}.*No such file"):
            checkpoint.check_unchanged()


def fingerprint(folder: Path) -> str:
    with open_partial(folder) as checkpoint:
        return checkpoint.fingerprint()


def test_fingerprint_is_the_documented_digest(good: Path) -> None:
    config = (good / "config.json").read_bytes()
    listing = listing_of(good)
    gate = "layers.0.ffn.gate.weight"
    data = np.arange(64, dtype=np.uint8).tobytes()
    header = f'{{"{gate}":{{"dtype":"BF16","shape":[2,16],"data_offsets":[0,64]}}}}'
    (good / INDEX).unlink()
    (good / "gate.safetensors").write_bytes(shard_bytes(header, data))
    listing[gate] = ("BF16", (2, 16))
    document = {
        "config": hashlib.sha256(config).hexdigest(),
        "gates": [[gate, xxhash.xxh3_128(data).hexdigest()]],
        "tensors": [[n, listing[n][0], list(listing[n][1])] for n in sorted(listing)],
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert fingerprint(good) == hashlib.sha256(text.encode()).hexdigest()


def test_fingerprint_does_not_depend_on_sharding_or_prefix(tmp_path: Path) -> None:
    listing = listing_of(TINY)
    prints = set()
    for shards, prefix, turn in ((1, "", 0), (3, "", 100), (2, "model.", 7)):
        names = list(listing)
        order = names[turn:] + names[:turn]
        folder = tmp_path / f"{shards}{prefix}"
        write_model(folder, {prefix + n: listing[n] for n in order}, {}, shards=shards)
        prints.add(fingerprint(folder))
    assert len(prints) == 1


def test_fingerprint_sees_config_shapes_and_router(tmp_path: Path) -> None:
    prints = [fingerprint(TINY)]
    folder = link_tree(TINY, tmp_path / "config")
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes() + b"\n")
    prints.append(fingerprint(folder))
    for name in ("layers.2.ffn.gate.weight", "layers.2.ffn.experts.0.w1.weight"):
        with Checkpoint.open(TINY) as checkpoint:
            tensor = checkpoint.tensors[name]
        folder = link_tree(TINY, tmp_path / name)
        raw = bytearray((folder / tensor.shard).read_bytes())
        raw[tensor.offset + 5] ^= 1
        (folder / tensor.shard).unlink()
        (folder / tensor.shard).write_bytes(raw)
        prints.append(fingerprint(folder))
    assert prints[3] == prints[0]  # expert bytes are covered by the source digest instead
    assert len(set(prints)) == 3


def test_fingerprint_reads_a_router_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (3 << 20, 2)
    write_shard(tmp_path / "f.safetensors", {"layers.0.ffn.gate.weight": ("BF16", shape)})
    sizes = record(monkeypatch, "preadv", lambda fd, buffers, at: len(buffers[0]))
    fingerprint(tmp_path / "f.safetensors")
    assert sizes == [4 << 20] * 3


def test_shard_info_tells_where_the_data_begins(cases_dir: Path) -> None:
    with open_partial(cases_dir / "good") as checkpoint:
        info = checkpoint.shards[ONE]
        assert isinstance(info, ShardInfo)
        raw = info.path.read_bytes()
        assert info.data_offset == 8 + int.from_bytes(raw[:8], "little")
        assert info.size == len(raw)
