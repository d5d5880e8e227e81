"""The secret that services show to each other: what it must be, and one that is being replaced.

A secret file holds one secret a line. The first is shown to others and all are accepted, so that a
secret is replaced without a stop: add the new one below, then move it to the top, then remove the old
one, each time until every service has read the file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from practicum.auth.entries import SERVICES, TokenEntry, sha256_of
from practicum.auth.scopes import Scope

MIN_SECRET_LENGTH = 24  # outside development
HOW_TO_MAKE = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSecret:
    """What a service shows, and what it accepts from the others."""

    shown: str = field(repr=False)
    accepted: tuple[TokenEntry, ...]


def service_secret(secrets: Sequence[str]) -> ServiceSecret:
    """The first of `secrets` is shown, all are accepted with every scope."""
    accepted = (
        TokenEntry(name=SERVICES, scopes=(Scope.INTERNAL,), sha256=sha256_of(secret)) for secret in secrets
    )
    return ServiceSecret(shown=secrets[0], accepted=tuple(accepted))


def parse_secret_file(content: bytes, *, is_development: bool) -> ServiceSecret:
    """The secrets of a file, one a line; `ValueError` names the line that will not do."""
    lines = [(number, line.strip()) for number, line in enumerate(content.decode().splitlines(), start=1)]
    secrets = [(number, line) for number, line in lines if line]
    if not secrets:
        raise ValueError(f"is empty; {HOW_TO_MAKE}")
    for number, secret in secrets:
        check_secret(secret, f"line {number}", is_development=is_development)
    return service_secret([secret for _, secret in secrets])


def check_secret(secret: str, name: str, *, is_development: bool) -> None:
    """Raises `ValueError`, which says what to do, where `secret` must not be served with."""
    if not secret:
        raise ValueError(f"{name} is empty; {HOW_TO_MAKE}")
    # HTTP and gRPC headers carry nothing else unchanged.
    if not all("!" <= character <= "~" for character in secret):
        raise ValueError(f"{name} may hold printable ASCII without spaces only; {HOW_TO_MAKE}")
    if not is_development and len(secret) < MIN_SECRET_LENGTH:
        raise ValueError(f"{name} has under {MIN_SECRET_LENGTH} characters; {HOW_TO_MAKE}")
