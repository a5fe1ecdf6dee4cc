"""Read files and folders with checks, write them atomically, and lock folders against other processes."""

from torchrl_lang._files.folders import (
    allocate_file,
    flush,
    folder_lock,
    is_unfinished,
    refuse_content,
    remove_folder,
    remove_leftovers,
    write_file,
    write_folder,
)
from torchrl_lang._files.readers import (
    CSVRecord,
    FileError,
    file_digest,
    file_errors,
    file_in,
    mistake,
    one_line,
    parse_rows,
    read_csv_records,
    read_json,
    read_json_list,
    read_tensor_headers,
    read_tensors,
    read_text,
    regular_file,
    shorten,
    unique_keys,
)
from torchrl_lang._files.records import (
    CHECKSUMS,
    Record,
    RecordFolder,
    check_replaceable,
    folder_digest,
    json_digest,
    validate,
    verify_checksums,
    write_checksums,
    write_json,
    write_manifest,
)
from torchrl_lang._files.weights import (
    check_loaded_weights,
    check_model_config,
    nested_fields,
    non_finite,
    read_weights,
    write_weights,
)
