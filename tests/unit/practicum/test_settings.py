"""The shared settings."""

from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from pydantic import ValidationError
from sqlalchemy.engine import make_url

from practicum.settings import DEVELOPMENT_TOKEN, ServiceSettings, read_settings

PASSWORD = "p@ss:w/o%r?d#é &=+"


def test_settings_when_production_keeps_the_default_token_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRACTICUM_TOKEN", raising=False)
    assert ServiceSettings().token.get_secret_value() == DEVELOPMENT_TOKEN
    monkeypatch.setenv("PRACTICUM_ENVIRONMENT", "production")
    monkeypatch.setenv("PRACTICUM_REDIS_PASSWORD", "of redis")
    with pytest.raises(ValidationError, match="PRACTICUM_TOKEN must be set"):
        ServiceSettings()
    monkeypatch.setenv("PRACTICUM_TOKEN", "a-secret-of-our-own-and-long-enough")
    settings = ServiceSettings()
    assert "a-secret-of-our-own" not in repr(settings)


def test_settings_when_secrets_lie_in_files_reads_them_and_variables_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "practicum_token").write_text("a-token-from-a-file-and-long-enough\n")
    (tmp_path / "practicum_redis_password").write_text("redis from a file\n")
    (tmp_path / "practicum_database_password").write_text("postgres from a file\n")
    monkeypatch.setenv("PRACTICUM_ENVIRONMENT", "production")
    monkeypatch.setenv("PRACTICUM_DATABASE_URL", "postgresql://practicum@postgres/rollout")
    monkeypatch.setenv("PRACTICUM_REDIS_PASSWORD", "redis from a variable")
    settings = read_settings(ServiceSettings, secrets_dir=tmp_path)
    assert settings.token.get_secret_value() == "a-token-from-a-file-and-long-enough"
    assert make_url(settings.database_url).password == "postgres from a file"
    assert settings.redis_url == "redis://:redis%20from%20a%20variable@127.0.0.1:6379/0"


def test_settings_when_there_is_no_folder_of_secrets_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_LOG_LEVEL", "debug")
    # A warning would fail this test.
    assert read_settings(ServiceSettings, secrets_dir=tmp_path / "absent").log_level == "debug"


def test_read_settings_when_several_are_wrong_names_each_variable_and_shows_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRACTICUM_TOKEN", "hunter2")
    monkeypatch.setenv("PRACTICUM_REST_PORT", "hunter3")
    monkeypatch.setenv("PRACTICUM_MAX_DELIVERIES", "0")
    with pytest.raises(ValueError, match="PRACTICUM_REST_PORT: .*valid integer") as raised:
        read_settings(ServiceSettings, secrets_dir=tmp_path)
    assert "PRACTICUM_MAX_DELIVERIES: " in str(raised.value)
    assert "hunter" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@host:5432/db?sslmode=require",
        "postgresql://u:@host:5432/db",
        "postgresql://u@/db?host=/run/pg",
        f"postgresql://u:{quote(PASSWORD, safe='')}@[::1]:5432/db",
    ],
)
def test_database_password_when_it_holds_any_characters_arrives_whole(url: str) -> None:
    settings = ServiceSettings.model_validate({"database_url": url, "database_password": PASSWORD})
    made, given = make_url(settings.database_url), make_url(url)
    assert made.password == PASSWORD
    assert (made.username, made.host, made.port, made.database, made.query) == (
        given.username,
        given.host,
        given.port,
        given.database,
        given.query,
    )


@pytest.mark.parametrize(
    ("url", "user"),
    [("redis://host:6379/1", None), ("rediss://u@host:6379/1", "u"), ("unix:///s?db=1", None)],
)
def test_redis_password_when_it_holds_any_characters_arrives_whole(url: str, user: str | None) -> None:
    settings = ServiceSettings.model_validate({"redis_url": url, "redis_password": PASSWORD})
    client = redis.Redis.from_url(settings.redis_url)
    found = client.connection_pool.connection_kwargs
    assert (found["password"], found.get("username"), found["db"]) == (PASSWORD, user, 1)
    client.close()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"redis_url": "redis://:hunter2@h", "redis_password": "hunter3"},
            "PRACTICUM_REDIS_URL holds another",
        ),
        (
            {"database_url": "postgresql://u:hunter2@h/d", "database_password": "hunter3"},
            "PRACTICUM_DATABASE_URL holds another",
        ),
        ({"database_url": "postgresql://u@h/d?password=hunter2"}, "PRACTICUM_DATABASE_URL has its password"),
        ({"redis_url": "redis://:hunter2/x@h"}, "PRACTICUM_REDIS_URL cannot be read"),
        (
            {"database_url": "sqlite:///x", "database_password": "hunter2"},
            "PRACTICUM_DATABASE_PASSWORD is set",
        ),
        ({"redis_password": ""}, "PRACTICUM_REDIS_PASSWORD is empty"),
        (
            {"environment": "production", "token": "hunter2-of-24-characters"},
            "PRACTICUM_REDIS_PASSWORD must be set",
        ),
        (
            {
                "environment": "production",
                "token": "hunter2-of-24-characters",
                "redis_password": "hunter3",
                "database_url": "postgresql://u@h/d",
            },
            "PRACTICUM_DATABASE_PASSWORD must be set",
        ),
    ],
)
def test_settings_when_a_password_is_wrong_name_the_setting_and_show_nothing(
    values: dict[str, str], message: str
) -> None:
    with pytest.raises(ValidationError, match=message) as raised:
        ServiceSettings.model_validate(values)
    assert "hunter" not in str(raised.value)
    assert "hunter" not in repr(raised.value)


def test_settings_when_shown_hide_every_password() -> None:
    settings = ServiceSettings.model_validate(
        {
            "redis_password": "hunter2",
            "database_url": "postgresql://u:hunter3@h/d",
            "token": "hunter4",
        }
    )
    assert "hunter" not in repr(settings) + str(settings)
