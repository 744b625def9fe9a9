"""Forty JSON schemas of the kinds that clients send: nested, enums, arrays, $ref, patterns, unions, numbers, strings.

Owns the list. Must never know the engine. Invariant: each can be enforced whole, and has replies that a small model
finishes within a few hundred tokens (lengths are bounded, or the model would talk for ever).
"""

from typing import Any

Schema = dict[str, Any]


def string(most: int = 12, **more: Any) -> Schema:
    """A short string."""
    return {"type": "string", "maxLength": most, **more}


def thing(required: bool = True, **properties: Any) -> Schema:
    """An object of exactly these properties."""
    made: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | ({"required": list(properties)} if required else {})


def listing(items: Any, least: int = 1, most: int = 3) -> Schema:
    """A short array."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


COORDINATE = {"type": "integer", "minimum": -99, "maximum": 99}
POINT = thing(x=COORDINATE, y=COORDINATE)
BRANCH = thing(False, name=string(8), left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"})

SCHEMAS: list[Schema] = [
    thing(name=string(20), age={"type": "integer", "minimum": 0, "maximum": 120}),
    thing(city=string(), country={"enum": ["France", "Japan", "Peru"]}),
    thing(person=thing(first=string(), last=string()), active={"type": "boolean"}),
    thing(a=thing(b=thing(c=thing(d=string(5))))),
    thing(points=listing(POINT)),
    thing(matrix=listing(listing({"type": "integer", "minimum": 0, "maximum": 9}, 2, 2), 2, 2)),
    thing(tags=listing({"enum": ["red", "green", "blue"]}, 0, 4)),
    thing(False, optional=string(), other={"type": "null"}),
    {"enum": ["yes", "no", "maybe"]},
    {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    {"const": {"fixed": ["value", 1.5, None]}},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 500},
    {"type": "integer", "minimum": 10, "maximum": 20},
    {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    thing(price={"type": "number", "minimum": 0, "maximum": 10}, unit={"const": "EUR"}),
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    thing(plate={"type": "string", "pattern": "^[a-z]{1,3} [0-9]{1,4}$"}, colour={"enum": ["black", "white"]}),
    thing(when={"type": "string", "format": "date"}),
    thing(at={"type": "string", "format": "date-time"}),
    thing(id={"type": "string", "format": "uuid"}),
    thing(host={"type": "string", "format": "ipv4"}),
    string(10, minLength=3),
    listing(string(6, minLength=1), 2, 4),
    {"type": "array", "prefixItems": [string(5), {"type": "boolean"}], "items": False, "minItems": 2},
    {"$defs": {"leaf": string(6)}, "type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 3},
    {"$defs": {"leaf": thing(v={"type": "boolean"})}, **BRANCH, "required": ["name", "left"]},
    {
        "$defs": {"node": thing(False, value=string(4), next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
                  | {"required": ["value", "next"]}},
        "$ref": "#/$defs/node",
    },
    {"definitions": {"colour": {"enum": ["c", "m", "y", "k"]}}, **thing(ink={"$ref": "#/definitions/colour"})},
    {"anyOf": [thing(cat=string(6)), thing(dog=string(6))]},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}, string(6)]},
    {"oneOf": [thing(kind={"const": "circle"}, r={"type": "integer", "minimum": 1, "maximum": 9}),
               thing(kind={"const": "square"}, a={"type": "integer", "minimum": 1, "maximum": 9})]},
    thing(shape={"anyOf": [thing(kind={"const": "a"}, n={"type": "null"}), thing(kind={"const": "b"}, s=string(5))]}),
    {"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
               {"properties": {"b": {"enum": [1, 2]}}, "required": ["b"]}], "additionalProperties": False,
     "properties": {"a": True, "b": True}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3}
    | {"minProperties": 1},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "additionalProperties": False,
     "maxProperties": 2},
    thing(**{'quo"te': string(5), "ünï": string(5), "back\\slash": {"type": "boolean"}}),
    thing(steps=listing(thing(action={"enum": ["go", "stop"]}, reason=string(15)), 1, 2), done={"type": "boolean"}),
]  # fmt: skip
