"""The tokenizer gives the ids, texts and chats of transformers; files that may mean something else
are refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from cluster.client.detokenizing import make_detokenizer
from cluster.client.prompts import Conversation
from cluster.client.tokenizer import Tokenizer
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.errors import ConfigError, RequestError
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
TRAINING_TEMPLATE = """{%- set seen = 'outside' %}{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {% generation %}{% set seen = 'inside' %}{{ message.content }}{{ seen }}{% endgeneration %}
    {%- else %}{{ message.role }}{{ message.content }}{{ message.name is defined }}
    {%- endif %}
{%- endfor %}{{ seen }}{{ pad_token }}{{ eos_token is defined }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if enable_thinking is defined %}thinking{% endif %}
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
    tokenizer = FastTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    added = ("<think>", "é\u0120")  # the letters of the second stand for bytes, one for a space
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
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
    write_tokenizer(
        path,
        chat_template="{{ eos_token }}{{ messages[0].content }}{{ pad_token }}"
        "{{ tools }}{{ enable_thinking }}",
    )
    change(path, eos_token="<|end|>", pad_token={"content": "<|pad|>", "__type": "AddedToken"})
    return path


def change(path: Path, **settings: Any) -> None:
    """Set entries of `tokenizer_config.json`."""
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def for_training(path: Path) -> Path:
    """As a program that trains a model may leave Qwen3's files behind."""
    like_qwen3(path)
    change(path, chat_template=TRAINING_TEMPLATE, eos_token=None)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    fast_tokenizer = FastTokenizer.from_file(str(path / "tokenizer.json"))
    fast_tokenizer.enable_truncation(4)
    fast_tokenizer.enable_padding(length=16)
    fast_tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    fast_tokenizer.save(str(path / "tokenizer.json"))
    return path


def saved_by_transformers(path: Path) -> Path:
    """Qwen3's files as transformers writes them."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(like_qwen3(path.with_name("original")))).save_pretrained(path)
    return path


def of_another_family(path: Path) -> Path:
    """As DeepSeek's distillations: a class of Llama's, and a token before every text."""
    bytes_with_names(path)
    change(path, tokenizer_class="LlamaTokenizerFast", legacy=True, sp_model_kwargs={})
    fast_tokenizer = FastTokenizer.from_file(str(path / "tokenizer.json"))
    pad_id = fast_tokenizer.token_to_id("<|pad|>")
    fast_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", pad_id)]
    )
    fast_tokenizer.save(str(path / "tokenizer.json"))
    return path


def told_to_begin_texts(path: Path) -> Path:
    """The configuration does not change what `tokenizer.json` puts around a text."""
    of_another_family(path)
    change(path, add_bos_token=True, add_eos_token=True, bos_token="<|end|>", eos_token="<|pad|>")
    return path


FAMILIES = [default_model, like_qwen3, bytes_with_names, for_training, saved_by_transformers]
FAMILIES += [of_another_family, told_to_begin_texts]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """Our tokenizer, and that of transformers."""
    from transformers import AutoTokenizer

    path = request.param(tmp_path_factory.mktemp("tokenizers") / "tokenizer")
    return Tokenizer(path), AutoTokenizer.from_pretrained(str(path))


def test_ids_are_those_of_transformers(pair: Any) -> None:
    ours, theirs = pair
    rng = random.Random(0)
    mixed = ["".join(rng.choices("".join(TEXTS), k=60)) for _ in range(200)]
    for text in [*TEXTS, *mixed]:
        assert ours.encode(text) == theirs.encode(text), text


def test_text_is_that_of_transformers(pair: Any) -> None:
    ours, theirs = pair
    rng = random.Random(1)
    for _ in range(200):
        ids = rng.choices(range(len(theirs)), k=rng.randrange(40))
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("messages", CHATS)
def test_chats_are_those_of_transformers(pair: Any, messages: list[dict[str, str]]) -> None:
    ours, theirs = pair
    want = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    text = ours.render_chat(Conversation(messages=messages))
    assert ours.encode_rendered(text) == want


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
WITH_NULLS = [USER | {"name": None}, CALLS[2] | {"content": None, "reasoning": None}, *CALLS[3:]]


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", [CALLS, CALLS[1:], WITH_NULLS])
def test_chats_with_tools_are_those_of_transformers(
    pair: Any, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    ours, theirs = pair
    want = theirs.apply_chat_template(
        messages, tools=[ADD], add_generation_prompt=True, tokenize=False, **variables
    )
    conversation = Conversation(messages=messages, tools=[ADD], template_variables=variables)
    assert ours.render_chat(conversation) == want


@pytest.mark.parametrize("begun", ["The answer is", "  85 and\n ", "<think>\nso", "end", "m"])
def test_a_last_message_is_continued(tmp_path: Path, begun: str) -> None:
    tokenizer = Tokenizer(default_model(tmp_path / "tokenizer"))
    question = {"role": "user", "content": f"What is 47 + 38? {begun}"}
    messages = [question, {"role": "assistant", "content": begun}]
    text = tokenizer.render_chat(Conversation(messages=messages, continues_last_message=True))
    assert text.startswith(tokenizer.render_chat(Conversation(messages=[question])))
    assert text.endswith((begun.strip(), begun.lstrip()))
    assert "<|im_end|>" not in text.rpartition("<|im_start|>")[2]


def test_a_message_that_the_template_changes_is_not_continued(tmp_path: Path) -> None:
    folder = default_model(tmp_path / "tokenizer")
    template = "{% for m in messages %}{{ m.content | upper }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "assistant", "content": "lower"}]
    with pytest.raises(RequestError, match="changes the last message"):
        Tokenizer(folder).render_chat(Conversation(messages=messages, continues_last_message=True))


def test_the_default_template_shows_tools_and_calls_verbatim(tmp_path: Path) -> None:
    ours = Tokenizer(default_model(tmp_path / "tokenizer"))
    assert ours.template_variables >= {"tools", "enable_thinking"}
    text = ours.render_chat(Conversation(messages=CALLS, tools=[ADD]))
    assert text.startswith("<|im_start|>system\nBe <brief>.\n\nThese functions can be called:")
    assert f"<tools>\n{json.dumps(ADD)}\n</tools>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a":  "ü"}}\n</tool_call>' in text
    assert "<think>\nso\n</think>" in text and "<tool_response>\n85\n</tool_response>" in text


def test_text_that_comes_token_by_token_is_that_of_transformers(pair: Any) -> None:
    """Also of tokens that no text has in this order, and of one whose letters stand for bytes."""
    ours, theirs = pair
    rng = random.Random(0)
    num_ids = len(theirs)
    for _ in range(200):
        token_ids = [rng.randrange(num_ids + 2) for _ in range(rng.randrange(40))]
        pieces = make_detokenizer(ours)
        text = "".join(pieces.push([token_id]) for token_id in token_ids) + pieces.finish()
        known_ids = [token_id for token_id in token_ids if token_id < num_ids]
        assert text == theirs.decode(known_ids, skip_special_tokens=True) == ours.decode(token_ids)


def test_the_bytes_of_tokens_add_up_to_those_of_the_text(pair: Any) -> None:
    ours, _ = pair
    for text in TEXTS:
        ids = ours.encode_rendered(text)
        if not any(token in text for token in (*SPECIAL, "<|end|>", "\ufffd")):
            assert b"".join(map(ours.token_bytes, ids)).decode() == ours.decode(ids)
    assert ours.token_bytes(10**6) == b""


def _stored(**entries: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))

    return edit


def not_of_bytes(path: Path) -> None:
    change(path, tokenizer_class="LlamaTokenizer")
    _stored(decoder={"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"})(path)


# What differs, how, and what the refusal says.
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "another class": (
        lambda path: change(path, tokenizer_class="GPT2Tokenizer"),
        "tokenizer_class is 'GPT2Tokenizer'; possible are Qwen2Tokenizer",
    ),
    "tokens that are not bytes": (
        not_of_bytes,
        "tokenizer_class is 'LlamaTokenizer'; possible are .*TokenizersBackend$",
    ),
    "code of the checkpoint": (
        lambda path: change(path, auto_map={"AutoTokenizer": ["a.B", None]}),
        "auto_map names code of the checkpoint",
    ),
    "a space before the text": (
        lambda path: change(path, add_prefix_space=True),
        "add_prefix_space is True",
    ),
    "special tokens as text": (
        lambda path: change(path, split_special_tokens=True),
        "split_special_tokens is True",
    ),
    "spaces cleaned up": (
        lambda path: change(path, clean_up_tokenization_spaces=True),
        "clean_up_tokenization_spaces is True",
    ),
    "a new special token": (
        lambda path: change(path, eos_token="<|new|>"),
        "names the special token '<|new|>', which is not one in its tokenizer.json",
    ),
    "a further special token": (
        lambda path: change(path, additional_special_tokens=["<|new|>"]),
        "names the special token '<|new|>'",
    ),
    "a token made special": (
        lambda path: change(path, pad_token="<think>"),
        "names the special token '<think>'",
    ),
    "a flag of a token": (
        lambda path: change(
            path, added_tokens_decoder={"263": {"content": "<|endoftext|>", "lstrip": True}}
        ),
        "differ in token 263, '<|endoftext|>'",
    ),
    "several templates": (
        lambda path: change(path, chat_template=[{"name": "default", "template": TEMPLATE}]),
        "several chat templates; keep one, in chat_template.jinja",
    ),
    "templates in files": (
        lambda path: (path / "additional_chat_templates").mkdir(),
        "several chat templates",
    ),
    "a template that is none": (
        lambda path: change(path, chat_template="{% if %}"),
        "the chat template in .* cannot be read: ",
    ),
    "another normalizer": (_stored(normalizer={"type": "NFKC"}), "set tokenizer_class to"),
    "no normalizer": (_stored(normalizer=None), "set tokenizer_class to"),
    "another split": (
        _stored(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False}),
        "does not cut text as its class, Qwen2Tokenizer, does",
    ),
    "no tokenizer.json": (
        lambda path: (path / "tokenizer.json").unlink(),
        "no tokenizer.json; write one with transformers: AutoTokenizer",
    ),
    "a broken configuration": (
        lambda path: (path / "tokenizer_config.json").write_text("{"),
        "the tokenizer in .* cannot be loaded: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_may_mean_something_else_to_transformers_are_refused_with_what_to_change(
    tmp_path: Path, name: str
) -> None:
    path = like_qwen3(tmp_path / "tokenizer")
    edit, message = REFUSED[name]
    edit(path)
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        Tokenizer(path)


def test_a_generic_class_cuts_text_as_its_file_says(tmp_path: Path) -> None:
    path = like_qwen3(tmp_path / "tokenizer")
    _stored(normalizer=None)(path)
    change(path, tokenizer_class="PreTrainedTokenizerFast")
    composed, decomposed = (Tokenizer(path).encode(text) for text in ("é", "e\u0301"))
    assert composed != decomposed


def test_template_in_its_own_file_comes_first(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer", chat_template="{{ 'config' }}")
    (path / "chat_template.jinja").write_text("file")
    assert Tokenizer(path).render_chat(Conversation(messages=[USER])) == "file"
