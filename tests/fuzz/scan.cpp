// The scanners under sanitizers: they read inside any text, and their results lie in the text.
//
// test_scan_sanitized.py builds it with g++ and feeds it. With libFuzzer, which chooses texts by
// the scanner's coverage:
//   clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined \
//     -Isrc/blobstore/formats/safetensors tests/fuzz/scan.cpp \
//     src/blobstore/formats/safetensors/scan.cpp -o /tmp/scan && /tmp/scan -max_total_time=600
#include "scan.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

bool inside(std::string_view part, std::string_view whole) {
  return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

// Returns whether the text is accepted. It is copied to memory of just its size, so that a step
// beyond its NUL is seen.
bool scan_once(const std::uint8_t* data, std::size_t size, std::optional<std::uint64_t> data_size) {
  const std::unique_ptr<char[]> copy(new char[size + 1]);
  if (size > 0) std::memcpy(copy.get(), data, size);
  copy[size] = '\0';
  const std::string_view text(copy.get(), size);
  const auto found = blobstore::scan(text, data_size);
  if (!found) return false;
  const blobstore::Tensors& tensors = found->tensors;
  require(found->names.size() == tensors.entries.size());
  require(inside(found->metadata, text));
  for (const auto& name : found->names) {
    require(inside(name.raw, text) && name.raw.size() <= blobstore::most_name_bytes);
  }
  for (const auto& entry : tensors.entries) {
    require(entry.begin <= entry.end && (!data_size || entry.end <= *data_size));
    require(entry.first_dim + std::size_t{entry.rank} <= tensors.dims.size() && entry.rank <= blobstore::most_rank);
    require(entry.dtype < std::size(blobstore::dtypes));
  }
  return true;
}

}  // namespace

// The first byte says how large the data are; from 254 on nobody knows.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto data_size = data[0] < 254 ? std::optional<std::uint64_t>(data[0]) : std::nullopt;
  scan_once(data + 1, size - 1, data_size);
  return 0;
}

#ifdef FROM_STDIN
// Texts from stdin, each after its length (u32) and the bytes of its data (u64), in this machine's
// byte order.
int main() {
  std::uint32_t size;
  std::uint64_t data_size;
  std::size_t texts = 0, accepted = 0;
  while (std::fread(&size, sizeof size, 1, stdin) == 1 && std::fread(&data_size, sizeof data_size, 1, stdin) == 1) {
    const std::unique_ptr<std::uint8_t[]> text(new std::uint8_t[size + 1]);
    require(std::fread(text.get(), 1, size, stdin) == size);
    accepted += scan_once(text.get(), size, data_size);
    ++texts;
  }
  std::printf("%zu %zu\n", texts, accepted);
}
#endif
