"""Regular expressions let the same characters through as Python's, and what no text fits, or what
is not supported, is refused by name.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import xgrammar

from cluster.grammar.formats import format_of, structural_tag_of
from cluster.grammar.patterns import other_names_pattern
from cluster.grammar.schemas import honored_schema
from scheduler.errors import RequestError
from scheduler.params import StructuredOutputs
from tests.cluster.grammar.test_schemas import COMPILER, END, INT, compiled

# Spaces of Unicode, among them what Python alone or ECMA-262 alone takes for one.
SPACES = "\t\n\v\f\r \u00a0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000"
DOUBTFUL_SPACES = "\x1c\x1f\x85\ufeff"
CHARACTERS = SPACES + DOUBTFUL_SPACES + '\0\x01\x7fafZ_01-^][{}."\\/\u20ac\U0001f600'


def regex_grammar(regex: str) -> xgrammar.CompiledGrammar:
    return COMPILER.compile_structural_tag(
        structural_tag_of(format_of(StructuredOutputs(regex=regex)))
    )


def lets_through(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(END)


@pytest.mark.parametrize(
    "regex",
    [
        *(".", r"[^\n]", "[^\n]", "[\n\t]", "\n", "\0", "[\0]", r"\s", r"\S", r"[^\s]", r"[^\S]"),
        *(r"\d", r"\D", r"[^\d]", r"\w", r"\W", r"[^\w]", r"[\S\n]", r"[\s\d]", "[^\u20ac]", "\\{"),
        *("[a-a]", "[\u2028-\u20ac]", r"[^\x00-\uffff]", "[\U0001f600-\U0001f64f]", r"[\]^-]"),
        *("[a-z^]", "[_^]", r"[\^]", r"[^\^]", r"[\^-a]", "[^^a]", "[{}^~]", "[\\^\u20ac]"),
        *(r"[\x01-\x1fa-f]", r"[^\x00-\x1f0-9]", r"[\x01^]", r"[\x00a]"),
    ],
)
def test_a_regex_lets_the_same_characters_through_as_python(regex: str) -> None:
    grammar = regex_grammar(regex)
    for character in CHARACTERS:
        is_let_through = lets_through(grammar, character)
        if character in DOUBTFUL_SPACES and re.search(r"\\[sS]", regex):
            assert not is_let_through, character
        else:
            assert is_let_through == bool(re.fullmatch(regex, character)), character


@pytest.mark.parametrize(
    "pattern",
    [
        *(".", r"\s", r"\S", r"[^\s]", r"[^\S]", r"\D", r"\W", r"[\S\n]", "[^\u20ac]", "[^a]"),
        *("\u20ac?.", "\u20ac?[^a]", r"\u20ac?\S", "[!-\u20ac]", r"[\x00-\x08a-z]", r"[\n -z]"),
        *(r"[\s^]", r"[a-z^\s]", "[\u20ac^]", r"[^\x01\^a\u20ac]"),
    ],
)
def test_a_pattern_lets_only_its_characters_through_and_only_json(pattern: str) -> None:
    grammar = compiled(honored_schema({"type": "string", "pattern": f"^{pattern}$"}, "json"))
    for character in CHARACTERS:
        for text in (f'"{character}"', json.dumps(character), f'"{ord(character):04x}"'):
            if lets_through(grammar, text):
                assert re.fullmatch(pattern, json.loads(text)), text
        if character in SPACES[5:] and not lets_through(grammar, f'"{character}"'):
            assert not re.fullmatch(pattern, character), character


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        ("{x}", ["{x}"]),
        ("a{", ["a{"]),
        ("a{}", ["a{}"]),
        ("a{1", ["a{1"]),
        ("a{,2}", ["", "a", "aa"]),
        ("a{,}b", ["b", "aaab"]),
        ("a{2}}", ["aa}"]),
        ("a{02,003}", ["aa", "aaa"]),
        ("a{\u0663}", ["a{\u0663}"]),
        ("(?:a{2})+", ["aa", "aaaa"]),
        ("a??b", ["ab", "b"]),
        ("(a+)??b", ["aab", "b"]),
        (r"\(?a\)?", ["(a)", "a"]),
        ("[(?]a", ["(a", "?a"]),
    ],
)
def test_braces_are_repetitions_where_they_are_in_python(regex: str, texts: list[str]) -> None:
    grammar = regex_grammar(regex)
    for text in ["", "a", "aa", "aaa", "aaaa", "b", "ab", "aaab", "a{,2}", *texts]:
        assert lets_through(grammar, text) == bool(re.fullmatch(regex, text)), text
    assert all(lets_through(grammar, text) for text in texts)


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("", "regex: nothing but an empty answer matches ''"),
        ("^$", "regex: nothing but an empty answer matches '^$'"),
        ("a++", "regex: '++' repeats a repetition, or is possessive"),
        ("(?i)a", "regex: groups that begin with '(?'"),
        (r"\012", "is not supported; write"),
        (r"[\01]", "is not supported; write"),
        ("a*+b", "regex: '*+' repeats a repetition, or is possessive"),
        ("(a)?+", "regex: ')?+' repeats a repetition"),
        ("a{2}{3}", "regex: '{2}{3}' repeats a repetition"),
        ("a???", "regex: '??' repeats a repetition"),
        ("+a", "regex: there is nothing that '+' could repeat"),
        ("(*a)", "regex: there is nothing that '*' could repeat"),
        ("a|{2}", "regex: there is nothing that '{2}' could repeat"),
        ("a{3,1}", "regex: nothing is repeated '{3,1}' times"),
        ("a{4294967297}", "regex: the bounds of a repetition have at most 9 digits"),
        ("a{" + "9" * 5000 + ",1}", "regex: the bounds of a repetition have at most 9 digits"),
        (r"[\ud800]", "is half of a character"),
        (r"a[^\s\S]", "regex: no character is in the class '[^"),
        (r"[^\w\W]", "regex: no character is in the class '[^"),
        ("[z-a]", "regex: the class '[z-a]' has a range that ends before it begins"),
        ("[a\\]", "regex: a class is not closed"),
        (r"\ud83d\ude00", "is half of a character"),
    ],
)
def test_what_no_text_fits_and_what_is_not_supported_is_refused(regex: str, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        format_of(StructuredOutputs(regex=regex))


NAMES = ["age", "ag", "a/b", "a.b", "gr\u00f6\u00dfe", "\U0001f600", 'q"', "", "x" * 40]


@pytest.mark.parametrize("names", [["age"], ["a/b"], NAMES[:4], NAMES, NAMES[-1:]], ids=str)
@pytest.mark.parametrize("additional", [True, {"type": "string"}], ids=str)
def test_a_named_property_has_its_schema_however_its_name_is_spelled(
    names: list[str], additional: Any
) -> None:
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, INT),
        "additionalProperties": additional,
    }
    grammar = compiled(honored_schema(schema, "json"))
    for name in names:
        plain = json.dumps(name, ensure_ascii=False)
        escaped = "".join(f"\\u{ord(c):04x}" for c in name if c < "\U00010000")
        spellings = {plain, json.dumps(name), f'"{escaped}"', plain.replace("/", "\\/")}
        assert lets_through(grammar, f"{{{plain}: 3}}")
        for spelling in spellings:
            assert json.loads(spelling) not in names or not lets_through(
                grammar, f'{{{spelling}: "x"}}'
            ), spelling
    for name in {"b", "agee", "a", "a/", "a/bc", "gr\u00f6", "\u20ac", "xx"} - {*names}:
        assert lets_through(grammar, f'{{"{name}": "x"}}'), name
        for character in '\0\n\x1f"\\':
            assert not lets_through(grammar, f'{{"{name}{character}": "x"}}')


def test_names_that_are_too_long_to_compare_are_not_free() -> None:
    assert len(other_names_pattern(("x" * 10_000,))) < 400
    many_names = [f"{i:03}{'ä' * 40}" for i in range(200)]
    assert len(other_names_pattern(tuple(many_names))) < 20_000
    schema = {"properties": {"x" * 40: INT}, "type": "object", "additionalProperties": True}
    grammar = compiled(honored_schema(schema, "json"))
    for length, is_free in ((5, True), (39, False), (40, False), (41, False)):
        assert lets_through(grammar, f'{{"{"x" * length}": "x"}}') == is_free
