"""What a generation_config.json asks for and does not get is named; what changes nothing is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds4q.quantize.audit import audit
from ds4q.quantize.checkpoint import Checkpoint
from ds4q.quantize.errors import ConfigError
from ds4q.quantize.generation import not_applied, note
from tests.quantize.builders import TINY
from tests.quantize.test_checkpoint import link_tree


def test_a_published_config_is_applied_whole() -> None:
    assert not_applied(json.loads((TINY / "generation_config.json").read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "generation",
    [
        {},
        {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": [1, 2]},
        {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "typical_p": 1, "num_beams": 1},
        {"top_k": None, "bad_words_ids": [], "transformers_version": "5.0", "use_cache": True},
    ],
    ids=["empty", "applied", "neutral", "none"],
)
def test_what_changes_nothing_is_not_named(generation: dict[str, object]) -> None:
    assert note(generation) == []


def test_what_would_change_answers_is_named_in_one_line() -> None:
    generation = {"top_k": 50, "repetition_penalty": 1.1, "min_p": 0.05, "new_setting": "x"}
    assert note(generation) == [
        "generation_config settings are not applied: min_p 0.05, new_setting 'x', "
        "repetition_penalty 1.1, top_k 50"
    ]


def test_the_audit_names_it_and_refuses_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    folder = link_tree(TINY, tmp_path / "m")
    place = folder / "generation_config.json"
    place.unlink()
    place.write_text(json.dumps({"top_k": 20, "pad_token_id": None}))
    with Checkpoint.open(folder) as checkpoint:
        assert "generation_config settings are not applied: top_k 20" in audit(checkpoint).warnings
    place.write_text(json.dumps({"eos_token_id": [1, 512]}))
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id: .*0 to 511"),
    ):
        audit(checkpoint)


@pytest.mark.parametrize(
    ("generation", "says"),
    [
        ({"temperature": 10**400}, "temperature: expected a number from 0 on, found 1000"),
        ({"temperature": "x"}, "temperature: expected a number from 0 on, found 'x'"),
        ({"top_p": 0}, "top_p: expected a number above 0, at most 1, found 0"),
        ({"do_sample": 1}, "do_sample: expected true or false, found 1"),
    ],
)
def test_what_no_sampler_takes_is_refused_before_it_is_packed(
    generation: dict[str, object], says: str, tmp_path: Path
) -> None:
    folder = link_tree(TINY, tmp_path / "m")
    place = folder / "generation_config.json"
    place.unlink()
    place.write_text(json.dumps(generation))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ConfigError) as caught:
        audit(checkpoint)
    assert str(caught.value).startswith(f"{place}: {says}")
