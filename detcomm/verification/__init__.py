# SPDX-License-Identifier: Apache-2.0
"""The promise, checked guarantee by guarantee on the machines where it must hold.

    contract.py     what is promised by which association
    reference.py    the bits that are expected, from all ranks' contributions, in this process
    record.py       what was checked and what failed, on one rank and over all
    checks.py       one guarantee, one operation, one type
    run.py          which groups are made, and what is checked on each

What is expected never comes from what is examined, except for a library that promises nothing: then it is the
library's own first answer.
"""

from detcomm.verification.record import Verdict
from detcomm.verification.run import Scope, verify

__all__ = ["Scope", "Verdict", "verify"]
