"""`practicum token`: makes, lists and revokes callers' tokens in a tokens file.

It works on the file alone and needs no service to run; services read the file again by themselves.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from practicum.auth.edit import add_entry, read_entries, remove_entry
from practicum.auth.entries import SERVICES, TokenEntry, new_secret, sha256_of
from practicum.auth.scopes import Scope
from practicum.errors import InvalidInput, PracticumError

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke callers' tokens.")

_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}

TokensFile = Annotated[
    Path, typer.Option(envvar="PRACTICUM_TOKENS_FILE", help="The tokens file that the services read.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def new(
    name: Annotated[str, typer.Option(help="Whose token it is; logs show it.")],
    scope: Annotated[list[Scope], typer.Option(help="What it may do; each includes those before it.")],
    tokens_file: TokensFile,
    expires: Annotated[
        str | None, typer.Option(help="How long it lasts: 90d, 12h or 30m; default: without end.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it, this once; the file keeps its hash."""
    with _errors_shown():
        secret = new_secret()
        entry = _entry(name, scope, secret, _end(expires))
        add_entry(tokens_file, entry)
    if as_json:
        typer.echo(json.dumps(_shown(entry) | {"token": secret}))
        return
    typer.echo(secret)
    typer.echo(f"{name} has {', '.join(entry.scopes)}; the token is not shown again", err=True)


@app.command("list")
def list_tokens(tokens_file: TokensFile, as_json: AsJson = False) -> None:
    """List the tokens of the file, never their secrets."""
    with _errors_shown():
        entries = read_entries(tokens_file)
    if as_json:
        typer.echo(json.dumps([_shown(entry) for entry in entries]))
        return
    table = Table("name", "scopes", "expires")
    for entry in entries:
        end = entry.expires_at.isoformat(timespec="seconds") if entry.expires_at else "never"
        table.add_row(
            entry.name, ", ".join(entry.scopes), end + (" (over)" if entry.is_over(datetime.now(UTC)) else "")
        )
    Console().print(table)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Whose token.")],
    tokens_file: TokensFile,
    as_json: AsJson = False,
) -> None:
    """Take a token out of the file; services refuse it from then on."""
    with _errors_shown():
        remove_entry(tokens_file, name)
    typer.echo(json.dumps({"revoked": name}) if as_json else f"{name} is revoked")


def _entry(name: str, scopes: list[Scope], secret: str, end: datetime | None) -> TokenEntry:
    if name == SERVICES:
        raise InvalidInput("--name", f"{SERVICES!r} means the services' own secret; take another")
    try:
        return TokenEntry(
            name=name, scopes=tuple(dict.fromkeys(scopes)), sha256=sha256_of(secret), expires_at=end
        )
    except ValidationError:
        raise InvalidInput(
            "--name", "give 1 to 64 of a-z, 0-9, '.', '_' and '-', a letter or digit first"
        ) from None


def _end(text: str | None) -> datetime | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if match is None:
        raise InvalidInput("--expires", f"{text!r} is no span; give a number and m, h or d, such as 90d")
    return datetime.now(UTC).replace(microsecond=0) + int(match[1]) * _UNITS[match[2]]


def _shown(entry: TokenEntry) -> dict[str, Any]:
    shown = entry.model_dump(mode="json", exclude={"sha256"})
    return shown | {"is_over": entry.is_over(datetime.now(UTC))}


@contextmanager
def _errors_shown() -> Iterator[None]:
    try:
        yield
    except PracticumError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
