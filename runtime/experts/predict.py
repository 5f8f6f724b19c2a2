"""Owns asking for experts ahead of their use, and stopping when that does not pay. Reads nothing.

Hash layers choose by token id alone, so their experts are known as soon as the token is: those
reads are certain, and come first. What an adapter tells of the next layer is a guess: it is read
into slots that cannot displace a demanded expert, one token at a time, while little else is being
read. Whatever is asked for here, the routers choose, so tokens never depend on it.

T tokens, K experts per token, M guessed, E experts, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ds4q.runtime.errors import AdapterError
from ds4q.runtime.experts.adapter import Adapter
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.store import Phase
from ds4q.runtime.experts.trace import BandRecord

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

DEFAULT_TOP = 2
MOST_WASTE = 0.10  # of the bytes that would be read without guesses
MAX_BYTES_IN_FLIGHT = 64 << 20
_JUDGED_EVERY_TOKENS = 16
_JUDGED_FROM_TOKENS = 32


def guess_slots(top: int | None) -> int:
    """Slots of a layer for what is guessed, of ``top`` guesses a token (None: ``DEFAULT_TOP``).

    Half of the best guesses are resident anyway. More slots than this were worth less than as many
    more for demanded experts, at every size of cache that was tried (benchmarks/prefetch.py).
    """
    return ((DEFAULT_TOP if top is None else top) + 1) // 2


class Slots(Protocol):
    """What reads ahead are asked of: a ``Pager``."""

    def prefetch(
        self, layer: int, ids: Sequence[int], purpose: Purpose, *, most_bytes: int | None = None
    ) -> int:
        """Begin to read experts ahead of their use."""

    def counters(self) -> dict[str, Any]:
        """Its counts."""


class Guess(Protocol):
    """Names experts of a layer before its router does."""

    needs_state: bool

    def candidates(self, layer: int, x: F32 | None) -> I64 | None:
        """Experts of ``layer + 1`` [T, M], best first, or None.

        Asked once per token for each layer, in order; ``x`` [T, d] is what the layer's router saw.
        """


class AdapterGuess:
    """What an adapter predicts.

    Parameters
    ----------
    biases : [E] by layer, of the layers that choose by score
    top : experts that are guessed; None takes ``DEFAULT_TOP``
    number : maps a layer, counted among those that run, to its number in the checkpoint
    """

    needs_state = True

    def __init__(
        self,
        adapter: Adapter,
        biases: Mapping[int, F32],
        top: int | None,
        number: Callable[[int], int] = int,
    ) -> None:
        self._adapter = adapter
        self._number = number
        self._biases = biases
        self._top = DEFAULT_TOP if top is None else top
        if self._top < 1:
            raise AdapterError("no experts to prefetch", expected="1 or more", found=top, remedy="")

    def candidates(self, layer: int, x: F32 | None) -> I64 | None:
        """See ``Guess``."""
        bias = self._biases.get(layer + 1)
        if bias is None or x is None:
            return None
        source = self._number(layer + 1) - 1  # entries are named after the layer before
        if source not in self._adapter.entries:
            return None
        return best(np.add(self._adapter.predict(source, x), bias), self._top)


class Oracle:
    """What the next layer did choose, from a trace of the very same run: no guess can gain more.

    Parameters
    ----------
    bands : of the trace; those of the decode phase count
    """

    needs_state = False

    def __init__(self, bands: Iterable[BandRecord]) -> None:
        self._tokens: list[dict[int, I64]] = []
        last = None
        for band in bands:
            if band.phase != "decode":
                continue
            place = (band.sequence, band.token)
            if place != last:
                self._tokens.append({})
                last = place
            self._tokens[-1][band.layer] = band.ids.astype(np.int64)
        self._token = -1
        self._last = 0

    def candidates(self, layer: int, x: F32 | None) -> I64 | None:
        """See ``Guess``; nothing beyond the trace's end."""
        self._token += layer <= self._last
        self._last = layer
        known = self._tokens[self._token] if self._token < len(self._tokens) else {}
        return known.get(layer + 1)


class Prefetcher:
    """Asks a pager for experts ahead of their use.

    Parameters
    ----------
    tables : experts by token id [V, K], of the hash layers
    guess : None: certain reads only
    say : told, once, when guesses have been given up
    most_waste : give them up where bytes that were read in vain are more than this share of what
        would have been read without them

    Attributes
    ----------
    needs_state : whether ``see`` wants to know what routers see
    """

    def __init__(
        self,
        pager: Slots,
        tables: Mapping[int, I32],
        guess: Guess | None = None,
        *,
        say: Callable[[str], None] = lambda line: None,
        most_waste: float = MOST_WASTE,
    ) -> None:
        self._pager = pager
        self._tables = dict(sorted(tables.items()))
        self._guess = guess
        self._say = say
        self._most_waste = most_waste
        self._x: F32 | None = None
        self._tokens = 0

    @property
    def needs_state(self) -> bool:
        """Whether ``see`` wants to know what routers see."""
        return self._guess is not None and self._guess.needs_state

    def begin(self, ids: I64, phase: Phase) -> None:
        """A batch of token ids [T] begins: ask for what hash layers will choose."""
        for layer, table in self._tables.items():
            self._pager.prefetch(layer, table[ids].ravel().tolist(), Purpose.CERTAIN)
        if phase == "decode" and self._guess is not None:
            before = self._tokens // _JUDGED_EVERY_TOKENS
            self._tokens += len(ids)  # one a sequence
            due = self._tokens // _JUDGED_EVERY_TOKENS != before
            if due and self._tokens >= _JUDGED_FROM_TOKENS:
                self._judge()

    def see(self, layer: int, ids: I64, logits: F32, x: F32) -> None:
        """The router of ``layer`` has seen ``x`` [T, d] and chosen."""
        self._x = x if self.needs_state else None

    def issue(self, layer: int, phase: Phase) -> None:
        """What ``layer`` itself needs is there: ask for what the next one may choose.

        Not while a prompt is read: its tokens together choose most experts anyway.
        """
        if self._guess is None or phase != "decode" or layer + 1 in self._tables:
            return
        found = self._guess.candidates(layer, self._x)
        if found is not None:
            wanted = found.T.ravel().tolist()  # the best of each token first
            self._pager.prefetch(
                layer + 1, wanted, Purpose.SPECULATIVE, most_bytes=MAX_BYTES_IN_FLIGHT
            )

    def _judge(self) -> None:
        """Give guesses up where they have cost too many bytes.

        Guesses displace no demanded expert, so each that was of use saved the one read that it
        was; without them what was demanded or of use would have been read, no more.
        """
        counts = self._pager.counters()
        guesses = counts["speculative"]
        if not guesses["issued"]:
            return
        wasted = guesses["bytes"] * guesses["dropped"] // guesses["issued"]
        needed = (
            sum(counts[phase]["bytes"] for phase in ("prefill", "decode"))
            + counts["certain"]["bytes"]
            + guesses["bytes_used"]
        )
        if wasted > self._most_waste * needed:
            self._guess = self._x = None
            self._say(
                f"prefetch by prediction is off: after {self._tokens} tokens it had read "
                f"{wasted / needed:.0%} more than is read without it, the limit is "
                f"{self._most_waste:.0%}"
            )


def best(merit: F32, m: int) -> I64:
    """The ``m`` experts of most ``merit`` [T, E] as [T, m], best first, ties to the lower id."""
    return np.argsort(-merit, axis=1, kind="stable")[:, :m]
