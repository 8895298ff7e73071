"""What becomes of fields that no request class of ours has.

Clients add fields with every release, so an unknown field is ignored, and the answer names it. It
is refused if it looks like a field of ours misspelled, or would change the answer in a way that
cannot be honored (`fields.py`, where samplers are an exception). Names come from clients:
everything made of them is bounded.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any

from prometheus_client import Counter

from cluster.api.errors import HttpError
from cluster.api.fields import (
    ERROR_CODE_BY_FIELD,
    FIELD_SYNONYMS,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ValuePredicate,
)
from scheduler.bounds import check_bound
from scheduler.errors import RequestError

IGNORED_HEADER = "x-eagleray-ignored"
MAX_NAME_LENGTH = 64  # characters of a name in the header, and in the log
MAX_HEADER_LENGTH = 1024  # characters
MAX_LOGGED_NAMES = 256  # names that are logged in the life of a process
# Names of so many letters may have one wrong, missing or superfluous; of longer ones, one more may
# be missing.
MIN_LENGTH_ONE_FAULT = 6
MIN_LENGTH_TWO_FAULTS = 10

logger = logging.getLogger("eagleray.api")


class UnknownFields:
    """The unknown fields of one request. `names`: those that are ignored, each once, in the order
    of the body; a field of an object within the request has the path of that object before it.
    `runner.py` adds those of `Job.ignored`.
    """

    def __init__(self, *, refuse: bool = False) -> None:
        """`refuse`: each unknown field that no table allows raises, a null one too."""
        self.names: dict[str, None] = {}
        self._refuse = refuse
        # The path and name of each that was let pass: many tools have the same.
        self._unknown_paths: set[tuple[str, str]] = set()

    def remove_unknown(
        self,
        values: dict[str, Any],
        field_names: frozenset[str],
        *,
        path: str = "",
        is_in_prompt: bool = False,
        fields_without_effect: Mapping[str, tuple[ValuePredicate, str]] = MappingProxyType({}),
        refused_fields: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Remove from an object at `path` what is not in `field_names`. `is_in_prompt`: the model
        reads that all the same, so it does not count as ignored. Raises `RequestError` for what
        cannot be ignored, and `HttpError`.
        """
        for name in [name for name in values if name not in field_names]:
            value = values.pop(name)
            if (path, name) in self._unknown_paths:
                continue
            if name in fields_without_effect:
                _check_effect(name, value, *fields_without_effect[name])
            elif name in refused_fields:
                _check_refused(name, value, refused_fields[name])
            elif self._check_unknown(name, value, values, field_names, path) and not is_in_prompt:
                full_name = f"{path}.{name}" if path else name
                self.names[full_name[:MAX_NAME_LENGTH]] = None

    def _check_unknown(
        self, name: str, value: Any, values: dict[str, Any], field_names: frozenset[str], path: str
    ) -> bool:
        """Whether an unknown field asks for anything. Raises as `remove_unknown`."""
        full_name = f"{path}.{name}" if path else name
        parameter = (path.split(".")[0] or name)[:MAX_NAME_LENGTH]
        if self._refuse:
            known_names = ", ".join(sorted(field_names))
            raise RequestError(
                f"unknown field {full_name[:100]!r}; known are {known_names}", parameter
            )
        if value is None:
            return False
        count = len(self._unknown_paths) + 1
        check_bound("unknown fields", count, path or "the body", path.split(".")[0])
        meant_fields = [
            field for field in FIELD_SYNONYMS.get(name, ()) if field in field_names and not path
        ]
        if meant_fields:
            if all(values.get(field) is None for field in meant_fields):
                raise RequestError(
                    f"unknown field {name!r}; did you mean {meant_fields[0]!r}?", parameter
                )
        elif (
            full_name not in IGNORED_FIELDS
            and (field := meant_field(name, field_names)) is not None
        ):
            raise RequestError(
                f"unknown field {full_name[:100]!r}; did you mean {field!r}?", parameter
            )
        self._unknown_paths.add((path, name))
        return True


class IgnoredFields:
    """Counts and logs ignored fields. Used from one event loop only."""

    def __init__(self, counter: Counter) -> None:
        """`counter`: has the label `field`."""
        self._counter = counter
        self._logged_names: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Fields of one request were ignored."""
        for name in names:
            self._counter.labels(name if name in IGNORED_FIELDS else "other").inc()
            if name not in self._logged_names and len(self._logged_names) < MAX_LOGGED_NAMES:
                self._logged_names.add(name)
                is_last = len(self._logged_names) == MAX_LOGGED_NAMES
                rest = "; further names are not logged" if is_last else ""
                logger.warning("requests have the field %s, which is ignored%s", ascii(name), rest)


def header_of(names: Iterable[str]) -> str:
    """The value of the header: names separated by commas, in letters that headers may have. What
    does not fit is left out, and `...` stands for it.
    """
    shown_names: list[str] = []
    length = 0
    for name in names:
        safe_name = re.sub(r"[^A-Za-z0-9_.-]", "?", name)[:MAX_NAME_LENGTH]
        length += len(safe_name) + 2
        if length > MAX_HEADER_LENGTH - 5:
            shown_names.append("...")
            break
        shown_names.append(safe_name)
    return ", ".join(shown_names)


def meant_field(name: str, field_names: frozenset[str]) -> str | None:
    """The known field of which a name looks like a misspelling, if there is one."""
    if len(name) > MAX_NAME_LENGTH:
        return None
    field_by_form = _misspellings(field_names)
    normalized_name = _normalized_name(name)
    candidates = [normalized_name]
    if len(normalized_name) >= MIN_LENGTH_ONE_FAULT:
        indices = range(len(normalized_name))
        candidates += [normalized_name[:i] + normalized_name[i + 1 :] for i in indices]
    return next((field_by_form[form] for form in candidates if form in field_by_form), None)


@functools.lru_cache(64)
def _misspellings(field_names: frozenset[str]) -> dict[str, str]:
    """The plain forms of names, and what remains of longer ones without one or two letters.

    Two names of which one has a wrong letter, or a superfluous one, or two exchanged, have a common
    form with one letter fewer (Garbe's symmetric deletion).
    """
    field_by_form: dict[str, str] = {}
    for num_deletions, min_length in (
        (0, 0),
        (1, MIN_LENGTH_ONE_FAULT),
        (2, MIN_LENGTH_TWO_FAULTS),
    ):
        for field in sorted(field_names):
            normalized_name = _normalized_name(field)
            if len(normalized_name) >= min_length:
                for letters in combinations(normalized_name, len(normalized_name) - num_deletions):
                    field_by_form.setdefault("".join(letters), field)
    return field_by_form


def _normalized_name(name: str) -> str:
    """A name without what differs between styles: `maxTokens`, `max-tokens`, `max_token`."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("s")


def _check_effect(name: str, value: Any, is_possible: ValuePredicate, advice: str) -> None:
    if value is not None and not is_possible(value):
        raise RequestError(f"{name}: {advice}", name)


def _check_refused(name: str, value: Any, reason: str) -> None:
    """Raise unless a field asks for nothing."""
    if value is None or value is False or value in ("", []):
        return
    if value == NEUTRAL_VALUES.get(name):
        return
    if name in ERROR_CODE_BY_FIELD:
        details = {"error_code": ERROR_CODE_BY_FIELD[name]}
        raise HttpError(400, f"{name}: {reason}", parameter=name, details=details)
    raise RequestError(f"{name}: {reason}", name)
