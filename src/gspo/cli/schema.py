"""The JSON schema of a config, for editors."""

from __future__ import annotations

from typing import Any

from gspo.algorithms import ALGORITHMS
from gspo.config import Config


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config, for editors. It has the schema's own keys, not AReaL's.

    It accepts what `load` accepts: `${…}` for any value, a number for a string, null for a section, list or mapping.
    """
    schema = Config.model_json_schema()
    schema["properties"]["algorithm"]["anyOf"] += [{"type": "string", "pattern": ".+:.+"}]  # a function of the user
    schema["properties"]["algorithm"]["anyOf"][0]["enum"] = list(ALGORITHMS)
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {name: _property(each) for name, each in section["properties"].items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "gspo config"}


def _property(schema: dict[str, Any]) -> dict[str, Any]:
    about = {name: schema.pop(name) for name in ("default", "description") if name in schema}
    schema = {name: value for name, value in schema.items() if name not in ("title", "unset")}
    options = schema.get("anyOf", [schema])
    # A `$ref` to a section has no type.
    kinds = {option.get("type", "section") for option in options if "const" not in option and "enum" not in option}
    for option in options:
        if "items" in option:
            option["items"] = _property(option["items"])
    if "string" in kinds:
        options.append({"type": "number"})
    else:
        # A value that is not a string may still be written as a reference.
        options.append({"type": "string", "pattern": r"\$\{"})
    if kinds & {"section", "array", "object"} and "null" not in kinds:
        options.append({"type": "null"})
    return {**about, "anyOf": options}
