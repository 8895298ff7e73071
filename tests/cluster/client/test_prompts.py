"""The forms in which a program gives prompts and parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import LLM, SamplingParams
from cluster.api.schema import ChatMessage
from cluster.client.prompts import (
    Conversation,
    ParsedPrompt,
    as_prompt_list,
    broadcast_params,
    conversations,
    form_of,
    parse_prompt,
)
from scheduler.errors import ConfigError, RequestError

MESSAGE = {"role": "user", "content": "Hi"}
PARAMS = SamplingParams(n=2)


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("Hi", ["Hi"]),
        ([1, 2], [[1, 2]]),
        ({"prompt": "Hi"}, [{"prompt": "Hi"}]),
        (["Hi", [1, 2]], ["Hi", [1, 2]]),
        (([1, 2], "Hi"), [[1, 2], "Hi"]),
        ([], []),
    ],
)
def test_one_prompt_or_many_become_a_list(prompts: Any, wanted: list[Any]) -> None:
    assert as_prompt_list(prompts) == wanted


@pytest.mark.parametrize(
    ("prompts", "kind"), [(5, "int"), (None, "NoneType"), ((p for p in ["Hi"]), "generator")]
)
def test_what_is_no_prompt_is_refused_with_the_forms_there_are(prompts: Any, kind: str) -> None:
    with pytest.raises(
        RequestError, match=f"text, a list of token ids, a mapping, or a list of these; got {kind}"
    ):
        as_prompt_list(prompts)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [(None, [None, None]), (PARAMS, [PARAMS, PARAMS]), ((PARAMS, None), [PARAMS, None])],
)
def test_parameters_are_for_all_prompts_or_one_each(params: Any, wanted: list[Any]) -> None:
    assert broadcast_params(params, 2) == wanted


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ({"temperature": 0}, "dict"),
        ({"temperature": 0, "n": 2}, "dict"),
        ([PARAMS, {}], "dict"),
        ("greedy", "str"),
    ],
)
def test_parameters_that_are_no_sampling_params_are_refused_with_what_makes_them(
    params: Any, kind: str
) -> None:
    with pytest.raises(
        RequestError, match=rf"SamplingParams or .*, got {kind}; use SamplingParams.from_dict"
    ) as refused:
        broadcast_params(params, 2)
    assert refused.value.parameter == "sampling_params"


def test_another_number_of_parameters_than_prompts_is_refused_with_both() -> None:
    with pytest.raises(RequestError, match="got 1 sampling_params for 2 prompts"):
        broadcast_params([PARAMS], 2)


def test_one_conversation_or_many_become_prompts() -> None:
    assert conversations([MESSAGE]) == [{"messages": [MESSAGE]}]
    assert conversations([[MESSAGE], [MESSAGE] * 2]) == [
        {"messages": [MESSAGE]},
        {"messages": [MESSAGE] * 2},
    ]


@pytest.mark.parametrize("messages", [MESSAGE, "Hi", None, 5])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(
        RequestError, match=f"a list of .role, content., .*; got {type(messages).__name__}"
    ):
        conversations(messages)


def test_a_mapping_gives_its_prompt_in_one_form() -> None:
    assert form_of({"prompt": "Hi", "cache_salt": "me"}) == "prompt"
    assert (
        form_of({"messages": [MESSAGE], "sampling_params": {}}, ("sampling_params",)) == "messages"
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"prompt": "Hi", "sampling_params": {}},
            "unknown key 'sampling_params'; known are prompt, .*, cache_salt, .*tools",
        ),
        (
            {"prompt": "Hi", "messages": []},
            "a prompt needs exactly one of prompt, .*, messages; has prompt, messages",
        ),
        ({}, "a prompt needs exactly one of .*; has none"),
    ],
)
def test_a_mapping_of_another_form_is_refused_with_the_forms_there_are(
    prompt: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        form_of(prompt)


def test_sampling_defaults_that_are_no_sampling_params_are_refused_before_ray_starts() -> None:
    defaults: Any = {"temperature": 0}
    with pytest.raises(ConfigError, match="sampling_defaults must be a SamplingParams, got dict"):
        LLM(sampling_defaults=defaults)


@pytest.mark.parametrize("messages", [[], ()])
def test_a_conversation_without_messages_is_refused(messages: object) -> None:
    with pytest.raises(RequestError, match="messages must be a non-empty list") as refused:
        parse_prompt({"messages": messages})
    assert refused.value.parameter == "messages"


@pytest.mark.parametrize(
    "message", [{"content": "Hi"}, {"role": "user"}, {"role": 1, "content": "Hi"}, "Hi", 5]
)
def test_a_message_without_role_or_content_is_refused_and_shown(message: object) -> None:
    with pytest.raises(RequestError, match="each message needs a role and content, got") as refused:
        parse_prompt({"messages": [MESSAGE, message]})
    assert repr(message) in str(refused.value)


def test_content_in_parts_is_joined_as_over_http_and_no_content_stays_so() -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "47 + 38?"}]
    message = {"role": "user", "content": parts, "name": "Ann"}
    over_http = ChatMessage.model_validate(message).for_template(arguments_as_text=True)
    answer = {"role": "assistant", "content": None, "reasoning": "Hm"}
    parsed = parse_prompt({"messages": [message, answer]})
    assert parsed.conversation == Conversation(messages=[over_http, answer])
    assert over_http["content"] == "What is\n47 + 38?" and message["content"] is parts


@pytest.mark.parametrize(
    "content",
    [5, True, {"text": "Hi"}, [["Hi"]], [{"type": "image", "url": "a"}], [{"type": "text"}]],
)
def test_content_that_is_no_text_is_refused_with_what_is_possible(content: Any) -> None:
    messages = [MESSAGE, {"role": "user", "content": content}]
    with pytest.raises(
        RequestError, match=r'must be text, None, or a list of {"type": "text", .*; got '
    ) as refused:
        parse_prompt({"messages": messages})
    shown_value = content[0] if isinstance(content, list) else content
    assert str(refused.value).endswith(f"got {shown_value!r}")
    assert refused.value.parameter == "messages"


def test_what_a_chat_template_gets_goes_with_messages_only() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    variables = {"enable_thinking": False}
    parsed = parse_prompt(
        {"messages": [MESSAGE], "tools": [tool], "chat_template_kwargs": variables}
    )
    assert parsed.conversation == Conversation(
        messages=[MESSAGE], tools=[tool], template_variables=variables
    )
    others = {"continue_final_message": True}
    for extra in ({"tools": [tool]}, {"chat_template_kwargs": variables}, others):
        with pytest.raises(RequestError, match="needs messages, and this prompt gives prompt"):
            parse_prompt({"prompt": "Hi"} | extra)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tools": "add"}, "tools must be a list of JSON objects, got 'add'"),
        ({"tools": [1]}, "tools must be a list of JSON objects"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"messages": []}}, "an object without messages, tools"),
        ({"continue_final_message": "yes"}, "continue_final_message must be true or false"),
        ({"continue_final_message": True}, "needs a last message of role assistant with text"),
    ],
)
def test_wrong_tools_and_template_variables_are_refused(
    extra: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        parse_prompt({"messages": [MESSAGE]} | extra)


def test_a_conversation_that_a_program_has_made_is_checked_and_taken_as_it_is() -> None:
    with pytest.raises(RequestError, match="an object without messages, tools"):
        Conversation(messages=[MESSAGE], template_variables={"tools": []})
    with pytest.raises(RequestError, match="needs a last message of role assistant with text"):
        Conversation(messages=[MESSAGE], continues_last_message=True)
    prompt = ParsedPrompt(conversation=Conversation(messages=[MESSAGE]))
    assert parse_prompt(prompt) is prompt and as_prompt_list(prompt) == [prompt]
