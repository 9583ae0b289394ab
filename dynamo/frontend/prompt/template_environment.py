"""The jinja2 of chat templates: sandboxed, with Hugging Face's functions, and fast for messages."""

from __future__ import annotations

import datetime
import json
import math
import time
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from dynamo.frontend.prompt.template_bounds import (
    ITEM_SIZE,
    bounded_filters,
    check_call,
    check_format,
    check_size,
    joined,
)

_RENDER_S = 1.0
"""How long a template may run: of a model from anywhere, it may contain an endless loop."""

_MAX_REPEATED = 1 << 20
_MAX_BITS = 4096

_CHECKED = 1 << 16
"""A value with more characters or items is checked against the bound, and so is the time."""

_SUMS_IN_A_ROW = 16

_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset(("depth", "first", "index", "index0", "last", "length", "revindex"))


class OutOfTime(Exception):
    """The template ran for longer than ``_RENDER_S``."""


class RenderContext(jinja2.runtime.Context):
    """A context with a deadline, which the code of loops, macros and blocks checks."""

    deadline_s = math.inf
    _ran_s = math.nan  # CPU seconds of the thread at the first deadline

    @classmethod
    def begin(cls, template: jinja2.Template, names: dict[str, Any]) -> RenderContext:
        """The context of one rendering, in which ``names`` replace the template's globals."""
        # Template.new_context would add the globals once more, which takes 2 µs.
        context = cls(template.environment, names, template.name, template.blocks)
        context.deadline_s = time.monotonic() + _RENDER_S / 2  # the first of at least two
        return context

    def end(self) -> bool:
        """End a rendering whose thread did run for the time; else extend the deadline.

        While other threads have Python's lock, or the machine is stopped, no template runs.
        """
        ran_s = time.thread_time()
        # It ran for half of the time since the first deadline: no other thread kept it waiting.
        if ran_s - self._ran_s >= _RENDER_S / 4:
            raise OutOfTime(f"it runs for more than {_RENDER_S:g} s")
        if math.isnan(self._ran_s):
            self._ran_s = ran_s
        self.deadline_s = time.monotonic() + _RENDER_S / 2
        return True

    def large(self, value: Any) -> Any:
        """Return a large value, unless it is too large, or the time is over."""
        check_size(len(value) if isinstance(value, str) else len(value) * ITEM_SIZE)
        if time.monotonic() > self.deadline_s:
            self.end()
        return value

    def derived(self, locals: dict[str, Any] | None = None) -> jinja2.runtime.Context:
        """The context of a block that sees the names around it."""
        context = super().derived(locals)
        context.deadline_s = self.deadline_s  # type: ignore[attr-defined]
        return context


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Reads ``message.role`` and ``message["role"]`` of a plain dict without a call.

    A message is such a dict, and its keys are what a short template spends its time on. All other
    objects, and missing keys, take the way through the environment.

    Whatever can run many times checks the deadline first: the bodies of loops, macros and blocks,
    and the condition of a loop.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timed: set[int] = set()  # ids of nodes, which the tree keeps alive
        self._unchecked: set[int] = set()

    def visit_For(self, node: jinja2.nodes.For, frame: jinja2.compiler.Frame) -> None:
        """Write ``node``."""
        self._timed |= {id(node.body), id(node.test)} - {id(None)}  # a loop without a condition
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: jinja2.compiler.Frame) -> Any:
        """Write the function of a macro or a call block."""
        self._timed.add(id(node.body))
        return super().macro_body(node, frame)

    def visit_Template(
        self, node: jinja2.nodes.Template, frame: jinja2.compiler.Frame | None = None
    ) -> None:
        """Write the module."""
        self.writeline("from time import monotonic")  # no name of a template is written like this
        self.writeline(f"from {check_size.__module__} import SIZED as _sized")
        self._timed |= {id(block.body) for block in node.find_all(jinja2.nodes.Block)}
        super().visit_Template(node, frame)

    def blockvisit(self, nodes: Any, frame: jinja2.compiler.Frame) -> None:
        """Write the statements ``nodes``."""
        if id(nodes) in self._timed:
            self.writeline("if monotonic() > context.deadline_s: context.end()")
        super().blockvisit(nodes, frame)

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write ``node``, of whatever kind."""
        if id(node) not in self._timed:
            return super().visit(node, *args, **kwargs)
        # end() is true where it returns, so that the condition itself decides.
        self.write("(monotonic() <= context.deadline_s or context.end()) and (")
        super().visit(node, *args, **kwargs)
        self.write(")")
        return None

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: jinja2.compiler.Frame) -> None:
        """Write ``node``."""
        # A method of dicts comes before a key of the same name, as in jinja2.
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

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:
        """Write ``node`` and the check of its size, without a call for a value that is short; one
        for several sums in a row."""
        if id(node) in self._unchecked:
            super().visit_Add(node, frame)
            return
        inner, count = node.left, 1
        while isinstance(inner, jinja2.nodes.Add):
            if count % _SUMS_IN_A_ROW:
                self._unchecked.add(id(inner))
            inner, count = inner.left, count + 1
        self.write("(_sum if type(_sum := ")
        super().visit_Add(node, frame)
        self.write(f") not in _sized or len(_sum) <= {_CHECKED} else context.large(_sum))")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """As :meth:`visit_Add`."""
        self.write("(_sum if len(_sum := ")
        super().visit_Concat(node, frame)
        self.write(f") <= {_CHECKED} else context.large(_sum))")

    def visit_Mod(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:
        """Write a remainder; that of a number and a constant, as ``loop.index0 % 2``, needs no
        call."""
        if not isinstance(node.right, jinja2.nodes.Const) or type(node.right.value) is not int:
            super().visit_Mod(node, frame)
            return
        number = node.right.value
        self.write(f"(_left % {number} if type(_left := ")
        self.visit(node.left, frame)
        self.write(f") is int else environment.call_binop(context, '%', _left, {number}))")

    def _write_item(
        self, node: jinja2.nodes.Expr, key: str, otherwise: str, frame: jinja2.compiler.Frame
    ) -> None:
        """Write the look-up of ``key`` in ``node``, which is evaluated once."""
        # _item is free: the names that jinja2 makes begin with l_ or t_, or are those it imports.
        self.write(f"(_item[{key!r}] if type(_item := ")
        self.visit(node, frame)
        self.write(f") is dict and {key!r} in _item else environment.{otherwise}(_item, {key!r}))")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with the functions that templates expect.

    Templates come with a model, from anywhere: they must not reach attributes of Python objects
    nor change the request.
    """

    code_generator_class = _CodeGenerator
    context_class = RenderContext
    intercepted_binops = frozenset(("*", "**", "%"))
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        self.filters["tojson"] = _tojson
        self.filters = bounded_filters(self.filters)
        del self.globals["lipsum"]  # makes texts of any length
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

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Compute a product, a power, or a formatted text, unless it is too large."""
        if operator == "**":
            if type(left) is type(right) is int and left.bit_length() * right > _MAX_BITS:
                raise jinja2.TemplateError(f"a power has more than {_MAX_BITS} bits")
        elif operator == "%":
            if isinstance(left, str | bytes):
                named = right if isinstance(right, dict) else {}
                values = right if isinstance(right, tuple) else () if named else (right,)
                check_format(
                    left if isinstance(left, str) else left.decode("latin-1"), values, named
                )
        elif type(left) is type(right) is int:
            if left.bit_length() + right.bit_length() > _MAX_BITS:
                raise jinja2.TemplateError(f"a product has more than {_MAX_BITS} bits")
        elif _repeated(left, right) > _MAX_REPEATED or _repeated(right, left) > _MAX_REPEATED:
            raise jinja2.TemplateError(f"a product has more than {_MAX_REPEATED} items")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **named: Any) -> Any:
        """Call ``function``, unless it is a method of a text whose result may be too large."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes):
            # An iterator, as for join, can be read only once: the check needs its items, too.
            if args and hasattr(args[0], "__next__"):
                args = (list(args[0]), *args[1:])
            check_call(function, owner, args, named)
        return super().call(context, function, *args, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandboxed ``format`` of a text, with a check of its size."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **named: Any) -> str:
            values = args[0] if value.__name__ == "format_map" and args else named
            check_format(value.__self__, args, values)
            return str(wrapped(*args, **named))

        return checked


def _repeated(items: Any, count: Any) -> int:
    """The length of ``items * count``; 0 for numbers."""
    return len(items) * count if isinstance(count, int) and hasattr(items, "__len__") else 0


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
