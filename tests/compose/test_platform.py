"""The platform as an operator starts it: runs through the gateway, restarts, what the gateway refuses."""

import re
from dataclasses import replace
from typing import Any

import pytest

from examples.first_bugs import generate_suite
from practicum.cli.main import TINY_FOLDER
from practicum.cli.recipe import TINY
from tests.compose.conftest import timed
from tests.compose.platform import Json, Platform, wait_for

pytestmark = pytest.mark.timeout(3600)

RUN_TIMEOUT_S = 900.0
RECIPE = replace(TINY, num_train=16, num_heldout=4, group_size=4, groups_per_step=4, max_turns=4)
MODEL = "/models/base"


@pytest.fixture(scope="module")
def suite(platform: Platform) -> str:
    """first-bugs, submitted through the gateway and admitted."""
    body = generate_suite(RECIPE.seed, RECIPE.num_train, RECIPE.num_heldout)
    with timed("suite admitted"):
        made = platform.call("POST", "/v1/suites", body)
        wait_for(lambda: platform.call("GET", f"/v1/suites/{made['suite_id']}")["ready"], RUN_TIMEOUT_S)
    counts = platform.call("GET", f"/v1/suites/{made['suite_id']}")
    assert counts["train"]["admitted"] == RECIPE.num_train
    return f"{body['name']}@{body['version']}"


def start_run(platform: Platform, suite: str, num_steps: int) -> str:
    body: Json = replace(RECIPE, num_steps=num_steps).rl_run(TINY_FOLDER, suite)
    body |= {"start_paused": False, "model": {"path": MODEL}}
    return str(platform.call("POST", "/v1/runs", body)["run_id"])


def run_view(platform: Platform, run_id: str) -> Json:
    return platform.call("GET", f"/v1/runs/{run_id}", last_steps=100)


def wait_for_version(platform: Platform, run_id: str, version: int) -> Json:
    view: Json = {}

    def reached() -> bool:
        view.update(run_view(platform, run_id))
        assert view["state"] not in ("failed", "stopped"), view["error"]
        return bool(view["weight_version"] >= version)

    wait_for(reached, RUN_TIMEOUT_S)
    return view


def wait_until_completed(platform: Platform, run_id: str) -> Json:
    wait_for(lambda: run_view(platform, run_id)["state"] not in ("pending", "running"), RUN_TIMEOUT_S)
    view = run_view(platform, run_id)
    assert view["state"] == "completed", view["error"]
    return view


def check_ledger(platform: Platform, run_id: str, num_steps: int) -> None:
    """Each step took whole groups, each episode once; what none took is over, with a reason to see."""
    rows = platform.sql(
        "SELECT step, count(*), count(DISTINCT episode_id) FROM trainer_consumed "
        f"WHERE run_id = '{run_id}' AND step IS NOT NULL GROUP BY step ORDER BY step"
    )
    a_step = str(RECIPE.group_size * RECIPE.groups_per_step)
    assert rows == [[str(step), a_step, a_step] for step in range(1, num_steps + 1)]
    left_behind = platform.sql(
        f"SELECT episode_id, state FROM rollout_episodes e WHERE run_id = '{run_id}' "
        "AND group_id IN (SELECT group_id FROM trainer_consumed c WHERE c.run_id = e.run_id) "
        "AND episode_id NOT IN (SELECT episode_id FROM trainer_consumed c WHERE c.run_id = e.run_id)"
    )
    assert left_behind == [], "a group was taken without these"
    quarantined = platform.sql(f"SELECT reason, message FROM trainer_quarantine WHERE run_id = '{run_id}'")
    assert quarantined == []

    def nothing_open() -> bool:
        query = f"SELECT DISTINCT state FROM rollout_episodes WHERE run_id = '{run_id}' AND NOT is_owed"
        return {state for (state,) in platform.sql(query)} <= {"graded", "cancelled", "infra_failed"}

    wait_for(nothing_open, RUN_TIMEOUT_S)


def test_migrations_when_up_ran_once_and_ended_well(platform: Platform) -> None:
    for service in ("rollout", "reward", "trainer"):
        (container,) = platform.containers(f"migrate-{service}")
        found = platform.inspect(container)
        assert found["State"]["ExitCode"] == 0
        assert found["RestartCount"] == 0
    tables = {name for (name,) in platform.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")}
    assert {"rollout_episodes", "reward_grades", "trainer_runs"} <= tables


def test_services_when_up_run_as_a_user_without_any_right(platform: Platform) -> None:
    for service in ("gateway", "rollout", "reward", "trainer", "engine"):
        status = platform.compose("exec", "-T", service, "cat", "/proc/1/status")
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {"10001"}, service
        assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"


def test_sandbox_when_asked_says_that_every_attack_failed(platform: Platform) -> None:
    found = platform.call("GET", "/v1/sandbox/capabilities")
    assert "bubblewrap" in str(found)
    (container,) = platform.containers("reward")
    assert "sandbox.held" in platform.docker.docker("logs", container)


def test_gateway_when_asked_for_the_documents_gives_all_three(platform: Platform) -> None:
    page = platform.ask("GET", "/docs/")
    assert page.status_code == 200
    links = re.findall(r'href="(\w+/openapi\.json)"', page.text)
    titles = [platform.call("GET", f"/docs/{link}")["info"]["title"] for link in links]
    assert [title.split()[1] for title in titles] == ["rollout", "reward", "trainer"]


def test_gateway_when_it_routes_every_path_of_a_service_reaches_it(platform: Platform) -> None:
    for service in ("rollout", "reward", "trainer"):
        paths = platform.call("GET", f"/docs/{service}/openapi.json")["paths"]
        for path in filter(lambda path: path.startswith("/v1/"), paths):
            made = re.sub(r"\{\w+\}", "nothing-there", path)
            answer = platform.ask("OPTIONS", made)  # no route takes it: the service itself says so
            assert "X-Trace-Id" in answer.headers
            assert answer.status_code == 405, f"{made}: {answer.status_code} {answer.text}"
            assert answer.json()["detail"] == "Method Not Allowed", made


@pytest.mark.parametrize(
    "path", ["/metrics", "/healthz/", "/readyz", "/openapi.json", "/v1/nothing", "/v1/runsx"]
)
def test_gateway_when_a_path_is_not_for_callers_answers_a_problem(platform: Platform, path: str) -> None:
    answer = platform.ask("GET", path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "not_found"
    assert answer.json()["trace_id"] == answer.headers["x-trace-id"]


def test_gateway_when_a_body_is_too_large_answers_a_problem(platform: Platform) -> None:
    answer = platform.ask("POST", "/v1/suites", content=b" " * (65 * 1024 * 1024))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_gateway_when_a_caller_traces_keeps_the_trace(platform: Platform) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    assert platform.ask("GET", "/v1/runs", headers=headers).headers["x-trace-id"] == trace_id
    assert platform.ask("GET", "/v1/nothing", headers=headers).json()["trace_id"] == trace_id


def test_gateway_when_a_token_is_wrong_passes_the_services_refusal_on(platform: Platform) -> None:
    answer = platform.ask("GET", "/v1/runs", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"


def test_token_when_made_for_a_running_platform_opens_what_its_scope_does(platform: Platform) -> None:
    printed = platform.docker.run(
        "make", "--silent", "token", "NAME=ci", "SCOPE=submit", folder=platform.folder
    )
    (token,) = set(re.findall(r"practicum_[\w-]{20,}", printed))
    headers = {"Authorization": f"Bearer {token}"}
    assert platform.ask("GET", "/v1/suites", headers=headers).status_code == 200
    refused = platform.ask("GET", "/v1/runs", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")


def test_run_when_submitted_over_the_gateway_trains_two_steps_and_serves_them(
    platform: Platform, suite: str
) -> None:
    with timed("two steps"):
        run_id = start_run(platform, suite, num_steps=2)
        view = wait_until_completed(platform, run_id)
    assert len(view["steps"]) == 2
    assert view["published_version"] == 2
    engines: list[dict[str, Any]] = platform.call("GET", "/v1/engines")["items"]
    assert [engine["weight_version"] for engine in engines] == [2]
    check_ledger(platform, run_id, num_steps=2)


def test_run_when_every_service_restarts_in_its_middle_loses_nothing(platform: Platform, suite: str) -> None:
    num_steps = 7
    with timed("seven steps, six restarts"):
        run_id = start_run(platform, suite, num_steps)
        for version, service in enumerate(
            ("reward", "rollout", "trainer", "engine", "redis", "postgres"), start=1
        ):
            wait_for_version(platform, run_id, version)
            platform.compose("restart", "--timeout", "60", service)
            (container,) = platform.containers(service)
            assert platform.inspect(container)["State"]["OOMKilled"] is False
        view = wait_until_completed(platform, run_id)
    assert len(view["steps"]) == num_steps
    assert view["published_version"] == num_steps
    check_ledger(platform, run_id, num_steps)


def test_run_when_services_are_scaled_is_shared_by_every_replica(platform: Platform, suite: str) -> None:
    platform.compose("up", "--detach", "--no-build", "--scale", "rollout=3", "--scale", "reward=2")
    platform.wait_until_healthy("rollout", "reward")
    # Containers are asked, not the gateway: each says what it did since it started.
    work = {"rollout": "practicum_rollout_attempts_total", "reward": "practicum_reward_grades_total"}
    replicas = [(one, metric) for service, metric in work.items() for one in platform.containers(service)]
    assert len(replicas) == 5
    before = {one: platform.metric(one, metric) for one, metric in replicas}
    with timed("three steps, 3 + 2 replicas"):
        run_id = start_run(platform, suite, num_steps=3)
        wait_until_completed(platform, run_id)
    did = {(metric, one[:12]): platform.metric(one, metric) - before[one] for one, metric in replicas}
    print(did)
    assert all(count > 0 for count in did.values()), did
    check_ledger(platform, run_id, num_steps=3)
    platform.compose("up", "--detach", "--no-build", "--scale", "rollout=1", "--scale", "reward=1")
    run_id = start_run(platform, suite, num_steps=2)
    wait_until_completed(platform, run_id)
    check_ledger(platform, run_id, num_steps=2)


def test_services_when_stopped_drain_and_exit_with_0(platform: Platform) -> None:
    services = ("gateway", "rollout", "reward", "trainer", "engine", "postgres", "redis")
    platform.compose("stop", "--timeout", "60", *services)
    codes = {
        service: platform.inspect(container)["State"]["ExitCode"]
        for service in services
        for container in platform.containers(service)
    }
    assert codes == dict.fromkeys(services, 0)
    platform.compose("start")
    platform.wait_until_healthy("gateway", "rollout", "reward", "trainer", "engine")
    assert platform.call("GET", "/v1/runs")["items"]
