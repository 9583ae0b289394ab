"""No message is lost in a template that does not print its role, its place or its form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.prompt.template import ChatTemplate

FAIL = "{{ raise_exception('no') }}"
BODY = "[{{ m.role }}]{{ m.content or '' }}"
PLAIN = "{% for m in messages %}" + BODY + "{% endfor %}"
DROPS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or (m.role == 'system' and "
    "loop.first) %}" + BODY + "{% endif %}{% endfor %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}" + FAIL + "{% elif "
    "m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    + FAIL
    + "{% endif %}"
    + BODY
    + "{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + FAIL
    + "{% endif %}"
    + BODY
    + "{% endfor %}"
)
IGNORES_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}" + BODY + "{% endif %}{% endfor %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}{% if c.id|length != 9 %}" + FAIL + "{% endif %}"
    "[call {{ c.id }}]{{ c.function|tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}" + FAIL + "{% endif %}"
    "[result {{ m.tool_call_id }}]{{ m.content }}{% elif m.role == 'user' %}"
    "{% if loop.last and s is defined %}[{{ s }}]{% endif %}[user]{{ m.content }}"
    "{% elif m.role == 'assistant' %}[assistant]{{ m.content }}{% else %}"
    + FAIL
    + "{% endif %}{% endfor %}"
)
OF_DEVELOPERS = (
    "{% for m in messages %}{% if m.role in ['developer', 'user', 'assistant', 'tool', 'system'] %}"
    + BODY
    + "{% endif %}{% endfor %}"
)
TEMPLATES = {
    "plain": PLAIN,
    "drops": DROPS,
    "refuses": REFUSES,
    "gemma": GEMMA,
    "ignores system": IGNORES_SYSTEM,
    "mistral": MISTRAL,
    "developer": OF_DEVELOPERS,
}


def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]}, {}, "here")


def said(role: str, text: str, **members: Any) -> Mapping[str, Any]:
    return {"role": role, "content": text, **members}


def called(call_id: str, argument: str) -> Mapping[str, Any]:
    function = {"name": "f", "arguments": f'{{"p": "{argument}"}}'}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_is_printed(name: str) -> None:
    """Messages of every role at every place, each with a text of its own."""
    use = template(name)
    for leading, later in itertools.product(
        ((), ("system",), ("developer",), ("system", "developer", "system")),
        ((), ("system",), ("developer",)),
    ):
        for ends in ("user", "tool", "function"):
            messages = [said(role, f"lead{at};") for at, role in enumerate(leading)]
            messages += [said("user", "ask;"), said("assistant", "answer;")]
            messages += [said(role, f"late{at};") for at, role in enumerate(later)]
            messages.append(said("user", "more;"))
            if ends == "tool":
                messages += [
                    called("toolu_01AbC", "arg;"),
                    said("tool", "result;", tool_call_id="toolu_01AbC"),
                ]
            if ends == "function":
                call = {"name": "f", "arguments": '{"p": "arg;"}'}
                messages.append({"role": "assistant", "content": None, "function_call": call})
                messages.append(said("function", "result;", name="f"))
            prompt = use.render(messages)
            texts = [each["content"] for each in messages if each["content"]]
            texts += ["arg;"] if ends != "user" else []
            assert [prompt.count(text) for text in texts] == [1] * len(texts), (prompt, messages)


def test_the_role_of_developers_is_kept_where_the_template_has_it() -> None:
    messages = [said("developer", "d"), said("user", "u")]
    assert template("developer").render(messages) == "[developer]d[user]u"
    assert template("plain").render(messages) == "[system]d[user]u"


def test_a_later_system_message_keeps_its_place() -> None:
    messages = [said("system", "s"), said("user", "u"), said("assistant", "a"), said("system", "t")]
    assert template("plain").render(messages) == "[system]s[user]u[assistant]a[system]t"
    assert template("refuses").render(messages) == "[system]s[user]u[assistant]a[user]t"
    assert template("gemma").render(messages) == "[user]s\n\nu[assistant]a[user]t"


def test_the_system_message_alone() -> None:
    assert template("gemma").render([said("system", "s")]) == "[user]s"


def test_what_is_fine_is_not_changed() -> None:
    messages = [said("system", "s"), said("user", "u"), called("call_1", "a"), said("user", "v")]
    given = [dict(each) for each in messages]
    template("mistral").render([*messages, said("tool", "r", tool_call_id="call_1")])
    assert messages == given


def test_ids_of_other_models_are_stable() -> None:
    use = template("mistral")

    def ids(call_id: str) -> tuple[str, str]:
        result = said("tool", "r", tool_call_id=call_id)
        prompt = use.render([said("user", "u"), called(call_id, "a"), result])
        return prompt.split("[call ")[1][:9], prompt.split("[result ")[1][:9]

    assert ids("aB3dE6gH9") == ("aB3dE6gH9", "aB3dE6gH9")  # its own
    given = (
        "call_abcdef0123456789",
        "toolu_01AbC",
        "a",
        "",
        "functions.f:0",
        "äöüäöüäöü",
        "\ud800",
    )
    made = [ids(one) for one in given]
    assert made == [ids(one) for one in given] and len(set(made)) == len(given)
    for call, result in made:
        assert call == result and call.isascii() and call.isalnum() and len(call) == 9
    assert made[0][0] == "hjwesyaBF"  # equal in every process and version


def test_a_role_of_no_api_is_not_dropped() -> None:
    with pytest.raises(InvalidArgument, match="does not print the role `critic`"):
        template("drops").render([said("user", "u"), said("critic", "c")])
    with pytest.raises(InvalidArgument, match=r"^Chat template: no$"):
        template("refuses").render([said("user", "u"), said("critic", "c")])
    assert template("plain").render([said("critic", "c")]) == "[critic]c"


def test_a_result_of_a_function_has_the_id_of_its_call() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages = [said("user", "q"), call, said("function", "r", name="f")]
    text = template("mistral").render(messages)
    assert text == '[user]q[call call00001]{"name": "f", "arguments": {}}[result call00001]r'


@pytest.mark.parametrize("call", [7, {"type": "function"}, {"function": None}])
@pytest.mark.parametrize("name", ["plain", "mistral"])
def test_a_call_without_its_function_is_refused(name: str, call: object) -> None:
    messages = [said("user", "q"), said("assistant", "x", tool_calls=[call]), said("user", "z")]
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls: missing `function`"):
        template(name).render(messages)


def test_the_text_of_a_part_of_another_type_is_not_taken_for_its_content() -> None:
    part = {"type": "audio", "text": "a caption"}
    with pytest.raises(InvalidArgument, match="this model takes text, got a part of type `audio`"):
        template("plain").render([{"role": "user", "content": [part]}])


def test_templates_may_call_the_methods_of_texts() -> None:
    text = "{{ messages[0].content.startswith('a') }}{{ messages[0]['content'].split('x') }}"
    found = ChatTemplate({"default": text}, {}, "here").render([said("user", "axb")])
    assert found == "True['a', 'b']"
