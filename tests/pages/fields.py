"""docs/fields.md: what becomes of each field of a request, printed from the models and the tables.

To write it: `python -m tests.pages.fields > docs/fields.md`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from cluster.api.document import POST_ENDPOINTS
from cluster.api.fields import (
    FIELD_SYNONYMS,
    FIELDS_OF_OTHER_PATHS,
    FIELDS_REFUSED_EVERYWHERE,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ValuePredicate,
)
from cluster.api.schema import Options, RequestModel
from cluster.api.unknown import IGNORED_HEADER

INTRODUCTION = (
    "Clients add fields with every release. So a field that is not known is **ignored**: the answer"
    f" names it in the header `{IGNORED_HEADER}`, the metric `eagleray_api_ignored_fields_total`"
    " counts it, and the log names it once. Two kinds are **refused** with 400 and a reason,"
    " because without them the answer would not be what was asked for: what looks like a field of"
    " ours misspelled (`max_token`, `temprature`, `topP`), where the error names the field that is"
    " meant; and what would change the answer in a way that cannot be honored"
    " ([below](#what-is-refused)). Samplers that are not offered are ignored all the same: they"
    " only change which token is drawn, and chat programs send a full set of them with every"
    " request, whether they are in use or not.",
    "The rule holds for the fields of the body and of the objects in it that say how to answer,"
    " such as formats. The tools of a chat are in the prompt as the client wrote them, so none of"
    " their keys is ignored; one that looks misspelled is refused all the same. Unknown keys of"
    " messages, their parts and their calls are ignored silently: clients send back what any server"
    " gave them. An unknown field that is null asks for nothing."
    " `launch.py serve --unknown-fields refuse`, or `unknown_fields: refuse` in `serve.yaml`,"
    " refuses all unknown fields by name. The Python API, the command line and YAML refuse what"
    " they do not know.",
    "A switch of thinking (`reasoning_effort`, `enable_thinking`, also in `chat_template_kwargs`)"
    " is a hint: where the chat template has no such switch, it changes nothing. Only a model that"
    " always thinks refuses to be told not to.",
    "This page is printed from [the tables](../cluster/api/fields.py) and [the request classes]"
    "(../cluster/api/schema.py).",
)
SHORT = {path: path.removeprefix("/v1/").removeprefix("/") for path in POST_ENDPOINTS}


def page() -> str:
    """The page."""
    models = {SHORT[path]: post.model for path, post in POST_ENDPOINTS.items()}
    lines = ["# Fields of requests", ""]
    for paragraph in INTRODUCTION:
        lines += [*textwrap.wrap(paragraph, 120), ""]
    lines += ["## The fields of each path", ""]
    lines += [
        "`yes`: honored. `no effect`: accepted, and changes nothing. `refused`: if it asks for",
        "something. `other name`: refused, with the name to use here.",
        "",
    ]
    lines += _table(["field", *(f"`{name}`" for name in models)], _rows_of_fields(models))
    lines += ["", "Objects within a request have these fields:", ""]
    lines += _table(["object", "fields"], _rows_of_options())
    lines += ["", "## What changes nothing", "", "Clients send these unasked.", ""]
    lists = [model.FIELDS_WITHOUT_EFFECT for model in models.values()]
    lines += _table(["field", "possible values"], _rows_without_effect(lists))
    lines += ["", "## What is refused", ""]
    neutral = " and ".join(f"`{name}` {value}" for name, value in NEUTRAL_VALUES.items())
    lines += [
        "A field that is null or false, or an empty text or list, asks for nothing, as do"
        f" {neutral}.",
        "",
    ]
    lines += _table(["field", "reason"], _rows_of_refused(models))
    lines += ["", "These are refused where they are not honored, unless they ask for nothing:", ""]
    lines += _table(["field", "reason"], _rows_without_effect([FIELDS_OF_OTHER_PATHS]))
    lines += ["", "## Other names", ""]
    lines += ["Refused alone, with the name to use; ignored beside the field that is meant.", ""]
    lines += _table(["field", "use"], _rows_of_names())
    lines += ["", "## What is known to be ignored", ""]
    lines += ["The metric counts these by name, and all other unknown fields as `other`.", ""]
    lines += _table(["of", "fields"], _rows_of_ignored())
    return "\n".join([*lines, ""])


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return lines + [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    ]


def _rows_of_fields(models: dict[str, type[RequestModel]]) -> Iterator[list[str]]:
    names = {
        name
        for model in models.values()
        for name in (*model.field_names(), *model.FIELDS_WITHOUT_EFFECT, *model.REFUSED_FIELDS)
    }
    for name in sorted(names):
        yield [f"`{name}`", *(_fate(name, model) for model in models.values())]


def _fate(name: str, model: type[RequestModel]) -> str:
    if name in model.field_names():
        return "yes"
    if name in model.FIELDS_WITHOUT_EFFECT:
        return "no effect"
    if model.field_names() & set(FIELD_SYNONYMS.get(name, ())):
        return "other name"
    is_refused = name in model.refused_fields() or name in model.fields_without_effect()
    return "refused" if is_refused else "ignored"


def _rows_of_options() -> Iterator[list[str]]:
    fields: dict[str, set[str]] = {}
    for options in Options.__subclasses__():
        fields.setdefault(options.FIELD_PATH, set()).update(options.field_names())
    for place in sorted(fields):
        yield [f"`{place}`", _names(fields[place])]


def _rows_without_effect(
    tables: Iterable[Mapping[str, tuple[ValuePredicate, str]]],
) -> Iterator[list[str]]:
    advice = {name: reason for table in tables for name, (_, reason) in table.items()}
    for name in sorted(advice):
        yield [f"`{name}`", advice[name] or "any"]


def _rows_of_refused(models: dict[str, type[RequestModel]]) -> Iterator[list[str]]:
    """Fields with the same reason stand together."""
    fields: dict[str, set[str]] = {}
    for name, reason in FIELDS_REFUSED_EVERYWHERE.items():
        fields.setdefault(reason, set()).add(name)
    for model in models.values():
        for name, reason in model.REFUSED_FIELDS.items():
            fields.setdefault(reason, set()).add(name)
    for reason in sorted(fields, key=lambda reason: min(fields[reason])):
        yield [_names(fields[reason]), reason]


def _rows_of_names() -> Iterator[list[str]]:
    for name in sorted(FIELD_SYNONYMS):
        yield [f"`{name}`", " or ".join(f"`{meant}`" for meant in FIELD_SYNONYMS[name])]


def _rows_of_ignored() -> Iterator[list[str]]:
    fields: dict[str, set[str]] = {}
    for name, owner in IGNORED_FIELDS.items():
        fields.setdefault(owner, set()).add(name)
    for owner in sorted(fields, key=str.lower):
        yield [owner, _names(fields[owner])]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    print(page(), end="")
