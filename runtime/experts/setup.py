"""Owns what options ask of an artifact's routed experts, read and checked, for either engine.

Knows neither where slots are nor what fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from ds4q.artifact.hfq import Reader
from ds4q.artifact.newfile import NewFile
from ds4q.runtime.config import ModelConfig
from ds4q.runtime.errors import CacheError
from ds4q.runtime.experts.adapter import Adapter, read_adapter
from ds4q.runtime.experts.catalogue import Catalogue
from ds4q.runtime.experts.header import Header
from ds4q.runtime.experts.options import CacheOptions
from ds4q.runtime.experts.ownership import ExpertOwnership
from ds4q.runtime.experts.pager import Pager
from ds4q.runtime.experts.plan import Plan, limits_of
from ds4q.runtime.experts.policy import DEFAULT_POLICY, parameters_of
from ds4q.runtime.experts.predict import AdapterGuess, Prefetcher
from ds4q.runtime.experts.profile import Profile, read_profile
from ds4q.runtime.experts.reading import Purpose
from ds4q.runtime.experts.trace import Recorder, identity_of
from ds4q.runtime.experts.transport import Transport


class Setup:
    """What ``options`` ask for.

    Parameters
    ----------
    reader : not used after construction
    stack : ends the trace and the reading that begin here
    notes : gets what a user should hear, one line each

    Attributes
    ----------
    ownership : the experts of this rank
    policy : name
    recorder : of the trace, once it is begun
    notes : as given; may grow

    Raises
    ------
    CacheError, AdapterError, ProfileError : it cannot be
    WriteError : the trace cannot be written, or another process writes it
    """

    def __init__(
        self,
        reader: Reader,
        config: ModelConfig,
        options: CacheOptions,
        stack: ExitStack,
        notes: list[str],
    ) -> None:
        self.options = options
        self.policy = options.policy or DEFAULT_POLICY
        self.recorder: Recorder | None = None
        self.notes = notes
        self._config = config
        self._stack = stack
        self._path = reader.path
        self._identity = identity_of(reader)
        self._adapter: Adapter | None = None
        self._profile: Profile | None = None
        self._trace: NewFile | None = None
        layers, experts = config.num_hidden_layers, config.n_routed_experts
        self.ownership = _ownership(options, experts)
        if options.adapter is not None:
            self._adapter = read_adapter(options.adapter)
            notes += self._adapter.check_model(config, self._identity)
        if options.profile is not None:
            self._profile = read_profile(options.profile, self._identity, layers, experts)
            if not any(self._warm(self._profile)):
                self.notes.append(
                    f"{options.profile}: names no expert of this rank, which holds "
                    f"{self.ownership.start} to {self.ownership.stop - 1} of {experts}: the cache "
                    "begins empty"
                )
        if options.trace is not None:
            self._trace = NewFile(options.trace)
            stack.callback(self._trace.discard)

    def check_owned(self, nbytes: int) -> None:
        """Refuse a budget that is less than ``nbytes``, where a rank keeps its experts alone."""
        budget = self.options.budget
        if isinstance(budget, int) and nbytes > budget:
            raise CacheError(
                "this rank's experts do not fit, and no others may stand in for them",
                path=self._path,
                expected=f"at least {nbytes:,} bytes",
                found=f"{budget:,} bytes",
                remedy="give more, or page them: leave out --cold none",
            )

    def record(self, catalogue: Catalogue, plan: Plan | None) -> None:
        """Begin the trace, if there is to be one; ``plan`` is None where nothing is paged."""
        if self._trace is None:
            return
        header = Header.of(
            self._identity,
            self._config,
            catalogue,
            len(self.ownership.owned) if plan is None else plan.slots,
            owned=(self.ownership.start, self.ownership.stop),
            policy=self.policy,
            parameters=parameters_of(self.policy),
            warm_start="" if self._profile is None else self._profile.digest,
            limits=limits_of(self.options, plan),
        )
        self.recorder = Recorder(self._trace, header)
        self._stack.callback(self.recorder.close)

    def pager(self, catalogue: Catalogue, plan: Plan, transport: Transport) -> Pager:
        """The pager of a plan's slots, which ``transport`` fills."""
        pager = Pager(
            catalogue,
            plan.slots,
            transport,
            policy=self.policy,
            ownership=self.ownership,
            quarantine=plan.quarantine,
            recorder=self.recorder,
        )
        self._stack.callback(pager.close)
        return pager

    def prefetcher(
        self,
        pager: Pager,
        plan: Plan,
        by_token: Mapping[int, npt.NDArray[np.int32]],
        bias: Callable[[int], npt.NDArray[np.float32]],
        say: Callable[[str], None],
    ) -> Prefetcher | None:
        """What asks for experts ahead of their use; None: nothing does.

        Parameters
        ----------
        by_token : i32 [V, K] of every hash layer
        bias : f32 [E] of any other layer
        """
        certain = {layer: table for layer, table in by_token.items() if plan.quarantine[layer]}
        guess = None
        if self._adapter is not None:
            others = (n for n in range(self._config.num_hidden_layers) if n not in by_token)
            biases = {layer: bias(layer) for layer in others}
            top, number = self.options.prefetch_top, self._config.number
            guess = AdapterGuess(self._adapter, biases, top, number)
        if not certain and guess is None:
            return None
        return Prefetcher(pager, certain, guess, say=say)

    def warm(self, pager: Pager, slots: int) -> None:
        """Read what the profile names, behind whatever is demanded."""
        for layer, experts in enumerate(() if self._profile is None else self._warm(self._profile)):
            pager.prefetch(layer, experts[:slots], Purpose.WARM)

    def drop_trace(self) -> None:
        """Leave no trace, of a run that failed."""
        if self.recorder is not None:
            self.recorder.drop()

    def _warm(self, profile: Profile) -> list[list[int]]:
        """Of the experts that a profile names in each layer, those of this rank."""
        return [[e for e in experts if self.ownership.owns(e)] for experts in profile.experts]


def _ownership(options: CacheOptions, experts: int) -> ExpertOwnership:
    if options.owner is None:
        return ExpertOwnership.all(experts)
    rank, ranks = options.owner
    ownership = ExpertOwnership.of_rank(rank, ranks, experts)
    if not ownership.owned:
        raise CacheError(
            f"rank {rank} of {ranks} owns no expert: every layer has {experts}",
            expected=f"at most {experts} ranks",
            found=f"{ranks} ranks",
            remedy=f"name a rank from 0 to {experts - 1}, or fewer ranks (--expert-owner)",
        )
    return ownership
