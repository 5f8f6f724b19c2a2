"""Owns ``ds4q run``: a prompt from options or stdin, generated text to stdout. No model code."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.cli.common import (
    claim_report,
    emit_json,
    json_option,
    say,
    talk_options,
    warn,
    write_report,
)
from ds4q.cli.experts import cache_report, say_breakdown, say_cache
from ds4q.cli.loading import ModelOptions, model_options

if TYPE_CHECKING:
    from ds4q.runtime.generate import Generation
    from ds4q.runtime.sampling import Sampler
    from ds4q.runtime.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 1024
LARGEST_SEED = (1 << 63) - 1
DRAWN_SEEDS = 1 << 32  # short to type again, and exact in every JSON reader


class TokenIds(click.ParamType):
    """Token ids as ``1,2,3``."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        try:
            ids = [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of token ids; write 1,2,3", param, ctx)
        if min(ids) < 0:
            self.fail(f"token id {min(ids)} is negative", param, ctx)
        return ids


def _finite(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A range lets NaN through, and infinity where it has no upper end."""
    if value is not None and not abs(value) < float("inf"):
        raise click.BadParameter(f"{value} is not a finite number")
    return value


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.hfq")
@click.option("-p", "--prompt", metavar="TEXT", help="What to say. Without it stdin is read.")
@click.option(
    "--prompt-ids",
    type=TokenIds(),
    metavar="1,2,3",
    help="The whole prompt as token ids, taken as they are. Needs no tokenizer.",
)
@click.option("--raw", is_flag=True, help="No chat format: the prompt is BOS and the text.")
@click.option(
    "--think/--no-think",
    default=False,
    help="Let the model reason before it answers. The default is chat without reasoning.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    metavar="N",
    help="Stop after N new tokens, or where the context ends.",
)
@click.option(
    "--temp",
    type=click.FloatRange(min=0),
    callback=_finite,
    show_default="of the model's generation_config, else 1",
    metavar="T",
    help="Temperature; 0 always takes the most likely token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, min_open=True, max=1),
    callback=_finite,
    show_default="of the model's generation_config, else 1",
    metavar="P",
    help="Draw from the fewest most likely tokens that hold this share of the probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    show_default="another one each time; -v and --json tell it",
    metavar="N",
    help="Seed of the draws; the same seed gives the same tokens.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on after the token that ends the text.")
@model_options
@click.option(
    "--stats",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE.json",
    help="Write usage and timings to this file.",
)
@json_option
@talk_options
def command(
    file: Path,
    prompt: str | None,
    prompt_ids: list[int] | None,
    raw: bool,
    think: bool,
    max_tokens: int,
    temp: float | None,
    top_p: float | None,
    seed: int | None,
    ignore_eos: bool,
    model: ModelOptions,
    stats: Path | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Generate text from an artifact.

    The text goes to stdout as it is made, statistics to stderr. Without -p and --prompt-ids the
    prompt is what stdin holds, less one final line break. With --think the reasoning comes first,
    between <think> and </think>. Where the artifact has no tokenizer, token ids are printed.

    Example: ds4q run model.hfq -p "What is 2+2?" --temp 0
    """
    if prompt is not None and prompt_ids:
        raise click.UsageError("-p and --prompt-ids exclude each other")
    if think and (raw or prompt_ids):
        raise click.UsageError("--think belongs to the chat format: leave out --raw, --prompt-ids")
    if stats is not None:
        claim_report(stats, "--stats", b'"timings"')
        trace = model.experts.trace
        if trace is not None and stats.resolve() == trace.resolve():
            raise click.UsageError("--stats and --trace name the same file")
    loading = model.loading(file, quiet=quiet)
    text = None if prompt_ids else _prompt_text(prompt)

    from ds4q.artifact.hfq import Reader
    from ds4q.runtime.generate import check_prompt, generate, metadata_object, stop_ids
    from ds4q.runtime.text.tokenizer import Tokenizer

    # What the metadata alone can refuse is refused before the weights are read.
    with Reader(file) as reader:
        metadata = reader.metadata
        for warning in reader.warnings:
            warn(f"{file}: {warning}")
    tokenizer = Tokenizer.from_metadata(metadata, path=file)
    stops = stop_ids(metadata, tokenizer)
    sampler = _sampler(metadata, temp, top_p, seed)
    ids = prompt_ids or _encode(text or "", metadata, tokenizer, file, raw=raw, think=think)
    vocabulary = metadata_object(metadata, "config").get("vocab_size")
    if isinstance(vocabulary, int):  # else the engine says what is wrong with the config
        check_prompt(ids, vocabulary)

    with ExitStack() as stack:
        started = time.perf_counter()
        engine, where = loading.open(stack, len(ids) + max_tokens)
        load_s = time.perf_counter() - started
        generation = generate(
            engine,
            ids,
            max_tokens=max_tokens,
            context_tokens=engine.max_context,
            sampler=sampler,
            stop_ids=stops,
            ignore_stop=ignore_eos,
            tokenizer=tokenizer,
        )
        stop = None
        try:
            if as_json:
                list(generation)
            else:
                _Screen(as_ids=tokenizer is None, thinking=think).run(generation)
        except KeyboardInterrupt as interrupt:
            stop = interrupt  # what there is so far is still reported
            generation.end()
        cache = cache_report(engine.cache_counters(), loading.cache, generation.rates())
    report = _report(generation, sampler, load_s, cache) | {"device": where}
    if as_json:
        emit_json(_answer(generation, has_text=tokenizer is not None, thinking=think) | report)
    if stats is not None:
        write_report(stats, json.dumps(report, indent=2) + "\n")
    if not quiet:
        _say_statistics(report, engine.load_s if verbose else None)
    if stop is not None:
        raise stop


def _prompt_text(prompt: str | None) -> str:
    """The text of ``-p``, else of stdin where something is piped into it."""
    if prompt is not None:
        return prompt
    from ds4q.runtime.errors import PromptError

    piped = b""
    if sys.stdin is not None and not sys.stdin.isatty():
        piped = sys.stdin.buffer.read()
    try:
        text = piped.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError("stdin is not UTF-8", found=f"byte {error.start}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise click.UsageError("no prompt: give -p TEXT or --prompt-ids, or pipe text into stdin")
    return text


def _encode(
    text: str,
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    file: Path,
    *,
    raw: bool,
    think: bool,
) -> list[int]:
    from ds4q.runtime.errors import PromptError
    from ds4q.runtime.generate import metadata_object
    from ds4q.runtime.text.chat import encode_chat, encode_raw

    if tokenizer is None:
        raise PromptError(
            "the artifact has no tokenizer to encode a text with",
            path=file,
            remedy="pass the prompt as --prompt-ids 1,2,3",
        )
    if raw:
        return encode_raw(tokenizer, text)
    messages = [{"role": "user", "content": text}]
    config = metadata_object(metadata, "config")
    return encode_chat(config, tokenizer, messages, thinking=think, path=file)


def _sampler(
    metadata: Mapping[str, Any], temp: float | None, top_p: float | None, seed: int | None
) -> Sampler:
    from ds4q.runtime.generate import metadata_object
    from ds4q.runtime.sampling import Sampler, sampling_defaults

    sampling = sampling_defaults(metadata_object(metadata, "generation_config"))
    return Sampler(
        temperature=sampling["temperature"] if temp is None else temp,
        top_p=sampling["top_p"] if top_p is None else top_p,
        seed=secrets.randbelow(DRAWN_SEEDS) if seed is None else seed,
    )


class _Screen:
    """Writes a generation to stdout as it comes: its text, or its ids where there is no text.

    With ``thinking`` the reasoning stands between ``<think>`` and ``</think>``.
    """

    def __init__(self, *, as_ids: bool, thinking: bool) -> None:
        from ds4q.runtime.text.decode import ReasoningStream
        from ds4q.runtime.text.pieces import THINK, THINK_END

        self._as_ids = as_ids
        self._last = ""
        self._think_end = THINK_END
        self._split = ReasoningStream() if thinking else None
        self._write(THINK if thinking else "")

    def run(self, generation: Generation) -> None:
        """Write until the generation ends; an interrupt still ends the line."""
        try:
            for step in generation:
                self._show(f"{',' if self._last else ''}{step.id}" if self._as_ids else step.text)
        except KeyboardInterrupt:
            self._show(generation.end())
            raise
        finally:
            if self._split is not None:
                self._write("".join(piece for _, piece in self._split.finish()))
            self._write("" if self._last.endswith("\n") else "\n")

    def _show(self, text: str) -> None:
        if self._split is None:
            self._write(text)
            return
        before = self._split.channel
        for channel, piece in self._split.push(text):
            self._write("" if channel == before else self._think_end + "\n")
            self._write(piece)
            before = channel

    def _write(self, text: str) -> None:
        if text:
            click.echo(text.encode("utf-8"), nl=False)  # UTF-8 whatever the locale says
            self._last = text


def _report(
    generation: Generation, sampler: Sampler, load_s: float, cache: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The figures of a run, for ``--json``, ``--stats`` and stderr."""
    return {
        "finish_reason": generation.finish_reason,
        "usage": generation.usage(),
        "timings": {"load_s": load_s, **generation.rates()},
        "sampling": {
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "seed": sampler.seed,
        },
        "cache": cache,
    }


def _answer(generation: Generation, *, has_text: bool, thinking: bool) -> dict[str, Any]:
    """What was generated; without a tokenizer the text is null, in chat mode the reasoning."""
    from ds4q.runtime.text.decode import split_reasoning

    text, reasoning = generation.text if has_text else None, None
    if thinking:
        reasoning, text = split_reasoning(generation.text)
    return {"text": text, "reasoning": reasoning, "ids": generation.ids}


def _say_statistics(report: Mapping[str, Any], load_s: Mapping[str, float] | None) -> None:
    """``load_s``: what loading took, for those who want to know more."""
    usage, times, sampling = report["usage"], report["timings"], report["sampling"]
    if load_s is not None:
        say(
            f"loaded in {times['load_s']:.2f} s; temperature {sampling['temperature']:g}, "
            f"top_p {sampling['top_p']:g}, seed {sampling['seed']}"
        )
        say_breakdown(load_s)
    if not usage["completion_tokens"]:  # stopped while the prompt was read: no figure holds
        say(f"prompt: {usage['prompt_tokens']} tokens; ended by: interrupt before the first token")
        return
    prefill = _rate_text(times["prefill_s"], times["prefill_tokens_per_s"])
    decode = _rate_text(times["decode_s"], times["decode_tokens_per_s"])
    say(f"prompt: {usage['prompt_tokens']} tokens in {prefill}")
    say(
        f"generated: {usage['completion_tokens']} tokens, the first after "
        f"{times['first_token_s']:.2f} s, the others in {decode}; "
        f"ended by: {report['finish_reason'] or 'interrupt'}"
    )
    if report["cache"] is not None:
        say_cache(report["cache"], verbose=load_s is not None)


def _rate_text(seconds: float, rate: float | None) -> str:
    return f"{seconds:.2f} s" + (f" ({rate:.1f} tokens/s)" if rate is not None else "")
