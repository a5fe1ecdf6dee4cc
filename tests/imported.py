"""The last import of the server that programs and workers are forked from."""

from .garbage import collect_what_comes_later

collect_what_comes_later()
