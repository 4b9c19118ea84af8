# SPDX-License-Identifier: Apache-2.0
"""``scripts/netlab``: several nodes on one machine, for people."""

from tests.netlab.command import main

if __name__ == "__main__":
    main()
