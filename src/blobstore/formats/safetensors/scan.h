// The scanner of safetensors headers: one pass that accepts a header or declines it, and never says why.
//
// What it declines is read again by codec.py, its twin in Python, which gives the verdict and the error's message. So only
// what is accepted here has to be right: strict JSON, no key twice in an entry, and rules F5 to F17 of __init__.py, but for
// the contents of strings. A caller decodes the names, refuses a name that is there twice, and reads the metadata.
//
// Declined though legal: unknown fields, names over 64 KiB, ranks over 64, and empty shapes whose other dimensions make 2^64
// bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tensors.h"

namespace blobstore {

constexpr std::size_t most_name_bytes = 65'536;  // MAX_NAME_BYTES of header.py

// A JSON string without its quotes, and whether a backslash is in it. It lies in the text.
struct String {
  std::string_view raw;
  bool escaped;
};

struct Scan {
  std::vector<String> names;
  Tensors tensors;
  std::string_view metadata;  // the JSON object of strings; empty where there is none
};

// `text` ends in a NUL that does not count, as Python's bytes do: no JSON goes on over it, so no step looks for the end.
std::optional<Scan> scan(std::string_view text, std::optional<std::uint64_t> data_size);

}  // namespace blobstore
