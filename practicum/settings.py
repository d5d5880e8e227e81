"""The settings that every service shares, read from `PRACTICUM_*` variables by its `main` alone.

A service that still holds the development token outside development refuses to start: an operator
who forgot the token learns it at once, not from an intruder.
"""

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

DEVELOPMENT_TOKEN = "development-only-token"


class Environment(StrEnum):
    """Where a service runs."""

    DEVELOPMENT = "development"
    PRODUCTION = "production"


class ServiceSettings(BaseSettings):
    """Base of each service's settings."""

    model_config = SettingsConfigDict(env_prefix="PRACTICUM_", extra="ignore", frozen=True)

    environment: Environment = Environment.DEVELOPMENT
    token: SecretStr = Field(
        default=SecretStr(DEVELOPMENT_TOKEN),
        description="Shared secret that callers and services show to each other.",
    )
    redis_url: str = "redis://127.0.0.1:6379/0"
    database_url: str = Field(
        default="sqlite:///var/practicum.sqlite",
        description="sqlite:///path or postgresql://user:password@host/database",
    )
    rest_host: str = "127.0.0.1"
    rest_port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port.")
    rpc_host: str = "127.0.0.1"
    rpc_port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port.")
    data_dir: Path = Path("var")
    log_level: str = "info"
    claim_after_s: float = Field(
        default=60.0, gt=0, description="Idle seconds after which a consumer's entries are taken over."
    )
    max_deliveries: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _refuse_default_secret(self) -> Self:
        secret = self.token.get_secret_value()
        if self.environment is not Environment.DEVELOPMENT and secret == DEVELOPMENT_TOKEN:
            raise ValueError("PRACTICUM_TOKEN must be set to a secret of your own outside development")
        if not secret:
            raise ValueError("PRACTICUM_TOKEN is empty")
        return self
