# SPDX-License-Identifier: Apache-2.0
"""How fast detcomm is, against other libraries, in one job: what ``detcomm bench`` runs.

    cases.py        what is measured: collective, type, operation, bytes; in place or not
    numbers.py      contributions with known results: exact ones, and ones whose sums tell the order of additions
    buffers.py      the memory of a case, the same for all
    contenders.py   who is measured: detcomm, its native call alone, any torch backend, NCCL's ring, MPI
    timing.py       interleaved rounds, so that a disturbance meets all contenders alike
    run.py          check, then time; one Measurement a case and contender
    report.py       bandwidths, ratios, machine and versions, JSON
    table.py        rows as nccl-tests print them
    plotting.py     a picture
    compare.py      two reports, before and after
    training.py     a training step with each contender, and without communication
    bars.py         how fast it should be on a CPU host, and alone.py on one rank; bounds.py: the machine's own limits

Every contender must give the right result on a case before it is timed on it.
"""

from detcomm.bench.cases import Case, Place
from detcomm.bench.contenders import Contender, open_contender
from detcomm.bench.report import Report
from detcomm.bench.run import Job, Measurement, measure
from detcomm.bench.timing import Effort

__all__ = ["Case", "Contender", "Effort", "Job", "Measurement", "Place", "Report", "measure", "open_contender"]
