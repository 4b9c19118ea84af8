# SPDX-License-Identifier: Apache-2.0
"""``python -m detcomm`` is ``detcomm``."""

from detcomm.commands import main

if __name__ == "__main__":
    main()
