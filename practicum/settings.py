"""The settings that every service shares, read from `PRACTICUM_*` variables by its `main` alone.

A service that still holds the development token outside development refuses to start: an operator
who forgot the token learns it at once, not from an intruder.
"""

from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from practicum.auth.keyring import Keyring
from practicum.auth.secret import HOW_TO_MAKE
from practicum.clock import SystemClock

DEVELOPMENT_TOKEN = "development-only-token"


class Environment(StrEnum):
    """Where a service runs."""

    DEVELOPMENT = "development"
    PRODUCTION = "production"


class ServiceSettings(BaseSettings):
    """Base of each service's settings."""

    model_config = SettingsConfigDict(
        env_prefix="PRACTICUM_", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    environment: Environment = Environment.DEVELOPMENT
    token: SecretStr = Field(
        default=SecretStr(DEVELOPMENT_TOKEN),
        description="Secret that the services show to each other; it opens everything.",
    )
    token_file: Path | None = Field(
        default=None,
        description="File that holds this secret in place of the variable, one a line: the first is shown, "
        "all are accepted. Read again when it changes.",
    )
    tokens_file: Path | None = Field(
        default=None,
        description="File of callers' tokens, which `practicum token` writes. Read again when it changes.",
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

    @field_validator("token_file", "tokens_file", mode="before")
    @classmethod
    def _none_when_empty(cls, value: object) -> object:
        return value or None

    @cached_property
    def keyring(self) -> Keyring:
        """Whom the service lets in and what it shows to others; one for the whole process."""
        return Keyring.open(
            token=self.token.get_secret_value(),
            token_file=self.token_file,
            tokens_file=self.tokens_file,
            is_development=self.environment is Environment.DEVELOPMENT,
            clock=SystemClock(),
        )

    @model_validator(mode="after")
    def _refuse_default_secret(self) -> Self:
        is_default = self.token_file is None and self.token.get_secret_value() == DEVELOPMENT_TOKEN
        if is_default and self.environment is not Environment.DEVELOPMENT:
            raise ValueError(
                f"PRACTICUM_TOKEN must be set to a secret of your own outside development; {HOW_TO_MAKE}"
            )
        assert self.keyring is not None  # made here, so that what is wrong with it stops the start
        return self
