"""Files and folders: read with checks, written whole or not at all, locked by one process at a time."""

from torchrl_lang.storage.errors import FileError
from torchrl_lang.storage.fields import Fields
from torchrl_lang.storage.folders import remove_folder, remove_leftovers, replace_folder, write_file, write_folder
from torchrl_lang.storage.locks import folder_lock
from torchrl_lang.storage.readers import file_digest, file_in, read_json, read_tensors, read_text

__all__ = [
    "Fields",
    "FileError",
    "file_digest",
    "file_in",
    "folder_lock",
    "read_json",
    "read_tensors",
    "read_text",
    "remove_folder",
    "remove_leftovers",
    "replace_folder",
    "write_file",
    "write_folder",
]
