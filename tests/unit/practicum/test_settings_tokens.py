"""The settings of secrets: what stops a start, and what the keyring is made of."""

import pytest
from pydantic import ValidationError

from practicum.settings import ServiceSettings

SECRET = "a-secret-of-our-own-and-long-enough"


@pytest.mark.parametrize(
    ("token", "environment", "complaint"),
    [
        ("", "development", "is empty"),
        ("", "production", "is empty"),
        ("two words", "development", "may hold printable ASCII without spaces"),
        ("ä" * 30, "production", "may hold printable ASCII without spaces"),
        ("x" * 23, "production", "has under 24 characters"),
        ("development-only-token", "production", "must be set to a secret of your own"),
    ],
)
def test_settings_when_the_token_is_weak_stop_and_say_what_to_do(
    token: str, environment: str, complaint: str
) -> None:
    # Only the token is wrong: what else a production asks for is given.
    values = {"environment": environment, "token": token, "redis_url": "redis://:redis-password@h"}
    with pytest.raises(ValidationError, match=f"PRACTICUM_TOKEN {complaint}.*openssl rand") as refused:
        ServiceSettings.model_validate(values)
    assert not token or token not in str(refused.value)


def test_settings_when_the_token_is_long_enough_start_with_it() -> None:
    values = {"environment": "production", "token": "x" * 24, "redis_url": "redis://:redis-password@h"}
    settings = ServiceSettings.model_validate(values)
    assert settings.keyring.shown() == "x" * 24
    assert settings.keyring is settings.keyring


@pytest.mark.parametrize("name", ["token_file", "tokens_file"])
def test_settings_when_a_file_is_not_there_name_the_variable(name: str) -> None:
    missing = f"PRACTICUM_{name.upper()}: /nowhere/file: No such file or directory"
    with pytest.raises(ValidationError, match=missing):
        ServiceSettings.model_validate({name: "/nowhere/file"})


def test_settings_when_a_files_variable_is_empty_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRACTICUM_TOKEN", SECRET)
    monkeypatch.setenv("PRACTICUM_TOKEN_FILE", "")
    monkeypatch.setenv("PRACTICUM_TOKENS_FILE", "")
    settings = ServiceSettings()
    assert (settings.token_file, settings.tokens_file) == (None, None)
    assert settings.keyring.shown() == SECRET
