"""Keys of servers, kept out of messages that repeat what a server replied."""

from __future__ import annotations

import json
import re
from functools import cache
from html.entities import html5

from torchrl_lang._files import shorten

__all__ = ["NOT_SHOWN", "Secret", "is_short", "shown", "without_key"]

NOT_SHOWN = "a text that is not shown (it may hold the key, which is short)"
_SHORTEST_KEY = 8
"""Characters of the shortest key that replies are searched for: "x", of a server that takes any, is in many words."""
_BETWEEN = rb"(?:\\|u0000)*"
"""What may stand between the characters of a key: escapes of escapes, and UTF-16 that was read as ASCII."""


class Secret(str):
    """A text that representations do not show, such as the local variables in a traceback.

    Examples:
        >>> from torchrl_lang.envs.secret import Secret
        >>> key = Secret("sk-1")
        >>> {"key": key}, f"Bearer {key}"
        ({'key': '***'}, 'Bearer sk-1')
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def is_short(key: str | None) -> bool:
    """Whether a key is too short to be found in a reply, whose text is then left out of messages."""
    return key is not None and len(key) < _SHORTEST_KEY


def shown(content: bytes | str, key: str | None) -> str:
    """A text of the server for a message, from which :func:`without_key` has removed a long key."""
    if is_short(key):
        return NOT_SHOWN
    return content if isinstance(content, str) else shorten(content)


def without_key(content: bytes, key: str | None) -> bytes:
    r"""A reply without a long key, also where it is escaped in JSON, HTML or a URL, or in UTF-16 or UTF-32.

    Examples:
        >>> from torchrl_lang.envs.secret import without_key
        >>> without_key(rb"no such key: sk-123456%2F7, or sk-123456&#x2f;7, or sk-123456\/7", "sk-123456/7")
        b'no such key: ***, or ***, or ***'
    """
    if key is None or is_short(key):
        return content
    try:
        content = json.dumps(json.loads(content)).encode()  # as ASCII; JSON may be UTF-16
    except (ValueError, RecursionError):
        content = content.replace(b"\0", b"")
    return re.sub(_BETWEEN.join(map(_forms, key)), b"***", content, flags=re.IGNORECASE)


@cache
def _forms(character: str) -> bytes:
    r"""A pattern of a character and its escapes: of ``/`` also ``\u002f``, ``%2f``, ``&#47;``, ``&amp;#47;``."""
    code = ord(character)
    names = {name.rstrip(";").lower() for name in html5 if html5[name] == character}  # each once: matches are tried all
    names |= {f"#0*{code}", f"#x0*{code:x}"}
    forms = [f"&(?:amp;)*(?:{'|'.join(names)});?", f"%(?:25)*{code:02x}", f"u{code:04x}", re.escape(character)]
    return f"(?:{'|'.join(forms)})".encode()
