"""The jinja2 of chat templates: sandboxed, with Hugging Face's functions, and fast for messages."""

from __future__ import annotations

import datetime
import functools
import json
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

__all__ = ["RenderContext", "TemplateEnvironment"]

_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset(("depth", "first", "index", "index0", "last", "length", "revindex"))


class RenderContext(jinja2.runtime.Context):
    """The context of one rendering, which may change ``names``.

    The constructor of jinja2 takes as long as a short template: it copies, and makes objects that
    chat templates do not use.
    """

    def __init__(self, template: jinja2.Template, names: dict[str, Any]) -> None:
        self.environment = template.environment
        self.name = template.name
        self.blocks = {name: [block] for name, block in template.blocks.items()}
        # Names that a template sets hide the given ones, and nothing reads those afterwards:
        # one dict serves as both.
        self.parent = self.vars = names
        self.exported_vars = set()
        self.globals_keys = set()

    @functools.cached_property
    def eval_ctx(self) -> jinja2.nodes.EvalContext:  # type: ignore[override]
        """Made when a filter asks for it."""
        return jinja2.nodes.EvalContext(self.environment, self.name)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Reads ``message.role`` and ``message["role"]`` of a plain dict without a call.

    A message is such a dict, and its keys are what a short template spends its time on. All other
    objects, and missing keys, take the way through the environment.
    """

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:
        """Write ``node``."""
        if node.attr in _DICT_NAMES:
            super().visit_Getattr(node, frame)
        else:
            self._write_item(node.node, node.attr, "getattr", frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        """Write ``node``."""
        if isinstance(node.arg, jinja2.nodes.Const) and type(node.arg.value) is str:
            self._write_item(node.node, node.arg.value, "getitem", frame)
        else:
            super().visit_Getitem(node, frame)

    def _write_item(
        self, node: jinja2.nodes.Expr, key: str, otherwise: str, frame: jinja2.compiler.Frame
    ) -> None:
        """Write the look-up of ``key`` in ``node``, which is evaluated once."""
        # The names that jinja2 makes begin with l_ and t_, or are in its list of imports.
        self.write(f"(_item[{key!r}] if type(_item := ")
        self.visit(node, frame)
        self.write(f") is dict and {key!r} in _item else environment.{otherwise}(_item, {key!r}))")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with the functions that templates expect.

    Templates come with a model, from anywhere: they must not reach attributes of Python objects
    nor change the request.
    """

    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox, but fast for ``message.role`` and ``loop.first``.

        The sandbox first tries the attribute, which for a key of a dict raises an exception, and
        checks the result. A key of a plain dict and these attributes of a loop are safe.
        """
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is jinja2.runtime.LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
