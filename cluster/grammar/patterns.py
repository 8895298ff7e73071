"""Regular expressions, rewritten to what xgrammar takes them for.

xgrammar matches whole texts, ignores anchors that stand inside, takes letters with a backslash that
it does not know for themselves, and spells the strings of a JSON schema as they are, without the
escapes of JSON. What cannot be rewritten so that only texts of the expression match is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scheduler.bounds import check_bound, short_repr
from scheduler.errors import RequestError

_TOKEN = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)"  # an escape
    r"|\[(?:\\.|[^\]\\])*+\]?"  # a class, or one that is not closed
    r"|\{\d+(?:,\d*)?\}"  # a repetition
    r"|\(\?:|\)\??|.",
    re.DOTALL,
)
_REPETITION = re.compile(r"\{\d")
_NON_CHARACTER_TOKENS = {"^", "$", "(", "(?:", ")", ")?", "?", "*", "+"}
# What Python takes for something else in a class, or will some day.
_AMBIGUOUS_CLASS = re.compile(r"\[|--|&&|~~|\|\|")
_CLASS_ITEM = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|.", re.DOTALL)
_CLASS_ESCAPES = set("dDwWsS")
_CONTROL_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
# Characters that JSON spells with a letter, as patterns of that.
_JSON_ESCAPE_PATTERNS = {
    '"': r"(?:\\\")",
    "\\": r"(?:\\\\)",
    "\n": r"(?:\\n)",
    "\t": r"(?:\\t)",
    "\r": r"(?:\\r)",
    "\f": r"(?:\\f)",
}
UNESCAPED_CHARACTER = r"[^\"\\\u0000-\u001f]"  # characters of a JSON string that are not escaped


@dataclass(slots=True)
class _Group:
    """What is open: whether its next part is at the start of the text, and whether an alternative
    of it has come to the end of the text.
    """

    began_at_start: bool
    is_at_start: bool
    is_at_end: bool = False
    has_ended_alternative: bool = False
    has_alternatives: bool = False


def rewritten_pattern(pattern: object, path: str, *, is_json_string: bool = False) -> str:
    """A pattern that matches nothing else when xgrammar reads it; with `is_json_string`, as the
    spelling of strings in JSON, which go on where a pattern has one anchor alone. Raises
    `RequestError`.
    """
    if not isinstance(pattern, str):
        raise refusal(f"{path} must be text, got {short_repr(pattern)}")
    check_bound("pattern", len(pattern), path, "structured_outputs")
    if re.search(r"\(\?(?!:)", pattern):
        raise refusal(f"{path}: groups that begin with '(?', other than '(?:', are not supported")
    groups = [_Group(True, True)]
    tokens = _TOKEN.findall(pattern)
    text = "".join(
        _rewritten_token(token, groups, path, is_json_string=is_json_string) for token in tokens
    )
    if len(groups) > 1:
        raise refusal(f"{path}: a group is not closed")
    if not is_json_string:
        return text
    if not groups[0].has_alternatives:
        if tokens[:1] == ["^"] and "$" not in tokens:
            text = f"{text}{UNESCAPED_CHARACTER}*"
        elif tokens[-1:] == ["$"] and "^" not in tokens:
            text = f"{UNESCAPED_CHARACTER}*{text}"
    # Without an end of its own, `(a|b|b{1,2})` of xgrammar 0.2.8 goes on after `a` as after `b`.
    return f"{text}()" if "|" in text else text


def leading_tokens(pattern: str) -> list[str]:
    """What every text that has a match of a pattern begins with: the tokens of single characters,
    as far as that is plain to see. The pattern is one that can be rewritten.
    """
    tokens = _TOKEN.findall(pattern)
    if tokens[:1] != ["^"] or "|" in tokens:
        return []
    characters: list[str] = []
    for token, next_token in zip(tokens[1:], [*tokens[2:], ""], strict=True):
        is_repeated = next_token[:1] in {"?", "*", "+"} or _REPETITION.match(next_token)
        may_be_left_out = is_repeated and next_token[:1] != "+"
        if token in _NON_CHARACTER_TOKENS or may_be_left_out:
            break
        characters.append(token)
        if is_repeated:
            break
    return characters


def cannot_begin_with(text: str, characters: list[str]) -> bool:
    """Whether a text certainly does not begin with these characters. No more than one character is
    matched with a class at a time: some patterns take Python years for a short text.
    """
    return len(text) < len(characters) or any(
        not _may_match(character, token) for character, token in zip(text, characters, strict=False)
    )


def _may_match(character: str, token: str) -> bool:
    is_plain = character.isascii() and not _AMBIGUOUS_CLASS.search(token[1:])
    try:
        return not is_plain or bool(re.fullmatch(token, character, re.ASCII | re.DOTALL))
    except re.error:
        return True


def _rewritten_token(token: str, groups: list[_Group], path: str, *, is_json_string: bool) -> str:
    """What a token becomes."""
    group = groups[-1]
    if token == "^":
        if not group.is_at_start:
            raise refusal(f"{path}: '^' is possible at the beginning alone")
        return ""
    if token == "$":
        group.is_at_end = True
        return ""
    if token == "|":
        group.has_alternatives = True
        group.has_ended_alternative |= group.is_at_end
        group.is_at_start, group.is_at_end = group.began_at_start, False
        return token
    if token in (")", ")?"):
        if len(groups) == 1:
            raise refusal(f"{path}: a group is closed that is not open")
        groups.pop()
        groups[-1].is_at_end |= group.has_ended_alternative or group.is_at_end
        # In a schema, `(ab+)?` of xgrammar 0.2.8 matches what `b*` matches.
        return "|)" if token == ")?" else token
    if token in ("?", "*", "+") or (token[0] == "{" and len(token) > 1):
        return token
    return _rewritten_atom(token, groups, path, is_json_string=is_json_string)


def _rewritten_atom(token: str, groups: list[_Group], path: str, *, is_json_string: bool) -> str:
    """What a token that matches something becomes."""
    group = groups[-1]
    if group.is_at_end:
        raise refusal(f"{path}: '$' is possible at the end alone")
    if token in ("(", "(?:"):
        groups.append(_Group(group.is_at_start, group.is_at_start))
        group.is_at_start = False
        return token
    group.is_at_start = False
    if token[0] == "[":
        _check_class(token, path, is_json_string=is_json_string)
        return token
    character = _character(token, path)
    if character is None or not is_json_string or not _is_escaped_in_json(character):
        return token
    if character not in _JSON_ESCAPE_PATTERNS:
        raise refusal(f"{path} has the control character {character!r}, which is not supported")
    return _JSON_ESCAPE_PATTERNS[character]


def _character(token: str, path: str) -> str | None:
    """The character that a token stands for, None if there are several."""
    if token[0] != "\\":
        return None if token == "." else token
    if len(token) > 2:
        return chr(int(token[2:], 16))
    name = token[1:]
    if name in _CLASS_ESCAPES:
        return None
    if name in _CONTROL_ESCAPES:
        return _CONTROL_ESCAPES[name]
    if name.isalnum() or not name:
        raise refusal(f"{path}: {token!r} is not supported")
    return name


def _check_class(token: str, path: str, *, is_json_string: bool) -> None:
    """Raise `RequestError` for a class whose characters xgrammar would not spell as JSON does: it
    leaves out those that need an escape, unless there are no others.
    """
    if token[-1] != "]":
        raise refusal(f"{path}: a class is not closed")
    items = _CLASS_ITEM.findall(token[1:-1])
    is_negated = items[:1] == ["^"]
    items = items[1:] if is_negated else items
    if not items:
        raise refusal(f"{path}: the class {token!r} is empty")
    characters = [_character(item, path) if item[0] == "\\" else item for item in items]
    has_unescaped = is_negated or any(map(_has_unescaped_character, _ranges(items, characters)))
    if is_json_string and not has_unescaped:
        raise refusal(f"{path}: the class {token!r} has no character that is not escaped in JSON")


def _ranges(items: list[str], characters: list[str | None]) -> list[tuple[int, int]]:
    """The code points that a class lists, as ranges; one of several characters as all of them."""
    ranges: list[tuple[int, int]] = []
    index = 0
    while index < len(items):
        first = characters[index]
        last = first
        if items[index + 1 : index + 2] == ["-"] and index + 2 < len(items):
            last = characters[index + 2]
            index += 2
        if first is None or last is None:
            ranges.append((0, 0x10FFFF))
        else:
            ranges.append((ord(first), ord(last)))
        index += 1
    return ranges


def _has_unescaped_character(span: tuple[int, int]) -> bool:
    """Whether a range has a character that JSON does not escape."""
    first, last = max(span[0], 0x20), span[1]
    some_characters = map(chr, range(first, min(last, first + 2) + 1))
    return not all(map(_is_escaped_in_json, some_characters))


def _is_escaped_in_json(character: str) -> bool:
    return character < " " or character in '"\\'


def refusal(reason: str) -> RequestError:
    """The error for a structure that cannot be followed."""
    return RequestError(f"structured_outputs: {reason}", "structured_outputs")
