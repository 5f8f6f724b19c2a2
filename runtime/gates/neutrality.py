"""Owns the neutrality gate: whether paging of experts changes a token, or a bit of a logit.

One artifact runs with all experts in memory, with a cache that holds whatever the prompts touch,
and with one that has to evict all the time. Every arm chooses its own tokens, greedily and past
tokens that end a text. Token ids are compared, since two lists of ids can render as one text; then
logits, of every token of the prompts, too. Those of the first arm wait on disk (``spool.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from ds4q.artifact.report import Check, Failure
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.gates import prompts as texts
from ds4q.runtime.gates.forced import F32, Call
from ds4q.runtime.gates.pair import Measurement, Model, Surroundings
from ds4q.runtime.gates.spool import Spool
from ds4q.runtime.rows import check_room
from ds4q.runtime.sampling import Sampler

TOKENS = 192
Place = tuple[int, int]  # a prompt and the position of a call's first token


class Running(Protocol):
    """What the gate needs of a loaded model."""

    def new_state(self) -> Any:
        """An empty sequence."""

    def forward(self, state: Any, ids: npt.NDArray[np.int64], logits: Any, *, trace: Any) -> F32:
        """Append ``ids`` and return logits [T, vocab]."""

    def cache_counters(self) -> dict[str, Any] | None:
        """What the pager counted; None where nothing is paged."""


class Arm(NamedTuple):
    """One way to keep experts, and whether it is meant to evict."""

    name: str
    cache: CacheOptions
    evicts: bool


class Routed:
    """Sees what experts a model chose, and what they gave: digests, layer by layer.

    Attributes
    ----------
    touched : experts used so far, by layer
    """

    def __init__(self) -> None:
        self.touched: dict[int, set[int]] = {}
        self._rows: dict[int, xxh3_128] = {}

    def __call__(self, name: str, values: npt.NDArray[Any]) -> None:
        place, _, what = name.partition(".")
        if what == "route_idx":
            self.touched.setdefault(int(place[1:]), set()).update(values.flat)
        elif what == "routed_out":
            self._rows.setdefault(int(place[1:]), xxh3_128()).update(values.tobytes())

    def take(self) -> dict[int, bytes]:
        """Digest of the routed rows of each layer since the last call."""
        rows, self._rows = self._rows, {}
        return {layer: digest.digest() for layer, digest in rows.items()}


@dataclass(slots=True)
class Truth:
    """What the model does with all experts in memory: its calls on disk, its digests here."""

    spool: Spool
    rows: dict[Place, dict[int, bytes]] = field(default_factory=dict)
    slots: int = 0  # most experts that the prompts touch in one layer


@dataclass(frozen=True, slots=True)
class Neutrality:
    """The gate ``neutrality``: passes if paging changes nothing, and was really exercised.

    Attributes
    ----------
    prompts : JSONL of texts or ids; None takes the built-in ones
    tokens : that each prompt is continued by, as far as the context goes
    cache : bytes of the cache that has to evict; None takes the smallest, top-k slots a layer
    fast : one layer of each kind runs (``fast_layers``), and the head on what they give
    policies : of the caches that evict; none takes the default one
    adapter : also run both caches with this predictor's prefetch
    """

    name: ClassVar[str] = "neutrality"
    prompts: str | os.PathLike[str] | None = None
    tokens: int = TOKENS
    cache: int | None = None
    fast: bool = False
    policies: Sequence[str] = ()
    adapter: str | os.PathLike[str] | None = None

    def prepare(self, path: str | os.PathLike[str], where: Surroundings) -> Measurement:
        """What runs the artifact ``path`` in every arm; see ``Gate``."""
        model = Model.read(path)
        config = model.config
        layers = tuple(fast_layers(config)) if self.fast else None
        prompts = self._prompts(model)
        small = self._small(config)
        if self.adapter is not None:  # of all arms that evict this one needs most
            small = replace(small, adapter=Path(self.adapter))
        model.check_cache(small, where, layers=layers)
        steps = [self._steps(config, prompt) for prompt in prompts]
        rows = sum(len(prompt) for prompt in prompts) + sum(steps) - len(steps)
        nbytes = rows * config.vocab_size * np.dtype(np.float32).itemsize
        check_room(nbytes)
        return partial(self._run, model, layers, prompts, nbytes, where)

    def _run(
        self,
        model: Model,
        layers: Sequence[int] | None,
        prompts: Sequence[Sequence[int]],
        nbytes: int,
        where: Surroundings,
        check: Check,
    ) -> None:
        config = model.config
        steps = [self._steps(config, prompt) for prompt in prompts]
        check.figures |= {
            "prompts": len(prompts),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "tokens": sum(steps),
            "layers": config.num_hidden_layers if layers is None else len(layers),
            "fast": self.fast,
            "device": where.device,
        }
        if layers is not None:
            kinds = fast_layers(config)
            check.figures["layer_kinds"] = {str(layer): kinds[layer] for layer in layers}
            each = "; ".join(f"layer {layer}: {', '.join(kinds[layer])}" for layer in layers)
            ran = f"{len(layers)} of {config.num_hidden_layers} layers"
            check.notes.append(f"fast: only {ran} ran, one of each kind: {each}")
        arms: dict[str, dict[str, Any]] = {}
        with Spool(nbytes) as spool:
            where.tell(
                f"neutrality: {len(prompts)} prompts, {sum(steps):,} new tokens an arm; logits "
                f"take {nbytes:,} bytes in {spool.folder} meanwhile"
            )
            truth = Truth(spool)
            with (
                model.running(where, None, layers) as engine,
                where.progress("all experts in memory", sum(steps), unit="tokens") as advance,
            ):
                for call in _record(engine, truth, prompts, steps, seen=where.device == "cpu"):
                    spool.write(call)
                    advance(1)
            for arm in self._arms(config, truth.slots or config.n_routed_experts):
                with (
                    model.running(where, arm.cache, layers) as engine,
                    where.progress(arm.name, sum(steps), unit="tokens") as advance,
                ):
                    lengths = [len(prompt) for prompt in prompts]
                    comparison = Comparison(arm.name, lengths, layers)
                    for _ in comparison.run(engine, truth, seen=where.device == "cpu"):
                        advance(1)
                    arms[arm.name] = comparison.figures()
                    arms[arm.name] |= _exercised(check, arm, engine.cache_counters())
                for failure in comparison.failures():
                    check.fail(failure)
        check.figures["arms"] = arms
        check.figures["equal"] = sum(arm["equal"] for arm in arms.values())
        check.figures["of"] = sum(steps) * len(arms)

    def _prompts(self, model: Model) -> list[list[int]]:
        config = model.config
        positions = config.max_position_embeddings
        if self.prompts is None:
            return texts.built_in(config, model.tokenizer, positions)
        return texts.read(
            self.prompts,
            tokenizer=model.tokenizer,
            vocab_size=config.vocab_size,
            positions=positions,
        )

    def _steps(self, config: ModelConfig, prompt: Sequence[int]) -> int:
        """New tokens that ``prompt`` is continued by."""
        return min(self.tokens, config.max_position_embeddings - len(prompt))

    def _small(self, config: ModelConfig) -> CacheOptions:
        """The cache that has to evict."""
        if self.cache is not None:
            return CacheOptions(budget=self.cache)
        return CacheOptions(slots=config.num_experts_per_tok)

    def _arms(self, config: ModelConfig, touched: int) -> Iterator[Arm]:
        """A cache of as many slots as a layer needs for the prompts, and caches that evict."""
        fits = CacheOptions(slots=max(touched, config.num_experts_per_tok))
        small = self._small(config)
        yield Arm("fits", fits, evicts=False)
        for policy in self.policies or (None,):
            name = "thrashes" if policy is None else f"thrashes ({policy})"
            yield Arm(name, replace(small, policy=policy), evicts=True)
        if self.adapter is not None:
            adapter = Path(self.adapter)
            yield Arm("fits, prefetch", replace(fits, adapter=adapter), evicts=False)
            yield Arm("thrashes, prefetch", replace(small, adapter=adapter), evicts=True)


def _record(
    engine: Running,
    truth: Truth,
    prompts: Sequence[Sequence[int]],
    steps: Sequence[int],
    *,
    seen: bool,
) -> Iterator[Call]:
    """The calls of the model with all experts in memory, one for each new token."""
    greedy = Sampler(temperature=0, top_p=1, seed=0)
    routed = Routed()
    for number, (prompt, count) in enumerate(zip(prompts, steps, strict=True)):
        state = engine.new_state()
        fed = np.array(prompt, np.int64)
        for _ in range(count):
            position = state.position
            logits = engine.forward(state, fed, "all", trace=routed if seen else None)
            truth.rows[number, position] = routed.take()
            yield Call(number, position, fed, logits)
            fed = np.array([greedy(logits[-1])], np.int64)
    truth.slots = max((len(experts) for experts in routed.touched.values()), default=0)


def fast_layers(config: ModelConfig) -> dict[int, list[str]]:
    """The layers that ``--fast`` runs, each with its kinds: how it routes, how it compresses.

    In order of the layers, the first one of every kind of routing and of every compress ratio.
    """
    chosen: dict[int, list[str]] = {}
    seen: set[str] = set()
    for layer, ratio in enumerate(config.compress_ratios):
        routing = "hash-routed" if config.is_hash_layer(layer) else "learned routing"
        kinds = [routing, f"compress ratio {ratio}" if ratio else "no compression"]
        if not seen.issuperset(kinds):
            chosen[layer] = kinds
            seen.update(kinds)
    return chosen


class Comparison:
    """One arm beside the first one: the first other token and the first other logit of a prompt.

    Parameters
    ----------
    arm : its name, for messages
    lengths : tokens of each prompt
    layers : numbers of the layers that run; None: all
    """

    def __init__(
        self, arm: str, lengths: Sequence[int], layers: Sequence[int] | None = None
    ) -> None:
        self._arm = arm
        self._lengths = lengths
        self._layers = layers
        self._tokens = self._equal = 0
        self._ids: list[Failure] = []
        self._logits: dict[int, Failure] = {}

    def run(self, engine: Running, truth: Truth, *, seen: bool) -> Iterator[None]:
        """Let ``engine`` continue the prompts; yields after each token.

        A prompt ends where another token is chosen: what follows has another past.
        """
        greedy = Sampler(temperature=0, top_p=1, seed=0)
        routed = Routed()
        for number, calls in groupby(truth.spool.calls(), key=lambda call: call.window):
            state = engine.new_state()
            own: npt.NDArray[np.int64] | None = None
            for call in calls:
                fed = call.fed if own is None else own
                if (fed != call.fed).any():
                    continue  # to the calls of the next prompt
                logits = engine.forward(state, fed, "all", trace=routed if seen else None)
                layer = self._first_other(truth.rows[number, call.position], routed.take())
                self._compare_logits(call, logits, layer)
                own = np.array([greedy(logits[-1])], np.int64)
                self._compare_ids(call, int(own[0]), greedy(call.logits[-1]), layer)
                yield

    def figures(self) -> dict[str, Any]:
        """Tokens chosen, and how many of them were the right ones."""
        return {"tokens": self._tokens, "equal": self._equal, "logits": not self._logits}

    def failures(self) -> list[Failure]:
        """Ids first."""
        return [*self._ids, *self._logits.values()]

    def _compare_ids(self, call: Call, found: int, wanted: int, layer: int | None) -> None:
        self._tokens += 1
        self._equal += found == wanted
        if found != wanted:
            place = self._place(call, len(call.fed))
            said = f"{place}: another token than with all experts in memory"
            self._ids.append(Failure(said, layer=layer, expected=wanted, found=found))

    def _compare_logits(self, call: Call, logits: F32, layer: int | None) -> None:
        other = call.logits.view(np.uint32) != logits.view(np.uint32)
        if call.window in self._logits or not other.any():
            return
        row, column = np.argwhere(other)[0]
        wanted, found = (f"{x[row, column]:.9g}" for x in (call.logits, logits))
        said = f"{self._place(call, row)}: other bits in logit {column}"
        self._logits[call.window] = Failure(said, layer=layer, expected=wanted, found=found)

    def _first_other(self, wanted: dict[int, bytes], found: dict[int, bytes]) -> int | None:
        """The number of the first layer whose experts gave other rows."""
        first = next((layer for layer, rows in found.items() if wanted[layer] != rows), None)
        return first if first is None or self._layers is None else self._layers[first]

    def _place(self, call: Call, after: int) -> str:
        length = self._lengths[call.window]
        return (
            f"{self._arm}, prompt {call.window} of {length} tokens, token {call.position + after}"
        )


def _exercised(check: Check, arm: Arm, counters: dict[str, Any] | None) -> dict[str, Any]:
    """What the cache did; a failure where that is not what the arm is there for."""
    if counters is None:
        check.fail(Failure(f"not exercised: {arm.name} paged nothing; all experts were in memory"))
        return {"evictions": 0, "misses": 0, "hits": 0}
    told = {name: _total(counters, name) for name in ("evictions", "misses", "hits")}
    if arm.evicts and not told["evictions"]:
        check.fail(
            Failure(
                f"not exercised: {arm.name} evicted nothing; give it less (--cache), "
                "or continue the prompts by more tokens (--tokens)",
                expected="evictions",
                found=0,
            )
        )
    if not arm.evicts and told["evictions"]:
        check.fail(
            Failure(
                f"not exercised: {arm.name} evicted, so it does not hold what the prompts touch",
                expected=0,
                found=told["evictions"],
            )
        )
    if arm.cache.adapter is not None:
        told["prefetched"] = counters["speculative"]["issued"]
        if arm.evicts and not told["prefetched"]:
            check.fail(Failure(f"not exercised: {arm.name} read nothing ahead"))
    return {"slots": counters["slots"]} | told


def _total(counters: dict[str, Any], name: str) -> int:
    """A count over both phases."""
    return sum(counters[phase][name] for phase in ("prefill", "decode"))
