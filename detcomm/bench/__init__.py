# SPDX-License-Identifier: Apache-2.0
"""How fast detcomm is, against other libraries, in one job: what ``detcomm bench`` runs.

    cases.py        what is measured: collective, type, bytes
    contenders.py   who is measured: detcomm, its native call alone, any torch backend, MPI
    timing.py       interleaved rounds, so that a disturbance meets all contenders alike
    run.py          verify, then time; one Measurement a case and contender
    report.py       bandwidths, ratios, machine and versions, JSON

Every contender must give the right result on a case before it is timed on it. All figures are of the slowest rank.
"""

from detcomm.bench.cases import Case
from detcomm.bench.contenders import CONTENDERS, Contender, open_contender
from detcomm.bench.report import Report
from detcomm.bench.run import Measurement, measure
from detcomm.bench.timing import Effort

__all__ = [
    "CONTENDERS",
    "Case",
    "Contender",
    "Effort",
    "Measurement",
    "Report",
    "measure",
    "open_contender",
]
