"""Jinja for chat templates: configured as in transformers, with limits, since templates come from checkpoints."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 2**20
"""Most characters of a template. Templates of published models have up to 30,000."""
_COUNTED = "counted"
_OF_DICT = frozenset(dir(dict))


class ShownTool(dict[str, Any]):
    """A tool with cached JSON text, since templates write it into every prompt."""

    def __init__(self, tool: Mapping[str, Any]) -> None:
        super().__init__({key: ShownTool(item) if key == "function" else item for key, item in tool.items()})
        self._text = json.dumps(self, ensure_ascii=False)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, with a fixed date in place of today, and a limit on the steps of a rendering.

    A step is one iteration of a loop, or one call. Memory is not limited.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, day: datetime.date) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.filters[_COUNTED] = self._counted
        self.globals.update(raise_exception=_refuse, strftime_now=day.strftime, range=self._range)
        self._steps = threading.local()

    def bounded(self, source: str) -> Callable[[int, Mapping[str, Any]], str]:
        """Return a function that renders a template; it takes the greatest number of steps, and the variables.

        Raises jinja2.TemplateError; the function raises any error that the template raises.
        """
        if len(source) > MOST_CHARACTERS:
            raise jinja2.TemplateError(f"it has {len(source)} characters, more than {MOST_CHARACTERS}")
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise jinja2.TemplateError("it has a recursive loop")
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        # A plain dict: each rendering copies the globals, and copying jinja2's own chain of dicts is slow.
        template = jinja2.Template.from_code(self, self.compile(tree), dict(self.globals))

        def render(most: int, variables: Mapping[str, Any]) -> str:
            self._steps.left = most
            return template.render(variables)

        return render

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as jinja2
        __self._take(1)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - as jinja2
        size = [len(each) if isinstance(each, Sized) else abs(each) for each in (left, right)]
        if operator == "**" or size[0] * size[1] > MOST_CHARACTERS:
            raise SecurityError(f"the result of `{operator}` is too large")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - as jinja2
        # As jinja2, but without first checking the attributes of a dict: this is the most frequent access.
        if isinstance(obj, dict) and attribute not in _OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def _take(self, steps: int) -> None:
        self._steps.left -= steps
        if self._steps.left < 0:
            raise SecurityError("it takes too many steps")

    def _range(self, *bounds: int) -> range:
        steps = range(*bounds)
        self._take(len(steps))
        return steps

    @jinja2.pass_context
    def _counted(self, _context: Context, items: Any) -> Any:  # noqa: ANN401 - all that can be looped over
        if isinstance(items, Sized):
            self._take(len(items))
            return items
        return self._each(items) if isinstance(items, Iterator) else items

    def _each(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._take(1)
            yield item


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, with which training libraries mark the assistant's text: its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: ANN401 - json's own options
    if isinstance(value, ShownTool) and not options and not ensure_ascii:
        return value._text
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
