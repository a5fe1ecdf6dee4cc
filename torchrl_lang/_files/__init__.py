"""Read files and folders with checks, write them atomically, and lock folders against other processes."""

from torchrl_lang._files.columns import parse_rows
from torchrl_lang._files.csv_records import CSVFault, CSVRecord, read_csv_records
from torchrl_lang._files.errors import FileError, one_line, shorten
from torchrl_lang._files.fields import Fields
from torchrl_lang._files.folder_formats import FolderFormat
from torchrl_lang._files.folders import (
    is_unfinished,
    refuse_content,
    remove_folder,
    remove_leftovers,
    write_file,
    write_folder,
)
from torchrl_lang._files.loaded_weights import check_loaded_weights, non_finite
from torchrl_lang._files.locks import folder_lock
from torchrl_lang._files.manifests import (
    CHECKSUMS,
    check_replaceable,
    folder_digest,
    json_digest,
    read_manifest,
    verify_checksums,
    write_checksums,
    write_json,
    write_manifest,
)
from torchrl_lang._files.model_configs import check_model_config, nested_fields
from torchrl_lang._files.readers import (
    TensorHeader,
    file_digest,
    file_in,
    read_json,
    read_json_list,
    read_json_value,
    read_tensor_headers,
    read_tensors,
    read_text,
    regular_file,
)
from torchrl_lang._files.records import Record, RecordFolder

__all__ = [
    "Record",
    "RecordFolder",
    "CHECKSUMS",
    "CSVFault",
    "CSVRecord",
    "Fields",
    "FileError",
    "FolderFormat",
    "check_loaded_weights",
    "check_model_config",
    "check_replaceable",
    "file_digest",
    "file_in",
    "folder_digest",
    "folder_lock",
    "is_unfinished",
    "json_digest",
    "nested_fields",
    "non_finite",
    "one_line",
    "parse_rows",
    "read_csv_records",
    "read_json",
    "read_json_list",
    "read_json_value",
    "read_manifest",
    "TensorHeader",
    "read_tensor_headers",
    "read_tensors",
    "read_text",
    "regular_file",
    "refuse_content",
    "remove_folder",
    "remove_leftovers",
    "shorten",
    "verify_checksums",
    "write_checksums",
    "write_file",
    "write_folder",
    "write_json",
    "write_manifest",
]
