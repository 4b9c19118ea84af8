# SPDX-License-Identifier: Apache-2.0
"""How commands get their ranks: exit codes, who is heard, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from detcomm.commands import app, ranks
from detcomm.errors import UsageError

PATIENCE_S = 120.0


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _run(*codes: str) -> int:
    return ranks.run([_python(code) for code in codes], [{} for _ in codes])


def test_all_end_well() -> None:
    assert _run("pass", "pass", "pass") == 0


def test_the_first_failure_is_the_exit_code_and_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    waits = "import time; time.sleep(600)"
    fails = "import sys; print('what happened', file=sys.stderr); sys.exit(7)"
    assert _run("print('from rank 0')", waits, fails) == 7
    out, err = capfd.readouterr()
    assert "from rank 0" in out
    assert "rank 2 of 3:\nwhat happened" in err


def test_a_signal_is_told_as_shells_do() -> None:
    assert _run("pass", "import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_only_rank_0_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    says = "import os; print('I am', os.environ['NAME'])"
    code = ranks.run([_python(says)] * 3, [{"NAME": f"rank {rank}"} for rank in range(3)])
    assert code == 0
    assert capfd.readouterr().out == "I am rank 0\n"


def _starter(tmp_path: Path, body: str) -> "subprocess.Popen[str]":
    """A process that starts two ranks, which write their ids to files and then sleep."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # some CI runs tests with it ignored\n"
        "from detcomm.commands import ranks\n"
        f"command = [sys.executable, '-c', {body!r}]\n"
        f"sys.exit(ranks.run([command] * 2, [{{'FILE': {str(tmp_path)!r} + f'/{{rank}}'}} for rank in range(2)]))"
    )
    return subprocess.Popen(_python(code), text=True)


_WRITE_ID = "import os; open(os.environ['FILE'] + '.new', 'w').write(str(os.getpid()))\n"
_WRITE_ID += "os.rename(os.environ['FILE'] + '.new', os.environ['FILE'])\n"


def _ids(tmp_path: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE_S
    while not all((tmp_path / str(rank)).exists() for rank in range(2)):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int((tmp_path / str(rank)).read_text()) for rank in range(2)]


def _gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while any(os.path.exists(f"/proc/{pid}") and not _is_zombie(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    starter = _starter(tmp_path, _WRITE_ID + "import time; time.sleep(600)")
    pids = _ids(tmp_path)
    starter.send_signal(signal.SIGINT)
    assert starter.wait(PATIENCE_S) == ranks.INTERRUPTED
    assert _gone(pids)


def test_ranks_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    waits = _WRITE_ID + "from detcomm.commands import ranks; ranks._end_with_standard_input()\n"
    starter = _starter(tmp_path, waits + "import time; time.sleep(600)")
    pids = _ids(tmp_path)
    starter.kill()
    starter.wait(PATIENCE_S)
    assert _gone(pids)


def test_under_a_launcher_the_place_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.take_place(None) == ranks.Place(2, 4)
    assert ranks.take_place(4) == ranks.Place(2, 4)
    with pytest.raises(UsageError, match="the launcher has started 4 ranks, --nproc says 3"):
        ranks.take_place(3)


def test_without_ranks_the_command_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="give --nproc N, or run it under torchrun, mpirun or srun"):
        ranks.take_place(None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["probe"], "give --nproc N"),
        (["probe", "--nproc", "4", "--sizes", "ten"], "--sizes: expected whole numbers, got 'ten'"),
        (["probe", "--nproc", "4", "--sizes", ""], "--sizes: expected at least one value"),
        (["probe", "--nproc", "4", "--sizes", "0"], "at least one element"),
        (["probe", "--nproc", "4", "--dtypes", "float12"], "--dtypes: expected among float32, "),
        (["probe", "--nproc", "4", "--dtypes", "int32"], "expected one of float16"),
        (["probe", "--nproc", "99"], "2 to 64 ranks"),
        (["probe", "--nproc", "4", "--root", "4"], "--root: expected a rank below 4"),
        (["probe", "--nproc", "4", "--expect", "star"], "--expect: expected one of tree"),
        (["probe", "--nproc", "4", "--draw", "tree.doc"], "ends in one of"),
        (["probe", "--nproc", "4", "--collective", "all_gather"], "adds nothing"),
        (["verify"], "give --nproc N"),
        (["verify", "--association", "star"], "--association: expected among tree"),
        (["verify", "--nproc", "2", "--dtypes", "float12"], "--dtypes: expected among float32, "),
        (["verify", "--nproc", "2", "--ops", "subtract"], "--ops: expected among sum, "),
        (["plan", "--model", "abacus"], "--model: expected one of h200-ib"),
        (["plan", "--plot", "x.png"], "--plot needs --model"),
    ],
)
def test_wrong_arguments_are_refused_before_any_rank_starts(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UsageError), result.output
    assert says in str(result.exception)
