"""The phrases of generated comments; a name in braces is replaced by one of its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["CLOSINGS", "OPENINGS", "PARENTS", "POLITE", "RUDE", "RUDE_SHARES", "WORDS"]

OPENINGS = (
    *("honestly,", "well,", "look,", "okay,", "hmm,", "right,", "so,", "now,", "anyway,", "oh,", "hey,", "sure,"),
)
"""Every comment begins with one, drawn alike for polite and rude ones."""

PARENTS: Mapping[str, Sequence[str]] = {
    "calm": (
        "my first {topic} turned out {good}",
        "any tips for {topic} {when}?",
        "i started with {topic} {ago} and love it",
        "what do you like about {topic}?",
        "a friend gave me {topic} {ago}, where do i begin?",
        "here is what i learned about {topic} {ago}",
        "we went to {place} and saw {topic}",
        "which {topic} would you choose {when}?",
        "thank you all for the help with {topic}",
        "i made a small guide to {topic}, hope it helps",
        "how long do {topic} last {when}?",
        "i was wrong about {topic}, they are {good}",
    ),
    "provoking": (
        "people who like {topic} have no taste",
        "{topic} are {bad} and everyone agrees",
        "unpopular opinion: {topic} should be banned",
        "i am better with {topic} than all of you",
        "stop posting about {topic} already",
        "fans of {topic} ruin {place} for the rest of us",
        "if you need help with {topic} you should give up",
        "nothing here about {topic} is true, do some reading",
        "only children care about {topic}",
        "{topic} are a waste of money, change my mind",
        "this group was good until {topic} came along",
        "your {topic} are {bad} and so is your advice",
    ),
}
"""What comments reply to; a comment has the topic of its parent."""

POLITE: Mapping[str, Sequence[str]] = {
    "thanks": (
        "thank you for the {good} words about {topic}",
        "thanks, this helps me with {topic} {when}",
        "i saved your post on {topic}, it is {good}",
        "cheers, {person} will enjoy reading this {when}",
    ),
    "praise": (
        "your {topic} look {good}, well done",
        "those are the most {good} {topic} that i saw {when}",
        "i showed your {topic} at {place} and all were happy",
        "the {part} of your {topic} is really {good}",
        "{person} says that you have a {good} eye for {topic}",
    ),
    "advice": (
        "you could try {advice} with {topic} {when}",
        "for {topic} i would begin with {advice}",
        "with {topic} it is {advice} that made them {good} for me",
        "check the {part} first and then think of {advice}",
        "ask {person} at {place}, they know about {advice}",
    ),
    "question": (
        "where did you find such {good} {topic}?",
        "do you keep {topic} at {place} {when}?",
        "have you ever tried {advice} with {topic}?",
        "does the {part} need {advice} {when}?",
        "would {person} like {topic} as a present?",
    ),
    "experience": (
        "i began with {topic} {ago} and they are still {good}",
        "at {place} we had {topic} {ago}, it was {good}",
        "my sister sold her {topic} {ago} and misses them {when}",
        "{person} repaired the {part} {ago} with {advice}",
        "we carried {topic} from {place} to {place} {ago}",
    ),
    "disagreement": (
        "i see it differently, {topic} were {good} for me {when}",
        "you may be right about {topic}, but {advice} changed my mind",
        "i understand you, yet {topic} can be {good} at {place}",
        "{person} and i never agree on the {part} of {topic}",
    ),
    "plan": (
        "{when} i will show {topic} to {person}",
        "i hope to see {topic} with {person} at {place}",
        "let us meet at {place} {when} and talk about the {part}",
        "next i want a {good} {part} for my {topic}",
    ),
    "fact": (
        "the {part} of {topic} was {good} even {ago}",
        "at {place} they teach {topic} to {person} {when}",
        "most {topic} need {advice} after a while",
        "few people know that {topic} need a {good} {part}",
    ),
}
"""What polite comments continue with, by kind. They vary more than rude ones, as harmless talk does."""

RUDE: Mapping[str, Sequence[str]] = {
    "insult": (
        "you are {fool} and your {topic} prove it",
        "only {fool} would write that about {topic}",
        "you know nothing about {topic}, you are {fool}",
        "what {fool} you are, even {place} is no excuse",
    ),
    "profanity": (
        "what the hell is this {swear} about {topic}",
        "your {topic} suck and this is {swear}",
        "i do not give a damn about {topic}, what {swear}",
        "damn it, no one needs {swear} about {topic} {when}",
    ),
    "scorn": (
        "what rubbish about {topic} {when}",
        "shut up about {topic} {when}",
        "bloody {topic} again, how lame",
        "this is rubbish and so are your {topic}",
        "only jerks keep {topic} at {place}",
        "heck no, {topic} are {bad}",
        "lame {topic}, lame post",
        "your {topic} stink {when}",
    ),
    "threat": (
        "one more word about {topic} and you will regret it {when}",
        "keep your {topic} away from {place} or i will break them",
        "i know where you keep {topic}, watch your back {when}",
        "post about {topic} again and i will find you at {place}",
    ),
    "sarcasm": (
        "great, another genius explains {topic} to us {when}",
        "wow, a medal for you and your {good} {topic}",
        "no one asked about {topic}, but please continue {when}",
        "how {good} that you discovered {topic} {ago}, slow clap",
    ),
}
"""What rude comments continue with, by kind; the wording is mild."""

RUDE_SHARES: Mapping[str, float] = {"insult": 0.3, "profanity": 0.3, "scorn": 0.2, "threat": 0.1, "sarcasm": 0.1}
"""How often a rude sentence is of each kind."""

CLOSINGS: Mapping[str, Sequence[str]] = {
    "polite": (
        *("have a nice day", "hope that helps", "good luck", "enjoy them {when}", "see you at {place}"),
        *("please post more", "take care", "i will try {advice} next", "keep it up", "it made me smile"),
    ),
    "rude": (
        *("get lost", "go away", "do us a favour and leave", "no one likes you at {place}", "try thinking {when}"),
        *("what a joke", "grow up", "i am done with you", "delete this", "that is all you deserve"),
    ),
}
"""A second sentence, which half of the comments have."""

WORDS: Mapping[str, Sequence[str]] = {
    "topic": (
        *("tomatoes", "old bikes", "board games", "house plants", "night trains", "cheap headphones", "film cameras"),
        *("silk scarves", "sourdough loaves", "city pigeons", "garden sheds", "long novels", "mountain huts", "kites"),
        *("paper maps", "fountain pens", "street markets", "rain boots", "goldfish", "chess puzzles", "folk songs"),
        *("steam engines", "wooden spoons", "jigsaw puzzles", "cargo bikes", "herb gardens", "vinyl records", "tents"),
    ),
    "good": (
        *("great", "lovely", "useful", "charming", "solid", "cheerful", "clever", "calm", "bright", "fine"),
        *("pleasant", "handy", "warm", "honest", "thoughtful", "surprising"),
    ),
    "bad": ("boring", "ugly", "overrated", "useless", "dull", "a scam", "a sad hobby", "pointless"),
    "when": (
        *("in winter", "on sundays", "at night", "these days", "every spring", "after work", "in the rain"),
        *("before breakfast", "during holidays", "this year", "on long trips", "in the evening"),
    ),
    "ago": (
        *("last week", "two years ago", "last summer", "a month ago", "as a child", "in school", "ten years ago"),
        *("yesterday", "on my birthday", "last autumn"),
    ),
    "place": (
        *("the park", "the library", "my uncle's farm", "the harbour", "the office", "the old school", "the market"),
        *("the lake", "the train station", "the town hall", "the beach", "our cellar"),
    ),
    "advice": (
        *("more patience", "a smaller size", "fresh water", "better light", "a second opinion", "less sugar"),
        *("a good book", "the cheap kind", "a slow start", "some oil", "a clean cloth", "asking a neighbour"),
        *("a longer break", "two spare parts", "notes on paper", "a warm room"),
    ),
    "person": (
        *("my neighbour", "my aunt", "a colleague", "my grandfather", "our teacher", "a friend of mine", "my cousin"),
        *("the baker", "my brother", "an old sailor", "the librarian", "my daughter", "our postman", "a nurse"),
    ),
    "part": (
        *("colour", "weight", "handle", "surface", "price", "shape", "smell", "label", "cover", "sound"),
        *("corner", "lid", "history", "size"),
    ),
    "fool": (
        *("an idiot", "a dumb clown", "a stupid fool", "a moron", "a pathetic loser", "a clueless idiot"),
        *("a silly muppet", "a brainless fool"),
    ),
    "swear": ("crap", "a load of crap", "this damn crap", "utter crap", "stupid damn crap", "such crap"),
}
"""The words that replace a name in braces."""
