"""One way to a current schema for every service, on SQLite and on a real PostgreSQL."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from practicum.db.migrate import (
    SchemaError,
    downgrade,
    is_current,
    require_current,
    upgrade,
    wait_until_up,
)
from services.reward.store import MIGRATIONS as REWARD
from services.rollout.main import MIGRATIONS as ROLLOUT
from services.trainer.store import MIGRATIONS as TRAINER

SCRIPTS = {"rollout": ROLLOUT, "reward": REWARD, "trainer": TRAINER}
WAIT_S = 120.0
PASSWORD = "hunter2"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/db.sqlite"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=sorted(SCRIPTS))
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def start_migrate(name: str, url: str, *, do: str = "migrate", **changes: str) -> subprocess.Popen[str]:
    """The service's own command in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PRACTICUM_")}
    return subprocess.Popen(
        [sys.executable, "-m", f"services.{name}.main", do],
        env=environment | {"PRACTICUM_DATABASE_URL": url, **changes},
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status and what was said."""
    try:
        _, said = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said


def test_schema_when_taken_up_down_and_up_is_that_of_the_code(service: str, database_url: str) -> None:
    script = SCRIPTS[service]
    with pytest.raises(SchemaError, match="not that of this version; run it first"):
        require_current(database_url, script, hint="run it first")
    for _ in range(2):
        upgrade(database_url, script)
        require_current(database_url, script, hint="run it first")
        assert is_current(database_url, script)
        downgrade(database_url, script)
    with pytest.raises(SchemaError, match="not that of this version"):
        require_current(database_url, script, hint="")


def test_schema_when_services_share_a_database_each_has_its_own(postgres_url: str) -> None:
    for script in SCRIPTS.values():
        upgrade(postgres_url, script)
    for script in SCRIPTS.values():
        assert is_current(postgres_url, script)


def test_schema_when_a_later_version_changed_it_is_refused(postgres_url: str) -> None:
    upgrade(postgres_url, REWARD)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE alembic_version_reward SET version_num = 'of_tomorrow'")
    with pytest.raises(SchemaError, match="of_tomorrow"):
        upgrade(postgres_url, REWARD)
    with pytest.raises(SchemaError, match="not that of this version"):
        require_current(postgres_url, REWARD, hint="")


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_main_when_told_to_migrate_does_and_else_names_the_command(name: str, postgres_url: str) -> None:
    serve = {"do": "serve", "PRACTICUM_MIGRATE_AT_START": "false"}
    status, said = ended(start_migrate(name, postgres_url, **serve))
    assert status == 1
    assert f"python -m services.{name}.main migrate" in said
    assert "Traceback" not in said
    for _ in range(2):
        status, said = ended(start_migrate(name, postgres_url))
        assert status == 0, said
    require_current(postgres_url, SCRIPTS[name], hint="")


def test_migrate_when_another_migrates_waits_for_it(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(hashtext('practicum migrations of reward'))")
        process = start_migrate("reward", postgres_url)
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        deadline_s = time.monotonic() + WAIT_S
        while other.execute(waiting).fetchone() != (1,):
            assert process.poll() is None, "it did not wait"
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        tables = "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'reward%'"
        assert other.execute(tables).fetchone() == (0,)
        other.execute("SELECT pg_advisory_unlock_all()")
        status, said = ended(process)
        assert status == 0, said
        assert other.execute(tables).fetchone() != (0,)


def test_migrate_when_several_start_at_once_all_succeed(database_url: str) -> None:
    together = [start_migrate("reward", database_url) for _ in range(4)]
    for process in together:
        status, said = ended(process)
        assert status == 0, said
    assert is_current(database_url, REWARD)


@pytest.fixture
def later(postgres_url: str, tmp_path: Path) -> tuple[Path, str]:
    """(folder, URL) of a server that is there once the folder is a link to the real one's."""
    folder = tmp_path / "pg"
    url = make_url(postgres_url).update_query_dict({"host": str(folder)}).set(password=PASSWORD)
    return folder, url.render_as_string(hide_password=False)


def test_migrate_when_the_database_starts_later_waits(later: tuple[Path, str], postgres_server: Path) -> None:
    folder, url = later
    process = start_migrate("reward", url)
    assert process.stderr is not None
    assert "database.away" in process.stderr.readline()
    folder.symlink_to(postgres_server)
    status, said = ended(process)
    assert status == 0, said
    assert is_current(url, REWARD)


def test_migrate_when_the_database_stays_away_says_so_without_its_password(later: tuple[Path, str]) -> None:
    _, url = later
    with pytest.raises(SchemaError, match=r"did not answer within 0.2 s: .*connection") as raised:
        wait_until_up(url, patience_s=0.2)
    assert PASSWORD not in str(raised.value)
    status, said = ended(start_migrate("reward", url, PRACTICUM_DATABASE_PATIENCE_S="0.2"))
    assert status == 1
    assert PASSWORD not in said
    assert "Traceback" not in said


def test_main_when_told_to_stop_while_it_waits_for_the_database_ends_with_0(later: tuple[Path, str]) -> None:
    _, url = later
    process = start_migrate("reward", url, do="serve")
    assert process.stderr is not None
    assert "database.away" in process.stderr.readline()
    process.terminate()
    status, said = ended(process)
    assert (status, "Traceback" in said) == (0, False)
