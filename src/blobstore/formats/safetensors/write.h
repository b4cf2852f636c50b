// The writer of safetensors headers: the parts of canonical text (docs/formats.md section 1).
#pragma once

#include <string>
#include <string_view>

#include "tensors.h"

namespace blobstore {

// A JSON string with its quotes: the escapes of Python's json with ensure_ascii=False, and those of Go's encoding/json.
void write_string(std::string& out, std::string_view utf8);

// {"dtype":…,"shape":[…],"data_offsets":[…,…]}
void write_entry(std::string& out, const Tensors& tensors, const Entry& entry);

}  // namespace blobstore
