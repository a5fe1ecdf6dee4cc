from tests.data.conftest import letters, talk, wordle_symbols  # noqa: F401 (fixtures)
