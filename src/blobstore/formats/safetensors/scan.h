// The scanner of safetensors headers: one pass that accepts a header or declines it, without a
// reason.
//
// header.py, its twin in Python, reads again what it declines, and gives the verdict and the error's
// message. So only what is accepted here has to be right: strict JSON, no key twice in an entry,
// and rules F5 to F17 of __init__.py, except for the contents of strings. The caller decodes the
// strings, and refuses a name that stands there twice.
//
// Declined though legal: unknown fields, names over 64 KiB, ranks over 64, and empty shapes whose
// other dimensions make 2^64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory_resource>
#include <optional>
#include <string_view>
#include <vector>

namespace blobstore {

constexpr std::size_t most_name_bytes = 65'536;  // MAX_NAME_BYTES of header.py
constexpr std::size_t most_rank = 64;            // MAX_RANK of header.py

// A JSON string without its quotes, and whether a backslash is in it. It points into the text.
struct String {
  std::string_view raw;
  bool escaped;
};

struct DType {
  std::string_view name;
  unsigned bits;
};

// The names and widths of dtypes.py, the frequent ones first: they are searched in this order.
constexpr DType dtypes[] = {
    {"BF16", 16},       {"F32", 32},        {"U32", 32},    {"U8", 8},      {"F16", 16},
    {"F8_E4M3", 8},     {"I64", 64},        {"I32", 32},    {"I8", 8},      {"F8_E5M2", 8},
    {"F8_E8M0", 8},     {"F64", 64},        {"BOOL", 8},    {"I16", 16},    {"U16", 16},
    {"U64", 64},        {"C64", 64},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},
    {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
};

// Its shape is Tensors::dims[first_dim : first_dim + rank].
struct Entry {
  std::uint64_t begin, end;
  std::uint32_t first_dim;
  std::uint8_t rank;
  std::uint8_t dtype;
};

// The tensors of a header, in columns.
struct Tensors {
  std::pmr::vector<Entry> entries;
  std::pmr::vector<std::uint64_t> dims;

  // F13 to F15, stricter than header.py for odd shapes: a dimension of 0 hides no overflow.
  bool fits(const Entry& entry) const;

  // F16 and F17. Without `data_size` the last tensor's end is the end of the data.
  bool cover(std::optional<std::uint64_t> data_size) const;
};

struct Scan {
  std::pmr::vector<String> names;
  Tensors tensors;
  std::string_view metadata;  // the JSON object of strings; empty if there is none
};

// Calls `pair` with each key and value of the metadata of a scan, in the order of the text.
void each_pair(std::string_view metadata, const std::function<void(String, String)>& pair);

// `text` ends in a NUL that does not count. The columns are in `memory`.
std::optional<Scan> scan(std::string_view text, std::optional<std::uint64_t> data_size,
                         std::pmr::memory_resource* memory = std::pmr::get_default_resource());

}  // namespace blobstore
