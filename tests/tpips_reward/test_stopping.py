"""A long job is asked to stop by a signal, or by the end of its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpips_reward.errors import TPIPSError, exit_on_errors
from tpips_reward.stopping import Interrupted, StopSignal


def test_the_first_signal_asks_and_the_second_insists() -> None:
    old = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(Interrupted):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is old


def test_the_end_of_accelerate_launch_asks_too(tmp_path: Path) -> None:
    """SIGTERM to the launcher leaves its child alive; the child notices and stops."""
    script, started, stopped = (tmp_path / name for name in ("job.py", "started", "stopped"))
    script.write_text(
        "import sys, time, pathlib\nfrom tpips_reward.stopping import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    while not stop.requested: time.sleep(0.05)\n"
        "pathlib.Path(sys.argv[2]).touch()\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", str(script)]
    with subprocess.Popen(
        [*command, str(started), str(stopped)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        _wait_for(started)
        time.sleep(0.3)
        assert not stopped.exists()
        launcher.send_signal(signal.SIGTERM)
    _wait_for(stopped)


def _wait_for(path: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (TPIPSError("a\nb"), 2, "error: a b"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "error: x.json cannot be used: No such file"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_a_command_ends_with_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop, exit_on_errors():
        raise error
    assert stop.value.code == code
    printed = capsys.readouterr().err
    assert printed.startswith(line) and printed.count("\n") == 1


def test_our_own_mistakes_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_on_errors():
        raise ZeroDivisionError
