// The tensors of a header, in columns, and the rules that hold for them whoever wrote them (F14 to F17 of __init__.py).
//
// Each rule says whether it is kept, and is stricter than its twin in rules.py where a shape is odd: what breaks it goes to
// the twin, which gives the verdict and the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace blobstore {

constexpr std::size_t most_rank = 64;  // MAX_RANK of header.py

struct DType {
  std::string_view name;
  unsigned bits;
};

// The frequent ones first: names are looked up one after the other.
constexpr DType dtypes[] = {
    {"BF16", 16}, {"F32", 32}, {"U32", 32},    {"U8", 8},      {"F16", 16},         {"F8_E4M3", 8},
    {"I64", 64},  {"I32", 32}, {"I8", 8},      {"F8_E5M2", 8}, {"F8_E8M0", 8},      {"F64", 64},
    {"BOOL", 8},  {"I16", 16}, {"U16", 16},    {"U64", 64},    {"C64", 64},         {"F4", 4},
    {"F6_E2M3", 6},            {"F6_E3M2", 6},                 {"F8_E4M3FNUZ", 8},  {"F8_E5M2FNUZ", 8},
};

// Its shape is Tensors::dims[first_dim : first_dim + rank].
struct Entry {
  std::uint64_t begin, end;
  std::uint32_t first_dim;
  std::uint8_t rank;
  std::uint8_t dtype;
};

struct Tensors {
  std::vector<Entry> entries;
  std::vector<std::uint64_t> dims;

  // F13 to F15. No 0 hides an overflow here.
  bool fits(const Entry& entry) const;

  // F16 and F17. Without `data_size` the last tensor's end is the end of the data.
  bool cover(std::optional<std::uint64_t> data_size) const;
};

}  // namespace blobstore
