"""Owns ``ds4q run``: a prompt from options or stdin, generated text to stdout. No model code."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ds4q.artifact.files import beginning
from ds4q.artifact.report import json_text
from ds4q.cli.chat import PREFIX_CACHE_BYTES, Chat, on_terminal
from ds4q.cli.common import (
    claim_report,
    emit_json,
    json_option,
    say,
    talk_options,
    visible,
    write_report,
    write_text,
)
from ds4q.cli.experts import cache_report, say_breakdown, say_cache
from ds4q.cli.loading import Loading, ModelOptions, model_options

if TYPE_CHECKING:
    from ds4q.runtime.generate import Generation
    from ds4q.runtime.sampling import Sampler
    from ds4q.runtime.serve.conversation import ChatFormat, Manner
    from ds4q.runtime.text.answer import ToolCall
    from ds4q.runtime.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 1024
LARGEST_SEED = (1 << 63) - 1
EFFORTS = ("low", "high", "max")
is_statistics = beginning(
    rb'\{\n(  "schema_version": \d+,\n)?'
    rb'  "finish_reason": (null|"\w+"),\n  "usage": \{\n    "prompt_tokens": '
)
"""Whether a file that begins so was written by ``--stats``."""
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
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    help="What to say. Without it stdin is read; a terminal there is a chat.",
)
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
    "--reasoning-effort",
    type=click.Choice(EFFORTS),
    default="low",
    show_default=True,
    help="With --think: how much to reason. More than low takes a text of the model's release.",
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
    reasoning_effort: str,
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

    On a terminal, without a prompt, it is a chat: /help there says more.

    Example: ds4q run model.hfq -p "What is 2+2?" --temp 0
    """
    if prompt is not None and prompt_ids:
        raise click.UsageError("-p and --prompt-ids exclude each other")
    if think and (raw or prompt_ids):
        raise click.UsageError("--think belongs to the chat format: leave out --raw, --prompt-ids")
    if reasoning_effort != "low" and not think:
        raise click.UsageError("--reasoning-effort belongs to --think")
    if stats is not None:
        claim_report(stats, "--stats", is_statistics)
        trace = model.experts.trace
        if trace is not None and stats.resolve() == trace.resolve():
            raise click.UsageError("--stats and --trace name the same file")
    chatting = prompt is None and not prompt_ids and on_terminal()
    if chatting and (raw or as_json or stats is not None):
        raise click.UsageError("--raw, --json and --stats need a prompt: -p, or text in stdin")
    loading = model.loading(file, quiet=quiet)

    from ds4q.quantize.generation import not_applied
    from ds4q.runtime.generate import metadata_object, room_after, stop_ids
    from ds4q.runtime.serve.conversation import ChatFormat, Manner
    from ds4q.runtime.text.chat import encode_raw
    from ds4q.runtime.text.tokenizer import Tokenizer

    # What the metadata alone can refuse is refused before the weights are read.
    metadata = loading.metadata()
    tokenizer = Tokenizer.from_metadata(metadata, path=file)
    stops = stop_ids(metadata, tokenizer, file)
    sampler = _sampler(file, metadata, temp, top_p, seed)
    drawn = (sampler.temperature, sampler.top_p, sampler.seed)
    manner = Manner(max_tokens, *drawn, stops, ignore_eos)
    config = metadata_object(metadata, "config")
    vocabulary, context = _size(config, "vocab_size"), _size(config, "max_position_embeddings")
    unused = tuple(not_applied(metadata_object(metadata, "generation_config")))
    telling = _Telling(think, as_json, stats, quiet, verbose, unused)
    ids = prompt_ids
    if not ids:
        tokenizer = _required(tokenizer, file)
        text = "" if chatting else _prompt_text(prompt, tokenizer, context)
        if raw:
            ids = encode_raw(tokenizer, text)
        else:
            encoding = model.read_encoding(file, metadata) if think or model.encoding else None
            words = ChatFormat(config, tokenizer, file, encoding, think, reasoning_effort)
            ids = words.prompt([{"role": "user", "content": text}]).ids
            if chatting:  # the prompt above shows that there can be one
                return _chat(loading, words, manner, telling)
    if vocabulary is not None and context is not None:  # else the engine says what is wrong
        room_after(ids, vocabulary, context)
    _generate(loading, ids, tokenizer, sampler, manner, telling)


@dataclass(frozen=True, slots=True)
class _Telling:
    """What is told of a run, and where."""

    thinking: bool
    as_json: bool
    stats: Path | None
    quiet: bool
    verbose: bool
    not_applied: tuple[str, ...]  # of the model's generation_config


def _generate(
    loading: Loading,
    ids: Sequence[int],
    tokenizer: Tokenizer | None,
    sampler: Sampler,
    manner: Manner,
    telling: _Telling,
) -> None:
    """Load the model, and continue one prompt."""
    from ds4q.runtime.generate import generate

    with ExitStack() as stack:
        started = time.perf_counter()
        engine, where = loading.open(stack, len(ids) + manner.max_tokens)
        load_s = time.perf_counter() - started
        generation = generate(
            engine,
            ids,
            max_tokens=manner.max_tokens,
            context_tokens=engine.max_context,
            sampler=sampler,
            stop_ids=manner.stop_ids,
            ignore_stop=manner.ignore_stop,
            tokenizer=tokenizer,
        )
        stop = None
        try:
            if telling.as_json:
                list(generation)
            else:
                _Screen(as_ids=tokenizer is None, thinking=telling.thinking).run(generation)
        except KeyboardInterrupt as interrupt:
            stop = interrupt  # what there is so far is still reported
            generation.end()
        cache = cache_report(engine.cache_counters(), loading.cache, generation.rates())
    report = _report(generation, sampler, load_s, cache)
    report["sampling"]["not_applied"] = list(telling.not_applied)
    report |= {"device": where, "kv_type": loading.kv_type}
    if telling.as_json:
        answer = _answer(generation, has_text=tokenizer is not None, thinking=telling.thinking)
        emit_json(answer | report)
    if telling.stats is not None:
        write_report(telling.stats, json_text(report), is_statistics)
    if not telling.quiet:
        _say_statistics(report, engine.load_s if telling.verbose else None)
    if stop is not None:
        raise stop


def _size(config: Mapping[str, Any], key: str) -> int | None:
    """A number of the config; None for what cannot be one."""
    found = config.get(key)
    return found if type(found) is int and found > 0 else None


def _prompt_text(prompt: str | None, tokenizer: Tokenizer, context_tokens: int | None) -> str:
    """The text of ``-p``, else of stdin where something is piped into it; never empty."""
    text = prompt
    if text is None:
        terminal = sys.stdin is None or sys.stdin.isatty()
        text = "" if terminal else _piped(tokenizer, context_tokens)
    if not text:
        raise click.UsageError("no prompt: give -p TEXT or --prompt-ids, or pipe text into stdin")
    return text


def _piped(tokenizer: Tokenizer, context_tokens: int | None) -> str:
    """The text in stdin; of one that no context of this size can hold only so much is read."""
    from ds4q.runtime.errors import ContextError, PromptError

    longest = tokenizer.longest_bytes
    if longest is None or context_tokens is None:
        piped = sys.stdin.buffer.read()
    else:
        most = context_tokens * longest  # BOS and an answer take the room of the last line break
        piped = sys.stdin.buffer.read(most + 1)
        if len(piped) > most:
            raise ContextError(
                f"stdin holds more than a context of {context_tokens:,} tokens can",
                expected=f"at most {most:,} bytes",
                remedy="shorten the prompt",
            )
    try:
        text = piped.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError("stdin is not UTF-8", found=f"byte {error.start}") from None
    return text.removesuffix("\n").removesuffix("\r")


def _required(tokenizer: Tokenizer | None, file: Path) -> Tokenizer:
    from ds4q.runtime.errors import PromptError

    if tokenizer is None:
        raise PromptError(
            "the artifact has no tokenizer to encode a text with",
            path=file,
            remedy="pass the prompt as --prompt-ids 1,2,3",
        )
    return tokenizer


def _chat(loading: Loading, words: ChatFormat, manner: Manner, telling: _Telling) -> None:
    """Chat on the terminal until the user ends it."""
    from ds4q.runtime.serve.conversation import Conversation
    from ds4q.runtime.serve.scheduler import Scheduler

    with ExitStack() as stack:
        engine, _ = loading.open(stack, None, beside_bytes=PREFIX_CACHE_BYTES, warm=True)
        if telling.verbose:
            say_breakdown(engine.load_s)
        scheduler = Scheduler(engine, queue=1, concurrent=1, prefix_cache_bytes=PREFIX_CACHE_BYTES)
        stack.callback(scheduler.close)
        chat = Chat(Conversation(scheduler, words, manner), quiet=telling.quiet)
        chat.run()
        times = {"prefill_s": chat.prefill_s, "decode_s": chat.decode_s}
        cache = cache_report(engine.cache_counters(), loading.cache, times)
    if cache is not None and not telling.quiet:
        say_cache(cache, verbose=telling.verbose)


def _sampler(
    file: Path,
    metadata: Mapping[str, Any],
    temp: float | None,
    top_p: float | None,
    seed: int | None,
) -> Sampler:
    from ds4q.runtime.generate import metadata_object
    from ds4q.runtime.sampling import Sampler, sampling_defaults

    asked = {"temperature": temp, "top_p": top_p}
    given = {key: value for key, value in asked.items() if value is not None}
    generation = metadata_object(metadata, "generation_config", file)
    return Sampler(
        **sampling_defaults(generation, given=given, path=file) | given,
        seed=secrets.randbelow(DRAWN_SEEDS) if seed is None else seed,
    )


class _Screen:
    """Writes a generation to stdout as it comes: its text, or its ids where there is no text.

    With ``thinking`` the reasoning stands between ``<think>`` and ``</think>``.
    """

    def __init__(self, *, as_ids: bool, thinking: bool) -> None:
        from ds4q.runtime.text.answer import AnswerStream
        from ds4q.runtime.text.pieces import THINK, THINK_END

        self._as_ids = as_ids
        self._last = ""
        self._think_end = THINK_END + "\n"
        self._answer = AnswerStream(thinking=thinking, tools=False)
        self._in_reasoning = thinking
        self._write(THINK if thinking else "")

    def run(self, generation: Generation) -> None:
        """Write until the generation ends; an interrupt still ends the line."""
        try:
            for step in generation:
                if self._as_ids:
                    self._write(f"{',' if self._last else ''}{step.id}")
                else:
                    self._show(self._answer.push(step.text))
        except KeyboardInterrupt:
            self._show(self._answer.push(generation.end()))
            raise
        finally:
            self._show(self._answer.finish(generation.finish_reason or "stop"))
            self._write("" if self._last.endswith("\n") else "\n")

    def _show(self, pieces: Sequence[tuple[str, str] | ToolCall]) -> None:
        for piece in pieces:
            if isinstance(piece, tuple):  # as it is without tools
                channel, text = piece
                self._leave_reasoning(channel)
                self._write(text)
        self._leave_reasoning(self._answer.channel)

    def _leave_reasoning(self, channel: str) -> None:
        if self._in_reasoning and channel == "content":
            self._in_reasoning = False
            self._write(self._think_end)

    def _write(self, text: str) -> None:
        if text:
            write_text(visible(text) if sys.stdout.isatty() else text)
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
