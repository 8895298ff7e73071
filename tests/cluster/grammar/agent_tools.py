"""The tools of a coding agent, in the form in which generators of schemas write them: 24, with
nested lists, alternatives, bounds and free properties.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description} | more


def number(description: str, **more: Any) -> Schema:
    return {"type": "number", "description": description} | more


def whole(description: str, **more: Any) -> Schema:
    return {"type": "integer", "description": description} | more


def flag(description: str, **more: Any) -> Schema:
    return {"type": "boolean", "description": description} | more


def one_of(description: str, *values: str) -> Schema:
    return {"type": "string", "enum": [*values], "description": description}


def many(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items} | more


def object_of(required: list[str], properties: Schema) -> Schema:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


POSITIVE = {"exclusiveMinimum": 0, "maximum": 9007199254740991}
ANY_NAMES = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
EDIT = object_of(
    ["old_string", "new_string"],
    {"old_string": text("old"), "new_string": text("new"), "replace_all": flag("all")},
)
TODO = object_of(
    ["content", "status", "activeForm"],
    {
        "content": text("what", minLength=1),
        "status": one_of("state", "pending", "in_progress", "completed"),
        "activeForm": text("in progress", minLength=1),
    },
)
OPTION = object_of(["label", "description"], {"label": text("l"), "description": text("d")})
QUESTION = object_of(
    ["question", "header", "options", "multiSelect"],
    {
        "question": text("q"),
        "header": text("h"),
        "options": many(OPTION, minItems=2, maxItems=4),
        "multiSelect": flag("several"),
    },
)
HUNK = object_of(
    ["lines"],
    {
        "context": text("c"),
        "lines": many(object_of(["op", "text"], {"op": one_of("o", "+", "-"), "text": text("t")})),
    },
)
CHANGE = {
    "oneOf": [
        object_of(
            ["kind", "path", "content"],
            {"kind": {"const": "add"}, "path": text("p"), "content": text("c")},
        ),
        object_of(["kind", "path"], {"kind": {"const": "delete"}, "path": text("p")}),
        object_of(
            ["kind", "path", "hunks"],
            {
                "kind": {"const": "update"},
                "path": text("p"),
                "move_to": {"type": ["string", "null"]},
                "hunks": many(HUNK),
            },
        ),
    ]
}
TOOLS: dict[str, Schema] = {
    "Agent": object_of(
        ["description", "prompt", "kind"],
        {
            "description": text("short"),
            "prompt": text("task"),
            "kind": text("kind"),
            "size": one_of("size", "small", "middle", "large"),
            "in_background": flag("background"),
        },
    ),
    "AgentOutput": object_of(
        ["id", "block", "timeout"],
        {
            "id": text("id"),
            "block": flag("wait", default=True),
            "timeout": number("ms", minimum=0, maximum=600000, default=30000),
        },
    ),
    "Shell": object_of(
        ["command"],
        {
            "command": text("command"),
            "timeout": number("ms"),
            "description": text("what it does"),
            "in_background": flag("background"),
        },
    ),
    "ShellOutput": object_of(["id"], {"id": text("id"), "filter": text("expression")}),
    "EndShell": object_of(["id"], {"id": text("id")}),
    "FindFiles": object_of(["pattern"], {"pattern": text("glob"), "path": text("folder")}),
    "Search": object_of(
        ["pattern"],
        {
            **{name: text(name) for name in ("pattern", "path", "glob", "type")},
            "output_mode": one_of("mode", "content", "files", "count"),
            **{name: number(name) for name in ("-A", "-B", "-C", "head_limit", "offset")},
            **{name: flag(name) for name in ("-i", "-n", "multiline")},
        },
    ),
    "Read": object_of(
        ["path"],
        {
            "path": text("path"),
            "offset": whole("line", minimum=0, maximum=9007199254740991),
            "limit": whole("lines", **POSITIVE),
        },
    ),
    "Edit": object_of(["path", *EDIT["required"]], {"path": text("p")} | EDIT["properties"]),
    "EditMany": object_of(["path", "edits"], {"path": text("p"), "edits": many(EDIT, minItems=1)}),
    "Write": object_of(["path", "content"], {"path": text("path"), "content": text("text")}),
    "EditNotebook": object_of(
        ["path", "source"],
        {
            "path": text("path"),
            "cell": text("id"),
            "source": text("source"),
            "kind": one_of("kind", "code", "markdown"),
            "mode": one_of("mode", "replace", "insert", "delete"),
        },
    ),
    "Fetch": object_of(["url", "prompt"], {"url": text("u", format="uri"), "prompt": text("p")}),
    "SearchWeb": object_of(
        ["query"],
        {
            "query": text("query", minLength=2),
            "allowed": many({"type": "string"}),
            "blocked": many({"type": "string"}),
        },
    ),
    "Todo": object_of(["todos"], {"todos": many(TODO)}),
    "Ask": object_of(
        ["questions"],
        {
            "questions": many(QUESTION, minItems=1, maxItems=4),
            "answers": ANY_NAMES | {"additionalProperties": {"type": "string"}},
        },
    ),
    "BeginPlan": object_of([], {}),
    "EndPlan": {
        "type": "object",
        "properties": {"allowed": many(object_of(["tool"], {"tool": one_of("t", "Shell")}))},
        "additionalProperties": {},
    },
    "Skill": object_of(["name"], {"name": text("name"), "arguments": text("arguments")}),
    "Symbols": object_of(
        ["operation", "path", "line", "character"],
        {
            "operation": one_of("operation", "definition", "references", "hover", "symbols"),
            "path": text("path"),
            "line": whole("line", **POSITIVE),
            "character": whole("character", **POSITIVE),
        },
    ),
    "Schedule": object_of(
        ["cron", "prompt"],
        {"cron": text("when"), "prompt": text("what"), "recurring": flag("again")},
    ),
    "NewTask": object_of(
        ["subject"], {"subject": text("s"), "description": text("d"), "metadata": ANY_NAMES}
    ),
    "ChangeTask": object_of(
        ["id"],
        {
            "id": text("id"),
            "status": {
                "anyOf": [one_of("s", "pending", "in_progress"), {"const": "deleted"}],
                "description": "state",
            },
            "blocks": many({"type": "string"}),
            "metadata": ANY_NAMES,
        },
    ),
    "Patch": object_of(["changes"], {"changes": many(CHANGE, minItems=1, maxItems=50)}),
}
assert len(TOOLS) == 24
