"""The main job with every process real: short, interrupted, and with the trainer killed in the middle."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from practicum.cli.stack import read_stack

pytestmark = pytest.mark.timeout(900)

REPORT_KEYS = {
    "heldout_before",
    "heldout_after",
    "steps",
    "wall_s",
    "zero_variance_groups",
    "tokens_generated",
    "tokens_trained",
    "logprob_mismatch_max",
    "engine_utilisation",
    "episodes_infra_failed",
}


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from practicum.cli.main import main; main()", "demo"]
    command += ["--data-dir", str(folder / "data"), "--report", str(folder / "report.json"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def processes_of(folder: Path) -> list[str]:
    """Every process of this machine whose environment or command names the stack's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("PRACTICUM_DATA_DIR", "") + " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in mine:
            found.append(f"{process.pid} {process.name()}")
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.1)


def committed_steps(folder: Path) -> int:
    database = folder / "data" / "trainer.sqlite"
    if not database.exists():
        return 0
    with sqlite3.connect(database) as connection:
        try:
            return int(connection.execute("SELECT COUNT(*) FROM trainer_steps").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def test_demo_when_run_short_trains_publishes_reports_and_leaves_no_process(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "2", "--heldout", "16", "--train", "32")
    out, err = demo.communicate(timeout=600)
    assert demo.returncode == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() >= REPORT_KEYS
    assert "held-out success after" in out
    assert report["steps"] == 2
    assert report["heldout_before"]["weight_version"] == 0
    assert report["heldout_after"]["weight_version"] == 2
    assert report["heldout_before"]["num_tasks"] == 16
    assert report["episodes_infra_failed"] == 0
    assert 0 < report["tokens_trained"] <= report["tokens_generated"]
    # At equal weights rollout and trainer differ by their kernels' rounding in fp32 alone.
    assert report["logprob_mismatch_max"] < 1e-3
    assert processes_of(tmp_path) == []


def test_demo_when_interrupted_leaves_no_process(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "50", "--heldout", "16", "--train", "32")
    wait_for(lambda: read_stack(tmp_path / "data") is not None, timeout_s=180)
    assert len(processes_of(tmp_path)) >= 5
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    wait_for(lambda: processes_of(tmp_path) == [], timeout_s=10)
    assert read_stack(tmp_path / "data") is None


def test_demo_when_the_supervisor_is_killed_leaves_no_process(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--steps", "50", "--heldout", "16", "--train", "32")
    wait_for(lambda: read_stack(tmp_path / "data") is not None, timeout_s=180)
    demo.kill()
    demo.communicate(timeout=60)
    wait_for(lambda: processes_of(tmp_path) == [], timeout_s=30)


def test_trainer_when_killed_in_the_middle_goes_on_and_trains_nothing_twice(tmp_path: Path) -> None:
    num_steps = 4
    demo = start_demo(tmp_path, "--steps", str(num_steps), "--heldout", "8", "--train", "32")
    wait_for(lambda: committed_steps(tmp_path) >= 1, timeout_s=400)
    stack = read_stack(tmp_path / "data")
    assert stack is not None
    os.kill(stack.pids["trainer"], signal.SIGKILL)
    _, err = demo.communicate(timeout=600)
    assert demo.returncode == 0, err
    assert json.loads((tmp_path / "report.json").read_text())["steps"] == num_steps
    with sqlite3.connect(tmp_path / "data" / "trainer.sqlite") as connection:
        steps = [row[0] for row in connection.execute("SELECT step FROM trainer_steps ORDER BY step")]
        consumed = connection.execute(
            "SELECT step, COUNT(*), COUNT(DISTINCT episode_id) FROM trainer_consumed GROUP BY step"
        ).fetchall()
        total, distinct = connection.execute(
            "SELECT COUNT(*), COUNT(DISTINCT episode_id) FROM trainer_consumed"
        ).fetchone()
    assert steps == list(range(1, num_steps + 1))
    assert [row[0] for row in sorted(consumed)] == steps
    assert total == distinct == num_steps * 64, "every step took 8 groups of 8, each episode once"
