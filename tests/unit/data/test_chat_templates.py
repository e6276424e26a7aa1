"""What is learnt under many kinds of chat templates: the answers where they stand, whatever they say, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.data import templates
from harness.data.answers import find_answers
from harness.data.templates import Template
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError

TEMPLATES = {
    file.stem: file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("chat_templates/*.jinja")
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}},
    }
]
Messages = list[dict[str, Any]]
# templates that write no answer without thoughts as it is served, or end none by a token
REFUSED = {
    "brackets_and_tildes": r"message 2: the generation prompt of the chat template ends with '<think>\\n'",
    "thoughts_never_kept": r"message 2: the generation prompt of the chat template ends with '<think>\\n'",
    "words_that_are_taken_out": r"message 2: the generation prompt of the chat template ends with '<think>\\n'",
    "reminder_at_the_end": "message 2: the generation prompt of the chat template ends with",
    "names_of_speakers": "message 2: the chat template writes no token that ends this answer",
}
TRAINED = [name for name in TEMPLATES if name not in REFUSED]
# what is learnt of the first and of the last of two answers, where it is more than the answer and its closing token
AROUND = {
    "closed_by_the_next_question": ("{}<|assistant_end|>",) * 2,
    "prompt_begins_at_any_end": ("{}<|answer_ends|><|turn_ends|>",) * 2,
    "prompt_behind_a_question_alone": ("{}<|end_of_text|>",) * 2,
    "prompt_opens_thoughts_at_any_end": ("<|answer_begins|>{}<|answer_ends|><|turn_ends|>",) * 2,
    "channels": ("<|channel|>final<|message|>{}", "<|channel|>final<|message|>{}<|return|>"),
    "end_of_text_behind_all": ("{}<|end|>", "{}<|end|>"),
    "header_with_a_date": ("{}<|eot_id|>", "{}<|eot_id|>"),
    "macros_for_roles": ("<think></think>{}<|im_end|>", "<think></think>{}<|im_end|>"),
    "no_line_break_behind_the_last": ("{}</s>", "{}</s>"),
    "end_of_document_closes": ("{}</s>", "{}</s>"),
    "nothing_closes": ("\n<think></think>\n{}<|user|>",) * 2,
    "parts_alone": (" {}<end_of_utterance>", " {}<end_of_utterance>"),
    "parts_of_content": ("{}<end_of_turn>", "{}<end_of_turn>"),
    "role_of_a_model": ("{}<end_of_turn>", "{}<end_of_turn>"),
    "roles_in_tokens": ("{}<|end_of_text|>", "{}<|end_of_text|>"),
    "system_in_the_first_question": (" {} </s>", " {} </s>"),
    "system_in_the_last_question": (" {}</s>", " {}</s>"),
    "system_of_its_own": ("{}</s>", "{}</s>"),
    "prompt_opens_thoughts": ("{}<|im_end|>", "\n</think>\n\n{}<|im_end|>"),
    "thoughts_behind_the_last_question": ("{}<|im_end|>", "<think>\n\n</think>\n\n{}<|im_end|>"),
    "turn_tokens": ("{}<|END_OF_TURN_TOKEN|>", "{}<|END_OF_TURN_TOKEN|>"),
    "answers_of_tools_in_the_turn": ("{}<turn|>", "{}<turn|>"),
}
SAME = (
    ("Hello!", "Hello!", "yes or no", "no"),
    ("A, B, C or D", "D", "one of them", "D"),
    ("assistant", "user", "user", "assistant"),
    ("<", "<|", "[", "im_end"),
    *(("say " + piece, piece, "once more", piece) for piece in ("e", "i", "d", "end", ">", "|", "model", "s", "t")),
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(**more: Any) -> dict[str, Any]:
    call = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "id": "call00001", "function": call}], **more}


TOLD = {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call00001"}


@cache  # each has a process of its own, which takes longer to start than all of its conversations
def template_of(source: str) -> Template:
    """A template as a tokenizer has it."""
    tokenizer = ByteTokenizer().as_transformers()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = source
    return Template(tokenizer)


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    template_of.cache_clear()


def learnt(
    template: str, messages: Messages, tools: list[Any] | None = None, only: set[int] | None = None
) -> list[str]:
    """The spans that are learnt, as text."""
    answers = {i for i, message in enumerate(messages) if message["role"] == "assistant"}
    found = find_answers(template_of(template), messages, tools, only or answers, "a.jsonl:7")
    return [found.text[start:end] for start, end in found.spans]


def two(first: str, answer: str, second: str, other: str) -> Messages:
    return [user(first), assistant(answer), user(second), assistant(other)]


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_write_answers_otherwise_than_they_are_served_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^a\.jsonl:7, {REFUSED[name]}"):
        learnt(TEMPLATES[name], two("what", "first", "and", "second"))


@pytest.mark.parametrize("name", TRAINED)
def test_answers_that_stand_elsewhere_too_are_learnt_where_they_are_said(name: str) -> None:
    first, last = AROUND.get(name, ("{}<|im_end|>", "{}<|im_end|>"))
    for turns in (("what", "first", "and", "second"), *SAME):
        said = learnt(TEMPLATES[name], two(*turns))
        assert said == [first.format(turns[1]), last.format(turns[3])], turns
        assert learnt(TEMPLATES[name], two(*turns), only={3}) == said[1:]


@pytest.mark.parametrize("name", TRAINED)
def test_a_system_prompt_changes_nothing_or_is_refused(name: str) -> None:
    plain = two("what", "first", "and", "second")
    try:
        said = learnt(TEMPLATES[name], [{"role": "system", "content": "first second"}, *plain])
    except UserError as error:
        assert "rejects it: no system role" in str(error) or "does not write a message of role system" in str(error)
    else:
        assert said == learnt(TEMPLATES[name], plain)


@pytest.mark.parametrize("name", TRAINED)
def test_an_answer_that_begins_a_conversation_is_learnt_without_its_header(name: str) -> None:
    plain = [user("what"), assistant("first")]
    for beginning in ([assistant("Hello!")], [assistant("assistant"), user("and"), assistant("one")]):
        try:
            said = learnt(TEMPLATES[name], [*beginning, *plain])
        except UserError as error:
            assert "rejects it" in str(error) or "cannot be found" in str(error)
        else:
            opening = AROUND.get(name, ("{}<|im_end|>",))[0]
            answers = [message["content"] for message in beginning if message["role"] == "assistant"]
            rest = learnt(TEMPLATES[name], plain)
            assert said[-1:] == rest and len(said) == len(answers) + 1
            for span, answer in zip(said, answers, strict=False):
                assert answer in span and opening.format(answer).strip().endswith(span.strip())


CALLS = (
    [user("Oslo?"), calling(), TOLD, assistant("It rains."), user("rain"), assistant("rain")],
    [user("Oslo?"), calling(content=""), TOLD, assistant("rain")],
    [user("Oslo?"), calling(content=None, reasoning_content="weather"), TOLD, assistant("Oslo", reasoning_content="2")],
    [user("weather"), calling()],
)


@pytest.mark.parametrize("name", TRAINED)
def test_tool_calls_are_learnt_and_what_tools_say_is_not(name: str) -> None:
    for messages in CALLS:
        answers = [message for message in messages if message["role"] == "assistant"]
        try:
            said = learnt(TEMPLATES[name], messages, TOOLS)
        except UserError as error:
            assert str(error).startswith("a.jsonl:7")
            continue
        assert len(said) == len(answers)
        for span, message in zip(said, answers, strict=True):
            words = ["weather", "Oslo"] if message.get("tool_calls") else [message["content"]]
            assert all(
                span.count(word) == 1 for word in words if word != "weather" or "reasoning_content" not in message
            )
            assert message.get("reasoning_content", "") in span
            assert "response" not in span.split("</tool_call>")[0]
            assert "<|observation|>" not in span.removesuffix("<|observation|>")


def test_most_templates_with_tool_calls_are_trained_on() -> None:
    taken = [name for name in TRAINED if _or_none(TEMPLATES[name], CALLS[0])]
    assert len(taken) >= 10, taken


def _or_none(template: str, messages: Messages) -> list[str]:
    try:
        return learnt(template, messages, TOOLS)
    except UserError:
        return []


@pytest.mark.parametrize(("name", "in_content"), [*product(TEMPLATES, (True, False))])
def test_thoughts_are_learnt_where_the_template_keeps_them(name: str, in_content: bool) -> None:
    def thinking(thought: str, text: str) -> dict[str, Any]:
        return (
            assistant(f"<think>\n{thought}\n</think>\n\n{text}")
            if in_content
            else assistant(text, reasoning_content=thought)
        )

    try:
        said = learnt(TEMPLATES[name], [user("q"), thinking("hm", "one"), user("hm"), thinking("so", "two")])
    except UserError as error:
        reasons = "not write `reasoning_content`", "leaves out a part", "generation prompt", "no token that ends"
        assert any(reason in str(error) for reason in reasons)
        return
    assert len(said) == 2
    for span, thought, text in zip(said, ("hm", "so"), ("one", "two"), strict=True):
        assert span.count(text) == 1
        assert span.count(thought) <= 1
    assert "so" in said[1]
    if name == "thoughts_behind_the_last_question":
        assert said == ["one<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize(
    "end", ["'</think>'", "'</think>' | list | join", "['<', '/', 't', 'h', 'i', 'n', 'k', '>'] | join"]
)
def test_thoughts_that_a_template_cuts_off_the_last_answer_are_refused(end: str) -> None:
    turn = "{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>{{ REST }}<|end|>{% endif %}"
    template = (
        "It's the model's or the user's turn.{% for m in messages %}"
        + turn.replace("REST", f"m.content.split({end})[-1]")
        + "{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    )
    conversation = two("a", "<think>\nhm\n</think>one", "b", "<think>\nso\n</think>two")
    with pytest.raises(UserError, match=r"message 2: the (chat template leaves out a part|generation prompt)"):
        learnt(template, conversation)


def test_an_answer_of_which_nothing_is_written_is_refused() -> None:
    with pytest.raises(UserError, match=r"^a.jsonl:7, message 2: the chat template does not write a message of role"):
        learnt("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", two("a", "b", "c", "d"))
    with pytest.raises(UserError, match=r"^a.jsonl:7, message 1: the chat template does not write a message of role"):
        learnt("{% for m in messages %}{{ m.content | length }} e {% endfor %}", two("a", "e", "c", "e"))


def test_marks_of_a_template_decide_unless_they_are_counted_wrong() -> None:
    marked = "{% generation %}{{ m.content }}</s>{% endgeneration %}"
    turn = "{% if m.role == 'user' %}{{ 'U:' + m.content }}{% else %}A:GENERATED;{% endif %}"
    plain = "{% for m in messages %}" + turn.replace("GENERATED", marked) + "{% endfor %}"
    assert learnt(plain, two("a", "b", "c", "d")) == ["b</s>", "d</s>"]
    assert learnt(plain, two("a", "b", "c", "d"), only={3}) == ["d</s>"]
    with pytest.raises(UserError, match=r"message 2: .* leaves out the token that ends an answer"):
        learnt(plain.replace("</s>{% endgeneration %}", "{% endgeneration %}</s>"), two("a", "b", "c", "d"))
    # transformers does not count what a macro has written before the mark
    macro = (
        "{% macro one(m) %}"
        + turn.replace("GENERATED", marked)
        + "{% endmacro %}{% for m in messages %}{{ one(m) }}{% endfor %}"
    )
    assert learnt(macro, two("a", "b", "c", "d")) == ["A:b</s>", "A:d</s>"]
    everything = "{% generation %}{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(UserError, match=r"^a\.jsonl:7: \{% generation %\} of the chat template does not stand"):
        learnt(everything, two("a", "b", "c", "d"))


def test_arguments_of_calls_come_as_the_template_takes_them() -> None:
    template = TEMPLATES["thoughts_behind_the_last_question"]
    text = calling()
    text["tool_calls"][0]["function"]["arguments"] = '{"city": "Oslo", "days": 2}'
    for messages in ([user("q"), text], [user("q"), calling()]):
        assert learnt(template, messages) == [
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
            "\n</tool_call><|im_end|>"
        ]


ARGUMENTS_AS_PYTHON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>{{ value | string }}</parameter>{% endfor %}</function>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tools %}{% endif %}"
)


def test_a_list_among_the_arguments_may_be_written_as_python_does() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"of": ["Oslo", {"and": "Rome"}]}}}
    said = learnt(ARGUMENTS_AS_PYTHON, [user("Oslo?"), assistant("", tool_calls=[call])])
    written = "<parameter=of>['Oslo', {'and': 'Rome'}]</parameter>"
    assert said == [f"<function=weather>{written}</function><|im_end|>"]


def test_each_call_of_a_message_has_to_be_written() -> None:
    first = calling(content="")
    both = {**first, "tool_calls": first["tool_calls"] * 2}
    one_alone = ARGUMENTS_AS_PYTHON.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    assert "Oslo" in learnt(one_alone, [user("a"), first])[0]
    assert learnt(ARGUMENTS_AS_PYTHON, [user("a"), both])[0].count("Oslo") == 2
    with pytest.raises(
        UserError, match=r"^a\.jsonl:7, message 2, call 2: the chat template does not write its tool calls"
    ):
        learnt(one_alone, [user("a"), both])


LOOPS = "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(LOOPS, id="always"),
        pytest.param("{% if add_generation_prompt %}" + LOOPS + "{% endif %}", id="prompt"),
        pytest.param("{% if messages[0].content == 'c' %}" + LOOPS + "{% endif %}", id="later"),
    ],
)
def test_a_template_that_runs_on_is_ended(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 1)
    with pytest.raises(UserError, match=r"^a\.jsonl:7: the chat template does not end within 1 s"):
        for first in ("a", "c"):
            learnt(endless + TEMPLATES["chatml"], two(first, "b", "c", "d"))


def test_a_template_that_writes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_CHARACTERS", 1000)
    with pytest.raises(UserError, match=r"^a\.jsonl:7: the chat template writes more than 1,000 characters"):
        learnt("{{ 'x' * 1001 }}" + TEMPLATES["chatml"], two("a", "b", "c", "d"))
