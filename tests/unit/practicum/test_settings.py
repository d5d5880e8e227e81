"""The shared settings."""

import pytest
from pydantic import ValidationError

from practicum.settings import DEVELOPMENT_TOKEN, ServiceSettings


def test_settings_when_production_keeps_the_default_token_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRACTICUM_TOKEN", raising=False)
    assert ServiceSettings().token.get_secret_value() == DEVELOPMENT_TOKEN
    monkeypatch.setenv("PRACTICUM_ENVIRONMENT", "production")
    with pytest.raises(ValidationError, match="PRACTICUM_TOKEN must be set"):
        ServiceSettings()
    monkeypatch.setenv("PRACTICUM_TOKEN", "a-secret-of-our-own-and-long-enough")
    settings = ServiceSettings()
    assert "a-secret-of-our-own-and-long-enough" not in repr(settings)
