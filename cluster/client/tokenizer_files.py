"""The files of a checkpoint's tokenizer, read without transformers, whose import takes seconds.

Accepted is what certainly means the same to transformers, which a test compares: a `tokenizer.json`
that `tokenizer_config.json` neither adds to nor contradicts, as all checkpoints of Qwen3 have it.
Anything else is refused, with what to change.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer

from cluster.client.chat_template import ChatTemplate
from scheduler.bounds import short_repr
from scheduler.errors import ConfigError

# Any of these shows that a folder has a tokenizer; only the first two are read.
FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
# With these, `tokenizer.json` alone says how text is cut; with Llama's if its tokens are bytes.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_QWEN2_CLASSES = (None, "Qwen2Tokenizer", "Qwen2TokenizerFast")
# What transformers' Qwen2 class builds, regardless of `tokenizer.json`; the tokens are defaults.
_QWEN2_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPECIAL_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
# Settings that change ids or text, which must be off.
_REFUSED_SETTINGS = ("add_prefix_space", "split_special_tokens", "clean_up_tokenization_spaces")
_SPECIAL_TOKEN_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)
_TOKEN_FIELDS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What the files hold. eos_token: the text that ends a sequence. is_byte_level: tokens stand
    for bytes; decodes_bytes: and decoding changes nothing else.
    """

    fast_tokenizer: FastTokenizer
    template: ChatTemplate | None
    eos_token: str | None
    is_byte_level: bool
    decodes_bytes: bool


def read(path: Path) -> TokenizerFiles:
    """The tokenizer in a directory. Raises `ConfigError`."""
    file = path / "tokenizer.json"
    try:
        if not file.exists():
            raise ConfigError(
                "it has no tokenizer.json; write one with transformers:"
                f" AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
            )
        config_file = path / "tokenizer_config.json"
        config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
        tokenizer_json = json.loads(file.read_text("utf-8"))
        decoder = tokenizer_json.get("decoder") or {}
        decoders = (decoder, *decoder.get("decoders", ()))
        is_byte_level = "ByteLevel" in [part.get("type") for part in decoders]
        is_qwen2 = config.get("tokenizer_class") in _QWEN2_CLASSES
        config = (_QWEN2_SPECIAL_TOKENS if is_qwen2 else {}) | config
        token_names = [name for name in _SPECIAL_TOKEN_NAMES if config.get(name) is not None]
        special_tokens = {name: _token_text(config[name]) for name in token_names}
        _check_class(config, is_byte_level=is_byte_level)
        if is_qwen2 and not _is_qwen2_pipeline(tokenizer_json):
            raise ConfigError(
                "its tokenizer.json does not cut text as its class, Qwen2Tokenizer, does; to cut"
                f" text as that file says, set tokenizer_class to {_GENERIC_CLASSES[0]!r}"
            )
        _check_added_tokens(config, tokenizer_json, special_tokens)
        fast_tokenizer = FastTokenizer.from_file(str(file))
        fast_tokenizer.no_truncation()  # left over from a training
        fast_tokenizer.no_padding()
        return TokenizerFiles(
            fast_tokenizer=fast_tokenizer,
            template=_template(path, config, special_tokens),
            eos_token=special_tokens.get("eos_token"),
            is_byte_level=is_byte_level,
            decodes_bytes=decoder.get("type") == "ByteLevel",
        )
    except TemplateError as error:
        raise ConfigError(f"the chat template in {path} cannot be read: {error}") from error
    except Exception as error:  # of any kind: the files may hold anything
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def _check_class(config: dict[str, Any], *, is_byte_level: bool) -> None:
    """Raise `ConfigError` for a class or a setting that says more than `tokenizer.json`."""
    name = config.get("tokenizer_class")
    llama_classes = _LLAMA_CLASSES if is_byte_level else ()
    possible_classes = (*_QWEN2_CLASSES, *_GENERIC_CLASSES, *llama_classes)
    if name not in possible_classes:
        raise ConfigError(
            f"its tokenizer_class is {short_repr(name)}; possible are"
            f" {', '.join(filter(None, possible_classes))}"
        )
    if "auto_map" in config:
        raise ConfigError("its auto_map names code of the checkpoint, which is not run")
    for setting in _REFUSED_SETTINGS:
        if config.get(setting):
            raise ConfigError(
                f"its {setting} is {short_repr(config[setting])}; only false is possible"
            )


def _is_qwen2_pipeline(tokenizer_json: dict[str, Any]) -> bool:
    model, pre_tokenizer = tokenizer_json["model"], tokenizer_json.get("pre_tokenizer") or {}
    parts = pre_tokenizer.get("pretokenizers") or []
    return (
        model.get("type") == "BPE"
        and not any(
            model.get(name)
            for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
        )
        and (tokenizer_json.get("normalizer") or {}).get("type") == "NFC"
        and [part.get("type") for part in parts] == ["Split", "ByteLevel"]
        and parts[0].get("pattern") == {"Regex": _QWEN2_SPLIT_PATTERN}
        and parts[0].get("behavior") == "Isolated"
        and not parts[0].get("invert")
        and not parts[1].get("add_prefix_space")
        and not parts[1].get("use_regex")
        and (tokenizer_json.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _check_added_tokens(
    config: dict[str, Any], tokenizer_json: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Raise `ConfigError` if the configuration adds or changes a token of `tokenizer.json`."""
    stored_tokens = {str(token["id"]): token for token in tokenizer_json.get("added_tokens", [])}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        stored_token = stored_tokens.get(token_id, {})
        if any(stored_token.get(field) != token.get(field) for field in _TOKEN_FIELDS):
            raise ConfigError(
                f"its added_tokens_decoder and its tokenizer.json differ in token {token_id},"
                f" {short_repr(token.get('content'))}"
            )
    names = ("extra_special_tokens", "additional_special_tokens")
    extra_tokens: Any = next((config[name] for name in names if config.get(name)), [])
    if not isinstance(extra_tokens, list):
        raise ConfigError(
            f"its extra_special_tokens must be a list, got {short_repr(extra_tokens)}"
        )
    special_texts = {token["content"] for token in stored_tokens.values() if token["special"]}
    for text in (*map(_token_text, extra_tokens), *special_tokens.values()):
        if text not in special_texts:
            raise ConfigError(
                f"its tokenizer_config.json names the special token {short_repr(text)}, which is"
                " not one in its tokenizer.json"
            )


def _template(
    path: Path, config: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """A template in a file of its own comes first."""
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if source is None:
        return None
    if not isinstance(source, str) or (path / "additional_chat_templates").exists():
        raise ConfigError("it has several chat templates; keep one, in chat_template.jinja")
    return ChatTemplate(source, special_tokens)


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)
