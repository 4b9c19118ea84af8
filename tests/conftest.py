# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: examples that repeat, a clean environment, one thread for each numerical library."""

import os

import hypothesis

# The same examples in every run, and no limit on the time of one: a loaded machine must not fail a test.
# HYPOTHESIS_PROFILE=explore draws new ones.
_NO_CLOCK = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None, suppress_health_check=_NO_CLOCK)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, suppress_health_check=_NO_CLOCK)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_configure() -> None:
    """Before any test module is imported, and inherited by all processes that tests start."""
    transport = os.environ.get("DETCOMM_TEST_TRANSPORT")  # for groups that name none; see the Makefile
    ranks_per_host = os.environ.get("DETCOMM_TEST_RANKS_PER_HOST")
    for name in list(os.environ):
        # Which build of the native library is tested is no option of a group.
        if name.startswith(("DETCOMM_", "NCCL_")) and not name.startswith("DETCOMM_NATIVE"):
            del os.environ[name]
    if transport is not None:
        os.environ["DETCOMM_TRANSPORT"] = transport
    if ranks_per_host is not None:
        from tests import launch

        launch.RANKS_PER_HOST = int(ranks_per_host)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def pytest_report_header() -> str:
    """The machine, as far as tests depend on it."""
    import numpy
    import torch

    return f"torch {torch.__version__}, numpy {numpy.__version__}, {len(os.sched_getaffinity(0))} cores"
