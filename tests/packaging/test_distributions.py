# SPDX-License-Identifier: Apache-2.0
"""What users install: the source distribution, the wheel built from it, and the one built where no compiler is."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from detcomm.version import __version__

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent  # cmake and ninja lie beside Python


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}", **(env or {})}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build_wheel(sdist: Path, folder: Path, env: dict[str, str] | None = None) -> Path:
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir"),
        *("-w", str(folder), str(sdist)),
        env=env,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _run_installed(wheel: Path, folder: Path, program: str) -> str:
    """Run a program that finds the wheel's detcomm, and of this environment all but its own detcomm."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    # -S: no .pth file of the environment is read, so that an editable install of detcomm stays out.
    paths = [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return _run(sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {paths}\n{program}")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", str(folder), str(ROOT))
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


def test_the_source_distribution_holds_what_a_build_needs_and_little_else(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "native/include/detcomm.h"} <= inside
    assert not [name for name in inside if name.startswith((".ci", ".git/", ".venv"))]
    assert sdist.stat().st_size < 4 << 20


def test_one_wheel_serves_every_python_and_torch(wheel: Path) -> None:
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("detcomm", __version__, "py3", "none")
    assert platform != "any", "it holds a native library"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert "detcomm/association.py" in inside
    assert any(name.endswith("/LICENSE") for name in inside)
    assert {"detcomm/libdetcomm.so", "detcomm/libdetcomm_cuda.so", "detcomm/kernels/fold.cu"} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "native/", "demo/"))]


def test_the_wheel_imports_with_its_native_library_and_passes_the_golden_vectors(wheel: Path, tmp_path: Path) -> None:
    program = f"""
import detcomm, detcomm.native, detcomm.testing
assert detcomm.__version__ == {__version__!r}
assert detcomm.__file__.startswith({str(tmp_path)!r}), detcomm.__file__
assert detcomm.native.available(), detcomm.native.why_not()
detcomm.testing.check_golden(numerics_id="tree/1:float32")
print("passed")
"""
    assert _run_installed(wheel, tmp_path, program).endswith("passed\n")


def test_without_a_compiler_the_wheel_has_the_same_bits(sdist: Path, tmp_path: Path) -> None:
    """The portable folds are announced once, and pass the same golden vectors."""
    without = {"CC": "/bin/false", "CXX": "/bin/false"}
    wheel = _build_wheel(sdist, tmp_path / "wheel", env=without)
    program = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import detcomm.native, detcomm.testing
    assert not detcomm.native.available()
    detcomm.testing.check_golden(numerics_id="tree/1:float32")
assert [warning.category.__name__ for warning in caught].count("PortableFoldWarning") == 1, caught
print("passed")
"""
    assert _run_installed(wheel, tmp_path / "installed", program).endswith("passed\n")


def test_planning_needs_no_torch(wheel: Path, tmp_path: Path) -> None:
    program = """
sys.modules["torch"] = None
from detcomm.__main__ import main
sys.argv = ["detcomm", "plan", "--help"]
main()
"""
    assert "plan" in _run_installed(wheel, tmp_path, program)
