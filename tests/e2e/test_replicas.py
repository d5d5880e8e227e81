"""Three rollout and two reward services with two engines and a trainer: work is shared, and none is lost.

Every process is real: PostgreSQL, Redis, the services. One rollout replica is killed in the middle of the
run, another is told to stop; the third plays what they leave.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from examples.first_bugs import generate_suite
from practicum.cli.ports import free_ports
from practicum.db.migrate import upgrade
from services.reward.store import MIGRATIONS as REWARD_MIGRATIONS
from services.rollout.main import MIGRATIONS as ROLLOUT_MIGRATIONS
from services.trainer.store import MIGRATIONS as TRAINER_MIGRATIONS
from tests.fixtures.engine_server import cpu_engine

pytestmark = pytest.mark.timeout(1800)

MODEL = Path(__file__).parents[2] / "examples" / "first_bugs" / "tiny"
TOKEN = "token-of-the-test"
ROLLOUTS = ("rollout-0", "rollout-1", "rollout-2")
REWARDS = ("reward-0", "reward-1")
# More steps than are taken: a fast machine must not be done before every replica was stopped.
NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 1000, 6, 4
START_TIMEOUT_S = 240.0
RUN_TIMEOUT_S = 300.0

Json = dict[str, Any]


class Fleet:
    """The processes of one platform."""

    def __init__(self, folder: Path, redis_url: str, database_url: str) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        names = (*ROLLOUTS, *REWARDS, "trainer")
        ports = iter(free_ports(2 * len(names)))
        self.ports = {name: (next(ports), next(ports)) for name in names}  # REST, gRPC
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PRACTICUM_")},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PRACTICUM_TOKEN": TOKEN,
            "PRACTICUM_REDIS_URL": redis_url,
            "PRACTICUM_DATABASE_URL": database_url,
            "PRACTICUM_DATA_DIR": str(folder / "data"),
            "PRACTICUM_MODEL_PATH": str(MODEL),
            "PRACTICUM_BEAT_INTERVAL_S": "2",
            "PRACTICUM_LOST_AFTER_S": "15",
            "PRACTICUM_MAX_EPISODES": "16",
            "PRACTICUM_ADMISSIONS_AT_ONCE": "2",
            "PRACTICUM_REWARD_GRADING_CONCURRENCY": "2",
            # As a name with several addresses is looked up.
            "PRACTICUM_ROLLOUT_RPC": "ipv4:" + ",".join(self.rpc(name) for name in ROLLOUTS),
            "PRACTICUM_REWARD_RPC": "ipv4:" + ",".join(self.rpc(name) for name in REWARDS),
            "PRACTICUM_TRAINER_RPC": self.rpc("trainer"),
        }
        self.http = httpx.Client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)

    def rpc(self, name: str) -> str:
        """host:port of a process's gRPC."""
        return f"127.0.0.1:{self.ports[name][1]}"

    def start(self, *names: str, **extra: str) -> None:
        """Start processes, and wait until each answers."""
        for name in names:
            service = name.partition("-")[0]
            rest, rpc = self.ports[name]
            environment = {
                **self.environment,
                f"PRACTICUM_{service.upper()}_INSTANCE": name,
                "PRACTICUM_REST_PORT": str(rest),
                "PRACTICUM_RPC_PORT": str(rpc),
                **extra,
            }
            with (self.folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", f"services.{service}.main"],
                    env=environment,
                    stderr=log,
                    stdout=log,
                )
        for name in names:
            wait_for(lambda name=name: self.is_up(name), START_TIMEOUT_S, f"{name} is up")  # type: ignore[misc]

    def is_up(self, name: str) -> bool:
        """Whether a process answers; an assertion where it ended."""
        log = (self.folder / f"{name}.log").read_text(errors="replace")
        assert self.processes[name].poll() is None, f"{name} ended: {log[-3000:]}"
        try:
            return self.http.get(self.url(name) + "/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def url(self, name: str) -> str:
        """Where a process's REST is."""
        return f"http://127.0.0.1:{self.ports[name][0]}"

    def call(self, name: str, method: str, path: str, body: Json | None = None) -> Json:
        """One call to one process."""
        answer = self.http.request(method, self.url(name) + path, json=body)
        assert answer.status_code < 300, answer.text
        return dict(answer.json())

    def metric(self, name: str, metric: str) -> float:
        """The sum of a metric's samples at one process."""
        text = self.http.get(self.url(name) + "/metrics").text
        return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def stop(self) -> None:
        """End everything."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.http.close()


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {timeout_s} s: {what}"
        time.sleep(0.1)
    return value


@contextmanager
def fleet(folder: Path, redis_url: str, database_url: str) -> Iterator[Fleet]:
    """A platform that is up."""
    for migrations in (ROLLOUT_MIGRATIONS, REWARD_MIGRATIONS, TRAINER_MIGRATIONS):
        upgrade(database_url, migrations)
    (folder / "data").mkdir()
    with ExitStack() as stack:
        engines = [stack.enter_context(cpu_engine(MODEL, "--max-running-requests", "16")) for _ in range(2)]
        made = Fleet(folder, redis_url, database_url)
        stack.callback(made.stop)
        made.environment["PRACTICUM_ENGINE_URLS"] = ",".join(url for url, _ in engines)
        made.start(*REWARDS, "trainer")
        made.start(*ROLLOUTS)
        yield made


def run_body(suite: str) -> Json:
    """A short run."""
    return {
        "name": "replicas",
        "stage": "rl",
        "model": {"path": str(MODEL)},
        "num_steps": NUM_STEPS,
        "rollout": {
            "suite": suite,
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS_PER_STEP,
            "max_turns": 3,
            "max_tokens": 400,
            "max_new_tokens": 48,
            "max_staleness": 1,
        },
        "optimizer": {"lr": 1e-4},
        "microbatch_tokens": 4096,
    }


def test_replicas_when_one_is_killed_and_one_is_stopped_share_the_work_and_finish_it(
    tmp_path: Path, redis_url: str, postgres_url: str
) -> None:
    with (
        fleet(tmp_path, redis_url, postgres_url) as made,
        psycopg.connect(postgres_url, autocommit=True) as sql,
    ):

        def rows(query: str, *values: object) -> list[Any]:
            return sql.execute(query, values).fetchall()

        def running(owner: str) -> set[str]:
            query = "SELECT episode_id FROM rollout_episodes WHERE owner = %s AND state = 'running'"
            return {row[0] for row in rows(query, owner)}

        suite = generate_suite(7, 12, 6)
        stored = made.call("rollout-0", "POST", "/v1/suites", suite)
        path = f"/v1/suites/{stored['suite_id']}"
        wait_for(lambda: made.call("rollout-1", "GET", path)["ready"], RUN_TIMEOUT_S, "the suite is ready")
        body = {"suite": stored["suite_id"], "num_tasks": 6, "max_turns": 3, "max_tokens": 400}
        evaluation = made.call("rollout-2", "POST", "/v1/evaluations", body)
        path = f"/v1/evaluations/{evaluation['evaluation_id']}"
        wait_for(
            lambda: made.call("rollout-0", "GET", path)["state"] == "completed", RUN_TIMEOUT_S, "evaluated"
        )
        run_id = made.call("trainer", "POST", "/v1/runs", run_body(stored["suite_id"]))["run_id"]

        def version() -> int:
            run = made.call("trainer", "GET", f"/v1/runs/{run_id}")
            assert run["state"] in ("pending", "running", "completed"), run
            return int(run["weight_version"])

        wait_for(lambda: version() >= 1, RUN_TIMEOUT_S, "a step")
        counts = dict(
            rows("SELECT owner, COUNT(*) FROM rollout_episodes WHERE run_id = %s GROUP BY owner", run_id)
        )
        engines = {
            engine["engine_id"]: sum(
                item["tokens_generated"]
                for name in ROLLOUTS
                for item in made.call(name, "GET", "/v1/engines")["items"]
                if item["engine_id"] == engine["engine_id"]
            )
            for engine in made.call("rollout-0", "GET", "/v1/engines")["items"]
        }
        retries = {name: made.metric(name, "practicum_rollout_retries_total") for name in ROLLOUTS}

        left_by_killed = wait_for(lambda: running("rollout-2"), RUN_TIMEOUT_S, "rollout-2 plays")
        os.kill(made.processes["rollout-2"].pid, signal.SIGKILL)
        made.processes["rollout-2"].wait()
        left_by_killed = running("rollout-2")
        wait_for(lambda: not running("rollout-2"), 120, "the killed replica owns nothing")

        wait_for(lambda: version() >= 2, RUN_TIMEOUT_S, "another step")
        left_by_stopped = wait_for(lambda: running("rollout-1"), RUN_TIMEOUT_S, "rollout-1 plays")
        retries["rollout-1"] = made.metric("rollout-1", "practicum_rollout_retries_total")
        made.processes["rollout-1"].terminate()
        while made.processes["rollout-1"].poll() is None:
            left_by_stopped |= running("rollout-1")
            time.sleep(0.05)
        assert made.processes["rollout-1"].returncode == 0
        assert running("rollout-1") == set()
        assert rows("SELECT instance FROM rollout_replicas") == [("rollout-0",)]

        reached = version()
        wait_for(lambda: version() >= reached + 2, RUN_TIMEOUT_S, "steps with one replica")
        made.call("trainer", "POST", f"/v1/runs/{run_id}:stop")
        ended_run = wait_for(
            lambda: (run := made.call("trainer", "GET", f"/v1/runs/{run_id}"))["state"] == "stopped" and run,
            RUN_TIMEOUT_S,
            "the run's end",
        )
        graded = {name: made.metric(name, "practicum_reward_grades_total") for name in REWARDS}
        tools = {name: made.metric(name, "practicum_reward_tool_calls_total") for name in REWARDS}
        retries["rollout-0"] = made.metric("rollout-0", "practicum_rollout_retries_total")
        again = dict(
            rows("SELECT episode_id, owner FROM rollout_episodes WHERE run_id = %s AND attempt > 1", run_id)
        )
        report = {
            "episodes": counts,
            "tokens": engines,
            "graded": graded,
            "tool_calls": tools,
            "left_by_killed": len(left_by_killed),
            "left_by_stopped": len(left_by_stopped),
            "played_again": len(again),
            "retries": retries,
        }
        print(json.dumps(report))

        assert set(counts) == set(ROLLOUTS)
        assert min(engines.values()) > 0
        assert len(engines) == 2
        assert min(graded.values()) > 0
        assert min(tools.values()) > 0, "each reward replica had sessions of its own"

        [(consumed, distinct)] = rows(
            "SELECT COUNT(*), COUNT(DISTINCT episode_id) FROM trainer_consumed "
            "WHERE run_id = %s AND step IS NOT NULL",
            run_id,
        )
        assert consumed == distinct == ended_run["weight_version"] * GROUPS_PER_STEP * GROUP_SIZE
        [(ended, ended_once)] = rows(
            "SELECT COUNT(*), COUNT(DISTINCT t.episode_id) FROM rollout_trajectories t "
            "JOIN rollout_episodes e USING (episode_id) WHERE e.run_id = %s",
            run_id,
        )
        assert ended == ended_once, "no episode ended twice"
        indexes = [
            row[0]
            for row in rows(
                "SELECT group_index FROM rollout_groups WHERE run_id = %s ORDER BY group_index", run_id
            )
        ]
        assert indexes == list(range(len(indexes))), "no group is missing, none was begun twice"
        grades = rows("SELECT COUNT(*), COUNT(DISTINCT trajectory_id) FROM reward_grades")
        assert grades[0][0] == grades[0][1]
        assert again.keys() & left_by_killed, "what the killed replica left was played again"
        assert {again[episode_id] for episode_id in again.keys() & left_by_killed} <= {
            "rollout-0",
            "rollout-1",
        }
        if not sum(retries.values()):
            assert again.keys() <= left_by_killed | left_by_stopped, "none was played twice without a reason"
