"""The tokenizer without transformers gives the ids, text and chats of transformers, or None."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.client import fast_tokenizer
from cluster.client.prompts import Conversation
from cluster.client.tokenizer import Tokenizer as ChatTokenizer
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import RequestError
from tests.cluster.client.byte_tokenizer import write_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world",
    "What is 47 + 38?",
    "  leading, trailing  and   inner spaces\t\n\r\n\n x ",
    "It's we'll I'D 'RE don't",
    "caf\u00e9 cafe\u0301 \ufb01 \u212b \u1e9b\u0323",  # composed, decomposed, compatibility forms
    "日本語 한국어 العربية ไทย हिन्दी",
    "🦅👩‍👩‍👧‍👦🇩🇪 \u200b\ufeff\u2028",
    "a<|im_start|>user\nHi<|im_end|> <|endoftext|>  <think>x</think>",
    "< |im_start|> <|im_start| > <|IM_START|> <|end|> [MASK]",
    "\x00\x01\x7f \ufffd 1234567890 ١٢٣ ²³ Ⅷ",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # ok\n\n\n",
]
USER = {"role": "user", "content": "What is <b>47 & 38</b>? 🦅"}
CHATS: list[list[dict[str, str]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n85"}, USER],
    [{"role": "user", "content": "  spaces kept?  \n"}],
    [{"role": "user", "content": ""}],
]
# Uses what transformers offers to templates, in ways that differ between setups of jinja2.
TEMPLATE = """{%- for message in messages %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
    {{ message | tojson }}{{ {'a': '<ü>'} | tojson(indent=1) }}
{%- endfor %}
{%- if tools %}tools{% endif %}{% if documents %}documents{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
  {% if enable_thinking is defined %}thinking{% endif %}
"""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def default_model(path: Path) -> Path:
    """The files of the default model."""
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (path / name).write_bytes((DEFAULT_MODEL_DIR / name).read_bytes())
    return path


def like_qwen3(path: Path) -> Path:
    """A tokenizer with the pipeline and configuration of Qwen3's checkpoints, and few merges."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Ġ", "w"), ("Ã", "©"), ("e", "Ì"), ("eÌ", "ģ")]
    pieces = [*sorted(letters), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    stored = json.loads((path / "tokenizer.json").read_text())
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(token["id"]): {flag: token[flag] for flag in token if flag != "id"}
            for token in stored["added_tokens"]
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "unk_token": None,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def bytes_with_names(path: Path) -> Path:
    """A generic class with a template that names special tokens."""
    write_tokenizer(path, chat_template="{{ eos_token }}{{ messages[0].content }}{{ pad_token }}")
    change(path, eos_token="<|end|>", pad_token={"content": "<|pad|>", "__type": "AddedToken"})
    return path


def change(path: Path, **settings: Any) -> None:
    """Set entries of `tokenizer_config.json`."""
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.fixture(scope="module", params=[default_model, like_qwen3, bytes_with_names])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[fast_tokenizer.FastTokenizer, Any]:
    from transformers import AutoTokenizer

    path = request.param(tmp_path_factory.mktemp("tokenizers") / "tokenizer")
    fast = fast_tokenizer.load(path)
    assert fast is not None
    return fast, AutoTokenizer.from_pretrained(str(path))


def test_ids_are_those_of_transformers(pair: Any) -> None:
    fast, slow = pair
    rng = random.Random(0)
    mixed = ["".join(rng.choices("".join(TEXTS), k=60)) for _ in range(200)]
    for text in [*TEXTS, *mixed]:
        assert fast.encode(text) == slow.encode(text), text


def test_text_is_that_of_transformers(pair: Any) -> None:
    fast, slow = pair
    rng = random.Random(1)
    for _ in range(200):
        ids = rng.choices(range(len(slow)), k=rng.randrange(40))
        assert fast.decode(ids) == slow.decode(ids, skip_special_tokens=True), ids
    for text in TEXTS:
        ids = slow.encode(text)
        assert fast.decode(ids) == slow.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("messages", CHATS)
def test_chats_are_those_of_transformers(pair: Any, messages: list[dict[str, str]]) -> None:
    fast, slow = pair
    want = slow.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    text = fast.render_chat(Conversation(messages=messages))
    assert fast.encode(text, add_special_tokens=False) == want


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    USER,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "so",
        "tool_calls": [
            {"function": {"name": "add", "arguments": '{"a":  "ü"}'}},
            {"function": {"name": "add", "arguments": {"a": "<ü>"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "85"},
]


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", [CALLS, CALLS[1:]])
def test_chats_with_tools_are_those_of_transformers(
    pair: Any, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    fast, slow = pair
    want = slow.apply_chat_template(
        messages, tools=[ADD], add_generation_prompt=True, tokenize=False, **variables
    )
    conversation = Conversation(messages=messages, tools=[ADD], template_variables=variables)
    assert fast.render_chat(conversation) == want


@pytest.mark.parametrize("begun", ["The answer is", "  85 and\n ", "<think>\nso", "end", "m"])
def test_a_last_message_is_continued(tmp_path: Path, begun: str) -> None:
    tokenizer = ChatTokenizer(default_model(tmp_path / "tokenizer"))
    question = {"role": "user", "content": f"What is 47 + 38? {begun}"}
    messages = [question, {"role": "assistant", "content": begun}]
    text = tokenizer.render_chat(Conversation(messages=messages, continues_last=True))
    assert text.startswith(tokenizer.render_chat(Conversation(messages=[question])))
    assert text.endswith((begun.strip(), begun.lstrip()))
    assert "<|im_end|>" not in text.rpartition("<|im_start|>")[2]


def test_a_message_that_the_template_changes_is_not_continued(tmp_path: Path) -> None:
    folder = default_model(tmp_path / "tokenizer")
    template = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "assistant", "content": "lower"}]
    with pytest.raises(RequestError, match="changes the last message"):
        ChatTokenizer(folder).render_chat(Conversation(messages=messages, continues_last=True))


def test_the_default_template_shows_tools_and_calls_verbatim(tmp_path: Path) -> None:
    fast = fast_tokenizer.load(default_model(tmp_path / "tokenizer"))
    assert fast is not None
    assert fast.template_variables >= {"tools", "enable_thinking"}
    text = fast.render_chat(Conversation(messages=CALLS, tools=[ADD]))
    assert text.startswith("<|im_start|>system\nBe <brief>.\n\nThese functions can be called:")
    assert f"<tools>\n{json.dumps(ADD)}\n</tools>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a":  "ü"}}\n</tool_call>' in text
    assert "<think>\nso\n</think>" in text and "<tool_response>\n85\n</tool_response>" in text


def test_the_bytes_of_tokens_add_up_to_those_of_the_text(pair: Any) -> None:
    fast, _ = pair
    for text in TEXTS:
        ids = fast.encode(text)
        if not any(token in text for token in (*SPECIAL, "<|end|>", "\ufffd")):
            assert b"".join(map(fast.token_bytes, ids)).decode() == fast.decode(ids)
    assert fast.token_bytes(10**6) == b""


def _stored(**entries: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))

    return edit


LEFT_TO_TRANSFORMERS: dict[str, Callable[[Path], object]] = {
    "another class": lambda path: change(path, tokenizer_class="LlamaTokenizer"),
    "code of the checkpoint": lambda path: change(path, auto_map={"AutoTokenizer": ["a.B", None]}),
    "a token before the text": lambda path: change(path, add_bos_token=True),
    "a space before the text": lambda path: change(path, add_prefix_space=True),
    "special tokens as text": lambda path: change(path, split_special_tokens=True),
    "spaces cleaned up": lambda path: change(path, clean_up_tokenization_spaces=True),
    "a new special token": lambda path: change(path, eos_token="<|new|>"),
    "a further special token": lambda path: change(path, additional_special_tokens=["<|new|>"]),
    "a token made special": lambda path: change(path, pad_token="<think>"),
    "a flag of a token": lambda path: change(
        path, added_tokens_decoder={"263": {"content": "<|endoftext|>", "lstrip": True}}
    ),
    "several templates": lambda path: change(
        path, chat_template=[{"name": "default", "template": TEMPLATE}]
    ),
    "a template with transformers' block": lambda path: change(
        path, chat_template="{% generation %}x{% endgeneration %}"
    ),
    "a template with a token that the class has by default": lambda path: change(
        path, chat_template="{{ eos_token }}"
    ),
    "templates in files": lambda path: (path / "additional_chat_templates").mkdir(),
    "a cut": _stored(
        truncation={"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    ),
    "another normalizer": _stored(normalizer={"type": "NFKC"}),
    "no normalizer": _stored(normalizer=None),
    "another split": _stored(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False}),
    "no tokenizer.json": lambda path: (path / "tokenizer.json").unlink(),
    "a broken configuration": lambda path: (path / "tokenizer_config.json").write_text("{"),
}


@pytest.mark.parametrize("name", LEFT_TO_TRANSFORMERS)
def test_whatever_may_differ_is_left_to_transformers(tmp_path: Path, name: str) -> None:
    path = like_qwen3(tmp_path / "tokenizer")
    assert fast_tokenizer.load(path) is not None
    LEFT_TO_TRANSFORMERS[name](path)
    assert fast_tokenizer.load(path) is None


def test_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer", chat_template="{{ 'config' }}")
    (path / "chat_template.jinja").write_text("file")
    fast = fast_tokenizer.load(path)
    assert fast is not None and fast.render_chat(Conversation(messages=[USER])) == "file"
