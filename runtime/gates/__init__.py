"""Owns measurements that an artifact has to pass when it is run. Knows no checkpoint.

A gate is a frozen set of options with a ``name`` and a ``run`` that fills a ``Check`` of the one
report. It does not raise for what is wrong with an artifact.
"""

from ds4q.runtime.gates.divergence import Divergence
from ds4q.runtime.gates.fidelity import Fidelity
from ds4q.runtime.gates.load_time import LoadTime
from ds4q.runtime.gates.neutrality import Neutrality
from ds4q.runtime.gates.pair import Gate, Surroundings

__all__ = ["Divergence", "Fidelity", "Gate", "LoadTime", "Neutrality", "Surroundings"]
