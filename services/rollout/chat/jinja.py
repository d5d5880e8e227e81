"""Running a chat template's source in the environment that Hugging Face templates expect.

Owns the filters and functions of that environment (`tojson` without HTML escapes, `raise_exception`,
`strftime_now`, loop controls, `{% generation %}`). Templates come with models, so they run in Jinja's
immutable sandbox.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from practicum.errors import InvalidInput


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for trainers that mask by role; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateProgram:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Raises `InvalidInput` where the source is no template. `now` answers `strftime_now`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidInput("chat_template", f"is no Jinja template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. Raises `InvalidInput` where the template refuses it or fails."""
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        # A template's expressions fail with Python's own errors as well as with Jinja's.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidInput("chat_template", f"refuses the conversation: {error}") from error


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and ' for HTML, which a model would see.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))
