"""Settings on a command line: headings, ranges, and the options that only a variable sets."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from dynamo import __version__
from dynamo.config.absent import AbsentFlag, sort_words

_WIDEST = 100
_PROGRAM = "python -m dynamo."


class Option(NamedTuple):
    """How a field is read from a command line and an environment.

    ``flags`` may be empty (variable only), ``env`` may be empty (flag only). ``minimum`` and
    ``maximum`` are inclusive unless ``exclusive_minimum``. ``aliases`` maps accepted spellings to
    the canonical choice, ``retired`` maps refused values to what the error says about them.
    ``heading`` starts a section of ``--help`` at this field. A flag that may ``repeat`` takes one
    value each time, or ``several``. Unless it ``shows_default``, its help says what is in force
    without it.
    """

    flags: tuple[str, ...]
    env: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = MappingProxyType({})
    retired: Mapping[str, str] = MappingProxyType({})
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    metavar: str | None = None
    deprecated: str = ""
    repeat: bool = False
    several: bool = False
    heading: str = ""
    shows_default: bool = True


@functools.cache
def option_of(field: dataclasses.Field[Any]) -> Option:
    """Return how ``field`` is read. The names that it does not state follow from its own."""
    option: Option = field.metadata["option"](field.name)
    return option


def is_switch(field: dataclasses.Field[Any]) -> bool:
    """Whether the flags of ``field`` take no value."""
    return isinstance(field.default, bool) or field.type in ("bool", "bool | None")


class _ShowVersion(argparse._VersionAction):
    """Adds the commit to the version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print it, and exit."""
        from dynamo.revision import revision  # only here: it reads the checkout

        parser._print_message(f"{self.version} ({revision()})\n", sys.stdout)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser with a help section per topic and one-line errors that point to ``--help``."""

    def __init__(
        self, prog: str, description: str, epilog: str | None, add_help: bool = True
    ) -> None:
        self._variables: list[str] = []
        self._absent: list[AbsentFlag] = []
        self._epilog = epilog
        super().__init__(
            prog=prog,
            usage="%(prog)s [options]",
            description=description,
            add_help=add_help,
            # Else a flag of the engine that begins like one of ours would be taken for it.
            allow_abbrev=False,
            # argparse makes one at each add_argument; without a width it imports shutil: 3 ms.
            formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, width=_WIDEST),
        )
        if prog.startswith(_PROGRAM):
            name = prog.removeprefix("python -m ")
            self.add_argument("--version", action=_ShowVersion, version=f"{name} {__version__}")

    def add_settings(
        self,
        title: str,
        fields: Sequence[dataclasses.Field[Any]],
        absent: Sequence[AbsentFlag] = (),
    ) -> None:
        """Add an argument for each field with a flag, under ``title`` or the latest ``heading``.

        ``absent`` are flags of Dynamo that are refused.
        """
        self._absent += absent
        section = self.add_argument_group(title)
        for field in fields:
            spec = option_of(field)
            if spec.heading:
                section = self.add_argument_group(spec.heading)
            if spec.flags:
                _add_argument(section, field, spec)
                if not spec.flags[0].startswith("-"):
                    more = " ..." if spec.several else ""
                    self.usage = f"{self.usage} [{spec.flags[0]}{more}]"
            elif spec.env:
                self._variables.append(_paragraph(spec, field.default))

    def read(self, argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Return what ``argv`` sets and the words of no option, after refusing absent flags."""
        arguments, words = self.parse_known_args(argv)
        words, asked = sort_words(words, self._absent)
        if asked is not None:
            self.refuse(asked.flag, asked.absent.text)
        return arguments, words

    def did_you_mean(self, words: Sequence[str]) -> str:
        """Return a hint at the flag that is most like the first unknown one; "" without any."""
        import difflib  # slow to import: only for an error

        flag = next((word for word in words if word.startswith("--")), "").partition("=")[0]
        typed, flags = flag.lstrip("-"), [name[2:] for name in self._option_string_actions]
        close = difflib.get_close_matches(typed, flags, n=1)
        close += [name for name in flags if typed and name.endswith(f"-{typed}")]  # --api-key-file
        return f" (did you mean --{close[0]}?)" if close else ""

    def refuse(self, flag: str, text: str) -> NoReturn:
        """Exit with status 2 because of ``flag``."""
        self.error(f"{flag} {text}")

    def format_help(self) -> str:
        """Return the text of ``--help``."""
        variables = ["without a flag, by variable only:", *self._variables]
        parts = ["\n".join(variables)] if self._variables else []
        self.epilog = "\n\n".join([*parts, self._epilog] if self._epilog else parts) or None
        # Without the fixed width: the text is as wide as the terminal.
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\nTry '{self.prog} --help'.\n")


def range_text(spec: Option) -> str:
    """Return the range of a number, like ``0 to 1`` or ``> 0``; "" without limits."""
    low, high = spec.minimum, spec.maximum
    if low is None:
        return "" if high is None else f"<= {_plain(high)}"
    if high is None:
        return f"{'>' if spec.exclusive_minimum else '>='} {_plain(low)}"
    above = "more than " if spec.exclusive_minimum else ""
    return f"{above}{_plain(low)} to {_plain(high)}"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _add_argument(
    section: argparse._ArgumentGroup, field: dataclasses.Field[Any], spec: Option
) -> None:
    text = _text(spec, field.default).replace("%", "%%")
    # Without a default of argparse: variables come between the words and the defaults.
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if is_switch(field):
        options["action"] = argparse.BooleanOptionalAction
        if spec.flags[0].startswith("--no-"):  # --no-no-x works, but is not worth a place in --help
            options["action"] = "store_true"
            off = {**options, "action": "store_false", "help": argparse.SUPPRESS}
            section.add_argument(f"--no-{spec.flags[0][2:]}", **off)
    else:
        options["metavar"] = _metavar(spec, str(field.type))
        options["action"] = "append" if spec.repeat else "store"
        if spec.several:
            options |= {"action": "extend", "nargs": "+"}
    if not spec.flags[0].startswith("-"):  # positional; optional because it has a default
        del options["dest"]
        options["nargs"] = "*" if spec.several else "?"
    section.add_argument(*spec.flags, **options)


def _metavar(spec: Option, kind: str) -> str | None:
    if spec.metavar or spec.choices:
        return spec.metavar or "|".join(spec.choices)
    if spec.flags[0].endswith(("-secs", "-timeout")):
        return "SECONDS"
    if kind.startswith(("int", "float")):
        return "N" if kind.startswith("int") else "X"
    return spec.flags[0].rsplit("-", 1)[-1].upper() if spec.flags[0].startswith("-") else None


def _text(spec: Option, default: Any) -> str:
    old = f" (deprecated: {spec.deprecated})" if spec.deprecated else ""
    limits = [range_text(spec)] if range_text(spec) else []
    if spec.shows_default and default not in (None, (), ""):
        limits.append(f"default: {default}")
    notes = f" ({'; '.join(limits)})" if limits else ""
    variables = f" [env: {', '.join(spec.env)}]" if spec.flags and spec.env else ""
    return f"{spec.help}{old}{notes}{variables}"


def _paragraph(spec: Option, default: Any) -> str:
    import shutil  # slow to import: only for --help

    width = min(shutil.get_terminal_size().columns, _WIDEST) - 2
    text = textwrap.fill(_text(spec, default), width, initial_indent=" " * 8)
    return f"  {', '.join(spec.env)}\n{textwrap.indent(text.lstrip(), ' ' * 8)}"
