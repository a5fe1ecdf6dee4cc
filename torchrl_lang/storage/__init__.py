"""Read files and folders with checks, write them atomically, and lock folders against other processes."""

from torchrl_lang.storage.checksums import CHECKSUMS, verify_checksums, write_checksums
from torchrl_lang.storage.columns import parse_rows, read_rows
from torchrl_lang.storage.errors import FileError
from torchrl_lang.storage.fields import Fields
from torchrl_lang.storage.folders import (
    is_unfinished,
    remove_folder,
    remove_leftovers,
    replace_folder,
    write_file,
    write_folder,
)
from torchrl_lang.storage.locks import folder_lock
from torchrl_lang.storage.manifests import json_digest, read_manifest, write_json, write_manifest
from torchrl_lang.storage.readers import (
    TensorHeader,
    file_digest,
    file_in,
    read_json,
    read_tensor_headers,
    read_tensors,
    read_text,
    regular_file,
)

__all__ = [
    "CHECKSUMS",
    "Fields",
    "FileError",
    "file_digest",
    "file_in",
    "folder_lock",
    "is_unfinished",
    "json_digest",
    "parse_rows",
    "read_json",
    "read_manifest",
    "read_rows",
    "TensorHeader",
    "read_tensor_headers",
    "read_tensors",
    "read_text",
    "regular_file",
    "remove_folder",
    "remove_leftovers",
    "replace_folder",
    "verify_checksums",
    "write_checksums",
    "write_file",
    "write_folder",
    "write_json",
    "write_manifest",
]
