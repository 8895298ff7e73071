"""Regular expressions, rewritten to what xgrammar takes them for.

xgrammar matches whole texts, ignores anchors that stand inside, takes letters with a backslash that
it does not know for themselves, and spells the strings of a JSON schema as they are, without the
escapes of JSON. What cannot be rewritten so that only texts of the expression match is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from scheduler.bounds import check_bound, short_repr
from scheduler.errors import RequestError

_TOKEN = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)"  # an escape
    r"|\[(?:\\.|[^\]\\])*+\]?"  # a class, or one that is not closed
    r"|\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\}"  # a repetition
    r"|\(\?:|\)\??|.",
    re.DOTALL,
)
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*+\]", re.DOTALL)
_REPETITION_MARKS = {"?", "*", "+", ")?"}
_UNREPEATABLE_TOKENS = {"", "^", "$", "(", "(?:", "|"}
_MAX_BOUND_DIGITS = 9
_NON_CHARACTER_TOKENS = {"^", "$", "(", "(?:", ")", ")?", "?", "*", "+"}
# What Python takes for something else in a class, or will some day.
_AMBIGUOUS_CLASS = re.compile(r"\[|--|&&|~~|\|\|")
_CLASS_ITEM = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|.", re.DOTALL)
_Ranges = list[tuple[int, int]]  # code points, from the first to the last

# What `\s` of Python and of ECMA-262 has in common, and what is a space to either of them.
_SPACES: _Ranges = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
_SPACES_TO_SOME: _Ranges = [*_SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
_CLASS_ESCAPES: dict[str, _Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": _SPACES,
}
_ESCAPED_IN_JSON: _Ranges = [(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]
_SURROGATES, _END_OF_CODE_POINTS = (0xD800, 0xDFFF), (0x110000, 0x110000)
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
_MAX_COMPARED_CHARACTERS = 16  # of a name, after the first; fewer where there are many names
_MAX_NAMES_PATTERN_CHARS = 16_384
_ESCAPED_IN_CLASS = r"\"\\\u0000-\u001f"  # characters that JSON escapes, in a class
UNESCAPED_CHARACTER = f"[^{_ESCAPED_IN_CLASS}]"


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
    spelling of strings in JSON, which go on where a pattern has one anchor alone. `path`: its name
    in messages. Raises `RequestError`.
    """
    if not isinstance(pattern, str):
        raise refusal(f"{path} must be text, got {short_repr(pattern)}")
    check_bound("pattern", len(pattern), path, "structured_outputs")
    groups = [_Group(True, True)]
    tokens = _TOKEN.findall(pattern)
    if any(token == "(" and follower == "?" for token, follower in pairwise(tokens)):
        raise refusal(f"{path}: groups that begin with '(?', other than '(?:', are not supported")
    _check_nul(tokens, path)
    _check_repetitions(tokens, path)
    text = "".join(
        _rewritten_token(token, groups, path, is_json_string=is_json_string) for token in tokens
    )
    if len(groups) > 1:
        raise refusal(f"{path}: a group is not closed")
    if not is_json_string:
        if not text:
            raise refusal(f"{path}: nothing but an empty answer matches {short_repr(pattern)}")
        return text
    if not groups[0].has_alternatives:
        if tokens[:1] == ["^"] and "$" not in tokens:
            text = f"{text}{UNESCAPED_CHARACTER}*"
        elif tokens[-1:] == ["$"] and "^" not in tokens:
            text = f"{UNESCAPED_CHARACTER}*{text}"
    # Without an end of its own, `(a|b|b{1,2})` of xgrammar 0.2.8 goes on after `a` as after `b`.
    return f"{text}()" if "|" in text else text


@functools.lru_cache(maxsize=8)  # copies of an object have the same names
def other_names_pattern(names: tuple[str, ...]) -> str:
    """A pattern of the spellings in JSON, without a backslash, of all names but these. Where names
    are longer than is compared, those that begin like them are not matched either.
    """
    # xgrammar 0.2.8 leaves out what is escaped in JSON where a pattern is of ASCII alone.
    is_ascii = all(map(str.isascii, names))
    for depth in range(_MAX_COMPARED_CHARACTERS, -1, -1):
        pattern = _other_names_pattern(names, depth, "" if is_ascii else _ESCAPED_IN_CLASS)
        if len(pattern) <= _MAX_NAMES_PATTERN_CHARS:
            break
    return f"{pattern}()"


def _other_names_pattern(names: Collection[str], depth: int, escaped: str) -> str:
    """Compares `depth` characters after the first."""
    rests_by_character: dict[str, list[str]] = {}
    for name in filter(None, names):
        rests_by_character.setdefault(name[0], []).append(name[1:])
    any_character = f"[^{escaped}]" if escaped else "."
    alternatives = [] if "" in names else [""]
    if rests_by_character:
        characters = _class_text([(ord(each), ord(each)) for each in rests_by_character])
        alternatives.append(f"[^{characters}{escaped}]{any_character}*")
    else:
        alternatives.append(f"{any_character}+")
    if depth > 0:
        for character, rests in rests_by_character.items():
            if not _is_escaped_in_json(character):
                pattern = _other_names_pattern(rests, depth - 1, escaped)
                alternatives.append(_spelled(character) + pattern)
    return f"({'|'.join(alternatives)})"


def leading_tokens(pattern: str) -> list[str]:
    """What every text that has a match of a pattern begins with: the tokens of single characters,
    as far as that is plain to see, but no more than are compared. The pattern is one that can be
    rewritten.
    """
    tokens = _TOKEN.findall(pattern)
    if tokens[:1] != ["^"] or "|" in tokens:
        return []
    leading: list[str] = []
    for token, next_token in zip(tokens[1:], [*tokens[2:], ""], strict=True):
        is_repeated = _is_repetition(next_token)
        may_be_left_out = is_repeated and next_token[:1] != "+"
        if token in _NON_CHARACTER_TOKENS or may_be_left_out:
            break
        leading.append(token)
        if is_repeated:
            break
    return leading[: _MAX_COMPARED_CHARACTERS + 1]


def cannot_begin_with(text: str, tokens: list[str]) -> bool:
    """Whether a text certainly does not begin with these tokens of a pattern. No more than one
    character is matched with a class at a time: some patterns take Python years for a short text.
    """
    return len(text) < len(tokens) or any(
        not _may_match(character, token) for character, token in zip(text, tokens, strict=False)
    )


def _may_match(character: str, token: str) -> bool:
    is_plain = character.isascii() and not _AMBIGUOUS_CLASS.search(token[1:])
    try:
        return not is_plain or bool(re.fullmatch(token, character, re.ASCII | re.DOTALL))
    except re.error:
        return True


def _is_repetition(token: str) -> bool:
    return token in _REPETITION_MARKS or (token[:1] == "{" and len(token) > 1)


def _check_repetitions(tokens: list[str], path: str) -> None:
    """Raise `RequestError` for a repetition of nothing, or of a repetition."""
    for before, previous, token in zip(["", "", *tokens], ["", *tokens], tokens, strict=False):
        if token == ")?" or not _is_repetition(token):
            continue
        if previous in _UNREPEATABLE_TOKENS:
            raise refusal(f"{path}: there is nothing that {token!r} could repeat")
        is_lazy = token == "?" and (previous == ")?" or not _is_repetition(before))
        if _is_repetition(previous) and not is_lazy:
            raise refusal(
                f"{path}: {previous + token!r} repeats a repetition, or is possessive, which is"
                " not supported; repeat a group, as in '(?:a{2})+'"
            )
        bounds = re.findall("[0-9]+", token)
        if any(len(bound) > _MAX_BOUND_DIGITS for bound in bounds):  # xgrammar would cut it off
            raise refusal(
                f"{path}: the bounds of a repetition have at most {_MAX_BOUND_DIGITS} digits, got"
                f" {short_repr(token)}"
            )
        if len(bounds) == 2 and int(bounds[0]) > int(bounds[1]):
            raise refusal(f"{path}: nothing is repeated {token!r} times")


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
    if _is_repetition(token):
        return token.replace("{,", "{0,")
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
    if token == ".":
        return UNESCAPED_CHARACTER if is_json_string else r"[^\n]"
    if token[0] == "[":
        return _rewritten_class(token, path, is_json_string=is_json_string)
    character = _character(token, path)
    if character is None:
        return _rewritten_class(f"[{token}]", path, is_json_string=is_json_string)
    if not is_json_string or not _is_escaped_in_json(character):
        return _spelled(character)
    if character not in _JSON_ESCAPE_PATTERNS:
        raise refusal(f"{path} has the control character {character!r}, which is not supported")
    return _JSON_ESCAPE_PATTERNS[character]


def _character(token: str, path: str) -> str | None:
    """The character that a token, other than a dot, stands for; None if there are several."""
    if token[0] != "\\":
        return token
    if len(token) > 2:
        character = chr(int(token[2:], 16))
        if "\ud800" <= character <= "\udfff":
            raise refusal(f"{path}: {token!r} is half of a character; write the character itself")
        return character
    name = token[1:]
    if name.lower() in _CLASS_ESCAPES:
        return None
    if name in _CONTROL_ESCAPES:
        return _CONTROL_ESCAPES[name]
    if name.isalnum() or not name:
        raise refusal(f"{path}: {token!r} is not supported")
    return name


def _spelled(character: str) -> str:
    """A pattern of one character, inside a class or not."""
    is_plain = character.isalnum() or character in " _/,:;@#%&=!" or character > "\x9f"
    return character if is_plain else f"\\u{ord(character):04x}"


def _rewritten_class(token: str, path: str, *, is_json_string: bool) -> str:
    """A class without escapes of several characters; in JSON, without what needs an escape there,
    which xgrammar 0.2.8 leaves out only of some classes, depending on the whole pattern.
    """
    if not _CLASS.fullmatch(token):
        raise refusal(f"{path}: a class is not closed")
    items = _CLASS_ITEM.findall(token[1:-1])
    is_negated = items[:1] == ["^"]
    items = items[1:] if is_negated else items
    _check_nul(items, path)
    if not items:
        raise refusal(f"{path}: the class {token!r} is empty")
    listed = _listed_ranges(token, items, path, is_negated=is_negated)
    excluded = listed if is_negated else _complement(listed)
    if not _complement(excluded):
        raise refusal(f"{path}: no character is in the class {token!r}")
    if is_json_string:
        excluded = [*excluded, *_ESCAPED_IN_JSON]
    matched = _complement(excluded)
    if not matched:
        raise refusal(f"{path}: the class {token!r} has no character that is not escaped in JSON")
    if matched == [(ord("^"), ord("^"))]:
        return _spelled("^")
    return f"[^{_class_text(_complement(matched))}]" if is_negated else f"[{_class_text(matched)}]"


def _class_text(ranges: _Ranges) -> str:
    """Ranges as a class lists them. Before xgrammar 0.2.8 reads a class, it writes escapes as
    characters, and control characters as hexadecimal numbers that end where no digit follows: so
    '^' is not the first, and what is a digit comes before all that is escaped.
    """
    caret = ord("^")
    spans: list[str] = []
    has_caret = False
    for first, last in ranges:
        if first == caret:
            has_caret, first = True, first + 1
        if first <= last:
            end = f"-{_spelled(chr(last))}" if last > first else ""
            spans.append(_spelled(chr(first)) + end)
    spans.sort(key=lambda span: span[0] == "\\")
    return "".join(spans) + (_spelled("^") if has_caret else "")


def _check_nul(items: list[str], path: str) -> None:
    """Raise `RequestError` for `\\0` before a digit, an octal number of Python's."""
    for item, follower in pairwise(items):
        if item == r"\0" and follower.isdecimal():
            raise refusal(f"{path}: {item + follower!r} is not supported; write '\\x00'")


def _listed_ranges(token: str, items: list[str], path: str, *, is_negated: bool) -> _Ranges:
    """What a class lists."""
    characters = [_character(item, path) for item in items]
    ranges: _Ranges = []
    index = 0
    while index < len(items):
        first = characters[index]
        if first is None:
            ranges += _escape_ranges(items[index][1], is_negated=is_negated)
        else:
            last = first
            # Beside an escape of several characters, a dash stands for itself.
            if items[index + 1 : index + 2] == ["-"] and any(characters[index + 2 : index + 3]):
                index += 2
                last = characters[index] or first
            if last < first:
                raise refusal(f"{path}: the class {token!r} has a range that ends before it begins")
            ranges.append((ord(first), ord(last)))
        index += 1
    return ranges


def _escape_ranges(name: str, *, is_negated: bool) -> _Ranges:
    """What `\\s` and the like list in a class: what is a space to some is kept out either way."""
    ranges = _CLASS_ESCAPES[name.lower()]
    if name in "sS" and (name == "S") != is_negated:
        ranges = _SPACES_TO_SOME
    return _complement(ranges) if name.isupper() else ranges


def _complement(ranges: _Ranges) -> _Ranges:
    """All other characters."""
    gaps: _Ranges = []
    start = 0
    for first, last in sorted([*ranges, _SURROGATES, _END_OF_CODE_POINTS]):
        if first > start:
            gaps.append((start, first - 1))
        start = max(start, last + 1)
    return gaps


def _is_escaped_in_json(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _ESCAPED_IN_JSON)


def refusal(reason: str) -> RequestError:
    """The error for a structure that cannot be followed."""
    return RequestError(f"structured_outputs: {reason}", "structured_outputs")
