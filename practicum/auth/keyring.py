"""The keyring of a service: whom it lets in, and what it shows to the services that it calls.

Every door asks it the same way: `identify` says whose token was shown, `Caller.require` whether the
scope reaches. A caller's token and the hashes stay in this room; logs and errors have names only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from practicum.auth.entries import TokenEntry, find_entry, parse_entries, sha256_of
from practicum.auth.scopes import Scope
from practicum.auth.secret import ServiceSecret, check_secret, parse_secret_file, service_secret
from practicum.auth.watched import WatchedFile
from practicum.clock import Clock, SystemClock
from practicum.errors import Forbidden, Unauthorized

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever showed a valid token."""

    name: str
    scopes: tuple[Scope, ...]

    def require(self, needed: Scope) -> None:
        """Raises `Forbidden`, which names `needed`, where no scope of the token includes it."""
        if not any(scope.includes(needed) for scope in self.scopes):
            raise Forbidden(
                f"this needs the scope {str(needed)!r}; the token {self.name!r} has {', '.join(self.scopes)}"
            )


class Keyring:
    """What a service shows and accepts; files behind it are read again when they change."""

    def __init__(
        self,
        secret: Callable[[], ServiceSecret],
        tokens: Callable[[], Sequence[TokenEntry]],
        clock: Clock,
    ) -> None:
        self._secret, self._tokens, self._clock = secret, tokens, clock

    @classmethod
    def of(cls, token: "str | Self") -> "Self":
        """`token` itself, or the keyring of a secret that never changes and is all there is."""
        if not isinstance(token, str):
            return token
        return cls(_always(service_secret([token])), tuple, SystemClock())

    @classmethod
    def open(
        cls,
        *,
        token: str,
        token_file: Path | None,
        tokens_file: Path | None,
        is_development: bool,
        clock: Clock,
    ) -> Self:
        """The keyring of a service's settings; `ValueError` says which of them will not do and why.

        `token_file` goes before `token`; without `tokens_file` there are no callers but the services.
        """
        if token_file is None:
            check_secret(token, "PRACTICUM_TOKEN", is_development=is_development)
            secret = _always(service_secret([token]))
        else:
            parse = partial(parse_secret_file, is_development=is_development)
            secret = _watched("PRACTICUM_TOKEN_FILE", token_file, parse, clock)
        if tokens_file is None:
            return cls(secret, tuple, clock)
        return cls(secret, _watched("PRACTICUM_TOKENS_FILE", tokens_file, parse_entries, clock), clock)

    def shown(self) -> str:
        """The secret to show to another service now."""
        return self._secret().shown

    def identify(self, headers: Sequence[str]) -> Caller:
        """Whose token stands in the values of the `Authorization` headers; `Unauthorized` says what is amiss.

        Several headers are refused: a proxy and we might each believe another one.
        """
        if len(headers) > 1:
            raise Unauthorized("several Authorization headers; show one")
        scheme, _, credentials = (headers[0] if headers else "").strip().partition(" ")
        if scheme.lower() != "bearer" or not credentials.strip():
            raise Unauthorized("show a token as 'Authorization: Bearer …'")
        entries = (*self._secret().accepted, *self._tokens())
        entry = find_entry(sha256_of(credentials.strip()), entries)
        if entry is None:
            raise Unauthorized("the token is not known here; it may have been revoked")
        if entry.expires_at is not None and entry.is_over(self._clock.now()):
            raise Unauthorized(f"the token {entry.name!r} expired at {entry.expires_at.isoformat()}")
        return Caller(name=entry.name, scopes=entry.scopes)


def _always(value: T) -> Callable[[], T]:
    return lambda: value


def _watched(variable: str, path: Path, parse: Callable[[bytes], T], clock: Clock) -> Callable[[], T]:
    try:
        return WatchedFile(path, parse, clock).get
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None
