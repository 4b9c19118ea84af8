# SPDX-License-Identifier: Apache-2.0
"""Tables of measured figures in the documents are those that their scripts write from the figures that are kept."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize("script", ["bench_page", "performance_page"])
def test_tables_are_written_by_their_script(script: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPTS / script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/{script}\n{done.stderr}"
