"""Chat templates behave as under Hugging Face, inside a sandbox."""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from text_kit import EXAMPLE, card

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import ConfigError, InvalidArgument
from dynamo.frontend.prompt import template_environment
from dynamo.frontend.prompt.messages import IMAGE, ContentForm, alternating
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.template import (
    ChatTemplate,
    TemplateTimeout,
    load_template,
    template_variables,
)
from dynamo.frontend.prompt.template_environment import TemplateEnvironment
from dynamo.protocols.openai import ChatCompletionRequest

USER = [{"role": "user", "content": "Hi"}]
LOOP = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}<{{ p.text }}>"
    "{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"a": "<é>"}}}


def test_the_version_of_jinja2_is_tested() -> None:
    """The code generator extends the internals of jinja2: run these tests before a newer one."""
    assert version("jinja2").startswith("3.1."), "test it, then raise the bound in pyproject.toml"


STRICT = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.p }}{% endif %}{% endfor %}"
)
"""As the templates of Mistral check it."""


def template(source: str, **specials: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, specials, "here")


def example() -> ChatTemplate:
    found = load_template(EXAMPLE)
    assert found is not None
    return found


def test_turns_that_must_alternate() -> None:
    """Agents send two messages of the user in a row, and one behind the result of a tool."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "callcall1", "type": "function", "function": function}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "callcall1", "content": "r"}
    said = {"role": "assistant", "content": "a"}
    late = [{"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    given: list[Any] = [*USER, *late, called, result, *late, said, *USER]
    assert template(STRICT).render(given) == (
        "[user]Hi\n\nb\n\nc[assistant][tool]r\n\nb\n\nc[assistant]a[user]Hi"
    )
    assert template(LOOP).render(given) == (
        "[user]Hi[user]b[user]c[assistant]"
        '{"name":"f","arguments":{}}[tool]r[user]b[user]c[assistant]a[user]Hi'
    )
    with pytest.raises(InvalidArgument, match="must alternate"):
        template(STRICT).render([said])


def test_turns_of_parts_alternate() -> None:
    shown = {"role": "user", "content": [IMAGE]}
    found = alternating([*USER, shown, {"role": "assistant", "content": "a"}], False)
    assert found[0] == {"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE]}
    assert len(found) == 2


def test_example_chat() -> None:
    messages = [{"role": "system", "content": "Be kind"}, *USER]
    head = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert example().render(messages) == head + "<|im_start|>assistant\n"
    assert example().render(messages, add_generation_prompt=False) == head


def test_example_tools() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    prompt = example().render(messages, [TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in prompt
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert messages[1]["tool_calls"] == [call]


def test_errors_of_the_template_reach_the_client() -> None:
    with pytest.raises(InvalidArgument, match=r"^Chat template: Unknown role: clown$"):
        example().render([{"role": "clown", "content": "x"}])
    with pytest.raises(InvalidArgument, match=r"^Chat template: "):
        template("{{ messages[0].content.nothing.more }}").render(USER)
    with pytest.raises(InvalidArgument, match=r"^Chat template: "):
        template("{{ 1 + messages[0].content }}").render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ ''.__class__.__mro__ }}{{ raise_exception.__globals__ }}",
        "{{ range(99999999) | list }}",
    ],
)
def test_sandbox(source: str) -> None:
    messages = [dict(USER[0])]
    with contextlib.suppress(InvalidArgument):
        assert "globals" not in template(source).render(messages)
    assert messages == USER


TURN = {"role": "user", "content": "a"}
ENDLESS = [
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{% for i in range(90000) if range(90000)|list %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in [[1, 2]] recursive %}{{ loop([[1, 2]]) if loop.depth < 60 }}"
    "{{ loop([[1, 2]]) if loop.depth < 60 }}{% endfor %}",
    "{% block a %}{% set ns.n = ns.n + 1 %}{% if ns.n %}{{ self.b() }}{{ self.b() }}{% endif %}"
    "{% endblock %}{% block b %}{{ self.a() }}{{ self.a() }}{% endblock %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_an_endless_template_ends(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_environment, "_RENDER_S", 0.02)
    with pytest.raises(
        (ConfigError, InvalidArgument), match=r"runs for more than 0.02 s|recursion"
    ):
        template("{% set ns = namespace(n=0) %}" + source).render([TURN])
    bomb = template(
        "{{ messages[0].content }}{% if messages|length > 8 %}" + ENDLESS[0] + "{% endif %}"
    )
    assert bomb.render([TURN]) == "a"
    with pytest.raises(TemplateTimeout, match="send fewer messages"):
        bomb.render([TURN] * 9)


def test_an_endless_template_takes_a_thread_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    source = "{% if messages|length > 8 %}" + ENDLESS[0] + "{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    preprocessor = Preprocessor(card(), tmp_path)
    assert preprocessor.inline_limit_bytes > 0
    monkeypatch.setattr(template_environment, "_RENDER_S", 0.02)
    request = ChatCompletionRequest(model="m", messages=[TURN] * 9)
    with pytest.raises(InvalidArgument, match="Chat template: it runs for more than"):
        preprocessor.chat(request)
    assert preprocessor.inline_limit_bytes == 0
    # One that a request brings says nothing about the model's own.
    trusting = Preprocessor(card(), settings=FrontendSettings(trust_request_chat_template=True))
    brought = ChatCompletionRequest(model="m", messages=[TURN] * 9, chat_template=source)
    with pytest.raises(InvalidArgument, match="Chat template: it runs for more than"):
        trusting.chat(brought)
    assert trusting.inline_limit_bytes > 0


def test_a_template_whose_thread_does_not_run_is_not_endless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading a tokenizer of another model may hold Python's lock for a second."""
    monkeypatch.setattr(template_environment, "_RENDER_S", 0.02)
    source = "{% for i in range(3) if pause() or 1 %}{{ i }}{% endfor %}"
    stalled = template("{% if messages|length > 8 %}" + source + "{% endif %}")
    prompt = stalled.render([TURN] * 9, variables={"pause": lambda: time.sleep(0.03)})
    assert prompt == "012"


@pytest.mark.parametrize("expression", ["9 ** 99999", "'a' * 10 ** 9", "10 ** 9 * [1]"])
def test_large_products_are_refused(expression: str) -> None:
    with pytest.raises(InvalidArgument, match=r"4096 bits|1048576 items"):
        template(f"{{{{ {expression} }}}}").render([TURN])
    assert template("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 2.0 * 3 }}").render([TURN]) == "---10246.0"


def doubled(first: str, step: str) -> str:
    """A template that takes ``step`` forty times, which doubles its value."""
    begin = f"{{% set ns = namespace(x={first}) %}}"
    return begin + f"{{% set ns.x = {step} %}}" * 40 + "{{ ns.x|length }}"


BOMBS = [
    doubled("'aaaaaaaa'", "ns.x ~ ns.x"),
    doubled("'aaaaaaaa'", "ns.x + ns.x"),
    doubled("[1]", "ns.x + ns.x"),
    doubled("99999999", "ns.x * ns.x"),
    "{% set ns = namespace(x='aaaaaaaa') %}"
    + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}" * 40,
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='aaaaaaaa') %}"
    + "{% set ns.x = m(ns.x) %}" * 40,
    "{% set x = 'a' * 1000000 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    *(
        "{{ (" + expression + ")|length }}"
        for expression in (
            *(
                "'%999999999d' % 1",
                "'%*d' % (999999999, 1)",
            ),
            *("'{:>999999999}'.format(1)", "'{:>{w}}'.format(1, w=999999999)"),
            *("'{a:>999999999}'.format_map({'a': 1})", "'%999999999d'|format(1)"),
            *("'a'.ljust(999999999)", "'a'.rjust(999999999)", "'a'.zfill(999999999)"),
            *("'a'.center(999999999)", "'a'|center(999999999)", "'a'.encode().ljust(999999999)"),
            *("('\\t' * 99999).expandtabs(99999)", "('a' * 99999).replace('a', 'b' * 99999)"),
            *("('a' * 99999)|replace('a', 'b' * 99999)", "('a' * 99999).replace('', 'b' * 99999)"),
            *("('a' * 99999).join(range(9999)|map('string'))", "range(9999)|join('b' * 99999)"),
            *("('a' * 99999).translate({97: 'b' * 99999})", "('\\n' * 99999)|indent(99999)"),
            *("'a'|indent('b' * 999999, true)|indent('b' * 99999999, true)",),
            *("[1]|tojson(indent=999999999)", "[1, 2]|tojson(separators=('a' * 999999, 'b'))"),
            *("'a'|batch(999999999, 'b')|list", "[1]|slice(999999999)|list", "lipsum(n=9999999)"),
            *("'a b'|wordwrap(1, wrapstring='b' * 99999999)",),
            *("[[1]] * 9999|sum(start=[])", "(1.5|round(99999999))|string"),
        )
    ),
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_makes_no_huge_values(source: str) -> None:
    """Each would take gigabytes, or seconds within one call, which no deadline ends."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match="Chat template: "):
        template(source).render([TURN])
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1 << 20


def test_usual_values_are_made() -> None:
    source = (
        "{{ 'a' + 'b' ~ (1 + 2) }}|{{ 7 % 3 }}|{{ 7.5 % 2 }}|{{ 7 % 4 % 2 }}|"
        "{{ '%02d:%s' % (7, 'x') }}|"
        "{{ '{:>3}'.format(1) }}|{{ '{} {a}'.format(1, a=2) }}|{{ 'a\nb'|indent(2) }}|"
        "{{ ['a', 'b']|join(', ') }}|{{ ', '.join(['a', 'b']) }}|{{ 'aXb'.replace('X', '-') }}|"
        "{{ [[1], [2]]|sum(start=[]) }}|{{ 'a'.ljust(3) }}|{{ {'a': 1}|tojson(indent=2) }}|"
        "{{ ((1 + 2) + (3 + 4)) % (2 + 3) }}|{{ 'ab'|upper }}|"
        "{{ messages|map(attribute='role')|join }}"
    )
    expected = 'ab3|1|1.5|1|07:x|  1|1 2|a\n  b|a, b|a, b|a-b|[1, 2]|a  |{\n  "a": 1\n}|0|AB|user'
    assert template(source).render([TURN]) == expected


def test_huggingface_conventions() -> None:
    source = (
        "{% for i in [1, 2, 3] %}\n  {% if i == 2 %}{% continue %}{% endif %}\n{{ i }}\n"
        "{% endfor %}\n{% generation %}g{% endgeneration %}|{{ bos_token }}|"
        "{{ {'b': '<é>', 'a': 1} | tojson }}|{{ [1] | tojson(indent=2) }}|"
        "{{ strftime_now('%Y') }}|{{ missing is defined }}|{{ documents }}"
    )
    years = [datetime.datetime.now().year]
    rendered = template(source, bos_token="<s>").render(USER)
    years.append(datetime.datetime.now().year)
    assert rendered in [
        f'1\n3\ng|<s>|{{"b": "<é>", "a": 1}}|[\n  1\n]|{year}|False|None' for year in years
    ]


def test_dict_methods_and_keys() -> None:
    source = "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].x }}"
    assert template(source).render(USER) == "role=user;content=Hi;"


@pytest.mark.parametrize(
    ("source", "form"),
    [(LOOP, ContentForm.TEXT), (PARTS, ContentForm.PARTS), (EITHER, ContentForm.EITHER)],
)
def test_content_form_is_found(source: str, form: ContentForm) -> None:
    assert template(source)._content is form


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [(LOOP, "[user]a", "[user]a\nb"), (PARTS, "<a>", "<a><b>"), (EITHER, "a", "<a><b>")],
)
def test_content_is_converted_for_the_template(source: str, text: str, parts: str) -> None:
    made = template(source)
    both = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert made.render([{"role": "user", "content": "a"}]) == text
    assert made.render([{"role": "user", "content": both}]) == parts


@pytest.mark.parametrize("source", [LOOP, PARTS, EITHER])
def test_pictures_are_refused(source: str) -> None:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(InvalidArgument, match=r"messages\[1\].content\[0\].*`image_url`"):
        template(source).render([*USER, {"role": "user", "content": content}])


def test_missing_content_is_empty_and_null_tool_calls_are_none() -> None:
    source = "{% for m in messages %}{{ m.content + '.' }}{{ 'tool_calls' in m }}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": None}, {"role": "assistant"}]
    assert template(source).render(messages) == ".False.False"  # type: ignore[arg-type]


def test_null_content_beside_calls_stays_null_where_the_template_takes_it() -> None:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "1", "type": "function", "function": function}]
    silent, empty = (
        [{"role": "assistant", "content": content, "tool_calls": calls}] for content in (None, "")
    )
    tail = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
    # as of DeepSeek-R1-Distill-Qwen: a header for each content that is not null
    header = "{% for m in messages %}{% if m.content is not none %}[{{ m.content }}]{% endif %}"
    assert template(header + tail).render(silent) == "{}"
    assert template(header + tail).render(empty) == "[]{}"
    for source in ("{{ m.content }}", "{{ m.content + '' }}"):
        printed = template("{% for m in messages %}" + source + tail)
        assert printed.render(silent) == printed.render(empty) == "{}"


def test_continue_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is "}]
    prompt = example().render(messages, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nThe answer is ")
    stripping = template("{% for m in messages %}{{ m.content | trim }};{% endfor %}")
    assert stripping.render(messages, continue_final_message=True) == "Hi;The answer is"
    with pytest.raises(InvalidArgument, match="continue_final_message"):
        example().render([*USER, {"role": "assistant", "content": ""}], continue_final_message=True)


@pytest.mark.parametrize("text", ["im", "end", "|", "m_end|>", "<|im_end|>", "a\n", "\n", "x  "])
def test_a_text_that_is_also_in_the_end_marker_is_continued(text: str) -> None:
    messages = [*USER, {"role": "assistant", "content": text}]
    for content in (text, [{"type": "text", "text": text}]):
        messages[-1]["content"] = content  # type: ignore[assignment]
        prompt = example().render(messages, continue_final_message=True)
        assert prompt.endswith(f"<|im_start|>assistant\n{text}")
    assert messages[-1]["content"] == content


def test_variables_reach_the_template() -> None:
    made = template("{{ enable_thinking }}{{ tools }}")
    assert made.render(USER, variables={"enable_thinking": False}) == "FalseNone"


def write(directory: Path, **config: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, chat_template=named)
    found = load_template(tmp_path)
    assert found is not None
    assert (found.render(USER), found.render(USER, [TOOL])) == ("plain", "tools")
    order = [
        ("chat_template.json", '{"chat_template": "from json"}', "from json"),
        ("chat_template.jinja", "from jinja", "from jinja"),
    ]
    for name, content, text in order:
        (tmp_path / name).write_text(content)
        found = load_template(tmp_path)
        assert found is not None and found.render(USER) == text
    (tmp_path / "own.jinja").write_text("own {{ eos_token }}")
    write(tmp_path, eos_token={"content": "</s>"})
    found = load_template(tmp_path, tmp_path / "own.jinja")
    assert found is not None and found.render(USER) == "own </s>"


def test_bad_templates_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja, line 2: .* does not compile"):
        load_template(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere\.jinja cannot be read"):
        load_template(tmp_path, tmp_path / "nowhere.jinja")
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, chat_template=[1])
    with pytest.raises(ConfigError, match="must be a string or a list"):
        load_template(tmp_path)
    (tmp_path / "chat_template.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"chat_template\.json has no `chat_template`"):
        load_template(tmp_path)


def test_loop_attributes_are_those_of_the_stock_sandbox() -> None:
    source = (
        "{% for m in messages %}{{ [loop.first, loop.last, loop.index, loop.index0, loop.length,"
        " loop.revindex, loop.revindex0, loop.depth, loop.depth0, loop.previtem, loop.nextitem] }}"
        "{{ [loop.nothing, loop._iterable, loop.__class__] }}{% endfor %}"
    )
    messages = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    stock = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source)
    expected = stock.render(messages=messages)
    assert "True" in expected and "'b'" in expected
    assert template(source).render(messages) == expected


def test_variables_may_have_any_name() -> None:
    names = ("template", "tools_", "add", "context", "environment")
    made = template("{{ " + " ~ ".join(names) + " }}")
    variables = dict.fromkeys((*names, "self"), "x")
    assert made.render(USER, variables=variables) == "x" * len(names)


@pytest.mark.parametrize(
    "source",
    [
        "{% set a = 1 %}{% macro f(x) %}{{ x }}{{ a }}{{ messages[0].content }}{% endmacro %}"
        "{{ f(2) }}{% set a = 3 %}{{ f(2) }}{{ a }}",
        "{% block b %}x{{ messages | length }}{% endblock %}{{ self.b() }}",
        "{% for m in messages %}{% block q scoped %}{{ m.content }}{{ loop.first }}{% endblock %}"
        "{% endfor %}",
        "{% set messages = messages[1:] %}{{ messages | length }}"
        "{% macro g() %}{{ messages | length }}{{ kw }}{% endmacro %}{{ g() }}",
        "{% autoescape true %}{{ '<' }}{{ messages[0].content | string }}{% endautoescape %}<",
        "{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}{{ kw }}{% endcall %}",
        "{% if x is not defined %}{% set x = 4 %}{% endif %}{{ x }}{{ y is defined }}{{ tools }}",
        "{{ messages | map(attribute='content') | join(',') }}{{ '%s' % 3 }}{{ 'a' | e }}",
    ],
)
def test_names_resolve_as_in_jinja2(source: str) -> None:
    messages = [{"role": "user", "content": "<a>"}, {"role": "assistant", "content": "b"}]
    made = template(source)
    expected = made._default.render(
        messages=messages, tools=None, add_generation_prompt=True, kw="k"
    )
    for _ in range(2):  # nothing that a template sets outlives the rendering
        assert made.render(messages, variables={"kw": "k"}) == expected


class _Pair(dict[str, str]):
    """A dict of another type, with an attribute."""

    role = "attribute"


_VALUES = {
    "d": {"role": "user", "items": "key", "nested": {"role": ["x", {"deep": 1}]}, "none": None},
    "empty": {},
    "pair": _Pair(role="key"),
    "text": "words",
    "list": [{"role": "first"}],
    "number": 3,
}
_EXPRESSIONS = (
    *("d.role", "d['role']", "d.items is callable", "d['items']", "d.nested.role[1].deep"),
    *("d['nested']['role'][0]", "d.none", "d.missing is defined", "d['missing'] is defined"),
    *("empty.role is defined", "pair.role", "pair['role']", "text.role is defined"),
    *("text['upper'] is callable", "text.upper()", "list[0].role", "(list | first).role"),
    *("number.real", "number['real']", "absent is defined", "d.__class__ is defined"),
    *("d['__class__'] is defined", "d.role ~ d['nested'].role[0] ~ d.none", "(d.nested or d).role"),
    *("{'role': d.role}.role", "[d, empty] | map(attribute='role') | list", "d.get('role')"),
    *("list | selectattr('role', 'equalto', list[0].role) | list | length",),
    *("namespace(role=d.role).role", "d.nested.role[1].deep.real"),
)


@pytest.mark.parametrize("expression", _EXPRESSIONS)
def test_look_ups_are_those_of_the_sandbox(expression: str) -> None:
    sources = (
        "{{ " + expression + " }}",
        "{% macro f(d) %}{{ " + expression + " }}{% endmacro %}{{ f(d) }}",
        "{% for d in [d] if d.role %}{% set text = d.role %}{{ " + expression + " }}{% endfor %}",
    )
    for source in sources:
        plain = ImmutableSandboxedEnvironment().from_string(source).render(_VALUES)
        assert TemplateEnvironment().from_string(source).render(_VALUES) == plain


@pytest.mark.parametrize("expression", ["absent.role", "d.missing.role", "d.__class__.mro"])
def test_look_ups_fail_as_in_the_sandbox(expression: str) -> None:
    errors = []
    for environment in (ImmutableSandboxedEnvironment(), TemplateEnvironment()):
        with pytest.raises(jinja2.TemplateError) as caught:
            environment.from_string("{{ " + expression + " }}").render(_VALUES)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("effort", "given", "thinks"),
    [
        (None, None, {}),
        ("none", None, {"enable_thinking": False, "thinking": False}),
        ("low", None, {"enable_thinking": True, "thinking": True}),
        ("none", {"enable_thinking": True}, {"enable_thinking": True}),
        ("none", {"thinking": True}, {"thinking": True}),
    ],
)
def test_reasoning_effort_switches_thinking(
    effort: str | None, given: dict[str, Any] | None, thinks: dict[str, bool]
) -> None:
    request = ChatCompletionRequest(
        model="m", messages=[], reasoning_effort=effort, chat_template_kwargs=given
    )
    found = template_variables(request)
    assert found.pop("reasoning_effort", None) == effort
    assert found == thinks
