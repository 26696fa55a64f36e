"""What a section of the config is made of: keys with a default, a description and bounds."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

_SCALARS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
INT_LIMIT = 1 << 63


def key(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    unset: str | None = None,
) -> Any:
    """A field with its description and bounds (low and high inclusive, `above` exclusive).

    `unset` describes what gspo decides where the key is null; null then counts as not set. Otherwise null is a value.
    """
    given: dict[str, Any] = {"default": default}
    extra: dict[str, Any] = {}
    # Defaults that can be changed (sections, lists, mappings) are created anew for every config.
    if isinstance(default, type):
        given = {"default_factory": default}
    elif isinstance(default, (list, dict)):
        given, extra = {"default_factory": lambda: type(default)(default)}, {"default": default}
    if unset is not None:
        doc, extra = f"{doc.rstrip('.')}; null: {unset}.", {"unset": unset}
    return Field(description=doc, ge=low, le=high, gt=above, json_schema_extra=extra, **given)


class Section(BaseModel):
    """A section of the YAML; its fields are the keys. Types are not converted, and an instance cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_writable(cls, value: Any) -> Any:
        """Refuse what pydantic's types let through: integers beyond 64 bits, and inf and nan in free mappings."""
        if isinstance(value, int) and abs(value) >= INT_LIMIT:
            raise PydanticCustomError("int_64_bits", "must fit into 64 bits")
        if isinstance(value, (dict, list)) and not all(map(math.isfinite, numbers_in(value))):
            raise PydanticCustomError("finite_number", "must be finite")
        return value


def numbers_in(value: Any) -> Iterable[float]:
    """Every float in nested mappings and lists."""
    if isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(child)
    elif isinstance(value, float):
        yield value


@dataclass(frozen=True)
class Key:
    """One key of the schema, or one section of it.

    >>> from gspo.config.schema import known_keys
    >>> known_keys()["gconfig.top_p"].above, known_keys()["actor"].section.__name__
    (0.0, 'Actor')
    """

    name: str
    default: Any
    doc: str
    scalars: tuple[type, ...] = ()  # accepted scalar types; empty for sections, lists and mappings
    choices: tuple[str | int, ...] = ()
    nullable: bool = False
    null_is_unset: bool = False  # null leaves the decision to gspo; otherwise null is a value ("none")
    section: type[Section] | None = None
    items: type | None = None  # of a list; a Section where its items are sections
    more_items: tuple[Any, ...] = ()  # what else the items may be: of another type, or mappings, passed on as they are
    free: bool = False  # a mapping passed on as it is
    low: float | None = None
    high: float | None = None
    above: float | None = None

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.section is not None:
            parts = ["a section"]
        elif self.free:
            parts = ["a mapping"]
        else:
            parts = [_SCALARS[kind] for kind in self.scalars]
        if self.items is not None:
            others = (_PLURALS.get(kind, "mappings") for kind in self.more_items)
            parts.append("a list of " + " or ".join((_PLURALS.get(self.items, "sections"), *others)))
        if self.choices:
            parts.append("one of " * (len(self.choices) > 1) + ", ".join(map(str, self.choices)))
        return " or ".join([*parts, "null"] if self.nullable else parts)

    @property
    def bounds(self) -> str:
        """The allowed range in words; empty where there is none."""
        limits = ((self.above, "above"), (self.low, "at least"), (self.high, "at most"))
        return " and ".join(f"{word} {limit:.9g}" for limit, word in limits if limit is not None)


def keys_of(cls: type[Section], prefix: str) -> Iterable[Key]:
    """The keys of a section class, below `prefix`; sections before what they hold."""
    for name, entry in cls.model_fields.items():
        found = _key(prefix + name, entry)
        yield found
        if found.section is not None:
            yield from keys_of(found.section, found.name + ".")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _key(name: str, entry: FieldInfo) -> Key:
    found: dict[str, Any] = {"scalars": (), "choices": ()}
    limits = list(entry.metadata)
    for option in _options(entry.annotation):
        if get_origin(option) is Annotated:
            option, *more = get_args(option)
            limits += more
        if get_origin(option) is Literal:
            found["choices"] += get_args(option)
        elif get_origin(option) is list:
            found["items"], *others = _options(get_args(option)[0])
            found["more_items"] = tuple(others)
        elif get_origin(option) is dict:
            found["free"] = True
        elif issubclass(option, Section):
            found["section"] = option
        elif option is type(None):
            found["nullable"] = True
        else:
            found["scalars"] += (option,)
    for limit in limits:
        match limit:
            case Ge(low):
                found["low"] = low
            case Le(high):
                found["high"] = high
            case Gt(above):
                found["above"] = above
    default = entry.get_default(call_default_factory=True)
    extra = entry.json_schema_extra if isinstance(entry.json_schema_extra, dict) else {}
    return Key(name, default, entry.description or "", null_is_unset="unset" in extra, **found)
