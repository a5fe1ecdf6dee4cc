"""What the images of generated dialogues show: attributes, and the questions, replies and captions about them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ATTRIBUTES", "CAPTIONS", "YES_NO", "Attribute"]


class Attribute(NamedTuple):
    """A property of an image and how people ask about it."""

    name: str
    values: tuple[str, ...]
    open_questions: tuple[tuple[str, str], ...]
    """Question, and the reply with ``{}`` for the value."""
    claim: str
    """Of a yes-or-no question, with ``{}`` for the value asked about."""


YES_NO: tuple[tuple[str, str, str], ...] = (
    ("is it true that {}", "yes", "no"),
    ("would you agree that {}", "yes, i would", "no, i wouldn't"),
    ("do you think that {}", "i think so", "i don't think so"),
)
"""Forms of yes-or-no questions with ``{}`` for the claim, and their replies if it holds and if not.

The first replies are yes-or-no answers under all of the paper's definitions, the second ones under "soft" and
"conservative", the third ones under "conservative" alone.
"""


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "animal",
        ("dog", "cat", "horse", "cow", "bird", "sheep"),
        (("what animal is it", "a {}"), ("which animal can you see", "{}"), ("what kind of animal is there", "a {}")),
        "the animal is a {}",
    ),
    Attribute(
        "place",
        ("beach", "park", "street", "kitchen", "field", "forest"),
        (("where is it", "at the {}"), ("what place is this", "a {}"), ("where was the photo taken", "at the {}")),
        "this place is a {}",
    ),
    Attribute(
        "person",
        ("man", "woman", "boy", "girl"),
        (("who is with the animal", "a {}"), ("which person can you see", "a {}")),
        "the person is a {}",
    ),
    Attribute(
        "toy",
        ("ball", "stick", "rope", "frisbee", "bone"),
        (("what toy is there", "a {}"), ("what does the person hold", "a {}"), ("which toy do you see", "{}")),
        "the toy is a {}",
    ),
    Attribute(
        "colour",
        ("black", "white", "brown", "gray", "orange"),
        (("what colour is the animal", "{}"), ("which colour does the animal have", "it's {}")),
        "the animal is {}",
    ),
    Attribute(
        "weather",
        ("sunny", "cloudy", "rainy", "windy"),
        (("how is the weather", "{}"), ("what is the weather like", "it's {}")),
        "the weather is {}",
    ),
    Attribute(
        "time",
        ("morning", "midday", "evening", "night"),
        (("what time of day is it", "{}"), ("when was the photo taken", "in the {}")),
        "the time of day is {}",
    ),
    Attribute(
        "shirt",
        ("red", "blue", "green", "yellow", "pink"),
        (("what colour is the shirt", "{}"), ("which shirt does the person wear", "a {} one")),
        "the shirt is {}",
    ),
    Attribute(
        "people",
        ("one", "two", "three", "four"),
        (("how many people are there", "{}"), ("how many persons can you see", "i see {}")),
        "the number of people is {}",
    ),
    Attribute(
        "pose",
        ("standing", "sitting", "lying"),
        (("what is the animal doing", "it's {}"), ("how is the animal posing", "{}")),
        "the animal is {}",
    ),
    Attribute(
        "fence",
        ("wooden", "metal"),
        (("what is the fence made of", "{}"), ("which fence is there", "a {} one")),
        "the fence is {}",
    ),
    Attribute(
        "photo",
        ("old", "recent"),
        (("how old is the photo", "{}"), ("from when is the photo", "it's {}")),
        "the photo is {}",
    ),
)

CAPTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("animal",), ("a {} looks at the camera", "there is a {} in the picture", "picture of a {}")),
    (("place",), ("a photo taken at the {}", "someone at a {}", "a scene at a {}")),
    (("person",), ("a {} is having fun", "there is a {} in the photo", "a {} outside the house")),
    (("toy",), ("playing with a {}", "a {} lies on the ground", "a photo of a {}")),
    (("animal", "person"), ("a {} beside a {}", "one {} and one {}")),
    (("person", "toy"), ("a {} with a {}", "a {} throws a {}")),
    (("place", "animal"), ("a {} with a {} in it", "at the {} there is a {}")),
)
"""Attributes that a caption names, and its forms."""
