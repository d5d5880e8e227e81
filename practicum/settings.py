"""The settings that every service shares, read from `PRACTICUM_*` variables by its `main` alone.

A setting may also lie in a file that is named as its variable in lower case, which is how a container
is given secrets; a variable wins over a file.

A service that still holds the development token outside development refuses to start, as does one whose
Redis or PostgreSQL has no password there: an operator who forgot one learns it at once, not from an
intruder. What was read is never shown: not in a repr, nor in the error about it.
"""

from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from practicum.auth.keyring import Keyring
from practicum.auth.secret import HOW_TO_MAKE
from practicum.clock import SystemClock

DEVELOPMENT_TOKEN = "development-only-token"
SECRETS_DIR = Path("/run/secrets")

S = TypeVar("S", bound="ServiceSettings")


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
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", repr=False, description="With `redis_password` in it, once read."
    )
    redis_password: SecretStr | None = Field(
        default=None, description="Put into `redis_url`; may hold any characters. None = as the URL says."
    )
    database_url: str = Field(
        default="sqlite:///var/practicum.sqlite",
        repr=False,
        description="sqlite:///path or postgresql://user@host/database; with `database_password`, once read.",
    )
    database_password: SecretStr | None = Field(
        default=None, description="Put into `database_url`; may hold any characters. None = as the URL says."
    )
    migrate_at_start: bool = Field(
        default=True, description="False only checks the schema: a job of its own brings it up to date."
    )
    database_patience_s: float = Field(
        default=120.0, ge=0, description="How long a start waits for a database that is not there yet."
    )
    drain_timeout_s: float = Field(
        default=20.0, ge=0, description="How long a service that was told to stop goes on with what it has."
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

    @model_validator(mode="after")
    def _join_passwords(self) -> Self:
        is_open = self.environment is Environment.DEVELOPMENT
        redis_url = _with_password("REDIS", self.redis_url, self.redis_password, is_optional=is_open)
        has_password = not self.database_url.startswith("sqlite")
        if not has_password and self.database_password is not None:
            raise ValueError(
                "PRACTICUM_DATABASE_PASSWORD is set, but PRACTICUM_DATABASE_URL is SQLite, which has none; "
                "name a postgresql:// database or drop the password"
            )
        database_url = _with_password(
            "DATABASE", self.database_url, self.database_password, is_optional=is_open or not has_password
        )
        # The object is frozen for everyone else.
        object.__setattr__(self, "redis_url", redis_url)
        object.__setattr__(self, "database_url", database_url)
        return self


def read_settings(settings_type: type[S], *, secrets_dir: Path = SECRETS_DIR) -> S:
    """The settings of this process, from its variables and the files of `secrets_dir`, where that is there.

    Raises `ValueError` with a line for every setting that is wrong, which shows no setting's value.
    """
    try:
        return settings_type(_secrets_dir=secrets_dir if secrets_dir.is_dir() else None)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_input=False, include_url=False, include_context=False):
            variable = "".join(f"PRACTICUM_{part}: ".upper() for part in problem["loc"])
            lines.append(variable + problem["msg"].removeprefix("Value error, "))
    raise ValueError("\n".join(lines))


def _with_password(name: str, url: str, password: SecretStr | None, *, is_optional: bool) -> str:
    """The URL with the password in it. Raises `ValueError` that names the setting and shows neither."""
    secret = None if password is None else password.get_secret_value()
    if secret == "":
        raise ValueError(f"PRACTICUM_{name}_PASSWORD is empty")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(
            f"PRACTICUM_{name}_URL cannot be read: percent-encode what stands in its password, "
            f"or give the password as PRACTICUM_{name}_PASSWORD"
        ) from None
    if "password" in parse_qs(parts.query):
        raise ValueError(f"PRACTICUM_{name}_URL has its password after the ?; give PRACTICUM_{name}_PASSWORD")
    userinfo, _, host = parts.netloc.rpartition("@")
    user, _, held = userinfo.partition(":")
    if secret is None:
        if not held and not is_optional:
            raise ValueError(
                f"PRACTICUM_{name}_PASSWORD must be set outside development, "
                f"where PRACTICUM_{name}_URL has no password in it"
            )
        return url
    if held and unquote(held) != secret:
        raise ValueError(
            f"PRACTICUM_{name}_URL holds another password than PRACTICUM_{name}_PASSWORD; give one of them"
        )
    return parts._replace(netloc=f"{user}:{quote(secret, safe='')}@{host}").geturl()
