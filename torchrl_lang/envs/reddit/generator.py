"""Generate comments with scores in the files of the real dataset."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

from torchrl_lang._checks import Unit, checked
from torchrl_lang._files import refuse_content, write_file, write_folder
from torchrl_lang.envs.reddit.data import FILES

_HEADER = "id,parent_id,subreddit,author,text,score,ups,created,kind,parent_kind,parent_text,parent_score"
_SPLITS = {"train": 0.8, "eval": 0.1, "test": 0.1}
_MOST = 1 << 20
_NAME = re.compile(r"{(\w+)}")


_PHRASES: dict[str, Any] = json.loads(Path(__file__).with_name("phrases.json").read_text("utf-8"))
"""The phrases of comments, polite and rude ones by kind; a name in braces is replaced by one of its ``words``."""


class GeneratedComment(NamedTuple):
    """A comment on a parent, and its kind."""

    parent: str
    parent_kind: str
    """"calm" or "provoking"."""
    text: str
    kind: str
    """"insult", "profanity", "scorn", "threat" or "sarcasm" for rude comments, others for polite ones; of several
    sentences that of the first rude one, or of the first."""
    score: int
    """Never 0."""

    @property
    def is_rude(self) -> bool:
        """Whether a sentence of it is rude."""
        return self.kind in _PHRASES["rude"]


@checked
def generated_comments(
    pairs: Annotated[int, f"[1, {_MOST}]"] = 4000,
    *,
    provoking: Unit = 0.5,
    rude_when_calm: Unit = 0.1,
    rude_when_provoked: Unit = 0.7,
    sentences: Annotated[int, "[1, 20]"] = 1,
    seed: int = 0,
) -> list[GeneratedComment]:
    """Different pairs of parent and comment, with scores.

    Provoking parents get rude replies more often. A comment begins with an opening, drawn in the same way for all of
    them, so its first word does not show whether it is rude; half of them end with a closing. With several sentences
    each is rude or polite by itself, so that few comments are polite throughout. Polite comments have a score above 0
    in 80 % of cases, rude ones in 20 % below a calm parent and in 40 % below a provoking one.

    Args:
        pairs: how many.
        provoking: probability of a provoking parent.
        rude_when_calm: probability that a sentence is rude in a comment on a calm parent.
        rude_when_provoked: the same on a provoking parent.
        sentences: number of sentences between opening and closing.
        seed: the same arguments give the same pairs.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> from torchrl_lang.envs.reddit.generator import generated_comments
        >>> for comment in generated_comments(2, seed=50):
        ...     print(f"{comment.parent} | {comment.text}")
        fans of sourdough loaves ruin the beach for the rest of us | okay, heck no, sourdough loaves are ugly
        any tips for long novels after work? | right, i showed your long novels at the town hall and all were happy
    """
    phrases, random, found = _PHRASES, Random(seed), dict[tuple[str, str], GeneratedComment]()
    while len(found) < pairs:
        parent_kind = "provoking" if random.random() < provoking else "calm"
        topic = random.choice(phrases["words"]["topic"])
        parent = _filled(random.choice(phrases["parents"][parent_kind]), topic, random)
        rate = rude_when_provoked if parent_kind == "provoking" else rude_when_calm
        kind, text = _comment(rate, sentences, topic, random)
        liked = 0.8 if kind in phrases["polite"] else 0.4 if parent_kind == "provoking" else 0.2
        size = 1 + int(random.expovariate(0.1))
        score = size if random.random() < liked else -size
        found.setdefault((parent, text), GeneratedComment(parent, parent_kind, text, kind, score))
    return list(found.values())


def generate_reddit_comments(folder: str | Path, pairs: int = 4000, *, seed: int = 0, **options: Any) -> None:
    """Write :func:`generated_comments` into the two CSV files of the real dataset.

    Comments with a score above 0 are in ``comments_positive.csv``, the others in ``comments_negative.csv``. The files
    ``train_idxs.json``, ``eval_idxs.json`` and ``test_idxs.json`` select 80, 10 and 10 % of the rows at random; a text
    may be in two of them, on different parents. Column 8 has the comment's kind, column 9 the parent's. The same
    arguments write the same files.

    Args:
        folder: the folder to create.
        pairs: how many.
        seed: of comments and splits.
        **options: further ones of :func:`generated_comments`, such as ``sentences``.

    Raises:
        ValueError: a number is out of range.
        FileExistsError: the folder exists and is not empty.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_reddit_comments(home, 50)
        ...     len(RedditComments.read(home)), len(RedditComments.read(home, f"{home}/train_idxs.json"))
        (50, 40)
    """
    comments = generated_comments(pairs, seed=seed, **options)
    refuse_content(folder)
    random = Random(f"files {seed}")
    order = random.sample(range(pairs), pairs)
    with write_folder(folder) as target:
        for file, is_positive in zip(FILES, (True, False), strict=True):
            write_file(target / file, _csv([each for each in comments if (each.score > 0) == is_positive], random))
        begin = 0.0
        for split, fraction in _SPLITS.items():
            rows = order[round(begin * pairs) : round((begin + fraction) * pairs)]
            write_file(target / f"{split}_idxs.json", json.dumps(sorted(rows)))
            begin += fraction


def _comment(rate: float, sentences: int, topic: str, random: Random) -> tuple[str, str]:
    """A comment's kind and text."""
    phrases, found = _PHRASES, list[str]()
    text, shares = random.choice(phrases["openings"]), phrases["rude_shares"]
    for _ in range(sentences):
        tone = "rude" if random.random() < rate else "polite"
        kinds = phrases[tone]
        kind = random.choices([*shares], [*shares.values()])[0] if tone == "rude" else random.choice([*kinds])
        sentence = _filled(random.choice(kinds[kind]), topic, random)
        text = _continued(text, sentence) if found else f"{text} {sentence}"
        found.append(kind)
    if random.random() < 0.5:
        text = _continued(text, _filled(random.choice(phrases["closings"][tone]), topic, random))
    return next((kind for kind in found if kind in phrases["rude"]), found[0]), text


def _continued(text: str, sentence: str) -> str:
    return f"{text}{'' if text.endswith('?') else '.'} {sentence}"


def _filled(phrase: str, topic: str, random: Random) -> str:
    words = _PHRASES["words"]
    return _NAME.sub(lambda name: topic if name[1] == "topic" else random.choice(words[name[1]]), phrase)


def _csv(comments: Sequence[GeneratedComment], random: Random) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(_HEADER.split(","))
    for number, each in enumerate(comments):
        ids = (f"c{number}", f"p{random.randrange(_MOST)}", "generated", f"user{random.randrange(1000)}")
        parent = (each.parent, random.randrange(1, 50))
        writer.writerow((*ids, each.text, each.score, max(each.score, 0), number, each.kind, each.parent_kind, *parent))
    return text.getvalue()
