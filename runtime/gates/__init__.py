"""Owns measurements that an artifact has to pass when it is run. Knows no checkpoint.

A gate is a frozen set of options with a ``name``. Its ``prepare`` refuses what options, index and
small files tell to be in vain, before anything large is read; what it returns runs the model and
fills a ``Check`` of the one report.
"""

from ds4q.runtime.gates.divergence import Divergence
from ds4q.runtime.gates.fidelity import Fidelity
from ds4q.runtime.gates.load_time import LoadTime
from ds4q.runtime.gates.neutrality import Neutrality
from ds4q.runtime.gates.pair import Gate, Measurement, Surroundings

__all__ = [
    "Divergence",
    "Fidelity",
    "Gate",
    "LoadTime",
    "Measurement",
    "Neutrality",
    "Surroundings",
]
